"""Sweeps on Ray and through submitit, with both of them really running on this machine, and the
runs they leave."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from builders.commands import ENVIRONMENT, PGTK, has_steps, run_sweep, running_sweep, wait_until
from builders.runs import SHORT, assert_equal, checkpoint_of, metrics_of
from builders.runs import run as train_short

from pgtoolkit.errors import ConfigError
from pgtoolkit.launch import engines

pytestmark = pytest.mark.slow
STEPS = 120
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=10")
RAY = ("hydra/launcher=ray_cluster", "hydra.launcher.ray.init.address=auto")
SUBMITIT = (
    "hydra/launcher=slurm",
    "hydra.launcher.cluster=local",
    "hydra.launcher.gpus_per_node=null",
)


def ended(process) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    assert "Traceback" not in output
    return process.returncode, output


def wait_for_steps(folder, name, steps) -> Path:
    """The run directory of a job that has made so many steps."""
    wait_until(has_steps(folder, name, steps), 120)
    return next((folder / "sweep").glob(f"{name}*/metrics.jsonl")).parent


def status_of(directory) -> dict:
    return json.loads((directory / "status.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of a seed that nobody interrupted."""
    return functools.cache(
        lambda seed: train_short(tmp_path_factory.mktemp("whole"), *LONG, f"seed={seed}")
    )


@pytest.fixture(scope="module")
def ray_head():
    """A head of Ray on the loopback interface, and the processes it has started, as a script begins
    it by `&`."""
    command = [
        PGTK.with_name("ray"),
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=2",
    ]
    command += ["--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    lock = (Path(tempfile.gettempdir()) / "pgtk-tests-ray.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # "auto" would find the head of another worker of pytest
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    deaf = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    head = subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=deaf, **streams)
    try:
        for line in head.stdout:
            if "Ray runtime started" in line:
                break
        yield psutil.Process(head.pid)
    finally:
        head.terminate()
        head.wait(timeout=60)
        lock.close()


def test_a_killed_worker_of_ray_is_replaced_and_finished_jobs_are_not_sent_again(
    tmp_path, ray_head, whole
):
    with running_sweep(tmp_path, *RAY, *LONG, "seed=0,1") as launcher:
        first = wait_for_steps(tmp_path, "seed-0", 25)
        process = psutil.Process(status_of(first)["pid"]).parent()
        assert process.ppid() in {child.pid for child in ray_head.children(recursive=True)}
        psutil.Process(process.ppid()).kill()
        status, output = ended(launcher)
    assert status == 0, output
    assert len(json.loads((first / "provenance.json").read_text())["resumed"]) == 1
    for seed in (0, 1):
        (directory,) = (tmp_path / "sweep").glob(f"seed-{seed}-*")
        assert metrics_of(directory) == metrics_of(whole(seed))
        assert_equal(checkpoint_of(directory, STEPS), checkpoint_of(whole(seed), STEPS))
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "sweep").glob("seed-*/**/*")}
    status, output = run_sweep(tmp_path, *RAY, *LONG, "seed=0,1")
    assert status == 0, output
    assert not re.search("connecting|starts", output)
    assert {
        file: file.stat().st_mtime_ns for file in (tmp_path / "sweep").glob("seed-*/**/*")
    } == times


def test_a_signal_to_a_sweep_on_ray_saves_its_jobs(tmp_path, ray_head):
    with running_sweep(
        tmp_path, *RAY, "trainer.max_steps=100000", "trainer.checkpoint_every=100000", "seed=0,1,2"
    ) as launcher:
        directory = wait_for_steps(tmp_path, "seed-0", 5)
        launcher.send_signal(signal.SIGTERM)
        status, output = ended(launcher)
    assert status == 75, output
    found = status_of(directory)
    assert (found["state"], found["reason"]) == ("interrupted", "SIGTERM")
    assert (directory / "checkpoints" / f"step-{found['step']:06d}" / "manifest.json").exists()
    assert "Continue with: " in output


def test_a_failing_job_on_ray_is_one_line_with_its_log(tmp_path, ray_head):
    wrong = (
        "optimizer.learning_rate=1e5",
        "optimizer.warmup_steps=0",
        "optimizer.weight_decay=10",
        "seed=0,1",
    )
    status, output = run_sweep(tmp_path, *RAY, *wrong)
    assert status == 1, output
    assert (
        len(
            re.findall(
                r"^failed: seed-\d-\w+\n  .*not finite.*\n  log: sweep/.*output.log$", output, re.M
            )
        )
        == 2
    )


def test_a_head_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(engines, "_SECONDS_TO_CONNECT", 1)
    with pytest.raises(
        ConfigError, match=r"address=127\.0\.0\.1:1 needs a Ray cluster .*after 1 seconds"
    ):
        engines.RayEngine({"address": "127.0.0.1:1"}, {})


def test_a_signal_ends_the_wait_for_a_head(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with running_sweep(
            tmp_path, *RAY[:1], f"hydra.launcher.ray.init.address={address}", "seed=0,1"
        ) as launcher:
            while "connecting to Ray" not in launcher.stdout.readline():
                pass
            launcher.send_signal(signal.SIGTERM)
            status, output = ended(launcher)
    assert (status, "stopped as asked (SIGTERM)" in output) == (75, True), output


def test_a_preempted_job_of_submitit_saves_and_is_queued_again(tmp_path, whole):
    command = (*SUBMITIT, f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=1000", "seed=0")
    with running_sweep(tmp_path, *command) as launcher:
        directory = wait_for_steps(tmp_path, "", 25)
        task = psutil.Process(status_of(directory)["pid"]).parent().parent()
        assert "submitit.core._submit" in task.cmdline()
        task.send_signal(signal.SIGUSR2)
        status, output = ended(launcher)
    assert status == 0, output
    assert len(json.loads((directory / "provenance.json").read_text())["resumed"]) == 1
    log = (directory / "run.log").read_text()
    saved = int(
        re.search(r"^.*SIGUSR2\) after step (\d+); saved up to step \1", log, re.MULTILINE)[1]
    )
    assert 25 <= saved < STEPS
    assert metrics_of(directory) == metrics_of(whole(0))
    status, output = run_sweep(tmp_path, *command)
    assert status == 0, output
    assert "starts" not in output


def test_what_slurm_refuses_is_one_sentence(tmp_path):
    path = os.pathsep.join(
        part for part in ENVIRONMENT["PATH"].split(os.pathsep) if not Path(part, "sbatch").exists()
    )
    command = [PGTK, "-m", *SHORT, "seed=0,1", "hydra/launcher=slurm", "hydra.sweep.dir=sweep"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | {"PATH": path},
    )
    assert done.returncode == 2, done.stderr
    assert "hydra/launcher=slurm needs a cluster that takes such jobs (got " in done.stderr
    assert "Traceback" not in done.stderr
