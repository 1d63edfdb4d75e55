"""Keeps a server, or a folder, for as long as the process that wants it lives, however that ends.

A script of its own that knows the standard library alone. `python server_guard.py PARENT run COMMAND...`: when the
process PARENT, which started it, is gone, or at SIGTERM, it ends the server and every process that came of it. It ends
with the server's status where the server ended by itself. `python server_guard.py PARENT keep FOLDER`: when PARENT is
gone it deletes FOLDER; PARENT kills it where it has done so itself.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

_GRACE_SECONDS = 5
"""From SIGTERM, at which a server may clean up, to SIGKILL."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""Options of Linux's prctl: PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER."""


def run(parent: int, command: list[str]) -> int:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _prctl(_SUBREAPER, 1)  # what the server starts and leaves behind becomes a child of this process
    server = subprocess.Popen(command, preexec_fn=_ending_with_parent)
    while server.poll() is None and not stopped and os.getppid() == parent:
        time.sleep(0.1)
    _end_all(server)
    code = server.returncode
    return code if code >= 0 else 128 - code


def keep(parent: int, folder: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job, they are not the end of PARENT
    while os.getppid() == parent:
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _ending_with_parent() -> None:
    """Even a guard that is killed takes the server along."""
    if sys.platform == "linux":
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_all(server: subprocess.Popen) -> None:
    """SIGTERM to the server and all that came of it, and SIGKILL to what still lives after the grace."""
    deadline = time.monotonic() + _GRACE_SECONDS
    _send(signal.SIGTERM, server)
    while (server.poll() is None or _descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    while server.poll() is None or _descendants():
        _send(signal.SIGKILL, server)
        time.sleep(0.05)


def _send(number: int, server: subprocess.Popen) -> None:
    for process in _descendants() or ([server.pid] if server.poll() is None else []):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Living children of this process, their children, and so on; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for process in found:  # grows as it goes on
        found += children.get(process, ())
    return found


if __name__ == "__main__":
    process, what, *rest = sys.argv[1:]
    sys.exit(run(int(process), rest) if what == "run" else keep(int(process), *rest))
