"""Processes of jobs on this machine, forked from one that has imported what training needs: `Forks` starts them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
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
from pgtoolkit.system.imports import without
from pgtoolkit.system.terminal import flush_streams, prepare_streams
from pgtoolkit.tracking.signals import STOP_SIGNALS, answer_stop_signals
from pgtoolkit.tracking.store import importing_mlflow

_MODULES = (
    *("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2", "tokenizers.trainers"),
    *("transformers.convert_slow_tokenizer", "pyarrow.dataset", "pyarrow.json", "pyarrow.pandas_compat", "pandas"),
    *("matplotlib.figure", "matplotlib.ticker", "matplotlib.backends.backend_agg", "PIL.JpegImagePlugin"),
    *("sqlalchemy.dialects.sqlite", "alembic.command"),
)
"""What jobs import after `pgtoolkit.training.train`, as they begin and end."""

_WHILE_IMPORTED = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""NumPy and Arrow start no threads, which a fork would inherit half."""


class JobProcess:
    """The process of one job, in a session of its own; it saves and stops when this process ends.

    line: to the job, which obeys the signals whose numbers it is sent, and to what has forked it, which answers with
    the exit status.
    """

    reason: str | None = None
    """What the engine says of a job that did not end by itself."""

    def __init__(self, line: socket.socket, forks: Forks):
        self._line, self._forks, self._status = line, forks, None
        line.setblocking(False)

    def poll(self) -> int | None:
        """The exit status once the job has ended; negative where a signal ended it."""
        if self._status is None:
            try:
                self._status = int(self._line.recv(8))
            except BlockingIOError:
                return None
            except (ConnectionResetError, ValueError):  # nobody is left to answer
                self._status, self.reason = Interrupted.exit_status, "the process that forks the jobs was ended"
            self._line.close()
        return self._status

    def stop(self, number: int) -> None:
        """Let the job save and stop; number: of the signal that asks for it."""
        with contextlib.suppress(OSError):  # it has ended
            self._line.send(bytes([number]))

    def wait(self) -> int:
        """Until it has ended; also in a signal handler, which may have interrupted a `poll`."""
        while (status := self.poll()) is None:
            time.sleep(0.05)
        return status


class Forks:
    """The process that forks those of jobs; it ends with this object, or with this process, after its last job.

    environment: of the jobs, where it is not that of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "pgtoolkit.launch.forks"]
        # A session of its own: Ctrl-C in the terminal reaches the jobs through this process alone, once.
        own = {"stdout": subprocess.DEVNULL, "start_new_session": True, "env": environment}
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs, **own)
        weakref.finalize(self, _end, self._channel, self._process)  # at the latest when the interpreter ends

    def start(self, file: str | Path, log: str | Path, gpu: str | None = None) -> JobProcess:
        """file: the job's description, see `multirun`. log: what the process prints is added to it.

        gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it. Raises PgtoolkitError.
        """
        ours, theirs = socket.socketpair()
        with theirs, Path(log).open("a+", encoding="utf-8") as output:
            try:
                request = json.dumps([str(file), gpu]).encode()
                socket.send_fds(self._channel, [request], [theirs.fileno(), output.fileno()])
            except OSError as error:
                raise PgtoolkitError(f"the process that forks the jobs has ended: {error.strerror}") from error
        return JobProcess(ours, self)


def _end(channel: socket.socket, process: subprocess.Popen) -> None:
    channel.close()
    process.wait()


def serve() -> int:
    """Fork a process for each request, until the launcher has closed its end and the last of them has ended.

    Returns the exit status, in the process of a job that of the job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # which may come to all processes of a node at once
    launcher = [socket.socket(fileno=os.dup(0))]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    loaded = _code()
    _load()
    lines: dict[int, socket.socket] = {}
    while launcher or lines:
        for channel in select.select(launcher, [], [], 0.05)[0]:
            request, received, _, _ = socket.recv_fds(channel, 65536, 2, socket.MSG_CMSG_CLOEXEC)
            if not request:
                launcher.clear()
                break
            line, log = socket.socket(fileno=received[0]), received[1]
            if (process := os.fork()) == 0:
                for inherited in (channel, *lines.values()):
                    inherited.close()
                if _code() != loaded:
                    _begin_anew(request.decode(), line.fileno(), log)
                return _job(*json.loads(request), line, log)
            lines[process] = line
            os.close(log)
        for process in [*lines]:
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)  # what a killed job may have left of its own processes
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with lines.pop(process) as line, contextlib.suppress(OSError):
                    line.send(str(status).encode())
    return 0


def _code() -> dict[Path, int]:
    """When each file of this package was changed last."""
    changed = {}
    for file in Path(pgtoolkit.__file__).parent.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):
            changed[file] = file.stat().st_mtime_ns
    return changed


def _begin_anew(request: str, line: int, log: int) -> NoReturn:
    """A job as if it was started alone, by another code than was imported here; what it imports later, too, is new."""
    for inherited in (line, log):
        os.set_inheritable(inherited, True)
    command = [sys.executable, "-P", "-m", "pgtoolkit.launch.forks", request, str(line), str(log)]
    os.execv(sys.executable, command)


def _load() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch counts GPUs without CUDA; Lightning sets it for good, too
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


def _job(file: str, gpu: str | None, line: socket.socket, log: int) -> int:
    os.setsid()
    atexit.unregister(shutil.rmtree)  # of matplotlib's folder, where the home cannot be written: others still need it
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    prepare_streams()
    # Until training minds them: nothing has begun that would have to be saved.
    answer_stop_signals(lambda *_: os._exit(Interrupted.exit_status))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_obey, args=[line], name="launcher", daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return run_job(Path(file))


def _obey(line: socket.socket) -> None:
    """Take the launcher's signals, and stop in an orderly way when it ends, even if it was killed."""
    while told := line.recv(1):
        os.kill(os.getpid(), told[0])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        status = _job(*json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    else:
        status = serve()
    # As multiprocessing ends its processes. The interpreter's own end would copy what a job shares with the others,
    # only to free it: 0.4 s.
    threading._shutdown()
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(status)
