"""Several GPUs: a step in bfloat16 is as near to one GPU's as bfloat16 to float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LOSS, NORM, GRADIENT = 1e-3, 1e-2, 3e-2
"""The relative distances allowed; gradients are compared parameter by parameter."""


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2, 4])
def test_the_step_is_the_same_on_several_gpus(number):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    for name, row in run(number).items():
        print(name, row)
        assert row.get("loss", 0.0) < LOSS, name
        assert row["norm"] < NORM, name
        assert row["gradient"] < GRADIENT, (name, row["where"])


def run(number: int) -> dict[str, dict]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={number}",
    ]
    command.append(str(Path(__file__).with_name("parallel_gpu.py")))
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
