"""Runs the jobs of a sweep, each in a process of its own: which are left to do, what became of each, and signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.engines import Engine, JobHandle
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import say
from pgtoolkit.tracking.signals import STOP_SIGNALS, answered_by

STOPPED = (signal.SIGKILL, signal.SIGHUP, *STOP_SIGNALS)
"""Signals by which someone ends a process; by others it ends itself."""


@dataclass
class _Running:
    job: Job
    handle: JobHandle
    started: float
    log_start: int


class Jobs:
    """The jobs of one launch, of which those that are not done are run: waiting, running, ended."""

    def __init__(self, sweep: Sweep, jobs: list[Job], fail_fast: bool):
        self._sweep, self._jobs, self._fail_fast = sweep, jobs, fail_fast
        self._waiting = [job for job in jobs if job.status != "done"]
        self._running: list[_Running] = []
        self._stopped_by: str | None = None
        self._ended = len(jobs) - len(self._waiting)

    def run(self, start_engine: Callable[[], Engine]) -> None:
        """Raises Interrupted after one of STOP_SIGNALS, once the running jobs have saved and stopped."""
        arrived: list[int] = []
        engine = None

        def stop(number: int, _frame) -> None:
            arrived.append(number)
            if engine is None:
                raise Interrupted(f"the sweep was stopped by {signal.Signals(number).name} before a job began.")

        with answered_by(stop):
            try:
                engine = start_engine()
                while self._waiting or self._running:
                    while arrived:
                        self._stop(arrived.pop(0))
                    if self._waiting and len(self._running) < engine.at_a_time:
                        self._start(engine)
                    time.sleep(0.05)
                    for one in list(self._running):
                        if (status := one.handle.poll()) is not None:
                            self._end(one, status)
            finally:
                # After a defect of the launcher itself the jobs must not run on unseen.
                self._stop_all(signal.SIGTERM)
                if engine is not None:
                    engine.close()
        if self._stopped_by:
            raise Interrupted(f"the sweep was stopped by {self._stopped_by}.")

    def _start(self, engine: Engine) -> None:
        """As many of the waiting jobs as there is room for."""
        free = engine.at_a_time - len(self._running)
        chosen, self._waiting = self._waiting[:free], self._waiting[free:]
        files = []
        for job in chosen:
            directory = (self._sweep.folder / job.directory).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            content = {"command": self._sweep.command, "sweep": self._sweep.name, "directory": str(directory)}
            content |= {"overrides": job.overrides, "config": job.config}
            write_atomically(file := directory / ".job.json", json.dumps(content, indent=1) + "\n")
            files.append((str(file), str(self._sweep.folder.resolve() / job.log)))
        sizes = [os.path.getsize(log) if os.path.exists(log) else 0 for _, log in files]
        for job, handle, size in zip(chosen, engine.start(files), sizes, strict=True):
            self._running.append(_Running(job, handle, time.monotonic(), size))
            say(sweep_report.started(job, self._ended + len(self._running), len(self._jobs)))
            job.status, job.reason = "running", None
        self._sweep.save()

    def _end(self, one: _Running, status: int) -> None:
        self._running.remove(one)
        self._ended += 1
        job, taken = one.job, time.monotonic() - one.started
        try:
            job.update_from(self._sweep.folder)
        except PgtoolkitError as error:  # a damaged file in its directory ends no other job
            job.status, job.reason, status = "failed", str(error), status or 1
        job.seconds = round(job.seconds + taken, 1)
        if status < 0:
            number = signal.Signals(-status)
            job.status = "interrupted" if number in STOPPED else "failed"
            job.reason = f"killed by {number.name}"
        elif status == Interrupted.exit_status:
            job.reason = job.reason or one.handle.reason or "stopped before it began"
        elif status != 0:
            if job.status != "failed" or not job.reason:
                said = one.handle.reason or sweep_report.last_line(self._sweep.folder / job.log, one.log_start)
                job.reason = said or f"exit status {status}"
            job.status = "failed"
        self._sweep.save()
        say(sweep_report.ended(job, self._sweep.folder, self._ended, len(self._jobs), taken))
        if job.status != "done" and self._fail_fast and not self._stopped_by and self._waiting + self._running:
            say("--fail-fast: no further job is started; running ones save and stop")
            self._waiting.clear()
            self._stop_all(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopped_by = signal.Signals(number).name
        self._waiting.clear()
        say(f"{self._stopped_by}: {len(self._running)} running jobs finish their step, save and stop")
        self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        for one in self._running:
            one.handle.stop(number)
