"""Servers of vLLM's protocol for the tests: how they are called, what still lives of them, runs
with them."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil

from builders.commands import Command

COMMAND = f"{sys.executable} {Path(__file__).with_name('vllm_server.py')}"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """What lives of the small servers that wrote to this run directory: themselves, and the
    children they told of."""
    numbers = [
        word
        for log in run_dir.glob("vllm*.log")
        for word in log.read_text().split()
        if word.isdigit()
    ]
    found = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(number))
            if _lives(process) and "python" in process.name():
                found.append(process)
    return found


def all_ended(processes: list[psutil.Process], seconds: float = 30) -> bool:
    """Within so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [one for one in processes if _lives(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def _lives(process: psutil.Process) -> bool:
    """Who nobody waits for stays behind as a zombie, and holds nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class ServerCommand(Command):
    """A run whose completions servers write."""

    def server(self) -> list[psutil.Process]:
        """The processes of its server, with the guard."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        guards = [one for one in found if "child.py" in " ".join(one.cmdline())]
        return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]

    def weights(self) -> Path:
        """The folder that its server was started from."""
        words = [
            word for one in self.server() for word in one.cmdline() if "/pgtk-weights-" in word
        ]
        return Path(words[0])
