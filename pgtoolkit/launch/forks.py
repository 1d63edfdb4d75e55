"""Starts the processes of jobs on this machine, forked from a process with all imports done.

`Forks` is the side of the launcher; `fork_jobs` runs in the process that forks.
"""

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
from pgtoolkit.system.imports import imports_skipping, variables
from pgtoolkit.system.own_end import end, really_exit, refuse_silent_ends
from pgtoolkit.system.pictures import import_matplotlib
from pgtoolkit.system.terminal import prepare_streams
from pgtoolkit.tracking.signals import STOP_SIGNALS, answer_stop_signals
from pgtoolkit.tracking.store import importing_mlflow

_MODULES = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "tokenizers.trainers",
    "transformers.convert_slow_tokenizer",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyarrow.pandas_compat",
    "pandas",
    "matplotlib.figure",
    "matplotlib.ticker",
    "matplotlib.backends.backend_agg",
    "PIL.JpegImagePlugin",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
)
"""Modules that jobs import after `pgtoolkit.assembly.train`, as they begin and end."""

_WHILE_IMPORTED = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables that keep NumPy and Arrow from starting threads, which would not survive a fork."""


class JobProcess:
    """The process of one job, in a session of its own.

    It saves and stops when the process that forked it ends.
    """

    reason: str | None = None
    """Why the job ended, if not by itself."""

    def __init__(self, number: int, forks: Forks):
        self._number = number
        self._forks = forks

    def poll(self) -> int | None:
        """Return the exit status, negative where a signal ended the job; None while it runs."""
        nobody_answers = self._forks.has_ended.is_set()
        status = self._forks.statuses.get(self._number)
        if status is None and nobody_answers:
            self.reason = "the process that forks the jobs was ended"
            return Interrupted.exit_status
        return status

    def stop(self, number: int) -> None:
        """Let the job save and stop, by sending it the signal of this number."""
        with contextlib.suppress(OSError):  # it has ended
            self._forks.send(["stop", self._number, number])

    def wait(self) -> int:
        """Wait until the job has ended, also in a signal handler; return its exit status."""
        status = self.poll()
        while status is None:
            time.sleep(0.05)
            status = self.poll()
        return status


class Forks:
    """The process that forks the processes of jobs.

    It ends with this object, or with this process, once its jobs have saved.
    environment: the variables of the jobs; None for those of this process.
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
        # A finalizer also runs when the interpreter ends.
        weakref.finalize(self, self._process.end, math.inf)

    def start(self, file: str | Path, log: str | Path, gpu: str | None = None) -> JobProcess:
        """Start the job of a file that `multirun` has written.

        log: receives what the process prints, after what it holds already.
        gpu: the only GPU that the process sees, as CUDA_VISIBLE_DEVICES names it.
        Raises PgtoolkitError.
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

    def send(self, request: list[str | int | None]) -> None:
        """Send a request to the process that forks; raises OSError where it has ended."""
        self._process.channel.sendall(json.dumps(request).encode() + b"\n")


def _listen(channel: socket.socket, statuses: dict[int, int], has_ended: threading.Event) -> None:
    """Write down the exit statuses of jobs, until the process that forks them ends.

    This runs in a thread of its own, since a signal handler may wait for the same job as the code
    that it interrupts.
    """
    with contextlib.suppress(OSError):
        for line in channel.makefile():
            number, status = map(int, line.split())
            statuses[number] = status
    has_ended.set()


def fork_jobs() -> int:
    """Fork a process for each job asked for, until the launcher and then the last job have ended.

    Returns the exit status; in the process of a job, that of the job.
    """
    # These signals may come to all processes of a node at once; the jobs answer them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    launcher = channel_to_parent()
    code_times = _code_times()
    _load()
    jobs: dict[int, tuple[int, socket.socket]] = {}  # job -> its process, and the channel to it
    is_open = True
    unread = b""
    while is_open or jobs:
        lines: list[bytes] = []
        if select.select([launcher] if is_open else [], [], [], 0.05)[0]:
            try:
                received = launcher.recv(65536)
            except ConnectionResetError:  # the launcher was killed with statuses unread
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
                if _code_times() != code_times or _has_own_callbacks(arguments[0]):
                    _begin_anew(arguments, other_end)
                return _job(other_end, *arguments)
            other_end.close()
            jobs[number] = process, channel
        _report_ended(jobs, launcher)
    return 0


def _report_ended(jobs: dict[int, tuple[int, socket.socket]], launcher: socket.socket) -> None:
    """Remove the jobs that have ended, and send their exit statuses to the launcher."""
    for number, (process, channel) in list(jobs.items()):
        if not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A killed job may have left processes of its own.
            os.killpg(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        del jobs[number]
        channel.close()
        with contextlib.suppress(OSError):
            launcher.sendall(f"{number} {status}\n".encode())


def _code_times() -> dict[Path, int]:
    """Return when each file of this package was changed last, in nanoseconds."""
    changed = {}
    for file in Path(pgtoolkit.__file__).parent.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):
            changed[file] = file.stat().st_mtime_ns
    return changed


def _has_own_callbacks(file: str) -> bool:
    """Return whether a job has callbacks of the user's own, which need more imports than others."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    return bool(job["config"].get("callbacks", {}).get("own"))


def _begin_anew(job: list[str | None], channel: socket.socket) -> NoReturn:
    """Run a job in a new interpreter, because the code has changed since this one imported it, or
    because it needs other imports."""
    os.dup2(channel.fileno(), 0)
    command = [sys.executable, "-P", "-m", "pgtoolkit.launch.forks", json.dumps(job)]
    os.execv(sys.executable, command)


def _load() -> None:
    """Import all that jobs need, without threads and without CUDA."""
    # torch then counts GPUs without CUDA, which must not start before a fork. Lightning sets this
    # variable, too, and keeps it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with variables(_WHILE_IMPORTED), imports_skipping():
        importlib.import_module("pgtoolkit.assembly.train")
        with importing_mlflow():
            _import_ahead("mlflow.store.tracking.sqlalchemy_workspace_store")
        with contextlib.suppress(Exception):  # a job then says that it has no picture
            import_matplotlib()
        for name in _MODULES:
            _import_ahead(name)


def _import_ahead(name: str) -> None:
    """Import a module that jobs import later. Where it is missing, a job that needs it says so."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def _job(channel: socket.socket, file: str, gpu: str | None, log: str) -> int:
    """Run a job in this process, whose output goes to its log; return the exit status."""
    os.setsid()
    # Where the home cannot be written, matplotlib deletes its folder at exit; other jobs need it.
    atexit.unregister(shutil.rmtree)
    with open(log, "ab") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    prepare_streams()
    # Until training handles these signals there is nothing to save.
    answer_stop_signals(lambda *_: really_exit(Interrupted.exit_status))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    follow_parent(channel)
    refuse_silent_ends()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return run_job(Path(file))


if __name__ == "__main__":
    status = _job(channel_to_parent(), *json.loads(sys.argv[1])) if sys.argv[1:] else fork_jobs()
    # The interpreter's own end would copy the memory that jobs share, only to free it: 0.4 s.
    end(status)
