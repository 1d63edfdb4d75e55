"""Jobs forked from one process: the same as those started alone, and nothing of one in another."""

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from builders.commands import ENVIRONMENT, Command, wait_until
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, metrics_of

import pgtoolkit
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.launch import engines
from pgtoolkit.launch.forks import Forks, JobProcess

TELLING = """
import json, os, random, signal, threading
import numpy, torch

told = {"draws": []}

def score(completion, answer):
    if completion == answer:  # so it is tried at the start, in the process that is started alone
        return 1.0
    told["draws"].append([random.random(), float(numpy.random.rand()), float(torch.rand(1))])
    if len(told["draws"]) == 1:
        told["environment"] = dict(os.environ)
        names = [one.name for one in threading.enumerate()]
        # A thread "(call)" lives only while MLflow is asked something.
        lasting = [name for name in names if not name.endswith("(call)")]
        told["threads"] = [torch.get_num_threads(), sorted(lasting)]
        told["blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        links = [link for link in links if os.path.exists(link)]
        told["sockets"] = sum("socket" in os.readlink(link) for link in links)
    with open(f"{os.getpid()}.json", "w") as file:
        json.dump(told, file)
    return len(completion) % 3 / 2
"""
"""A verifier that draws from every state which a fork shares, and tells what it finds in its
process."""


LEAVING = """
import subprocess

started = []

def score(completion, answer):
    if not started:
        started.append(subprocess.Popen(["sleep", "600"]))
        with open("left.txt", "w") as file:
            file.write(f"{started[0].pid}.")
    return len(completion) % 3 / 2
"""
"""A verifier that starts a process, which would outlive a job that is killed."""


@pytest.fixture
def forks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TELLING)
    (tmp_path / "leaving.py").write_text(LEAVING)
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(10, 40))
    )
    return Forks(ENVIRONMENT | {"OMP_NUM_THREADS": "2", COUNTING: "0"})


COUNTING = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""A variable that Lightning sets."""

OVERRIDES = [
    *(one for one in SHORT if not one.startswith(("task.", "tracking"))),
    *("task=prompts", "task.path=rows.jsonl", "task.verifier=mine.score"),
    *("trainer.num_threads=null", "tracking.uri=sqlite:///mlflow.db"),
]


def start(forks: Forks, name: str, *overrides: str, gpu: str | None = None) -> JobProcess:
    """Start the job of these overrides in the directory of this name."""
    directory = Path(name).resolve()
    directory.mkdir()
    config = plain_config(config_of(*OVERRIDES, *overrides))
    job = {
        "command": ["pgtk"],
        "sweep": "s",
        "directory": str(directory),
        "overrides": [*overrides],
        "config": config,
    }
    (directory / ".job.json").write_text(json.dumps(job))
    return forks.start(directory / ".job.json", directory / "output.log", gpu)


def told_by(directory: Path) -> dict:
    return json.loads(
        Path(f"{json.loads((directory / 'status.json').read_text())['pid']}.json").read_text()
    )


def test_forked_jobs_are_those_that_are_started_alone(tmp_path, forks):
    """Metrics, weights and moments, to the last bit; random states, environment, threads and
    signals."""
    jobs = [start(forks, f"seed-{seed}", f"seed={seed}", gpu=f"{seed}") for seed in (1, 2)]
    assert [job.wait() for job in jobs] == [0, 0], (tmp_path / "seed-1" / "output.log").read_text()
    alone = Command(
        tmp_path, *OVERRIDES, "seed=2", environment={"OMP_NUM_THREADS": "2", COUNTING: "0"}
    )
    assert "reward" in alone.end()
    assert (
        metrics_of(tmp_path / "seed-2")
        == metrics_of(alone.directory)
        != metrics_of(tmp_path / "seed-1")
    )
    assert_equal(checkpoint_of(tmp_path / "seed-2", 6), checkpoint_of(alone.directory, 6))
    forked, one = told_by(tmp_path / "seed-2"), told_by(alone.directory)
    assert forked["draws"] == one["draws"] != told_by(tmp_path / "seed-1")["draws"]
    assert forked["threads"] == [2, sorted([*one["threads"][1], "launcher"])]
    assert forked["blocked"] == one["blocked"] == []
    assert forked["sockets"] == one["sockets"] + 1  # the line to the launcher
    assert forked["environment"] == one["environment"] | {"CUDA_VISIBLE_DEVICES": "2"}


def test_the_process_that_forks_has_one_thread_and_outlives_its_jobs(tmp_path, forks):
    """A thread would be missing in the jobs, with the locks that it held."""
    pid = forks._process.pid
    long = start(forks, "long", "trainer.max_steps=5000", "trainer.checkpoint_every=5000")
    wait_until(lambda: (tmp_path / "long" / "metrics.jsonl").exists())
    (job,) = psutil.Process(pid).children()
    assert os.getsid(job.pid) == job.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert "libcuda.so" not in Path(f"/proc/{pid}/maps").read_text()
    assert long.poll() is None
    long.stop(signal.SIGINT)
    assert long.wait() == 75
    status = json.loads((tmp_path / "long" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("interrupted", "SIGINT")
    assert checkpoint_of(tmp_path / "long", status["step"])
    killed = start(forks, "killed", "trainer.max_steps=5000", "task.verifier=leaving.score")
    left = tmp_path / "left.txt"
    wait_until(lambda: left.exists() and left.read_text().endswith("."))
    process = psutil.Process(int(left.read_text().rstrip(".")))
    psutil.Process(pid).children()[0].kill()
    assert killed.wait() == -signal.SIGKILL
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 30)


def test_a_job_that_needs_no_mlflow_runs_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "mlflow.py").write_text("raise ModuleNotFoundError('no mlflow here')")
    forks = Forks(ENVIRONMENT | {"PYTHONPATH": str(missing)})
    config = plain_config(config_of(*SHORT, "tracking=none", "trainer.max_steps=2"))
    job = {
        "command": ["pgtk"],
        "sweep": "s",
        "directory": str(tmp_path / "job"),
        "overrides": [],
        "config": config,
    }
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / ".job.json").write_text(json.dumps(job))
    status = forks.start(tmp_path / "job" / ".job.json", tmp_path / "job" / "output.log").wait()
    assert (status, len(metrics_of(tmp_path / "job"))) == (0, 2), (
        tmp_path / "job" / "output.log"
    ).read_text()


def test_a_killed_process_that_forks_is_said(forks):
    waiting = start(forks, "waiting")
    waiting.stop(signal.SIGTERM)
    forks._process.send_signal(signal.SIGKILL)
    assert (waiting.wait(), waiting.reason) == (75, "the process that forks the jobs was ended")
    with pytest.raises(PgtoolkitError, match="the process that forks the jobs has ended"):
        start(forks, "next")


ANSWER = """
import os, sys
def run_job(file):
    return {} if {} else 8
"""
"""In the place of `pgtoolkit/launch/ranks.py`."""


def test_a_job_runs_the_code_that_provenance_finds(tmp_path, monkeypatch):
    """That of its start: code that was changed since the first job is imported anew, by the jobs
    that follow.

    Where the home cannot be written, and matplotlib makes a folder for a while, a job leaves it to
    those that follow.
    """
    shutil.copytree(Path(pgtoolkit.__file__).parent, package := tmp_path / "pgtoolkit")
    (tmp_path / "temporary").mkdir()
    unwritable = {
        "HOME": "/proc/none",
        "MPLCONFIGDIR": "/proc/none",
        "TMPDIR": str(tmp_path / "temporary"),
    }
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    (package / "launch" / "ranks.py").write_text(
        ANSWER.format(6, "os.path.isdir(os.environ['MPLCONFIGDIR'])")
    )
    forks = Forks(ENVIRONMENT | unwritable | {"PYTHONPATH": str(tmp_path)})
    assert [forks.start("any", log).wait() for log in logs[:2]] == [6, 6]
    (package / "launch" / "ranks.py").write_text(
        ANSWER.format(7, "'matplotlib' not in sys.modules")
    )
    assert forks.start("any", logs[2]).wait() == 7
    assert [log.read_text() for log in logs] == [""] * 3


class Recorded:
    """In the place of `Forks`: what it is made with, and the GPU of each job, which ends when
    `ended` holds it."""

    made, started, ended = [], [], set()

    def __init__(self, environment):
        self.made.append(environment.get("OMP_NUM_THREADS"))

    def start(self, file, log, gpu):
        self.started.append(gpu)
        return type("Job", (), {"poll": lambda job: 0 if file in self.ended else None})()


def test_jobs_are_spread_over_gpus_and_divide_the_cores(monkeypatch):
    monkeypatch.setattr(engines, "Forks", Recorded)
    monkeypatch.setattr(engines, "visible_gpus", lambda: ["2", "GPU-5a"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(9))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine = engines.LocalEngine(n_jobs=1, jobs_per_gpu=2)
    assert engine.at_a_time == 4
    engine.start([(name, "") for name in "abcd"])
    assert Recorded.started == ["2", "GPU-5a", "2", "GPU-5a"]
    Recorded.ended |= {"b", "d"}
    engine.start([("e", ""), ("f", "")])
    assert Recorded.started[4:] == ["GPU-5a", "GPU-5a"]
    engines.LocalEngine(n_jobs=12, jobs_per_gpu=None)
    engines.LocalEngine(n_jobs=1, jobs_per_gpu=None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engines.LocalEngine(n_jobs=2, jobs_per_gpu=None).start([("g", "")])
    assert Recorded.made == ["2", "1", None, "7"]
    assert Recorded.started[6:] == [None]
