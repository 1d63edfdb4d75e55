"""Shows the progress of a sweep, in one line of the terminal that renews itself."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.launch.sweep import PlannedRun
from pgtoolkit.tracking.progress import duration

if TYPE_CHECKING:
    from pgtoolkit.tracking.renewed_line import RenewedLine, ToldLine

_SECONDS_BETWEEN = 0.5
_TAIL = 65536
"""Bytes at the end of metrics.jsonl that hold its last rows."""


class SweepLine:
    """Shows how many jobs run, are done or have failed, and the time left.

    It writes nothing to a file or a pipe.
    folder: the sweep's folder.
    jobs: all jobs of one launch, with their status and steps before it.
    """

    def __init__(self, folder: Path, jobs: list[PlannedRun]):
        self._folder = folder
        self._jobs = jobs
        self._looked_at = 0.0
        self._began = time.monotonic()
        self._steps_before = sum(
            _all_steps(job) if job.status == "done" else job.step for job in jobs
        )
        self._steps_in_all = sum(_all_steps(job) for job in jobs)
        self._line: RenewedLine | ToldLine | None = None

    def begin(self) -> None:
        from pgtoolkit.tracking.renewed_line import progress_line

        self._line = progress_line(self._steps_in_all, self._steps_before)
        if self._line is not None:
            self._line.show(self._steps_before, [f"{len(self._jobs)} jobs"])

    def show(self, waiting: Collection[PlannedRun], running: Collection[PlannedRun]) -> None:
        """Show the progress while these jobs wait and run, and the others have ended."""
        if self._line is None or time.monotonic() - self._looked_at < _SECONDS_BETWEEN:
            return
        self._looked_at = time.monotonic()
        steps = sum(job.step for job in waiting)
        steps += sum(
            max(job.step, last_step(self._folder / job.directory / "metrics.jsonl"))
            for job in running
        )
        going_on = {job.directory for job in [*waiting, *running]}
        ended = [job for job in self._jobs if job.directory not in going_on]
        # A job that failed takes no more time either.
        steps += sum(_all_steps(job) for job in ended)
        counts = Counter(job.status for job in ended)
        fields = [f"{len(ended)}/{len(self._jobs)} jobs"]
        if steps > self._steps_before:
            seconds_per_step = (time.monotonic() - self._began) / (steps - self._steps_before)
            fields.append(f"{duration(seconds_per_step * (self._steps_in_all - steps))} left")
        fields.append(f"{len(running)} running")
        fields += [
            f"{counts[state]} {state}"
            for state in ("failed", "interrupted", "pruned")
            if counts[state]
        ]
        self._line.show(steps, [*fields, f"{counts['done']} done"])

    def close(self) -> None:
        """Remove the line, since a table follows."""
        if self._line is not None:
            self._line.close(leave=False)
        self._line = None


def _all_steps(job: PlannedRun) -> int:
    return job.config.trainer.max_steps


def last_step(metrics: Path) -> int:
    """Return the step in the last row of metrics.jsonl; 0 where there is none.

    Only the end of the file is read.
    """
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
    except OSError:  # the job has not begun, or this machine cannot read its file
        return 0
    return int(steps[-1]) if steps else 0
