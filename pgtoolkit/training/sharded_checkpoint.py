"""Checkpoints that several ranks write together, in torch's distributed format: a folder that is whole or not there.

`step-NNNNNN/` holds the tensors (`__RANK_N.distcp`, with their shapes and places in `.metadata`), all else in
`rest.pt`, and `manifest.json` with the size and CRC-32 of each of these files. It is written under a temporary name,
flushed to disk, and renamed.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.ranks.agreement import failing_together, gather
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.plain_files import (
    open_to_read,
    refuse_other_than_folder,
    remove,
    replacing,
    sync_folder,
    write_atomically,
)
from pgtoolkit.training.disk import fingerprint, prune

MANIFEST, REST = "manifest.json", "rest.pt"


def save_shards(folder: Path, step: int, rest: dict, tensors: dict[str, Tensor], keep: int, layout: Layout) -> Path:
    """Write `step-NNNNNN/` with all ranks and delete all but the newest `keep` checkpoints; called by every rank.

    rest: what is the same on all ranks, in tensors and plain containers. tensors: by name; what several ranks hold
    alike is written once. Raises StorageError on all ranks if the disk refuses any of them; earlier ones are intact.
    """
    path = folder / f"step-{step:06d}"
    temporary = folder / f".{path.name}.tmp"
    with failing_together(layout), _storage(path):
        if layout.rank == 0:
            refuse_other_than_folder(folder)
            remove(temporary)
            temporary.mkdir(parents=True)
    with _storage(path):
        # Errors of any rank reach all of them here.
        dcp.save(tensors, storage_writer=_Writer(temporary, sync_files=True))
    with failing_together(layout), _storage(path):
        own = {file.name: fingerprint(file) for file in temporary.glob(f"__{layout.rank}_*")}
    files = {name: found for part in gather(own, layout.world_group) for name, found in part.items()}
    with failing_together(layout), _storage(path):
        if layout.rank == 0:
            _commit(temporary, path, step, rest, files, layout)
            prune(path, keep)
    return path


def _commit(temporary: Path, path: Path, step: int, rest: dict, files: dict, layout: Layout) -> None:
    with replacing(temporary / REST) as file:
        torch.save(rest, file)
    for name in (REST, ".metadata"):
        files[name] = fingerprint(temporary / name)
    manifest = {"format": 1, "step": step, "world_size": layout.world_size, "files": files}
    write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
    remove(path)  # written before the run was set back to an earlier step
    temporary.rename(path)
    sync_folder(path.parent)


def load_rest(path: Path, check: bool = True) -> dict:
    """What is no part of weights and moments; with `check`, OSError if a file is not as the manifest says."""
    with open_to_read(path / MANIFEST) as file:
        manifest = json.load(file)
    for name, expected in manifest["files"].items():
        if check and fingerprint(path / name) != expected:
            raise OSError(f"{name} is not as {MANIFEST} says")
    with open_to_read(path / REST) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def read_tensors(path: Path, targets: Callable[[set[str]], dict[str, Tensor]], layout: Layout) -> None:
    """Fill tensors, plain or sharded in any way, from a checkpoint of any number of ranks; called by every rank.

    targets: the tensors to fill by name, given the names that the checkpoint has. Raises ConfigError where these do
    not fit. No code in the files is run.
    """
    reader = _Reader(str(path))
    wanted = targets(set(reader.read_metadata().state_dict_metadata))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as one process wants it
            dcp.load(wanted, storage_reader=reader, no_dist=layout.world_size == 1)
    except (CheckpointException, ValueError, RuntimeError) as error:
        raise ConfigError(f"the checkpoint does not fit the configured model: {_reason(error)}") from error


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the temporary path, which would be pickled with a type of its own."""
        return StorageMeta()


class _Reader(dcp.FileSystemReader):
    """Reads `.metadata`, which is pickled, without running code that somebody may have put there."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open_to_read(Path(self.path) / ".metadata") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("this is no metadata of a checkpoint")
        for name, found in metadata.state_dict_metadata.items():
            if not isinstance(found, TensorStorageMetadata):  # torch would unpickle anything else
                raise pickle.UnpicklingError(f"{name} is not a tensor")
        return metadata


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
"""What torch writes into `.metadata`, by module, besides types of numbers."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


@contextlib.contextmanager
def _storage(path: Path):
    """What the disk refuses, as StorageError."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        reason = _reason(error)
        raise StorageError(f"the checkpoint {path} cannot be written: {reason}. Earlier ones are intact.") from error


def _reason(error: BaseException) -> str:
    """The first rank's own error where torch collected those of several."""
    found = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
    return first_line(found)
