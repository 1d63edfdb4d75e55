"""Servers of vLLM's protocol for the tests: how they are called, what still lives of them, runs with them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from builders.runs import once

COMMAND = f"{sys.executable} {Path(__file__).with_name('vllm_server.py')}"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """What lives of the small servers that wrote to this run directory: themselves, and the children they told of."""
    numbers = [word for log in run_dir.glob("vllm*.log") for word in log.read_text().split() if word.isdigit()]
    found = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(number))
            if _lives(process) and "python" in process.name():
                found.append(process)
    return found


def gone(processes: list[psutil.Process], seconds: float = 30) -> bool:
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


class Command:
    """`pgtk` in a process of its own, with `folder`/run as its run directory; environment: what it has besides ours."""

    def __init__(self, folder: Path, *overrides: str, environment: dict[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self.directory, self.log = folder / "run", folder / "terminal"
        settings = once(*overrides, f"hydra.run.dir={self.directory}")
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        with self.log.open("w") as file:
            command = [sys.executable, "-m", "pgtoolkit.cli", *settings]
            self.process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env=environment)

    def steps(self) -> int:
        rows = self.directory / "metrics.jsonl"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    def wait_for_steps(self, count: int, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while self.steps() < count:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def server(self) -> list[psutil.Process]:
        """The processes of its server, with the guard."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        guards = [one for one in found if "server_guard.py" in " ".join(one.cmdline())]
        return [*guards, *(child for guard in guards for child in guard.children(recursive=True))]

    def weights(self) -> Path:
        """The folder that its server was started from."""
        words = [word for one in self.server() for word in one.cmdline() if "/pgtk-weights-" in word]
        return Path(words[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
