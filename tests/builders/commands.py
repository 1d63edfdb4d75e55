"""`pgtk` as a process, for the tests: a run, or a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from builders.processes import ForkedProcess
from builders.runs import SHORT, last_of_each_key
from pgtoolkit.system import child

PGTK = Path(sys.executable).with_name("pgtk")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Command:
    """`pgtk` as a process, whose run directory is `folder`/run and whose output goes into
    `folder`/terminal.

    words: overrides of a run, or a sub-command. environment: variables besides ENVIRONMENT.
    """

    process: subprocess.Popen | ForkedProcess

    def __init__(self, folder: Path, *words: str, environment: dict[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self.directory = folder / "run"
        self.log = folder / "terminal"
        if "=" in words[0]:
            words = [*last_of_each_key(*words), f"hydra.run.dir={self.directory}"]
        self._start(list(words), folder, ENVIRONMENT | (environment or {}))

    def _start(self, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "pgtoolkit.cli", *words]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file
            )

    def steps(self) -> int:
        rows = self.directory / "metrics.jsonl"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    def wait_for(self, condition: Callable[[], object], seconds: float = 150) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.log.read_text()[-3000:]

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: self.steps() >= count)

    def end(self, seconds: float = 120) -> str:
        """Wait for the end of the command, check that its child processes have ended too, and
        return the output."""
        children = psutil.Process(self.process.pid).children()
        try:
            self.process.wait(timeout=seconds)
        finally:
            self.kill()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())


class ForkedCommand(Command):
    """`pgtk` as a process that needs no imports: for tests of what happens after them."""

    def _start(self, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.process = ForkedProcess(words, folder, environment, self.log)


@contextlib.contextmanager
def running_sweep(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Run a sweep in folder/sweep as a process, which is killed at the end of the block."""
    overrides = last_of_each_key(*SHORT, "hydra.sweep.dir=sweep", *overrides)
    process = child.subprocess.Popen(  # of `forked_children`, where the test starts no Python
        [sys.executable, "-m", "pgtoolkit.cli", "-m", *overrides],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_sweep(folder: Path, *overrides: str) -> tuple[int, str]:
    """Run a sweep in folder/sweep; return its exit status and its output."""
    with running_sweep(folder, *overrides) as process:
        output, _ = process.communicate(timeout=400)
        return process.returncode, output


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {seconds} s"
        time.sleep(0.02)


def has_steps(folder: Path, name: str, steps: int) -> Callable[[], bool]:
    """Return a condition: a job of the sweep has recorded at least this many steps."""

    def condition() -> bool:
        files = list((folder / "sweep").glob(f"{name}*/metrics.jsonl"))
        return bool(files) and files[0].read_bytes().count(b"\n") >= steps

    return condition


def job_directory(folder: Path, name: str) -> Path:
    """Return the only directory of the sweep whose name begins with `name`."""
    (directory,) = (path for path in (folder / "sweep").glob(f"{name}*") if path.is_dir())
    return directory
