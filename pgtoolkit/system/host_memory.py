"""Tells how much of the memory of a machine a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version of control groups: the files of the limit and of the memory in use, and how
memory.stat names pages of files that the system gives away when memory is short."""


def available_bytes() -> int:
    """Return the bytes that neither the machine nor a limit of a container or a job refuses."""
    import psutil

    return min([psutil.virtual_memory().available, *left_in_groups(_GROUPS, _OF_PROCESS)])


def left_in_groups(groups: Path, of_process: Path) -> Iterator[int]:
    """Yield the bytes that are left in each control group of a process that has a limit.

    groups: where the system shows them. of_process: the file that names those of the process.
    """
    try:
        lines = of_process.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _left_in(folder)
            if folder == root:
                break


def _left_in(group: Path) -> Iterator[int]:
    for limit, taken, reclaimable in _FILES:
        try:
            limit_bytes = int((group / limit).read_text())
            taken_bytes = int((group / taken).read_text())
            rows = (group / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        given_away = sum(int(row.split()[1]) for row in rows if row.split()[0] == reclaimable)
        yield max(0, limit_bytes - taken_bytes + given_away)
