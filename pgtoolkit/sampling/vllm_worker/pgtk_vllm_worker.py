"""What runs inside vLLM's workers, in their environment: loads weights from shared memory at the
GPU's own speed.

vLLM reads each tensor from a file into pages that CUDA first has to copy: 7.5 GB/s on an H200,
where pages that CUDA knows take 55.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

_TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_TYPES |= {"BOOL": torch.bool, "U8": torch.uint8, "F64": torch.float64}


class FromMemory:
    """Added to vLLM's class of workers: `--worker-extension-cls pgtk_vllm_worker.FromMemory`."""

    if TYPE_CHECKING:  # what that class has
        device: torch.device
        reload_weights: Callable[..., None]

    def load_from_memory(self, folder: str) -> None:
        """Take the weights of the safetensors files in a folder. All of them are read when this
        returns."""
        self.reload_weights(weights_iterator=self._from_memory(Path(folder)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _from_memory(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        contents = {file: self._mapped(file) for file in folder.glob("*.safetensors")}
        places = {}
        for file, content in contents.items():
            (length,) = struct.unpack("<Q", content[:8].numpy().tobytes())
            entries = json.loads(content[8 : 8 + length].numpy().tobytes())
            entries.pop("__metadata__", None)
            places |= {name: (file, entry, 8 + length) for name, entry in entries.items()}
        # the parts of a layer one after the other, as vLLM buffers them
        for name in sorted(places):
            file, entry, start = places[name]
            first, end = (start + offset for offset in entry["data_offsets"])
            # In the host's memory, as vLLM's own are: a whole matrix more on the GPU might be too
            # much for it.
            yield name, contents[file][first:end].view(_TYPES[entry["dtype"]]).view(entry["shape"])

    def _mapped(self, file: Path) -> torch.Tensor:
        """The bytes of a file, which stay mapped for the next version, and known to CUDA where it
        can."""
        kept = self.__dict__.setdefault("_mapped_files", {})
        status = file.stat()
        if (key := (file, status.st_ino)) not in kept:
            kept[key] = torch.from_file(
                str(file), shared=True, size=status.st_size, dtype=torch.uint8
            )
            if self.device.type == "cuda":
                cuda: Any = torch.cuda.cudart()
                cuda.cudaHostRegister(kept[key].data_ptr(), status.st_size, 0)
        return kept[key]
