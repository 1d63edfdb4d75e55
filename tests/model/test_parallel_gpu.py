"""Several GPUs: a step in bfloat16 is as near to one GPU's as bfloat16 to float32; runs continue on more and fewer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders.runs import SHORT, metrics_of, once

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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    command.append(str(Path(__file__).with_name("parallel_gpu.py")))
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.gpu
def test_a_run_goes_on_on_another_number_of_gpus(tmp_path):
    """One GPU, two that share the weights, one again, against one that trains through; in float32."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")

    def pgtk(*words: str) -> None:
        done = subprocess.run([sys.executable, "-m", "pgtoolkit.cli", *words], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[-4000:]

    sample = once(*SHORT, "trainer.max_steps=4", f"rollout.save_path={tmp_path / 'rollouts'}")
    pgtk(*sample, "hydra.run.dir=sampled")
    kept = [setting for setting in SHORT if not setting.startswith(("rollout.", "trainer.max_steps"))]
    recorded = [*kept, "rollout=recorded", f"rollout.path={tmp_path / 'rollouts'}", "optimizer.learning_rate=0.01"]
    recorded += ["aggregation.divisor=4"]
    pgtk(*recorded, "trainer.max_steps=3", "hydra.run.dir=whole")
    pgtk(*recorded, "trainer.max_steps=1", "hydra.run.dir=cut")
    pgtk("resume", "cut", "trainer.max_steps=2", "parallelism=fsdp", "parallelism.data_parallel=2")
    pgtk("resume", "cut", "trainer.max_steps=3", "parallelism=single")
    rows, others = metrics_of(tmp_path / "cut"), metrics_of(tmp_path / "whole")
    assert [row["documents_seen"] for row in rows] == [8, 16, 24]
    for row, other in zip(rows, others, strict=True):
        for name in ("loss", "grad_norm", "new_logprobs"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (row["step"], name)
