"""Jobs of a sweep as forks of one process: bit for bit those that `pgtk` runs alone, and nothing of one in another."""

import os
import signal
import subprocess

import psutil
import pytest
from builders.commands import ENVIRONMENT, PGTK, directory_of, has_steps, started, wait_until
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, assert_equal, checkpoint_of, metrics_of, once, with_model

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.launch.check import divide_gpus
from pgtoolkit.runs.directory import read_status
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system.report import Report


@pytest.mark.slow
def test_jobs_are_bit_equal_to_runs_started_alone(tmp_path):
    """A tiny model and one of a folder, two seeds at a time."""
    save_with_tokenizer(small_llama(max_position_embeddings=64), tmp_path / "model")
    steps = ("trainer.max_steps=4", "trainer.checkpoint_every=2")
    for name, words in (("tiny", once(*SHORT, *steps)), ("folder", once(*with_model(tmp_path / "model", *steps)))):
        together = ("-m", "seed=1,2", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={tmp_path / name}")
        alone = tmp_path / f"{name}-alone"
        for command in (together, (f"hydra.run.dir={alone}", "seed=2")):
            subprocess.run([PGTK, *command, *words], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
        (job,) = (tmp_path / name).glob("seed-2-*")
        assert metrics_of(job) == metrics_of(alone)
        assert_equal(checkpoint_of(job, 4), checkpoint_of(alone, 4))
        assert (job / "output.log").read_text().count("step 4/4") == 1
        own = [read_status(run)["id"] for run in (tmp_path / name).glob("seed-*")]
        assert len({*own}) == 2


@pytest.mark.slow
def test_a_job_whose_helper_is_killed_saves_and_the_next_gets_another(tmp_path):
    command = ("seed=0,1", "trainer.max_steps=150", "trainer.checkpoint_every=1000")
    with started(tmp_path, *command) as launcher:
        wait_until(has_steps(tmp_path, "seed-0", 3))
        (helper,) = psutil.Process(launcher.pid).children()
        cores = len(os.sched_getaffinity(0))
        assert helper.environ()["OMP_NUM_THREADS"] == ENVIRONMENT.get("OMP_NUM_THREADS", str(cores))
        assert [child.pid for child in helper.children()] == [read_status(directory_of(tmp_path, "seed-0"))["pid"]]
        os.kill(helper.pid, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 1, output
    assert [job["status"] for job in read_sweep(tmp_path / "sweep")["jobs"]] == ["interrupted", "done"]
    status = read_status(directory_of(tmp_path, "seed-0"))
    assert (status["state"], status["reason"]) == ("interrupted", "SIGTERM")
    assert (directory_of(tmp_path, "seed-0") / "checkpoints" / f"step-{status['step']:06d}").is_dir()


def refusals(jobs_per_gpu, gpus, *overrides):
    config = compose(list(overrides)).config
    divide_gpus(resolve_and_validate(config)[0], jobs_per_gpu, gpus, report := Report())
    return report.problems


def test_jobs_share_a_gpu_if_their_memory_fits(tmp_path):
    save_with_tokenizer(small_llama(), tmp_path / "model")
    model = ("model=huggingface", f"model.path={tmp_path / 'model'}")
    assert refusals(8, [1e6]) == []  # of the tiny model nothing is estimated
    assert refusals(13, [80e9, 80e6], *model) == []
    (problem,) = refusals(14, [80e9, 80e6], *model)
    assert problem == (
        "hydra.launcher.jobs_per_gpu=14 needs 0.0832 GB of each GPU, 0.00595 for each job (got 0.08). "
        "pgtk check lists what they hold. Use hydra.launcher.jobs_per_gpu=13."
    )


@pytest.mark.parametrize(
    ("gpus", "overrides", "says"),
    [
        ([], [], "jobs_per_gpu=2 needs a GPU (got none)"),
        ([80e9], ["trainer.device=cpu"], "trainer.device=cpu needs hydra.launcher.jobs_per_gpu=null (got 2)"),
        ([80e9], ["parallelism=ddp"], "jobs_per_gpu=2 needs jobs of one process (got 2)"),
    ],
)
def test_what_shares_no_gpu_is_refused(gpus, overrides, says):
    (problem,) = refusals(2, gpus, *overrides)
    assert says in problem
