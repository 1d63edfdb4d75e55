"""Sweeps on a real Ray cluster and through submitit's local executor on this machine: their runs
end bit-equal to runs that were never interrupted."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import submitit.local.local
from builders.commands import ENVIRONMENT, PGTK, has_steps, run_sweep, running_sweep, wait_until
from builders.forked import forking_subprocess
from builders.runs import SHORT, assert_equal, checkpoint_of, metrics_of
from builders.runs import run as train_short

from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch import engines
from pgtoolkit.runs.records import read_status

pytestmark = pytest.mark.slow
STEPS = 40
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=5")
RAY = ("hydra/launcher=ray_cluster", "hydra.launcher.ray.init.address=auto")
SUBMITIT = (
    "hydra/launcher=slurm",
    "hydra.launcher.cluster=local",
    "hydra.launcher.gpus_per_node=null",
)


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit status and output of a process, once it has ended."""
    output, _ = process.communicate(timeout=300)
    assert "Traceback" not in output
    return process.returncode, output


def wait_for_steps(folder: Path, name: str, steps: int) -> Path:
    """Return the run directory of a job, once it has made this number of steps."""
    wait_until(has_steps(folder, name, steps), 120)
    return next((folder / "sweep").glob(f"{name}*/metrics.jsonl")).parent


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that trains a seed without interruption, once, and returns its folder."""
    return functools.cache(
        lambda seed: train_short(tmp_path_factory.mktemp("uninterrupted"), *LONG, f"seed={seed}")
    )


@pytest.fixture(scope="module")
def ray_head() -> Iterator[psutil.Process]:
    """Start a head of Ray on the loopback interface, deaf to SIGINT like a process that a script
    starts by `&`."""
    command = [
        PGTK.with_name("ray"),
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=2",
    ]
    command += ["--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--no-monitor", "--include-log-monitor=false"]  # each is a further Python
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
    tmp_path, ray_head, uninterrupted
):
    with running_sweep(tmp_path, *RAY, *LONG, "seed=0,1") as launcher:
        first = wait_for_steps(tmp_path, "seed-0", 12)
        process = psutil.Process(read_status(first)["pid"]).parent()
        assert process.ppid() in {child.pid for child in ray_head.children(recursive=True)}
        psutil.Process(process.ppid()).kill()
        status, output = wait_for_end(launcher)
    assert status == 0, output
    assert len(json.loads((first / "provenance.json").read_text())["resumed"]) == 1
    for seed in (0, 1):
        (directory,) = (tmp_path / "sweep").glob(f"seed-{seed}-*")
        assert metrics_of(directory) == metrics_of(uninterrupted(seed))
        assert_equal(checkpoint_of(directory, STEPS), checkpoint_of(uninterrupted(seed), STEPS))
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "sweep").glob("seed-*/**/*")}
    status, output = run_sweep(tmp_path, *RAY, *LONG, "seed=0,1")
    assert status == 0, output
    assert not re.search("connecting|starts", output)
    assert {
        file: file.stat().st_mtime_ns for file in (tmp_path / "sweep").glob("seed-*/**/*")
    } == times


def test_a_signal_to_a_sweep_on_ray_saves_its_running_jobs(tmp_path, ray_head):
    with running_sweep(
        tmp_path, *RAY, "trainer.max_steps=100000", "trainer.checkpoint_every=100000", "seed=0,1,2"
    ) as launcher:
        directory = wait_for_steps(tmp_path, "seed-0", 5)
        launcher.send_signal(signal.SIGTERM)
        status, output = wait_for_end(launcher)
    assert status == 75, output
    run = read_status(directory)
    assert (run["state"], run["reason"]) == ("interrupted", "SIGTERM")
    assert (directory / "checkpoints" / f"step-{run['step']:06d}" / "manifest.json").exists()
    assert "Continue with: " in output


def test_each_failing_job_on_ray_is_named_with_its_error_and_its_log(tmp_path, ray_head):
    diverging = (
        "optimizer.learning_rate=1e5",
        "optimizer.warmup_steps=0",
        "optimizer.weight_decay=10",
        "seed=0,1",
    )
    status, output = run_sweep(tmp_path, *RAY, *diverging)
    assert status == 1, output
    failures = re.findall(
        r"^failed: seed-\d-\w+\n  .*not finite.*\n  log: sweep/.*output.log$", output, re.M
    )
    assert len(failures) == 2


def test_a_head_of_ray_that_does_not_answer_is_refused(monkeypatch):
    monkeypatch.setattr(engines, "_SECONDS_TO_CONNECT", 1)
    with pytest.raises(
        ConfigError, match=r"address=127\.0\.0\.1:1 needs a Ray cluster .*after 1 seconds"
    ):
        engines.RayEngine({"address": "127.0.0.1:1"}, {})


def test_a_signal_ends_the_wait_for_a_head_of_ray(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with running_sweep(
            tmp_path, *RAY[:1], f"hydra.launcher.ray.init.address={address}", "seed=0,1"
        ) as launcher:
            while "connecting to Ray" not in launcher.stdout.readline():
                pass
            launcher.send_signal(signal.SIGTERM)
            status, output = wait_for_end(launcher)
    assert (status, "stopped as asked (SIGTERM)" in output) == (75, True), output


def test_a_preempted_job_of_submitit_saves_and_is_queued_again_to_its_end(
    tmp_path, uninterrupted, monkeypatch
):
    # Its processes are forked, from the launcher on: they need no imports.
    monkeypatch.setattr(submitit.local.local, "subprocess", forking_subprocess())
    command = (*SUBMITIT, f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=1000", "seed=0")
    with running_sweep(tmp_path, *command) as launcher:
        directory = wait_for_steps(tmp_path, "", 12)
        task = psutil.Process(read_status(directory)["pid"]).parent().parent()
        assert task.name() == "task" or "submitit.core._submit" in task.cmdline()
        task.send_signal(signal.SIGUSR2)
        status, output = wait_for_end(launcher)
    assert status == 0, output
    assert len(json.loads((directory / "provenance.json").read_text())["resumed"]) == 1
    log = (directory / "run.log").read_text()
    saved = int(
        re.search(r"^.*SIGUSR2\) after step (\d+); saved up to step \1", log, re.MULTILINE)[1]
    )
    assert 12 <= saved < STEPS
    assert metrics_of(directory) == metrics_of(uninterrupted(0))
    status, output = run_sweep(tmp_path, *command)
    assert status == 0, output
    assert "starts" not in output


def test_a_sweep_that_slurm_does_not_take_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(
        part for part in ENVIRONMENT["PATH"].split(os.pathsep) if not Path(part, "sbatch").exists()
    )
    monkeypatch.setenv("PATH", path)
    command = ["-m", *SHORT, "seed=0,1", "hydra/launcher=slurm", "hydra.sweep.dir=sweep"]
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert "hydra/launcher=slurm needs a cluster that takes such jobs (got " in errors
    assert "Traceback" not in errors
