"""The folder that a server reads weights from: what lies in it, and where it cannot be written."""

from __future__ import annotations

import resource

import pytest
import torch
from safetensors.torch import load_file

from pgtoolkit.errors import StorageError
from pgtoolkit.rollouts.weights_folder import WeightsFolder, _lock_pages


def test_a_full_disk_is_one_sentence(tmp_path):
    folder = WeightsFolder(tmp_path, tmp_path, torch.float32)
    folder.make(1, lambda _: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=r"weights for the sampling server cannot be written.*weights_folder"):
            folder.fill({"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
def test_weights_of_a_gpu_are_in_the_file_once_they_are_written(tmp_path, shared):
    folder = WeightsFolder(None if shared else tmp_path, tmp_path, torch.bfloat16)
    weights = {"large": torch.randn(8000, 5000, device="cuda"), "small": torch.randn(3, device="cuda")}
    weights["count"] = torch.arange(7, device="cuda")
    folder.make(2**27, lambda _: None)
    try:
        for _ in range(3):
            folder.fill(weights)
            found = load_file(folder.path / "model.safetensors")
            for name, tensor in weights.items():
                assert torch.equal(found[name], tensor.to(found[name].dtype).cpu())
                tensor.add_(1)
            assert (folder._known_at is not None) == shared
        if shared:
            content = folder._rooms["large"]
            assert content.is_pinned()
            assert not _lock_pages(content)  # a second time
            assert torch.ones(3, device="cuda").sum().item() == 3
    finally:
        folder.remove()
