"""The jobs of a sweep on this machine: forks of a process that has loaded the libraries of training once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pgtoolkit.errors import Interrupted
from pgtoolkit.runs.directory import is_held
from pgtoolkit.system.imports import without
from pgtoolkit.tracking.signals import STOP_SIGNALS

FORKS = "--forks"
"""`python -m pgtoolkit.launch.job --forks N`: the process that is forked; N: the file number of its connection."""


class LocalEngine:
    """n_jobs processes at a time on this machine, or jobs_per_gpu on each of its GPUs.

    Each is a fork of a helper process that imports what training needs, and does nothing else: no job has anything of
    another's. The cores are divided among the jobs, unless OMP_NUM_THREADS is set.
    """

    def __init__(self, n_jobs: int, jobs_per_gpu: int | None):
        self._gpus = deque(visible_gpus() * (jobs_per_gpu or 0))
        self.at_a_time = len(self._gpus) or n_jobs
        self._jobs: list[_ForkedJob] = []
        self._helper: subprocess.Popen | None = None

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[_ForkedJob]:
        """jobs: absolute paths of each job's file, which `multirun` writes, and of its log."""
        if self._helper is None:
            self._begin()
        started = []
        for file, log in jobs:
            gpu = self._gpus.popleft() if self._gpus else None
            started.append(job := _ForkedJob(self, len(self._jobs), Path(log).parent, gpu))
            self._jobs.append(job)
            self.send(job.number, (file, log, {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}))
        return started

    def _begin(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment = {"OMP_NUM_THREADS": str(max(1, cores // self.at_a_time))} | os.environ
        command = [sys.executable, "-P", "-m", "pgtoolkit.launch.job", FORKS, str(theirs.fileno())]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
        # A session of its own: Ctrl-C in the terminal reaches the jobs through this process alone, once.
        self._helper = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        theirs.close()

    def send(self, number: int, order: tuple | int) -> None:
        """Have the helper start the job of this number, or send it a signal."""
        with contextlib.suppress(OSError):  # of a helper that is gone, which `receive` sees
            self._connection.send((number, order))

    def receive(self) -> None:
        """Note which jobs have ended. A helper that was killed is replaced; its jobs see that it is gone, and stop."""
        try:
            while self._helper is not None and self._connection.poll():
                number, status = self._connection.recv()
                self.end(self._jobs[number], status)
        except (EOFError, OSError):
            self.close()
            for job in self._jobs:
                job.lost = job.status is None

    def end(self, job: _ForkedJob, status: int) -> None:
        """Note how a job has ended; another may have its GPU."""
        job.status = status
        if job.gpu is not None:
            self._gpus.append(job.gpu)

    def close(self) -> None:
        """End the helper, and with it what may still run."""
        if self._helper is not None:
            self._connection.close()
            self._helper.wait()
            self._helper = None


class _ForkedJob:
    """One job. status: how it ended, negative by a signal; None while it runs. lost: whether its helper was killed."""

    reason: str | None = None
    """What the engine says of a job that did not end by itself."""

    def __init__(self, engine: LocalEngine, number: int, directory: Path, gpu: str | None):
        self._engine, self.number, self._directory, self.gpu = engine, number, directory, gpu
        self.status: int | None = None
        self.lost = False

    def poll(self) -> int | None:
        """The exit status once the job has ended; negative where a signal ended it."""
        self._engine.receive()
        if self.status is None and self.lost and not is_held(self._directory):
            self.reason = "the process that starts the jobs was killed"
            self._engine.end(self, Interrupted.exit_status)
        return self.status

    def stop(self, number: int) -> None:
        """Let the job save and stop; number: of the signal that asks for it."""
        self._engine.send(self.number, number)


def visible_gpus() -> list[str]:
    """The GPUs of this machine that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = range(torch.cuda.device_count())
    return [str(number) if names is None else names.split(",")[number].strip() for number in numbers]


def forked(connection: Connection) -> str:
    """In the helper: fork a process for each job that is asked for, report how it ended, until the launcher is gone.

    Returns in each of these processes, with the path of the job's file; standard input closes when the helper ends.
    """
    import numpy

    jobs: dict[int, int] = {}  # process -> number of the job
    watched, held = os.pipe()
    while True:
        if connection.poll(0.05):
            try:
                number, order = connection.recv()
            except (EOFError, OSError):
                sys.exit()
            if isinstance(order, int):
                for process in (process for process, of in jobs.items() if of == number):
                    os.kill(process, order)
                continue
            file, log, environment = order
            _load(file)
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the job answers them
            if (process := os.fork()) == 0:
                os.setsid()
                connection.close()
                os.close(held)
                os.dup2(watched, 0)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(output, 1)
                os.dup2(output, 2)
                for descriptor in (watched, output):
                    os.close(descriptor)
                os.environ |= environment
                numpy.random.seed()  # as in a process that has just imported it; Python's own generator does so itself
                return file
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            jobs[process] = number
        while jobs and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)  # what a killed job may have left of its own processes
            _, status = os.waitpid(ended.si_pid, 0)
            connection.send((jobs.pop(ended.si_pid), os.waitstatus_to_exitcode(status)))


def _load(file: str) -> None:
    """Import what a run of the job's kind will import; an import that fails is said by the job, in its log."""
    config = json.loads(Path(file).read_text())["config"]
    with contextlib.suppress(ImportError), without():
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: F401

        import pgtoolkit.training.train  # noqa: F401

        if config["tracking"]["name"] == "mlflow":
            from pgtoolkit.tracking.store import load

            load(config["tracking"]["uri"])
        import matplotlib.backends.backend_agg  # noqa: F401
        import pandas  # noqa: F401  (which pyarrow looks for)
