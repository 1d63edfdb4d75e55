"""Checkpoints: folders that are whole or not there, written by any number of processes and read by
any other.

`step-NNNNNN/` is a Hugging Face folder, which transformers loads as it lies: of a model, or of
LoRA's adapters, which name their model. Its subfolder `training/` holds what else the next step
depends on: the optimizer's moments by the names of their parameters, a reference that moves, a
critic with its moments, and state.json, whose tensors are in state.safetensors. manifest.json names
the format, and the size and CRC-32 of each file, and of the rows that the run had recorded by
then. Nothing is pickled: reading a checkpoint runs no code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.runs.checksums import checksum
from pgtoolkit.runs.records import expect, is_count, read_status
from pgtoolkit.system.plain_files import remove, sync_folder

log = logging.getLogger("pgtoolkit")

WEIGHTS, ADAPTERS, MOMENTS, REFERENCE = (
    "model",
    "adapter_model",
    "training/optimizer",
    "training/reference",
)
CRITIC, CRITIC_MOMENTS = "training/critic", "training/moments_of_critic"
"""Kinds of tensors, as their files' names begin; adapters are in one file, since peft reads no
more."""


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and 1 <= value < math.inf


_MANIFEST, _STATE = "manifest.json", "training/state"
_IN_EVERY_STATE = {"step", "num_updates", "num_skipped_steps", "documents_seen", "data", "config"}
_STATE_SHAPE = dict.fromkeys(
    ("step", "num_updates", "num_skipped_steps", "documents_seen"), is_count
)
_STATE_SHAPE |= {"data": {"position": is_count, "num_steps": is_count, "source": dict}}
_STATE_SHAPE |= {
    "loss_scale?": {"value": _is_scale, "good_steps": is_count, "num_overflows": is_count}
}
_STATE_SHAPE |= {"config": str, "without_moments?": [str], "base_digest?": str | None}
_STATE_SHAPE |= {"critic_updates?": is_count, "critic_without_moments?": [str]}
_SHARD_BYTES = 2**30
"""A rank writes its tensors as soon as it holds so many bytes of them."""


def save_checkpoint(
    folder: Path,
    state: dict,
    tensors: dict[str, dict[str, Tensor]],
    write_settings: Callable[[Path], None],
    keep: int,
    layout: Layout = ONE_PROCESS,
    best: int | None = None,
    rows: dict[str, dict[str, int]] | None = None,
) -> Path:
    """Write `step-NNNNNN/` and delete all but the newest `keep` checkpoints and that of step
    `best`; by every rank.

    state: what is the same on all ranks, `step` included: values that JSON has, and tensors.
        tensors: of WEIGHTS or
    ADAPTERS, of MOMENTS, of a REFERENCE that moves, and of a critic, by name; DTensors are written
    whole.
    write_settings: puts the other files into a folder; called by rank 0. rows: checksums of the
        rows that the run has
    recorded, of rank 0.
    All is written under a temporary name, flushed to disk, and renamed: killed at any moment,
    `folder` holds only whole checkpoints beside at most one `.tmp`. Raises StorageError on all
    ranks if the disk refuses any of them.
    """
    path = folder / f"step-{state['step']:06d}"
    temporary = folder / f".{path.name}.tmp"
    try:
        with failing_together(layout), _storage(path):
            if layout.rank == 0:
                remove(temporary)
                (temporary / "training").mkdir(parents=True)
        with failing_together(layout), _storage(path):
            written = _write_tensors(temporary, tensors, layout)
        written = [file for part in gather_objects(written, layout.world_group) for file in part]
        with failing_together(layout), _storage(path):
            if layout.rank == 0:
                write_settings(temporary)
                _write_rest(temporary, state, written, rows or {})
                remove(path)  # written before the run was set back to an earlier step
                temporary.rename(path)
                sync_folder(folder)
                _prune(path, keep, best)
    except StorageError:
        if layout.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def load_newest(folder: Path, before: int | None = None) -> dict | None:
    """The state of the newest checkpoint that can be read; a damaged one is passed over with a
    warning.

    before: a step; only checkpoints of earlier ones are looked at. `path` is added to the state;
        weights and moments
    stay in its folder. None where no checkpoint was written yet.
    Raises StorageError if there are checkpoints but none can be read.
    """
    paths = [path for path in list_checkpoints(folder) if before is None or step_of(path) < before]
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except Exception as error:  # a damaged file of any kind, each with errors of its own
            log.warning(
                f"the checkpoint {path} cannot be read and is passed over: {first_line(error)}"
            )
    if paths:
        raise StorageError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; start the run anew in "
            "another directory. Its configuration and metrics are in other files."
        )
    return None


def read_checkpoint(path: Path, check: bool = True) -> dict:
    """The state in one checkpoint, as `load_newest` gives it; without `check` its files are taken
    for undamaged."""
    files = _manifest(path)
    for name in files if check else ():
        if checksum(path / name) != files[name]:
            raise OSError(f"{name} is not as {_MANIFEST} says")
    tensors = load((path / f"{_STATE}.safetensors").read_bytes())
    state = json.loads(
        (path / f"{_STATE}.json").read_bytes(),
        object_hook=lambda value: tensors[value["tensor"]] if value.keys() == {"tensor"} else value,
    )
    _check_state(state)
    for step in (state["step"], state["data"]["num_steps"]):
        if step != step_of(path):
            raise ValueError(f"its state is of step {step}")
    return state | {"path": path}


def _check_state(state: Any) -> None:
    """Raise ValueError where a value that every state has is missing, or of another kind."""
    if not isinstance(state, dict):
        raise ValueError("its state is no JSON object")
    if lacking := sorted(_IN_EVERY_STATE - state.keys()):
        raise ValueError(f"its state lacks {', '.join(lacking)}")
    expect(state, _STATE_SHAPE)
    expect(json.loads(state["config"]), dict, "config")


@contextlib.contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """Raise what a forged state raises inside the block as StorageError."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise StorageError(damaged(path, first_line(error))) from error


def damaged(path: Path, problem: str) -> str:
    """Return what is said of a checkpoint that does not hold what pgtk writes there."""
    return (
        f"the checkpoint {path} is damaged: {problem}. Remove it, and pgtk resume goes on from "
        "the one before."
    )


@contextlib.contextmanager
def open_tensors(path: Path, kind: str) -> Iterator[dict[str, safe_open]]:
    """The tensors of one kind in a checkpoint: the open file of each, by the tensor's name."""
    with contextlib.ExitStack() as opened:
        names = [
            name
            for name in _manifest(path)
            if name.startswith(kind) and name.endswith(".safetensors")
        ]
        try:
            files = [opened.enter_context(safe_open(path / name, "pt")) for name in names]
        except SafetensorError as error:
            raise StorageError(damaged(path, first_line(error))) from error
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no dictionary)


def settings_of(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint's Hugging Face folder but for the weights, by name."""
    kinds = (WEIGHTS, ADAPTERS, "training/")
    return {
        name: (path / name).read_bytes() for name in _manifest(path) if not name.startswith(kinds)
    }


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)),
        key=step_of,
    )


def step_of(path: Path) -> int:
    """After which step a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def refuse_lost_checkpoint(run_dir: Path, use: str) -> None:
    """ConfigError where the newest checkpoint that a run has saved was deleted; use: the command,
    for what is said.

    To go on from an earlier step, or from the first, would overwrite what the run has recorded
    since.
    """
    # damaged or not
    newest = max(map(step_of, list_checkpoints(run_dir / "checkpoints")), default=0)
    saved = read_status(run_dir).get("saved", 0)
    if newest < saved:
        raise ConfigError(
            f"{use} needs the checkpoint of step {saved}, which the run has saved (got "
            f"{f'step {newest} as the newest' if newest else 'none'}). It was deleted, and to "
            f"train the steps after step {newest} again would overwrite their record. Use a new "
            "run in another directory"
            + (
                f", or a copy of this one without its status.json to go on from step {newest}."
                if newest
                else "."
            )
        )


def _prune(newest: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints beside `newest`, which was just written, but for the keep - 1 before
    it and the best.

    One of a later step goes, too: the run was continued from before it, since it was damaged. What
        a kill left half
    written or half deleted goes as well. That one cannot be deleted is a warning.
    """
    step, checkpoints = step_of(newest), list_checkpoints(newest.parent)
    before = [path for path in checkpoints if step_of(path) < step]
    kept = {newest, *(before[-(keep - 1) :] if keep > 1 else [])}
    for old in (*checkpoints, *newest.parent.glob(".step-*")):
        if old not in kept and old.name != f"step-{best or 0:06d}":
            try:
                remove(old)
            except OSError as error:
                log.warning(
                    f"the old checkpoint {old} cannot be deleted: {error.strerror or error}"
                )


def _write_tensors(
    folder: Path, tensors: dict[str, dict[str, Tensor]], layout: Layout
) -> list[tuple]:
    """Write this rank's share of the tensors: (name, fingerprint, names of the tensors) of each
    file."""
    files, failure = [], None
    for kind, named in tensors.items():
        for number, shard in enumerate(_shards(named, layout, kind == ADAPTERS), start=1):
            name = f"{kind}-{layout.rank + 1:05d}-{number:05d}.safetensors"
            try:
                save_file(shard, folder / name, {"format": "pt"})
                files.append((name, checksum(folder / name), list(shard)))
            except (OSError, SafetensorError) as error:
                # only now: other ranks need this one's parts of the tensors that they write
                failure = error
    if failure is not None:
        raise failure
    _flush(folder / name for name, _, _ in files)
    return files


def _shards(
    tensors: dict[str, Tensor], layout: Layout, in_one_file: bool
) -> Iterator[dict[str, Tensor]]:
    """The tensors that this rank is to write, whole and on the CPU, for each of its files.

    Ranks that hold parts of the same tensors, those of a pipeline stage, bring them together one at
    a time and share them out evenly by size, or leave them all to the first.
    """
    count = layout.world_size // layout.size("pipeline_parallel")
    shares, shard, size = [0] * count, {}, 0
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole = whole.detach()
        writer = 0 if in_one_file else shares.index(min(shares))
        shares[writer] += whole.nbytes
        if writer == layout.rank % count:
            shard[name], size = whole.cpu().contiguous(), size + whole.nbytes
            if size >= _SHARD_BYTES and not in_one_file:
                yield shard
                shard, size = {}, 0
    if shard:
        yield shard


def _write_rest(
    folder: Path, state: dict, written: list[tuple], rows: dict[str, dict[str, int]]
) -> None:
    """Write the state, the index of the weights and, at last, the manifest.

    written: what `_write_tensors` gave on every rank. rows: as of `save_checkpoint`.
    """
    files = {name: fingerprint for name, fingerprint, _ in written}
    weights = {name: names for name, _, names in written if name.startswith((WEIGHTS, ADAPTERS))}
    if len(weights) == 1:
        (only,) = weights
        files[whole := f"{only.partition('-')[0]}.safetensors"] = files.pop(only)
        (folder / only).rename(folder / whole)
    else:
        index = {
            "metadata": {},
            "weight_map": {tensor: name for name in weights for tensor in weights[name]},
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=1), encoding="utf-8"
        )
    stored = {}

    def put_aside(tensor: Tensor) -> dict[str, str]:
        stored[name := str(len(stored))] = tensor.clone()
        return {"tensor": name}

    (folder / f"{_STATE}.json").write_text(json.dumps(state, default=put_aside), encoding="utf-8")
    save_file(stored, folder / f"{_STATE}.safetensors")
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    new = {name: path for name, path in paths.items() if name not in files}
    files |= {name: checksum(path) for name, path in new.items()}
    (folder / _MANIFEST).write_text(
        json.dumps({"format": 2, "files": files, "rows": rows}, indent=1), encoding="utf-8"
    )
    _flush([*new.values(), folder / _MANIFEST])
    for part in {path.parent for path in paths.values()}:
        sync_folder(part)


def _flush(paths: Iterable[Path]) -> None:
    """Bring new files to the disk, all at once, which takes a fraction of the time of one after the
    other's writing."""
    for path in paths:
        path.chmod(0o644)  # safetensors writes for the owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _manifest(path: Path) -> dict[str, dict]:
    """Size and CRC-32 of each file of a checkpoint, by its name, which leads nowhere else."""
    files = json.loads((path / _MANIFEST).read_bytes())["files"]
    for name in files:
        if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
            raise ValueError(f"{_MANIFEST} names {name!r}, which is no file of a checkpoint")
    return files


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    """What the disk refuses, as StorageError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the checkpoint {path} cannot be written: {error}. Earlier ones are intact."
        ) from error
