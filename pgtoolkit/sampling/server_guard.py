"""Keeps the servers of a run and the folder of its weights for as long as the run lives, however that ends.

A script of its own, which imports nothing of pgtoolkit: `python server_guard.py PARENT FOLDER`. Each line of its
input starts a server: JSON of its command, its environment variables and the file for what it prints. Each line of its
output says that one has ended: its number and its exit status. When the process PARENT, which started it, is gone, or
at SIGTERM, it ends the servers and every process that came of them, and deletes FOLDER.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys

import psutil

_GRACE_SECONDS = 5
"""From SIGTERM, at which a server may clean up, to SIGKILL."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36
"""Options of Linux's prctl: PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER."""


def main(parent: int, folder: str) -> None:
    stopped, servers, told, unread = [], [], set(), b""
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job, they are not the end of PARENT
    if sys.platform == "linux":
        _prctl(_SUBREAPER, 1)  # what a server starts and leaves behind becomes a child of this process
    while not stopped and os.getppid() == parent:
        if select.select([0], [], [], 0.1)[0]:
            read = os.read(0, 2**16)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            servers += [_start(**json.loads(line)) for line in lines]
        for number, server in enumerate(servers):
            if server.poll() is not None and number not in told:
                told.add(number)
                code = server.returncode
                with contextlib.suppress(OSError):  # PARENT may be gone
                    os.write(1, f"{number} {code if code >= 0 else 128 - code}\n".encode())
    _end_all()
    shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str], log: str) -> subprocess.Popen:
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_ending_with_parent,
        )


def _ending_with_parent() -> None:
    """Even a guard that is killed takes the servers along."""
    if sys.platform == "linux":
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_all() -> None:
    """SIGTERM to the servers and all that came of them, and SIGKILL to what still lives after the grace."""
    number, seconds = signal.SIGTERM, _GRACE_SECONDS
    while living := _descendants():
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(living, seconds)
        number, seconds = signal.SIGKILL, 0.1


def _descendants() -> list[psutil.Process]:
    """Living children of this process, their children, and so on."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
