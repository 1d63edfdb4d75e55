"""Sweeps as processes of the installed command, for the tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from builders.runs import SHORT, once

PGTK = Path(sys.executable).with_name("pgtk")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@contextlib.contextmanager
def started(folder: Path, *overrides: str):
    """A sweep in folder/sweep as a process, which does not outlive the block."""
    command = [PGTK, "-m", *once(*SHORT, "hydra.sweep.dir=sweep", *overrides)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def sweep(folder: Path, *overrides: str) -> tuple[int, str]:
    """(exit status, output) of a sweep in folder/sweep."""
    with started(folder, *overrides) as process:
        output, _ = process.communicate(timeout=400)
        return process.returncode, output


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def has_steps(folder: Path, name: str, steps: int) -> Callable[[], bool]:
    """Whether a job has made so many steps."""

    def condition() -> bool:
        files = list((folder / "sweep").glob(f"{name}*/metrics.jsonl"))
        return bool(files) and files[0].read_bytes().count(b"\n") >= steps

    return condition


def directory_of(folder: Path, name: str) -> Path:
    (found,) = (path for path in (folder / "sweep").glob(f"{name}*") if path.is_dir())
    return found
