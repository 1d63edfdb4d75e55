"""An extension that runs inside vLLM's workers, in their environment: it loads weights from shared
memory as fast as the GPU can read them.

vLLM itself reads each tensor from a file into pages that CUDA has to copy first. On an H200 that
reaches 7.5 GB/s, and pages that CUDA knows reach 55 GB/s.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Number types by their names in safetensors."""


class FromMemory:
    """A base that vLLM adds to its class of workers.

    `--worker-extension-cls pgtk_vllm_worker.FromMemory` asks for it.
    """

    if TYPE_CHECKING:  # vLLM's class has these
        device: torch.device
        reload_weights: Callable[..., None]

    def load_from_memory(self, folder: str) -> None:
        """Load the weights of the safetensors files in a folder.

        All have been read when this returns.
        """
        self.reload_weights(weights_iterator=self._from_memory(Path(folder)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _from_memory(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight with its name, in the host's memory."""
        contents = {file: self._mapped(file) for file in folder.glob("*.safetensors")}
        places = {}
        for file, content in contents.items():
            (length,) = struct.unpack("<Q", content[:8].numpy().tobytes())
            entries = json.loads(content[8 : 8 + length].numpy().tobytes())
            entries.pop("__metadata__", None)
            places |= {name: (file, entry, 8 + length) for name, entry in entries.items()}
        # vLLM buffers the parts of a layer, so they come one after the other.
        for name in sorted(places):
            file, entry, start = places[name]
            first, end = (start + offset for offset in entry["data_offsets"])
            # In the host's memory, as vLLM's own reader gives them: one more matrix on the GPU
            # might be too much for it.
            yield name, contents[file][first:end].view(_TYPES[entry["dtype"]]).view(entry["shape"])

    def _mapped(self, file: Path) -> torch.Tensor:
        """Return the bytes of a file; they stay mapped for the next version, known to CUDA where
        that is possible."""
        mapped = self.__dict__.setdefault("_mapped_files", {})
        status = file.stat()
        key = (file, status.st_ino)
        if key not in mapped:
            mapped[key] = torch.from_file(
                str(file), shared=True, size=status.st_size, dtype=torch.uint8
            )
            if self.device.type == "cuda":
                cuda: Any = torch.cuda.cudart()  # torch gives this module no type
                cuda.cudaHostRegister(mapped[key].data_ptr(), status.st_size, 0)
        return mapped[key]
