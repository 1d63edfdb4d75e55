"""Sweeps as real processes: what a second run of the same command skips, resumes and retries; kills
and signals."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from builders.commands import has_steps, job_directory, run_sweep, running_sweep, wait_until
from builders.runs import assert_equal, checkpoint_of, metrics_of
from builders.runs import run as train_short

from pgtoolkit.runs.records import read_sweep

pytestmark = pytest.mark.slow
STEPS = 200
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=20")


def jobs_of(folder) -> dict[str, dict]:
    return {job["name"].rpartition("-")[0]: job for job in read_sweep(folder / "sweep")["jobs"]}


def process_of(folder, name) -> int:
    return json.loads((job_directory(folder, name) / "status.json").read_text())["pid"]


def rows_of(folder, name, steps) -> list[str]:
    """The rows of a job's first steps, with the time at which they were written."""
    return (job_directory(folder, name) / "metrics.jsonl").read_text().splitlines()[:steps]


def times(path: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(path.rglob("*"))}


def test_killed_jobs_and_a_killed_launcher_are_gone_on_with(tmp_path):
    """SIGKILL of one job, then of the launcher of another: the same command resumes both, to the
    same bits."""
    command = (*LONG, "seed=0,1", "hydra.launcher.n_jobs=2")
    with running_sweep(tmp_path, *command) as launcher:
        wait_until(has_steps(tmp_path, "seed-0", 50))
        os.kill(process_of(tmp_path, "seed-0"), signal.SIGKILL)
        wait_until(lambda: jobs_of(tmp_path)["seed-0"]["status"] == "interrupted")
        assert jobs_of(tmp_path)["seed-0"]["reason"] == "killed by SIGKILL"
        wait_until(has_steps(tmp_path, "seed-1", 50))
        launcher.kill()
        output, _ = launcher.communicate()
    assert re.findall(r"^\[[12]/2\] (?:starts|interrupted)", output, re.MULTILINE)[:2] == [
        "[1/2] starts",
        "[2/2] starts",
    ]
    made = rows_of(tmp_path, "seed-0", 40) + rows_of(tmp_path, "seed-1", 40)

    # At once: the second job may still be saving, since it sees that its launcher is gone.
    status, output = run_sweep(tmp_path, *command)
    assert status == 0, output
    assert len(re.findall(r"continues after step \d+", output)) == 2
    assert rows_of(tmp_path, "seed-0", 40) + rows_of(tmp_path, "seed-1", 40) == made
    for seed in (0, 1):
        found, name = job_directory(tmp_path, f"seed-{seed}"), f"seed-{seed}"
        whole = train_short(tmp_path / f"whole-{seed}", *LONG, f"seed={seed}")
        assert metrics_of(found) == metrics_of(whole)
        assert_equal(checkpoint_of(found, STEPS), checkpoint_of(whole, STEPS))
        status = json.loads((found / "status.json").read_text())
        assert (status["state"], status["sweep"]) == ("done", "sweep")
        assert (
            f"step {STEPS}/{STEPS}"
            in (tmp_path / "sweep" / jobs_of(tmp_path)[name]["log"]).read_text()
        )
    assert (
        len(
            re.findall(
                r"^\[\d/2\] done +\d+ s seed-\d-[0-9a-f]{8}  reward \d", output, re.MULTILINE
            )
        )
        == 2
    )
    assert (
        len(re.findall(rf"^done +{STEPS} +\d+ +\d\.\d{{3}}  seed-\d-", output, re.MULTILINE)) == 2
    )

    before = times(tmp_path / "sweep")
    status, output = run_sweep(tmp_path, *command)
    assert status == 0, output
    assert "sweep sweep: 2 jobs, 2 done" in output
    assert {path: time for path, time in times(tmp_path / "sweep").items() if "/seed-" in path} == {
        path: time for path, time in before.items() if "/seed-" in path
    }


def test_a_failing_job_is_named_and_hides_no_other(tmp_path):
    overrides = (
        "optimizer.learning_rate=1e5,1e-3",
        "optimizer.warmup_steps=0",
        "optimizer.weight_decay=10",
    )
    status, output = run_sweep(tmp_path, *overrides, "--fail-fast")
    assert status == 1, output
    assert "no further job is started" in output
    assert {name: job["status"] for name, job in jobs_of(tmp_path).items()} == {
        "learning-rate-100000.0": "failed",
        "learning-rate-0.001": "pending",
    }
    status, output = run_sweep(tmp_path, *overrides)
    assert status == 1, output
    assert "Traceback" not in output
    assert re.search(
        r"^failed: learning-rate-100000.0-\w+\n  .*not finite.*\n  log: sweep/.*output.log$",
        output,
        re.M,
    )
    jobs = jobs_of(tmp_path)
    assert [job["status"] for job in jobs.values()] == ["failed", "done"]
    assert "not finite" in jobs["learning-rate-100000.0"]["reason"]
    assert len(list((tmp_path / "sweep").glob("learning-rate-*"))) == 2


def test_an_interrupt_of_the_launcher_lets_the_jobs_save_and_says_how_to_go_on(tmp_path):
    with running_sweep(
        tmp_path, "seed=0,1", "trainer.max_steps=2000", "trainer.checkpoint_every=2000"
    ) as launcher:
        wait_until(has_steps(tmp_path, "seed-0", 3))
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, output
    assert "Traceback" not in output
    assert re.search(r"Continue with: .*pgtk -m .* seed=0,1", output)
    first, second = jobs_of(tmp_path).values()
    assert (first["status"], first["reason"], second["status"]) == (
        "interrupted",
        "SIGINT",
        "pending",
    )
    assert (
        job_directory(tmp_path, "seed-0") / "checkpoints" / f"step-{first['step']:06d}"
    ).is_dir()
    assert not list((tmp_path / "sweep").glob("seed-1-*"))


def test_a_signal_before_training_has_begun_ends_a_job_at_once(tmp_path):
    with running_sweep(tmp_path, "seed=0,1") as launcher:
        while not launcher.stdout.readline().startswith("[1/2] starts"):
            pass
        time.sleep(1)  # amid the imports, where an exception would break modules
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    jobs = jobs_of(tmp_path)
    assert [job["status"] for job in jobs.values()] == ["pending", "pending"]
    assert (tmp_path / "sweep" / jobs["seed-0"]["log"]).read_text() == ""


def test_data_parallel_jobs_in_one_sweep(tmp_path):
    """Two jobs at a time, each of two processes: their ranks do not meet."""
    overrides = ("parallelism=ddp", "seed=1,2", "trainer.max_steps=4", "hydra.launcher.n_jobs=2")
    status, output = run_sweep(tmp_path, *overrides)
    assert status == 0, output
    assert "2 jobs, 2 done" in output
    rows = [metrics_of(job_directory(tmp_path, name)) for name in ("seed-1", "seed-2")]
    assert [[row["step"] for row in one] for one in rows] == [[1, 2, 3, 4]] * 2
    assert [row["reward"] for row in rows[0]] != [row["reward"] for row in rows[1]]
    assert all(
        (job_directory(tmp_path, name) / "checkpoints" / "step-000004").is_dir()
        for name in ("seed-1", "seed-2")
    )
