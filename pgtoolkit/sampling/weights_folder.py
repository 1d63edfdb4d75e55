"""The weights on their way to a server: a Hugging Face folder in shared memory, filled anew for
each version.

The ranks of one node write it together, a file each. All ranks gather each matrix, and one of them
copies it, so that the GPUs copy at the same time, and the next matrix is gathered meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from pgtoolkit.errors import StorageError
from pgtoolkit.model.weight_files import Shapes, published
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.collectives import whole
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.child import Child

_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 2**26
"""Bytes of shared memory that stay free beside the weights."""
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of number types in safetensors."""

_KEEPER = """
import shutil, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
sys.stdin.buffer.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""A program that deletes a folder once its channel is closed: by the end of its parent, or by
`end`. It ignores signals, since one may be sent to all processes of a job."""
_SECONDS_TO_DELETE = 15


_Kinds = dict[str, tuple[torch.dtype, torch.Size]]
"""Number type and shape of weights, by their names."""


class _Entry(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class WeightsFolder:
    """A folder with the weights and the other files of a model.

    It exists until `remove`, or until the process that made it has ended.
    parent: the folder to make it in; None for shared memory if there is room, else `fallback`.
    dtype: of the weights in it.
    for_others: whether other users of the machine may read it, since one of them may have started
        the server.
    published: whether weights have the names in the files that models are published with.
    number, count: this is process `number` of the `count` that write a file each; one with another
        number writes none. Process 0 makes the folder, and the others get its `path`.

    This process's file stays mapped. A new version overwrites it in place, straight from the GPU,
    so readers must have finished before. A file in shared memory has its pages locked and is made
    known to CUDA, so that copies need not wait for one another. With a file on a disk that is not
    done: the GPU may not write its pages behind the file system.
    """

    def __init__(
        self,
        parent: Path | None,
        fallback: Path,
        dtype: torch.dtype,
        for_others: bool = False,
        published: bool = False,
        number: int = 0,
        count: int = 1,
    ):
        self._parent = parent
        self._fallback = fallback
        self.dtype = dtype
        self._number = number
        self._count = count
        self._more_rights = 0o055 if for_others else 0
        self._published = published
        self._header: bytes | None = None
        self._rooms: dict[str, Tensor] = {}  # the mapped memory of each weight in this file
        self._known_at: int | None = None  # the address of memory that CUDA knows
        self._keeper: Child | None = None
        self.path: Path | None = None

    @classmethod
    def of_ranks(
        cls,
        layout: Layout,
        parent: Path | None,
        fallback: Path,
        dtype: torch.dtype,
        for_others: bool = False,
        published: bool = False,
    ) -> WeightsFolder:
        """Return the folder that the ranks of rank 0's node write together.

        Every rank calls this.
        """
        writers = layout.node_group if layout.reader == 0 else None
        if writers is None:  # rank 0 writes alone
            number = min(layout.rank, 1)
            count = 1
        else:
            number = writers.rank()
            count = writers.size()
        return cls(parent, fallback, dtype, for_others, published, number, count)

    def write(
        self, weights: Mapping[str, Tensor], layout: Layout, write_settings: Callable[[Path], None]
    ) -> None:
        """Write a version of the weights, while nobody reads them; make the folder before the
        first.

        Called by every rank with its parts; one matrix at a time is gathered. All files are written
        when this returns. write_settings: puts the other files into the folder.
        """
        with failing_together(layout):
            if layout.rank == 0 and self.path is None:
                size = sum(
                    tensor.shape.numel() * tensor.dtype.itemsize for tensor in weights.values()
                )
                self.make(size, write_settings)
        self.path = gather_objects(self.path, layout.world_group)[0]
        with failing_together(layout):
            self.make_room(weights)
        with failing_together(layout):
            self.fill(weights)

    def make(self, num_bytes: int, write_settings: Callable[[Path], None]) -> Path:
        """Make the folder in a place where the weights fit; write_settings puts the other files
        into it."""
        parent = self._parent or _shared_memory(num_bytes) or self._fallback
        with _refusing(parent / f"pgtk-weights-{secrets.token_hex(8)}") as self.path:
            parent.mkdir(parents=True, exist_ok=True)
            # This comes first, so that a kill at any moment leaves nothing in memory.
            self._keeper = Child([sys.executable, "-I", "-c", _KEEPER, str(self.path)])
            self.path.mkdir(0o700)
            write_settings(self.path)
            self.path.chmod(0o700 | self._more_rights)
        return self.path

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        """Make this process's file for `fill`, unless it already has one of this kind.

        Raises StorageError where the disk, or the memory, is full.
        """
        shares: list[_Kinds] = [{} for _ in range(self._count)]
        sizes = [0] * self._count
        for name, tensor in weights.items():
            dtype = self._type_of(tensor)
            smallest = sizes.index(min(sizes))
            shares[smallest][name] = (dtype, tensor.shape)
            sizes[smallest] += tensor.shape.numel() * dtype.itemsize
        if self._number >= self._count:
            return
        entries = _entries(shares[self._number], self._parts)
        header = _header(entries)
        if header == self._header:
            return
        self._map(header, entries, shares[self._number])
        if self._number == 0 and self._count > 1:
            files = {
                part: self._file(number)
                for number, share in enumerate(shares)
                for name, (_, shape) in share.items()
                for part in self._parts(name, shape)
            }
            content = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
            with _refusing(self._folder / "model.safetensors.index.json") as index:
                index.write_text(json.dumps(content), encoding="utf-8")

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights into the files that were made; every rank gathers one after the other.

        This process's file is written when this returns.
        """
        stream = None if self._known_at is None else torch.cuda.Stream()
        for name, tensor in weights.items():
            room = self._rooms.get(name)
            if room is None and type(tensor) is Tensor:
                continue  # another process writes it, and has all of it
            numbers = whole(tensor, self._type_of(tensor)).reshape(-1)
            if room is not None and (stream is None or not numbers.is_cuda):
                room.copy_(numbers)
            elif room is not None and stream is not None:
                stream.synchronize()  # at most two matrices may wait in the GPU's memory
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    room.copy_(numbers, non_blocking=True)
                numbers.record_stream(stream)
        if stream is not None:
            stream.synchronize()

    @property
    def _folder(self) -> Path:
        assert self.path is not None
        return self.path

    def _file(self, number: int) -> str:
        if self._count == 1:
            return "model.safetensors"
        return f"model-{number + 1:05}-of-{self._count:05}.safetensors"

    def remove(self) -> None:
        """Delete the folder; no server may still read it."""
        self._unmap()
        if self._keeper is not None:
            self._keeper.end(_SECONDS_TO_DELETE)
            shutil.rmtree(self._folder, ignore_errors=True)  # in case the keeper was killed

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.dtype.is_floating_point else tensor.dtype

    def _parts(self, name: str, shape: torch.Size) -> Shapes:
        """Return the shapes of a weight's parts by their names in a file, in the order in which
        they lie in memory."""
        return published(name, tuple(shape)) if self._published else {name: tuple(shape)}

    def _map(self, header: bytes, entries: dict[str, _Entry], kinds: _Kinds) -> None:
        """Make the file with this header, and map the numbers of each weight in it."""
        self._unmap()
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        size = len(header) + max(ends, default=0)
        with _refusing(self._folder / self._file(self._number)) as file:
            file.unlink(missing_ok=True)
            with file.open("wb") as opened:
                # The room is taken now: a later write to mapped memory without room would end the
                # process.
                os.posix_fallocate(opened.fileno(), 0, size)
                opened.write(header)
            file.chmod(0o644)
        content = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        for name, (dtype, shape) in kinds.items():
            parts = [*self._parts(name, shape)]
            first = len(header) + entries[parts[0]]["data_offsets"][0]
            end = len(header) + entries[parts[-1]]["data_offsets"][1]
            self._rooms[name] = content[first:end].view(dtype)
        self._header = header
        if torch.cuda.is_initialized() and file.is_relative_to(_SHARED_MEMORY):
            self._known_at = content.data_ptr() if _lock_pages(content) else None

    def _unmap(self) -> None:
        if self._known_at is not None:
            cuda: Any = torch.cuda.cudart()  # torch gives this module no type
            cuda.cudaHostUnregister(self._known_at)
        self._rooms = {}
        self._header = None
        self._known_at = None


def _lock_pages(content: Tensor) -> bool:
    """Have CUDA lock the pages of memory, and return whether it could.

    Where it could not, copies wait for one another.
    """
    cuda: Any = torch.cuda.cudart()
    done = cuda.cudaHostRegister(content.data_ptr(), content.nbytes, 0) == cuda.cudaError.success
    if not done:
        # CUDA keeps the error for its next call, whatever that is; so let it be this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return done


def _entries(kinds: _Kinds, parts_of: Callable[[str, torch.Size], Shapes]) -> dict[str, _Entry]:
    """Return the entries of a safetensors file. Those of wide numbers come first, so that all are
    aligned.

    parts_of: gives the parts of a weight in the file.
    """
    entries: dict[str, _Entry] = {}
    offset = 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
        for part, shape_of_part in parts_of(name, shape).items():
            end = offset + math.prod(shape_of_part) * dtype.itemsize
            entries[part] = {
                "dtype": _TYPE_NAMES[dtype],
                "shape": list(shape_of_part),
                "data_offsets": [offset, end],
            }
            offset = end
    return entries


def _header(entries: dict[str, _Entry]) -> bytes:
    """Return the header of a safetensors file (https://huggingface.co/docs/safetensors)."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _shared_memory(num_bytes: int) -> Path | None:
    """Return the folder of shared memory, None where it does not exist or has no room."""
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    return _SHARED_MEMORY if shutil.disk_usage(_SHARED_MEMORY).free > num_bytes + _ROOM else None


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[Path]:
    """Raise StorageError in place of an error of the system on writing to `path`."""
    try:
        yield path
    except OSError as error:
        raise StorageError(
            f"the weights for the sampling server cannot be written to {path}: "
            f"{error.strerror or error}. Use sampler.weights_folder=FOLDER on a disk with room for "
            "them."
        ) from error
