"""The weights on their way to a server: a Hugging Face folder in shared memory, filled anew for
each version.

The ranks of one node write it together, a file each: every matrix is brought together by all ranks
    and copied by one,
so that the GPUs copy at the same time, and the next matrix is on its way meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.errors import StorageError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.collectives import whole
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.child import Child

_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 2**26
"""What is left free beside the weights."""
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_NAMES |= {torch.bool: "BOOL", torch.uint8: "U8", torch.float64: "F64"}
"""How safetensors calls number types."""

_KEEPER = """
import shutil, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
sys.stdin.buffer.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Deletes a folder when the channel of this process ends, as only the end of its parent or `end`
does: a signal may be sent to all processes of a job."""
_SECONDS_TO_DELETE = 15


class WeightsFolder:
    """A folder with the weights and what else a model needs, until `remove`, or until the process
    that made it is gone.

    parent: where it is made; None for shared memory if there is room, else `fallback`. dtype: of
        its weights.
    for_others: whether other users of the machine may read it, one of whom may have started the
        server.
    number, count: which of so many processes this is that write it; of none, beyond them. The first
        makes it, and tells
    the others its `path`.
    This process's file stays mapped: a new version overwrites it in place, from the GPU without a
    copy in between. Whoever reads it has to be done before. What of it is in shared memory is made
    known to CUDA, so that nothing
    waits for a copy: its pages are locked then. Those of a file on a disk the GPU may not write
        behind the file system.
    """

    def __init__(
        self,
        parent: Path | None,
        fallback: Path,
        dtype: torch.dtype,
        for_others: bool = False,
        number: int = 0,
        count: int = 1,
    ):
        self._parent, self._fallback, self.dtype = parent, fallback, dtype
        self._number, self._count = number, count
        self._more_rights = 0o055 if for_others else 0
        self._header: bytes | None = None
        self._rooms: dict[str, Tensor] = {}
        self._known_at: int | None = None  # the address that CUDA knows
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
    ) -> WeightsFolder:
        """Return the folder that the ranks of rank 0's node write together, a file each; every rank
        calls this."""
        writers = layout.node_group if layout.reader == 0 else None
        place = (min(layout.rank, 1), 1) if writers is None else (writers.rank(), writers.size())
        return cls(parent, fallback, dtype, for_others, *place)

    def write(
        self, weights: Mapping[str, Tensor], layout: Layout, write_settings: Callable[[Path], None]
    ) -> None:
        """Write a version of the weights, and make the folder before the first one; nobody may be
        reading.

        Called by every rank with its parts: of what is spread over ranks, one matrix at a time is
            whole. All files
        are written when this returns. write_settings: puts the other files into the folder.
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
        """Make the folder where the weights fit; write_settings puts the other files into it."""
        parent = self._parent or _shared_memory(num_bytes) or self._fallback
        with _refusing(parent / f"pgtk-weights-{secrets.token_hex(8)}") as self.path:
            parent.mkdir(parents=True, exist_ok=True)
            # First, so that a kill at any moment leaves nothing in memory.
            self._keeper = Child([sys.executable, "-I", "-c", _KEEPER, str(self.path)])
            self.path.mkdir(0o700)
            write_settings(self.path)
            self.path.chmod(0o700 | self._more_rights)
        return self.path

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        """In this process's file, for `fill`. Raises StorageError where the disk, or the memory, is
        full."""
        kinds = {name: (self._type_of(tensor), tensor.shape) for name, tensor in weights.items()}
        shares: list[dict] = [{} for _ in range(self._count)]
        sizes = [0] * self._count
        for name, (dtype, shape) in kinds.items():
            least = sizes.index(min(sizes))
            shares[least][name] = dtype, shape
            sizes[least] += shape.numel() * dtype.itemsize
        if self._number < self._count and (header := _header(shares[self._number])) != self._header:
            self._map(header)
            if self._number == 0 and self._count > 1:
                files = {
                    name: self._file(number)
                    for number, share in enumerate(shares)
                    for name in share
                }
                content = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
                with _refusing(self._folder / "model.safetensors.index.json") as index:
                    index.write_text(json.dumps(content), encoding="utf-8")

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights, which every rank brings together one after the other, into the room
        that was made.

        Those of this process are written when this returns.
        """
        stream = None if self._known_at is None else torch.cuda.Stream()
        for name, tensor in weights.items():
            room = self._rooms.get(name)
            if room is None and type(tensor) is Tensor:
                continue  # nobody needs a part of it from here
            numbers = whole(tensor, self._type_of(tensor)).reshape(-1)
            if room is not None and (stream is None or not numbers.is_cuda):
                room.copy_(numbers)
            elif room is not None and stream is not None:
                stream.synchronize()  # so that no more than two matrices wait in the GPU's memory
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
        return (
            "model.safetensors"
            if self._count == 1
            else f"model-{number + 1:05}-of-{self._count:05}.safetensors"
        )

    def remove(self) -> None:
        """Delete the folder, which no server may still read."""
        self._forget()
        if self._keeper is not None:
            self._keeper.end(_SECONDS_TO_DELETE)
            shutil.rmtree(self._folder, ignore_errors=True)  # where the keeper was killed

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.dtype.is_floating_point else tensor.dtype

    def _map(self, header: bytes) -> None:
        """The file of this header, and in memory the place of each tensor's numbers in it."""
        self._forget()
        entries = json.loads(header[8:])
        size = len(header) + max(
            (entry["data_offsets"][1] for entry in entries.values()), default=0
        )
        with _refusing(self._folder / self._file(self._number)) as file:
            file.unlink(missing_ok=True)
            with file.open("wb") as opened:
                # Room is taken now: a write to mapped memory that finds none would end the process.
                os.posix_fallocate(opened.fileno(), 0, size)
                opened.write(header)
            file.chmod(0o644)
        content = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        types = {name: dtype for dtype, name in _NAMES.items()}
        for name, entry in entries.items():
            first, end = (len(header) + offset for offset in entry["data_offsets"])
            self._rooms[name] = content[first:end].view(types[entry["dtype"]])
        self._header = header
        if torch.cuda.is_initialized() and file.is_relative_to(_SHARED_MEMORY):
            self._known_at = content.data_ptr() if _lock_pages(content) else None

    def _forget(self) -> None:
        if self._known_at is not None:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._known_at)
        self._rooms, self._header, self._known_at = {}, None, None


def _lock_pages(content: Tensor) -> bool:
    """Whether CUDA could; where it cannot, copies wait for one another."""
    cuda: Any = torch.cuda.cudart()
    done = cuda.cudaHostRegister(content.data_ptr(), content.nbytes, 0) == cuda.cudaError.success
    if not done:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # whatever computes next would raise the error
    return done


def _header(kinds: dict[str, tuple[torch.dtype, torch.Size]]) -> bytes:
    """Of a safetensors file: https://huggingface.co/docs/safetensors. Wide numbers first, so that
    all are aligned."""
    entries, offset = {}, 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
        end = offset + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _shared_memory(num_bytes: int) -> Path | None:
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    return _SHARED_MEMORY if shutil.disk_usage(_SHARED_MEMORY).free > num_bytes + _ROOM else None


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[Path]:
    """StorageError where the system refuses it."""
    try:
        yield path
    except OSError as error:
        raise StorageError(
            f"the weights for the sampling server cannot be written to {path}: "
            f"{error.strerror or error}. Use sampler.weights_folder=FOLDER on a disk with room for "
            "them."
        ) from error
