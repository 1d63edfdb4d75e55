"""Folders of checkpoints: written whole or not at all, read, checked and deleted.

Any number of processes may write a checkpoint, and any other number read it.

`step-NNNNNN/` is a Hugging Face folder, which transformers loads directly. It holds a model, or
LoRA's adapters, which name their model. Its subfolder `training/` holds what else the next step
depends on: the optimizer's moments by the names of their parameters, a reference that moves, a
critic with its moments, and state.json, whose tensors are in state.safetensors. manifest.json has
the number of the format, and size and CRC-32 of each file and of the rows that the run had recorded
by then. Nothing is pickled: reading a checkpoint runs no code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from pgtoolkit.errors import ConfigError, StorageError, first_line, refused_by_disk
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.runs.checksums import checksum
from pgtoolkit.runs.records import expect, is_count, list_checkpoints, read_status, step_of
from pgtoolkit.system.background import in_background
from pgtoolkit.system.host_memory import available_bytes
from pgtoolkit.system.plain_files import remove, set_aside, sync_folder

log = logging.getLogger("pgtoolkit")

# Kinds of tensors: with these words the names of their files begin.
WEIGHTS = "model"
ADAPTERS = "adapter_model"  # always one file, since peft reads one only
MOMENTS = "training/optimizer"
REFERENCE = "training/reference"
CRITIC = "training/critic"
CRITIC_MOMENTS = "training/moments_of_critic"

_MANIFEST = "manifest.json"
_STATE = "training/state"


def _is_scale(value: object) -> bool:
    return isinstance(value, float) and 1 <= value < math.inf


_STATE_SHAPE = {
    "step": is_count,
    "num_updates": is_count,
    "num_skipped_steps": is_count,
    "documents_seen": is_count,
    "documents_trained?": is_count,
    "reference_is_due?": bool,
    "data": {"position": is_count, "pass?": is_count, "num_steps": is_count, "source": dict},
    "config": str,
    "loss_scale?": {"value": _is_scale, "good_steps": is_count, "num_overflows": is_count},
    "without_moments?": [str],
    "base_digest?": str | None,
    "flash_attention?": str,
    "callbacks?": dict,
    "critic_updates?": is_count,
    "critic_without_moments?": [str],
}
"""The values of a state, see `expect`; a question mark is on those that not every state has."""

_SHARD_BYTES = 2**30
"""A rank writes a file of its tensors as soon as it holds this many bytes of them."""


class _WrittenFile(NamedTuple):
    """A file that a rank has written; it travels between ranks.

    fingerprint: size and CRC-32. tensors: the names of the tensors in it.
    """

    name: str
    fingerprint: dict[str, int]
    tensors: list[str]


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
    """Write `step-NNNNNN/`, and delete old checkpoints. Called by every rank.

    state: the values that are equal on all ranks, `step` among them: JSON values and tensors.
    tensors: by kind and name: WEIGHTS or ADAPTERS, MOMENTS, a REFERENCE that moves, a critic's.
        DTensors are written whole.
    write_settings: writes the other files into a folder; only rank 0 calls it.
    keep: the number of newest checkpoints to keep. best: the step of a further one to keep.
    rows: checksums of the rows that the run has recorded; only rank 0's are read.

    The folder is written under a temporary name, flushed to disk and renamed. So after a kill at
    any moment, `folder` holds only whole checkpoints and at most one `.tmp`. Raises StorageError on
    all ranks if the disk refuses any of them.
    """
    finish = _begin(folder, state, write_settings, keep, layout, best, rows or {})
    return finish(tensors)


def save_behind(
    folder: Path,
    state: dict,
    tensors: dict[str, dict[str, Tensor]],
    write_settings: Callable[[Path], None],
    keep: int,
    best: int | None = None,
    rows: dict[str, dict[str, int]] | None = None,
) -> Future[Path]:
    """Copy what `save_checkpoint` writes, and write it in a thread, while training changes it.

    For a single process. What is no tensor is written when this returns. The result is there once
    the checkpoint is whole; it raises what `save_checkpoint` would.
    """
    finish = _begin(folder, state, write_settings, keep, ONE_PROCESS, best, rows or {})
    copies = {
        # Memory of its own also where the tensor lies on the CPU.
        kind: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for kind, named in tensors.items()
    }
    return in_background(functools.partial(finish, copies))


def can_be_copied(tensors: dict[str, dict[str, Tensor]]) -> bool:
    """Return whether this machine has the memory for `save_behind`.

    It takes the tensors' bytes twice, as the system also keeps what the disk has yet to write.
    """
    num_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    return 2 * num_bytes <= available_bytes()


def _begin(
    folder: Path,
    state: dict,
    write_settings: Callable[[Path], None],
    keep: int,
    layout: Layout,
    best: int | None,
    rows: dict[str, dict[str, int]],
) -> Callable[[dict[str, dict[str, Tensor]]], Path]:
    """Write the files of a checkpoint that are not of its tensors; return what writes the rest.

    The arguments are those of `save_checkpoint`.
    """
    path = folder / f"step-{state['step']:06d}"
    temporary = folder / f".{path.name}.tmp"

    with _removing(temporary, layout), failing_together(layout), _storage(path):
        if layout.rank == 0:
            remove(temporary)
            (temporary / "training").mkdir(parents=True)
            write_settings(temporary)
            _write_state(temporary, state)

    def finish(tensors: dict[str, dict[str, Tensor]]) -> Path:
        with _removing(temporary, layout):
            with failing_together(layout), _storage(path):
                files_of_rank = _write_tensors(temporary, tensors, layout)
            gathered = gather_objects(files_of_rank, layout.world_group)
            written = [file for files in gathered for file in files]
            with failing_together(layout), _storage(path):
                if layout.rank == 0:
                    _write_rest(temporary, written, rows)
                    if os.path.lexists(path):  # the run was set back to an earlier step
                        set_aside(path)
                    temporary.rename(path)
                    sync_folder(folder)
                    _prune(path, keep, best)
        return path

    return finish


@contextlib.contextmanager
def _removing(temporary: Path, layout: Layout) -> Iterator[None]:
    """Delete a folder where the disk refuses what the block writes into it."""
    try:
        yield
    except StorageError:
        if layout.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_newest(folder: Path, before: int | None = None) -> dict | None:
    """Return the state of the newest checkpoint that can be read, or None if none was written yet.

    before: a step; later checkpoints and its own are not read. None: all are.
    The state has a further value `path`: weights and moments stay in that folder. A damaged
    checkpoint is skipped with a warning. Raises StorageError if there are checkpoints, but all are
    damaged, and for one that the system does not let us read: it may be whole.
    """
    paths = [path for path in list_checkpoints(folder) if before is None or step_of(path) < before]
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except StorageError:
            raise
        except Exception as error:  # a damaged file of any kind, each with errors of its own
            log.warning(f"the checkpoint {path} cannot be read and is skipped: {first_line(error)}")
    if paths:
        raise StorageError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; start the run anew in "
            "another directory. Its configuration and metrics are in other files."
        )
    return None


def read_checkpoint(path: Path, check: bool = True) -> dict:
    """Return the state of a checkpoint, as `load_newest` does.

    check: whether the checksums of its files are compared. Raises StorageError if the system does
    not let us read it, and any other exception if it is damaged.
    """
    try:
        files = _manifest(path)
        if check:
            for name, fingerprint in files.items():
                if checksum(path / name) != fingerprint:
                    raise ValueError(f"{name} is not as {_MANIFEST} says")
        data = (path / f"{_STATE}.safetensors").read_bytes()
        text = (path / f"{_STATE}.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise  # it is damaged
    except OSError as error:
        raise refused_by_disk(error.filename or path, error) from error
    tensors = load(data)

    def with_tensor(value: dict) -> dict | Tensor:
        return tensors[value["tensor"]] if value.keys() == {"tensor"} else value

    state = json.loads(text, object_hook=with_tensor)
    _check_state(state)
    for step in (state["step"], state["data"]["num_steps"]):
        if step != step_of(path):
            raise ValueError(f"its state is of step {step}")
    return state | {"path": path}


def _check_state(state: object) -> None:
    """Raise ValueError where a value that every state has is missing, or of another kind."""
    if not isinstance(state, dict):
        raise ValueError("its state is no JSON object")
    in_every_state = {key for key in _STATE_SHAPE if not key.endswith("?")}
    missing = sorted(in_every_state - state.keys())
    if missing:
        raise ValueError(f"its state lacks {', '.join(missing)}")
    expect(state, _STATE_SHAPE)
    expect(json.loads(state["config"]), dict, "config")


@contextlib.contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """Raise as StorageError what using a forged state raises inside the block."""
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
    """Return the message for a checkpoint that does not hold what pgtk writes there."""
    return (
        f"the checkpoint {path} is damaged: {problem}. Delete its {_MANIFEST}; pgtk resume then "
        "sets the folder aside and continues from the one before."
    )


@contextlib.contextmanager
def open_tensors(path: Path, kind: str) -> Iterator[dict[str, safe_open]]:
    """Open the files of one kind of tensors, and yield the file of each tensor by its name."""
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
    """Return the files of a checkpoint's Hugging Face folder but for the weights, by name."""
    kinds = (WEIGHTS, ADAPTERS, "training/")
    return {
        name: (path / name).read_bytes() for name in _manifest(path) if not name.startswith(kinds)
    }


def refuse_lost_checkpoint(run_dir: Path, use: str) -> None:
    """Raise ConfigError where the newest checkpoint that a run has saved was deleted.

    To continue from an earlier step, or to start again, would overwrite what the run has recorded
    since. use: the command, for the message.
    """
    # Damaged ones count: they were not deleted.
    newest = max(map(step_of, list_checkpoints(run_dir / "checkpoints")), default=0)
    saved = read_status(run_dir).get("saved", 0)
    if newest >= saved:
        return
    got = f"step {newest} as the newest" if newest else "none"
    way_out = "a new run in another directory"
    if newest:
        way_out += f", or a copy of this one without its status.json to continue from step {newest}"
    raise ConfigError(
        f"{use} needs the checkpoint of step {saved}, which the run has saved (got {got} in "
        f"{run_dir / 'checkpoints'}). It was deleted, and to train the steps after step {newest} "
        f"again would overwrite their record. Use {way_out}."
    )


def _prune(newest: Path, keep: int, best: int | None) -> None:
    """Delete old checkpoints, but for the best and the `keep` - 1 before `newest`.

    newest: was just written. A checkpoint of a later step is deleted, too: it is damaged, or else
    the run had continued from there. So are folders that a kill left half written or half deleted.
    A failure to delete is a warning.
    """
    step = step_of(newest)
    checkpoints = list_checkpoints(newest.parent)
    earlier = [path for path in checkpoints if step_of(path) < step]
    kept = {newest}
    if keep > 1:
        kept.update(earlier[-(keep - 1) :])
    if best is not None:
        kept.add(newest.parent / f"step-{best:06d}")
    for old in (*checkpoints, *newest.parent.glob(".step-*")):
        if old in kept:
            continue
        try:
            remove(old)
        except OSError as error:
            log.warning(f"the old checkpoint {old} cannot be deleted: {error.strerror or error}")


def _write_tensors(
    folder: Path, tensors: dict[str, dict[str, Tensor]], layout: Layout
) -> list[_WrittenFile]:
    """Write this rank's share of the tensors, and return its files.

    Threads read and flush a file while the next one is written.
    """
    files: list[tuple[str, list[str], Future[dict[str, int]], Future[None]]] = []
    failure = None
    with ThreadPoolExecutor() as threads:
        for kind, named_tensors in tensors.items():
            shards = _shards(named_tensors, layout, in_one_file=kind == ADAPTERS)
            for number, shard in enumerate(shards, start=1):
                name = f"{kind}-{layout.rank + 1:05d}-{number:05d}.safetensors"
                path = folder / name
                try:
                    save_file(shard, path, {"format": "pt"})
                except (OSError, SafetensorError) as error:
                    # Raised after the loop: other ranks need this one's parts of the tensors that
                    # they write.
                    failure = error
                    continue
                fingerprint = threads.submit(checksum, path)
                flushed = threads.submit(_flush, [path])
                files.append((name, list(shard), fingerprint, flushed))
    if failure is not None:
        raise failure
    for *_, flushed in files:
        flushed.result()
    return [
        _WrittenFile(name, fingerprint.result(), names) for name, names, fingerprint, _ in files
    ]


def _shards(
    tensors: dict[str, Tensor], layout: Layout, in_one_file: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file that this rank has to write, whole and on the CPU.

    The ranks of a pipeline stage hold parts of the same tensors. They gather them one at a time,
    and each writes about the same number of bytes. For one file, the first rank writes all.
    """
    num_writers = layout.world_size // layout.size("pipeline_parallel")
    bytes_of_writers = [0] * num_writers
    shard = {}
    shard_bytes = 0
    for name, tensor in tensors.items():
        full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full_tensor = full_tensor.detach()
        writer = 0 if in_one_file else bytes_of_writers.index(min(bytes_of_writers))
        bytes_of_writers[writer] += full_tensor.nbytes
        if writer == layout.rank % num_writers:
            shard[name] = full_tensor.cpu().contiguous()
            shard_bytes += full_tensor.nbytes
            if shard_bytes >= _SHARD_BYTES and not in_one_file:
                yield shard
                shard = {}
                shard_bytes = 0
    if shard:
        yield shard


def _write_rest(folder: Path, written: list[_WrittenFile], rows: dict[str, dict[str, int]]) -> None:
    """Write the index of the weights and, last, the manifest.

    written: the files with tensors of all ranks. rows: as of `save_checkpoint`.
    """
    fingerprints = {file.name: file.fingerprint for file in written}
    weights = [file for file in written if file.name.startswith((WEIGHTS, ADAPTERS))]
    if len(weights) == 1:
        name = weights[0].name
        name_of_single_file = f"{name.partition('-')[0]}.safetensors"
        fingerprints[name_of_single_file] = fingerprints.pop(name)
        (folder / name).rename(folder / name_of_single_file)
    else:
        weight_map = {tensor: file.name for file in weights for tensor in file.tensors}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=1), encoding="utf-8"
        )
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    other_paths = {name: path for name, path in paths.items() if name not in fingerprints}
    fingerprints |= {name: checksum(path) for name, path in other_paths.items()}
    manifest = {"format": 2, "files": fingerprints, "rows": rows}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _flush([*other_paths.values(), folder / _MANIFEST])
    for subfolder in {path.parent for path in paths.values()}:
        sync_folder(subfolder)


def _write_state(folder: Path, state: dict) -> None:
    """Write the state as JSON, in which numbers stand for its tensors, and the tensors."""
    tensors = {}

    def replaced(tensor: Tensor) -> dict[str, str]:
        number = str(len(tensors))
        tensors[number] = tensor.clone()
        return {"tensor": number}

    text = json.dumps(state, default=replaced)
    (folder / f"{_STATE}.json").write_text(text, encoding="utf-8")
    save_file(tensors, folder / f"{_STATE}.safetensors")


def _flush(paths: Iterable[Path]) -> None:
    """Bring new files to the disk.

    Flushing them together takes a fraction of the time of flushing each after it is written.
    """
    for path in paths:
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _manifest(path: Path) -> dict[str, dict[str, int]]:
    """Return size and CRC-32 of each file of a checkpoint, by name.

    Raises ValueError for a name that leads out of the folder.
    """
    files = json.loads((path / _MANIFEST).read_bytes())["files"]
    for name in files:
        if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
            raise ValueError(f"{_MANIFEST} names {name!r}, which is no file of a checkpoint")
    return files


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    """Raise what the disk refuses as StorageError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors writes the number of the system's error into its own.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is not None:
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        message = f"the checkpoint {path} cannot be written: {first_line(error)}"
        if isinstance(error, OSError):
            message = f"the checkpoint {refused_by_disk(path, error, 'written')}"
        with contextlib.suppress(StorageError):
            if list_checkpoints(path.parent):
                message = f"{message.removesuffix('.')}. Earlier ones are intact."
        raise StorageError(message) from error
