"""A step in bfloat16 on several GPUs is as near to that of one GPU as bfloat16 is to float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [2, 4])
def test_the_step_is_the_same_on_several_gpus(num_gpus):
    """The distances are relative. That of gradients is of the parameter where it is largest."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    for name, row in distances_by_cut(num_gpus).items():
        print(name, row)
        assert row.get("loss", 0.0) < 1e-3, name
        assert row["norm"] < 1e-2, name
        assert row["gradient"] < 3e-2, (name, row["where"])


def distances_by_cut(num_gpus: int) -> dict[str, dict]:
    """Return the distances that parallel_gpu.py prints for each cut."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_gpus}",
        str(Path(__file__).with_name("parallel_gpu.py")),
    ]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
