"""Processes of jobs on this machine, forked from one that has imported what training needs: `Forks`
starts them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pgtoolkit
from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.launch.ranks import run_job
from pgtoolkit.system.child import Child, channel_to_parent, follow_parent
from pgtoolkit.system.imports import without
from pgtoolkit.system.terminal import flush_streams, prepare_streams
from pgtoolkit.tracking.signals import STOP_SIGNALS, answer_stop_signals
from pgtoolkit.tracking.store import importing_mlflow

_MODULES = (
    *(
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "tokenizers.trainers",
    ),
    *(
        "transformers.convert_slow_tokenizer",
        "pyarrow.dataset",
        "pyarrow.json",
        "pyarrow.pandas_compat",
        "pandas",
    ),
    *(
        "matplotlib.figure",
        "matplotlib.ticker",
        "matplotlib.backends.backend_agg",
        "PIL.JpegImagePlugin",
    ),
    *("sqlalchemy.dialects.sqlite", "alembic.command"),
)
"""What jobs import after `pgtoolkit.training.train`, as they begin and end."""

_WHILE_IMPORTED = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""NumPy and Arrow start no threads, which a fork would inherit half."""


class JobProcess:
    """The process of one job, in a session of its own; it saves and stops when the process that
    forked it ends."""

    reason: str | None = None
    """What the engine says of a job that did not end by itself."""

    def __init__(self, number: int, forks: Forks):
        self._number = number
        self._forks = forks

    def poll(self) -> int | None:
        """Return the exit status once the job has ended, negative where a signal ended it; None
        before."""
        nobody_answers = self._forks.has_ended.is_set()
        status = self._forks.statuses.get(self._number)
        if status is None and nobody_answers:
            self.reason = "the process that forks the jobs was ended"
            return Interrupted.exit_status
        return status

    def stop(self, number: int) -> None:
        """Let the job save and stop; number: of the signal that asks for it."""
        with contextlib.suppress(OSError):  # it has ended
            self._forks.send(["stop", self._number, number])

    def wait(self) -> int:
        """Wait until the job has ended, also in a signal handler; return its exit status."""
        while (status := self.poll()) is None:
            time.sleep(0.05)
        return status


class Forks:
    """The process that forks those of jobs; it ends with this object, or with this process, once
    its jobs have saved.

    environment: of the jobs, where it is not that of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._process = Child(
            [sys.executable, "-P", "-m", "pgtoolkit.launch.forks"], environment, is_quiet=True
        )
        self._started = 0
        self.statuses: dict[int, int] = {}
        """Exit statuses of the jobs that have ended."""
        self.has_ended = threading.Event()
        listening = [self._process.channel, self.statuses, self.has_ended]
        threading.Thread(target=_listen, args=listening, daemon=True).start()
        # at the latest when the interpreter ends
        weakref.finalize(self, self._process.end, math.inf)

    def start(self, file: str | Path, log: str | Path, gpu: str | None = None) -> JobProcess:
        """Start the job that a file describes, see `multirun`. What the process prints is added to
        the log.

        gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it. Raises PgtoolkitError.
        """
        self._started += 1
        Path(log).touch()
        try:
            self.send(["start", self._started, str(file), gpu, str(log)])
        except OSError as error:
            raise PgtoolkitError(
                f"the process that forks the jobs has ended: {error.strerror}"
            ) from error
        return JobProcess(self._started, self)

    def send(self, request: list) -> None:
        self._process.channel.sendall(json.dumps(request).encode() + b"\n")


def _listen(channel: socket.socket, statuses: dict[int, int], has_ended: threading.Event) -> None:
    """Take down the exit statuses of jobs, until the process that forks them ends.

    In a thread of its own: a signal handler may wait for a job that the interrupted code waits for,
        too.
    """
    with contextlib.suppress(OSError):
        for line in channel.makefile():
            number, status = map(int, line.split())
            statuses[number] = status
    has_ended.set()


def serve() -> int:
    """Fork a process for each job asked for, until the launcher has ended and then the last of the
    jobs.

    Returns the exit status, in the process of a job that of the job.
    """
    # which may come to all processes of a node at once
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    launcher = channel_to_parent()
    loaded = _code()
    _load()
    jobs: dict[int, tuple[int, socket.socket]] = {}  # the process of each, and its channel
    is_open = True
    unread = b""
    while is_open or jobs:
        lines: list[bytes] = []
        if select.select([launcher] if is_open else [], [], [], 0.05)[0]:
            try:
                received = launcher.recv(65536)
            except ConnectionResetError:  # it was killed with statuses unread
                received = b""
            *lines, unread = (unread + received).split(b"\n")
            is_open = len(received) > 0
        if not is_open:
            for _, channel in jobs.values():
                channel.close()  # so they save and stop
        for line in lines:
            action, number, *arguments = json.loads(line)
            if action == "stop":
                if number in jobs:
                    os.kill(jobs[number][0], *arguments)
                continue
            channel, other_end = socket.socketpair()
            process = os.fork()
            if process == 0:
                for inherited in (launcher, channel, *(channel for _, channel in jobs.values())):
                    inherited.close()
                if _code() != loaded:
                    _begin_anew(arguments, other_end)
                return _job(other_end, *arguments)
            other_end.close()
            jobs[number] = process, channel
        for number, (process, channel) in list(jobs.items()):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # what a killed job may have left of its own processes
                    os.killpg(process, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                del jobs[number]
                channel.close()
                with contextlib.suppress(OSError):
                    launcher.sendall(f"{number} {status}\n".encode())
    return 0


def _code() -> dict[Path, int]:
    """When each file of this package was changed last."""
    changed = {}
    for file in Path(pgtoolkit.__file__).parent.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):
            changed[file] = file.stat().st_mtime_ns
    return changed


def _begin_anew(job: list, channel: socket.socket) -> NoReturn:
    """A job as if it was started alone, by another code than was imported here; what it imports
    later, too, is new."""
    os.dup2(channel.fileno(), 0)
    os.execv(
        sys.executable, [sys.executable, "-P", "-m", "pgtoolkit.launch.forks", json.dumps(job)]
    )


def _load() -> None:
    # torch counts GPUs without CUDA; Lightning sets it for good, too
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    before = {name: os.environ.get(name) for name in _WHILE_IMPORTED}
    os.environ |= _WHILE_IMPORTED
    with without():
        importlib.import_module("pgtoolkit.training.train")
        with importing_mlflow():
            _import_ahead("mlflow.store.tracking.sqlalchemy_workspace_store")
        for name in _MODULES:
            _import_ahead(name)
    for name, value in before.items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value


def _import_ahead(name: str) -> None:
    """Import a module that jobs import later. Where it is missing, a job that needs it says so."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def _job(channel: socket.socket, file: str, gpu: str | None, log: str) -> int:
    os.setsid()
    # of matplotlib's folder, where the home cannot be written: others still need it
    atexit.unregister(shutil.rmtree)
    with open(log, "ab") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    prepare_streams()
    # Until training minds them: nothing has begun that would have to be saved.
    answer_stop_signals(lambda *_: os._exit(Interrupted.exit_status))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    follow_parent(channel)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return run_job(Path(file))


if __name__ == "__main__":
    status = _job(channel_to_parent(), *json.loads(sys.argv[1])) if sys.argv[1:] else serve()
    # As multiprocessing ends its processes. The interpreter's own end would copy what a job shares
    # with the others, only to free it: 0.4 s.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  (CPython's, without a type)
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(status)
