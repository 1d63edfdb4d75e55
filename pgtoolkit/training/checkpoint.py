"""Checkpoints that are either whole or not there: how one process writes them, and how any are read."""

from __future__ import annotations

import logging
import random
import zipfile
from pathlib import Path

import numpy
import torch

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.system.plain_files import open_to_read, refuse_other_than_folder, replacing
from pgtoolkit.training.disk import list_checkpoints, prune
from pgtoolkit.training.sharded_checkpoint import load_rest

log = logging.getLogger("pgtoolkit")


FORMAT = 1
"""Of checkpoints; written into each, and read before anything else in it."""


def save_checkpoint(folder: Path, step: int, state: dict, keep: int) -> Path:
    """Write `step-NNNNNN.ckpt` and delete all but the newest `keep`.

    The file is written under a temporary name in the same folder, flushed to disk, and renamed: killed at any moment,
    the folder holds only whole checkpoints beside at most one `.tmp`. Raises StorageError if the disk refuses.
    """
    path = folder / f"step-{step:06d}.ckpt"
    try:
        refuse_other_than_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when its archive cannot be finished
        while not isinstance(error, OSError) and error.__context__ is not None:
            error = error.__context__
        raise StorageError(f"the checkpoint {path} cannot be written: {error}. Earlier ones are intact.") from error
    prune(path, keep)
    return path


def load_newest(folder: Path) -> dict | None:
    """The state of the newest checkpoint that can be read, on the CPU; a damaged one is passed over with a warning.

    Of a checkpoint of several ranks, weights and moments stay in its folder. `path` is added to the state.
    None where none was written yet. Tensors and plain containers only: no code in a file is run. Raises StorageError
    if there are checkpoints but none can be read, or the newest is of another version.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except _OtherFormat:
            raise
        except Exception as error:  # torch reports damage by many types of exception
            log.warning(f"the checkpoint {path} cannot be read and is passed over: {first_line(error)}")
    if paths:
        raise StorageError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; start the run anew in another directory. "
            "Its configuration and metrics are in other files."
        )
    return None


def read_checkpoint(path: Path, check: bool = True) -> dict:
    """The state in one checkpoint, as `load_newest` gives it; without `check` it is taken for undamaged."""
    if path.is_dir() and not path.is_symlink():
        state = load_rest(path, check)
    else:
        with open_to_read(path) as file:
            with zipfile.ZipFile(file) as archive:  # torch does not look at the checksums in its own files
                if check and (damaged := archive.testzip()):
                    raise OSError(f"the checksum of {damaged} is wrong")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    _check(path, state)
    return state | {"path": path}


class _OtherFormat(StorageError):
    """Undamaged, but of a version of pgtoolkit that writes checkpoints in another way."""


def _check(path: Path, state: dict) -> None:
    """What every checkpoint has, whatever is trained; ValueError where something is missing or of another type."""
    if not isinstance(state, dict):
        raise ValueError("it holds no state")
    if (found := state.get("format", FORMAT)) != FORMAT:
        raise _OtherFormat(
            f"the checkpoint {path} is of format {found}, of which this version of pgtoolkit, which reads format "
            f"{FORMAT}, knows nothing. Nothing is damaged. Use the version that provenance.json names."
        )
    for key in ("format", "step", "num_updates", "num_skipped_steps", "documents_seen"):
        if not isinstance(state.get(key), int):
            raise ValueError(f"its {key} is {'not a whole number' if key in state else 'missing'}")
    for key in ("data", "random"):
        if not isinstance(state.get(key), dict):
            raise ValueError(f"its {key} is {'not an object' if key in state else 'missing'}")


def random_state() -> dict:
    """State of every random number generator that a step or a rollout may draw from."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    version, internal, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
