"""Processes that a process has started, directly or not, found and ended, whatever sessions they have made."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

SECONDS_TO_END = 10
"""For processes that were killed to be gone: one that waits for a disk may take longer, and is left to the kernel."""


def adopt_orphans() -> None:
    """Let every descendant whose parent ends become a child of this process, so that it stays a descendant."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, whose number this is."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def end_descendants(process: int) -> None:
    """Kill what a process has started, again and again until nothing is left, for it may start more meanwhile."""
    end = time.monotonic() + SECONDS_TO_END
    while (running := descendants(process)) and time.monotonic() < end:
        for number in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def descendants(process: int) -> list[int]:
    """Return the numbers of all running processes below a process, by Linux's /proc."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        children.setdefault(int(parent), []).append((int(name), state.decode()))
    found = []
    following = [process]
    while following:
        for number, state in children.get(following.pop(), []):
            following.append(number)
            if state != "Z":
                found.append(number)
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
