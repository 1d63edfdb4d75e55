"""Sweeps whose jobs are real processes: after kills, signals and failures the same command skips
finished jobs, resumes the others, and ends bit-equal to runs without interruption.

Where only the jobs matter, the command runs in this process, and all jobs are forked from one.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.commands import ENVIRONMENT, has_steps, job_directory, running_sweep, wait_until
from builders.runs import SHORT, assert_equal, checkpoint_of, last_of_each_key, metrics_of
from builders.runs import run as train_short

from pgtoolkit.cli import main
from pgtoolkit.launch import engines, multirun
from pgtoolkit.launch.check import check_sweep
from pgtoolkit.launch.forks import Forks
from pgtoolkit.launch.search import Watched
from pgtoolkit.runs.find import read_run
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system import pictures

pytestmark = pytest.mark.slow
STEPS = 80
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=10")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Start the process that forks the jobs of all sweeps of this process."""
    shared = Forks(ENVIRONMENT)
    yield shared
    shared._process.end(60)


@pytest.fixture
def run_sweep(
    forks: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a sweep in tmp_path/sweep, and returns its exit status and what
    it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(engines, "Forks", lambda environment: forks)
            status = main(["-m", *last_of_each_key(*SHORT, "hydra.sweep.dir=sweep", *overrides)])
        printed = capfd.readouterr()
        return status, printed.out + printed.err

    return run


def jobs_of(folder: Path) -> dict[str, dict]:
    """Return the jobs of a sweep by their names without the digest."""
    return {job["name"].rpartition("-")[0]: job for job in read_sweep(folder / "sweep")["jobs"]}


def pid_of_job(folder: Path, name: str) -> int:
    return json.loads((job_directory(folder, name) / "status.json").read_text())["pid"]


def first_rows(folder: Path, steps: int) -> list[str]:
    """Return the rows of the first steps of both jobs, with the times at which they were
    written."""
    rows = []
    for name in ("seed-0", "seed-1"):
        metrics = job_directory(folder, name) / "metrics.jsonl"
        rows += metrics.read_text().splitlines()[:steps]
    return rows


def times_of_jobs(folder: Path) -> dict[str, int]:
    """Return when each file in the directories of the jobs was last written."""
    files = (folder / "sweep").glob("seed-*/**/*")
    return {str(file): file.stat().st_mtime_ns for file in files}


def test_a_sweep_whose_job_and_launcher_were_killed_resumes_bit_equal_to_uninterrupted_runs(
    tmp_path, run_sweep
):
    command = (*LONG, "seed=0,1", "hydra.launcher.n_jobs=2")
    with running_sweep(tmp_path, *command) as launcher:
        wait_until(has_steps(tmp_path, "seed-0", 20))
        os.kill(pid_of_job(tmp_path, "seed-0"), signal.SIGKILL)
        wait_until(lambda: jobs_of(tmp_path)["seed-0"]["status"] == "interrupted")
        assert jobs_of(tmp_path)["seed-0"]["reason"] == "killed by SIGKILL"
        wait_until(has_steps(tmp_path, "seed-1", 20))
        launcher.kill()
        output, _ = launcher.communicate()
    assert re.findall(r"^\[[12]/2\] (?:starts|interrupted)", output, re.MULTILINE)[:2] == [
        "[1/2] starts",
        "[2/2] starts",
    ]
    rows_before = first_rows(tmp_path, 10)

    # The second job may still be saving, since it sees that its launcher has ended.
    status, output = run_sweep(*command)
    assert status == 0, output
    assert len(re.findall(r"continues after step \d+", output)) == 2
    assert first_rows(tmp_path, 10) == rows_before
    for seed in (0, 1):
        directory = job_directory(tmp_path, f"seed-{seed}")
        uninterrupted = train_short(tmp_path / f"uninterrupted-{seed}", *LONG, f"seed={seed}")
        assert metrics_of(directory) == metrics_of(uninterrupted)
        assert_equal(checkpoint_of(directory, STEPS), checkpoint_of(uninterrupted, STEPS))
        run_status = json.loads((directory / "status.json").read_text())
        assert (run_status["state"], run_status["sweep"]) == ("done", "sweep")
        log = tmp_path / "sweep" / jobs_of(tmp_path)[f"seed-{seed}"]["log"]
        assert f"step {STEPS}/{STEPS}" in log.read_text()
    ends = r"^\[\d/2\] done +\d+ s seed-\d-[0-9a-f]{8}  reward \d"
    assert len(re.findall(ends, output, re.MULTILINE)) == 2
    summary = rf"^done +{STEPS} +\d+ +\d\.\d{{3}}  seed-\d-"
    assert len(re.findall(summary, output, re.MULTILINE)) == 2

    before = times_of_jobs(tmp_path)
    status, output = run_sweep(*command)
    assert status == 0, output
    assert "sweep sweep: 2 jobs, 2 done" in output
    assert times_of_jobs(tmp_path) == before


def test_a_failing_job_is_named_and_stops_the_others_only_with_fail_fast(tmp_path, run_sweep):
    overrides = (
        "optimizer.learning_rate=1e5,1e-3",
        "optimizer.warmup_steps=0",
        "optimizer.weight_decay=10",
    )
    status, output = run_sweep(*overrides, "hydra.launcher.fail_fast=true")
    assert status == 1, output
    assert "no further job is started" in output
    assert {name: job["status"] for name, job in jobs_of(tmp_path).items()} == {
        "learning-rate-100000.0": "failed",
        "learning-rate-0.001": "pending",
    }
    status, output = run_sweep(*overrides)
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


class AnyTrial:
    """A trial of Optuna's whose pruner gives it up once it has a number of step 4 or later."""

    def report(self, value: float, step: int) -> None:
        self.step = step

    def should_prune(self) -> bool:
        return self.step >= 4


def test_a_job_that_a_search_stops_early_is_marked_and_not_run_again(
    tmp_path, forks, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "Forks", lambda environment: forks)
    endless = ("trainer.max_steps=100000", "trainer.checkpoint_every=100000")
    evaluated = ("evaluation.every=2", "evaluation.prompts_per_set=4")
    typed = last_of_each_key(*SHORT, "hydra.sweep.dir=sweep", *endless, *evaluated, "seed=0")
    sweep = check_sweep(typed)
    with sweep.held():
        launch = multirun._Launch(sweep)
        # Once as it runs, and once as the search is continued.
        for _ in range(2):
            (result,) = launch.run_drawn([sweep.runs[0].overrides], 0, [Watched(AnyTrial(), True)])
            assert (result.is_pruned, result.value) == (True, None)
            assert result.points[0][0] == 2
    directory = next((tmp_path / "sweep").glob("*/status.json")).parent
    status = json.loads((directory / "status.json").read_text())
    assert status["state"] == "pruned"
    assert "at step 4 its best number so far is below the median" in status["reason"]
    assert 4 <= status["saved"] < 100000
    assert f"pruned at step {status['step']} of 100000" in read_run(directory).why_not_counted()
    assert len(re.findall("starts", capsys.readouterr().out)) == 1


def test_ctrl_c_lets_the_running_jobs_save_and_prints_the_command_that_continues(
    tmp_path, run_sweep
):
    def interrupt() -> None:
        wait_until(has_steps(tmp_path, "seed-0", 3))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    endless = ("trainer.max_steps=100000", "trainer.checkpoint_every=100000")
    status, output = run_sweep("seed=0,1", *endless)
    assert status == 75, output
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


def test_a_signal_before_training_has_begun_ends_a_job_which_stays_pending(tmp_path, monkeypatch):
    loading = tmp_path / "loading"

    def import_slowly() -> None:
        loading.touch()
        time.sleep(1)

    # In a new interpreter the imports take that long, and an exception there would break modules.
    monkeypatch.setattr(pictures, "import_matplotlib", import_slowly)
    with running_sweep(tmp_path, "seed=0,1") as launcher:
        while not launcher.stdout.readline().startswith("[1/2] starts"):
            pass
        wait_until(loading.exists)
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    assert "Traceback" not in output
    jobs = jobs_of(tmp_path)
    assert [job["status"] for job in jobs.values()] == ["pending", "pending"]
    assert (tmp_path / "sweep" / jobs["seed-0"]["log"]).read_text() == ""


def test_a_data_parallel_job_beside_another_learns_what_one_process_does(tmp_path, run_sweep):
    """test_ranks_start.py has the stores of two jobs, in which their ranks find each other."""
    status, output = run_sweep(
        "parallelism.data_parallel=1,2", "trainer.max_steps=4", "hydra.launcher.n_jobs=2"
    )
    assert status == 0, output
    assert "2 jobs, 2 done" in output
    folders = [job_directory(tmp_path, f"data-parallel-{size}") for size in (1, 2)]
    one, two = (metrics_of(folder) for folder in folders)
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3, 4]
    for row, other in zip(one, two, strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert all((folder / "checkpoints" / "step-000004").is_dir() for folder in folders)
