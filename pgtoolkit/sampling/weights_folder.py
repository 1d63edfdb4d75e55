"""The weights on their way to a server: a Hugging Face folder in shared memory, filled anew for each version."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pgtoolkit.errors import StorageError
from pgtoolkit.ranks.collectives import whole
from pgtoolkit.sampling.server_process import Guard

_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 2**26
"""What is left free beside the weights."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32"}
_NAMES |= {torch.bool: "BOOL", torch.uint8: "U8", torch.float64: "F64"}
"""How safetensors calls number types."""


class WeightsFolder:
    """A folder with `model.safetensors` and what else a model needs, until `remove`, or until this process is gone.

    parent: where it is made; None for shared memory if there is room, else `fallback`. dtype: of its weights.
    for_others: whether other users of the machine may read it, one of whom may have started the server.
    The file stays mapped: a new version overwrites it in place, from the GPU without a copy in between. Whoever reads
    it has to be done before. What of it is in shared memory is made known to CUDA, so that all tensors are copied at
    once: its pages are locked then. Those of a file on a disk the GPU may not write behind the file system's back.
    """

    def __init__(self, parent: Path | None, fallback: Path, dtype: torch.dtype, for_others: bool = False):
        self._parent, self._fallback, self.dtype = parent, fallback, dtype
        self._more_rights = 0o055 if for_others else 0
        self._header: bytes | None = None
        self._rooms: dict[str, Tensor] = {}
        self._known_at: int | None = None  # the address that CUDA knows
        self.guard: Guard | None = None
        self.path: Path | None = None

    def make(self, num_bytes: int, write_settings: Callable[[Path], None]) -> Path:
        """Make the folder where the weights fit; write_settings puts the other files into it."""
        try:
            parent = self._parent or _shared_memory(num_bytes) or self._fallback
            parent.mkdir(parents=True, exist_ok=True)
            self.path = parent / f"pgtk-weights-{secrets.token_hex(8)}"
            # First, so that a kill at any moment leaves nothing in memory.
            self.guard = Guard(self.path)
            self.path.mkdir(0o700)
            write_settings(self.path)
            self.path.chmod(0o700 | self._more_rights)
        except OSError as error:
            raise _refused(self.path or parent, error) from error
        return self.path

    def make_room(self, weights: Mapping[str, Tensor]) -> None:
        """In the file, for `fill`. Raises StorageError where the disk, or the memory, is full."""
        header = _header({name: (self._type_of(tensor), tensor.shape) for name, tensor in weights.items()})
        if header != self._header:
            self._map(header)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights, which every rank brings together one after the other; they are written when this returns.

        Raises StorageError where the disk, or the memory, is full.
        """
        self.make_room(weights)
        try:
            for name, tensor in weights.items():
                room = self._rooms[name]  # a copy to another type would wait, and be converted on the CPU
                room.copy_(whole(tensor, room.dtype).reshape(-1), non_blocking=self._known_at is not None)
        finally:
            for device in {tensor.device for tensor in weights.values() if tensor.device.type == "cuda"}:
                torch.cuda.synchronize(device)

    def remove(self) -> None:
        """With the servers that were started from it."""
        self._forget()
        if self.guard is not None:
            self.guard.end()
            shutil.rmtree(self.path, ignore_errors=True)  # where the guard was killed

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.dtype.is_floating_point else tensor.dtype

    def _map(self, header: bytes) -> None:
        """The file of this header, and in memory the place of each tensor's numbers in it."""
        self._forget()
        file, entries = self.path / "model.safetensors", json.loads(header[8:])
        size = len(header) + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        try:
            file.unlink(missing_ok=True)
            with file.open("wb") as opened:
                # Room is taken now: a write to mapped memory that finds none would end the process.
                os.posix_fallocate(opened.fileno(), 0, size)
                opened.write(header)
            file.chmod(0o644)
        except OSError as error:
            raise _refused(file, error) from error
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
            torch.cuda.cudart().cudaHostUnregister(self._known_at)
        self._rooms, self._header, self._known_at = {}, None, None


def _lock_pages(content: Tensor) -> bool:
    """Whether CUDA could; where it cannot, copies wait for one another."""
    cuda = torch.cuda.cudart()
    done = cuda.cudaHostRegister(content.data_ptr(), content.nbytes, 0) == cuda.cudaError.success
    if not done:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # whatever computes next would raise the error
    return done


def _header(kinds: dict[str, tuple[torch.dtype, torch.Size]]) -> bytes:
    """Of a safetensors file: https://huggingface.co/docs/safetensors. Wide numbers first, so that all are aligned."""
    entries, offset = {}, 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
        end = offset + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _shared_memory(num_bytes: int) -> Path | None:
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    return _SHARED_MEMORY if shutil.disk_usage(_SHARED_MEMORY).free > num_bytes + _ROOM else None


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the weights for the sampling server cannot be written to {path}: {error.strerror or error}. Use "
        "sampler.weights_folder=FOLDER on a disk with room for them."
    )
