"""Servers of vLLM's protocol for the tests: the command that starts one, and what still lives of
those that a run has started."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil

from builders.commands import ForkedCommand

COMMAND = f"{sys.executable} {Path(__file__).with_name('vllm_server.py')}"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the living processes of the small servers that logged to a run directory.

    A small server prints its own process id and that of its child; both are read from its log.
    """
    ids = [
        int(word)
        for log in run_dir.glob("vllm*.log")
        for word in log.read_text().split()
        if word.isdigit()
    ]
    living = []
    for process_id in ids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(process_id)
            if _lives(process) and "python" in process.name():
                living.append(process)
    return living


def all_ended(processes: list[psutil.Process], seconds: float = 30) -> bool:
    """Wait up to `seconds` for all processes to end; return whether they have."""
    deadline = time.monotonic() + seconds
    while any(_lives(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lives(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, for which its parent has not waited, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_guard(process: psutil.Process) -> bool:
    """Return whether a process is the guard of a server, forked or started."""
    return process.name() == "guard" or "child.py" in " ".join(process.cmdline())


class ServerCommand(ForkedCommand):
    """A run whose completions are sampled by servers that it starts."""

    def server_processes(self) -> list[psutil.Process]:
        """Return the guards of its servers, then all processes below them."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        guards = [process for process in descendants if _is_guard(process)]
        return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]

    def weights(self) -> Path:
        """Return the folder of weights that its server was started from.

        A small server that was forked has the arguments of another process, and logs its folder.
        """
        words = [word for process in self.server_processes() for word in process.cmdline()]
        words += [
            word for log in self.directory.glob("vllm*.log") for word in log.read_text().split()
        ]
        return Path(next(word for word in words if "/pgtk-weights-" in word))
