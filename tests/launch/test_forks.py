"""Jobs that are forked from one process are bit-equal to those started alone, and share no random
state, thread, signal or file with each other."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from builders.commands import ENVIRONMENT, Command, wait_until
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, metrics_of

import pgtoolkit
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.launch import engines
from pgtoolkit.launch.forks import Forks, JobProcess

STATE_WRITING = """
import json, os, random, signal, threading
import numpy, torch

seen = {"draws": []}

def score(completion, answer):
    if completion == answer:  # so it is tried at the start, in the process that is started alone
        return 1.0
    seen["draws"].append([random.random(), float(numpy.random.rand()), float(torch.rand(1))])
    if len(seen["draws"]) == 1:
        seen["environment"] = dict(os.environ)
        names = [thread.name for thread in threading.enumerate()]
        # A thread "(call)" lives only while MLflow is asked something.
        lasting = [name for name in names if not name.endswith("(call)")]
        seen["threads"] = [torch.get_num_threads(), sorted(lasting)]
        seen["blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        links = [link for link in links if os.path.exists(link)]
        seen["sockets"] = sum("socket" in os.readlink(link) for link in links)
    with open(f"{os.getpid()}.json", "w") as file:
        json.dump(seen, file)
    return len(completion) % 3 / 2
"""
"""A verifier that draws from every random state that forks share, and writes the state of its
process into a file."""


LEAVING = """
import subprocess, sys

for name in ["mlflow", *sys.modules]:
    if name.partition(".")[0] == "mlflow":
        sys.modules[name] = None  # as where it is not installed

started = []

def score(completion, answer):
    if not started:
        started.append(subprocess.Popen(["sleep", "600"]))
        with open("left.txt", "w") as file:
            file.write(f"{started[0].pid}.")
    return len(completion) % 3 / 2
"""
"""A verifier that starts a process, which would outlive a job that is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with both verifiers and their prompts."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "mine.py").write_text(STATE_WRITING)
    (folder / "leaving.py").write_text(LEAVING)
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(10, 40))
    )
    return folder


@pytest.fixture
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the current directory."""
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def started() -> list[Forks]:
    """Return a list for the processes that the tests share: the last one, unless it has ended."""
    return []


@pytest.fixture
def forks(inputs: None, started: list[Forks]) -> Forks:
    """Return the process that forks jobs, beside the verifiers and their prompts."""
    if not started or started[-1].has_ended.is_set():
        started.append(Forks(ENVIRONMENT | {"OMP_NUM_THREADS": "2", CUDA_CHECK: "0"}))
    return started[-1]


CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""A variable that Lightning sets."""

OVERRIDES = [
    *(setting for setting in SHORT if not setting.startswith(("task.", "tracking"))),
    *("task=prompts", "task.path=rows.jsonl", "task.verifier=mine.score"),
    *("trainer.num_threads=null", "tracking.uri=sqlite:///mlflow.db"),
]


def start(forks: Forks, name: str, *overrides: str, gpu: str | None = None) -> JobProcess:
    """Start the job of these overrides in the directory of this name."""
    config = config_of(*OVERRIDES, *overrides)
    return start_config(forks, Path(name).resolve(), config, overrides, gpu)


def start_config(
    forks: Forks,
    directory: Path,
    config: Config,
    overrides: Sequence[str] = (),
    gpu: str | None = None,
) -> JobProcess:
    directory.mkdir()
    job = {
        "command": ["pgtk"],
        "sweep": "s",
        "directory": str(directory),
        "overrides": [*overrides],
        "config": plain_config(config),
    }
    (directory / ".job.json").write_text(json.dumps(job))
    return forks.start(directory / ".job.json", directory / "output.log", gpu)


def state_of_process(directory: Path) -> dict:
    """Return what the verifier of a job has written about its process."""
    pid = json.loads((directory / "status.json").read_text())["pid"]
    return json.loads(Path(f"{pid}.json").read_text())


@pytest.mark.slow
@pytest.mark.starts_python
def test_a_forked_job_is_bit_equal_to_one_that_is_started_alone(folder, forks):
    """Also its random states, environment, threads and signals are the same."""
    jobs = [start(forks, f"seed-{seed}", f"seed={seed}", gpu=f"{seed}") for seed in (1, 2)]
    assert [job.wait() for job in jobs] == [0, 0], (folder / "seed-1" / "output.log").read_text()
    alone = Command(
        folder,
        *OVERRIDES,
        "seed=2",
        environment={"OMP_NUM_THREADS": "2", CUDA_CHECK: "0"},
    )
    assert "reward" in alone.end()
    assert metrics_of(folder / "seed-2") == metrics_of(alone.directory)
    assert metrics_of(folder / "seed-2") != metrics_of(folder / "seed-1")
    assert_equal(checkpoint_of(folder / "seed-2", 6), checkpoint_of(alone.directory, 6))
    forked = state_of_process(folder / "seed-2")
    single = state_of_process(alone.directory)
    assert forked["draws"] == single["draws"]
    assert forked["draws"] != state_of_process(folder / "seed-1")["draws"]
    assert forked["threads"] == [2, sorted([*single["threads"][1], "launcher"])]
    assert forked["blocked"] == single["blocked"] == []
    assert forked["sockets"] == single["sockets"] + 1  # the socket to the launcher
    assert forked["environment"] == single["environment"] | {"CUDA_VISIBLE_DEVICES": "2"}


@pytest.mark.starts_python
def test_the_process_that_forks_has_one_thread_and_no_cuda_and_its_job_saves_when_stopped(
    folder, forks
):
    """A job would lack any further thread, but have the locks that it held."""
    pid = forks._process.pid
    long = start(forks, "long", "trainer.max_steps=5000", "trainer.checkpoint_every=5000")
    wait_until(lambda: (folder / "long" / "metrics.jsonl").exists())
    (job,) = psutil.Process(pid).children()
    assert os.getsid(job.pid) == job.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert "libcuda.so" not in Path(f"/proc/{pid}/maps").read_text()
    assert long.poll() is None
    long.stop(signal.SIGINT)
    assert long.wait() == 75
    status = json.loads((folder / "long" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("interrupted", "SIGINT")
    assert checkpoint_of(folder / "long", status["step"])


@pytest.mark.slow
def test_the_processes_that_a_killed_job_has_started_are_ended(folder, inputs):
    """The job needs no MLflow, and runs where it is missing."""
    forks = Forks(ENVIRONMENT)
    overrides = ("trainer.max_steps=5000", "task.verifier=leaving.score", "tracking=none")
    killed = start(forks, "killed", *overrides)
    left = folder / "left.txt"
    wait_until(lambda: left.exists() and left.read_text().endswith("."))
    process = psutil.Process(int(left.read_text().rstrip(".")))
    wait_until(lambda: (folder / "killed" / "metrics.jsonl").exists())
    psutil.Process(forks._process.pid).children()[0].kill()
    assert killed.wait() == -signal.SIGKILL
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 30)


@pytest.mark.starts_python
def test_the_death_of_the_process_that_forks_is_the_reason_of_its_jobs_and_refuses_the_next(
    forks,
):
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
"""Replaces `pgtoolkit/launch/ranks.py`: a job ends with the first status if the condition holds."""

NOT_NEEDED = ("transformers", "tokenizers", "pyarrow", "pandas", "mlflow", "sqlalchemy", "alembic")
"""Libraries that jobs import as they begin and end; these jobs train nothing."""


@pytest.mark.slow
@pytest.mark.starts_python
def test_a_job_runs_the_code_of_its_start(tmp_path):
    """Code that has changed since the first job is imported anew by the jobs that follow.

    Where the home cannot be written, matplotlib makes a temporary folder. A job that ends leaves it
    to those that follow. Jobs run where libraries that they do not need are missing.
    """
    package = tmp_path / "pgtoolkit"
    shutil.copytree(Path(pgtoolkit.__file__).parent, package)
    (package / "assembly" / "train.py").write_text("")
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError('not here')")
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
    job = tmp_path / "job.json"
    job.write_text('{"config": {}}')
    assert [forks.start(job, log).wait() for log in logs[:2]] == [6, 6]
    (package / "launch" / "ranks.py").write_text(
        ANSWER.format(7, "'matplotlib' not in sys.modules")
    )
    assert forks.start(job, logs[2]).wait() == 7
    assert [log.read_text() for log in logs] == [""] * 3


class RecordedForks:
    """Takes the place of `Forks`, and starts no process.

    Records the threads of the environment that it gets, and the GPU of each job. A job ends when
    `ended` has its file.
    """

    threads: ClassVar[list[str | None]]
    gpus: ClassVar[list[str | None]]
    ended: ClassVar[set[str]]

    def __init__(self, environment: dict[str, str]) -> None:
        self.threads.append(environment.get("OMP_NUM_THREADS"))

    def start(self, file: str, log: str, gpu: str | None) -> SimpleNamespace:
        self.gpus.append(gpu)
        return SimpleNamespace(poll=lambda: 0 if file in self.ended else None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordedForks]:
    """Let the local engine use `RecordedForks`, on a machine of two GPUs and nine cores."""
    RecordedForks.threads = []
    RecordedForks.gpus = []
    RecordedForks.ended = set()
    monkeypatch.setattr(engines, "Forks", RecordedForks)
    monkeypatch.setattr(engines, "visible_gpus", lambda: ["2", "GPU-5a"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(9))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return RecordedForks


def test_jobs_are_spread_over_gpus_and_take_the_place_of_those_that_ended(recorded):
    engine = engines.LocalEngine(n_jobs=1, jobs_per_gpu=2)
    assert engine.at_a_time == 4
    engine.start([(file, "") for file in "abcd"])
    assert recorded.gpus == ["2", "GPU-5a", "2", "GPU-5a"]
    recorded.ended |= {"b", "d"}
    engine.start([("e", ""), ("f", "")])
    assert recorded.gpus[4:] == ["GPU-5a", "GPU-5a"]


def test_jobs_without_a_gpu_get_none(recorded):
    engines.LocalEngine(n_jobs=2, jobs_per_gpu=None).start([("a", "")])
    assert recorded.gpus == [None]


def test_jobs_at_a_time_divide_the_cores_unless_the_environment_sets_threads(recorded, monkeypatch):
    engines.LocalEngine(n_jobs=1, jobs_per_gpu=2)  # four at a time
    engines.LocalEngine(n_jobs=12, jobs_per_gpu=None)
    engines.LocalEngine(n_jobs=1, jobs_per_gpu=None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engines.LocalEngine(n_jobs=2, jobs_per_gpu=None)
    assert recorded.threads == ["2", "1", None, "7"]
