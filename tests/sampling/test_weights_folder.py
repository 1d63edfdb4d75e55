"""The folder that a server reads weights from: what lies in it, and where it cannot be written."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pgtoolkit.errors import StorageError
from pgtoolkit.sampling.weights_folder import WeightsFolder, _lock_pages


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


@pytest.mark.parametrize(("for_others", "rights"), [(False, 0o700), (True, 0o755)])
def test_weights_are_their_owners_alone_where_no_other_has_started_the_server(tmp_path, for_others, rights):
    folder = WeightsFolder(tmp_path, tmp_path, torch.float32, for_others)
    path = folder.make(1, lambda path: (path / "config.json").touch())
    assert path.stat().st_mode & 0o777 == rights
    folder.remove()


def test_nothing_is_left_of_the_folder_of_a_process_that_is_killed(tmp_path):
    """Of one without a server of its own, too, which joins others' for weeks."""
    program = """if True:
        import os, signal, sys, torch
        from pathlib import Path
        from pgtoolkit.sampling.weights_folder import WeightsFolder

        made = WeightsFolder(Path(sys.argv[1]), None, torch.float32).make(1, lambda folder: None)
        print(made, made.exists(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    path, existed = done.stdout.split()
    assert existed == "True"
    deadline = time.monotonic() + 30
    while Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(path).exists()


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
