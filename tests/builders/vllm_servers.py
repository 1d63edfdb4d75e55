"""Servers of vLLM's protocol for the tests: how they are called, and which of their processes still live."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil

SERVER = Path(__file__).with_name("vllm_server.py")
COMMAND = f"{sys.executable} {SERVER}"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """What lives of the servers that wrote to this run directory: themselves, and the children they told of."""
    numbers = [word for log in run_dir.glob("vllm*.log") for word in log.read_text().split() if word.isdigit()]
    found = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(number))
            if process.status() != psutil.STATUS_ZOMBIE and "python" in process.name():
                found.append(process)
    return found


def gone(run_dir: Path, seconds: float = 30) -> bool:
    """Whether all of them end within so many seconds."""
    deadline = time.monotonic() + seconds
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_of(run_dir)
