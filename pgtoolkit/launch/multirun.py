"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.check import Checked
from pgtoolkit.launch.engines import Engine, JobHandle, engine_of
from pgtoolkit.launch.search import run_search
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.launch.sweep_line import SweepLine
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import say
from pgtoolkit.tracking.signals import STOP_SIGNALS, answered_by

STOPPED = (signal.SIGKILL, *STOP_SIGNALS)
"""Signals by which someone ends a process; by others it ends itself."""


def run_sweep(checked: Checked) -> int:
    """Run the checked jobs, each if it is not done; returns the exit status: 1 if a job failed.

    Raises Interrupted after a signal.
    """
    assert checked.sweep is not None
    assert checked.sweep_config is not None
    sweep = checked.sweep
    search = checked.sweep_config.search
    if search is not None:
        sweep.jobs.clear()  # it makes its own, and repeats what it finds done
    with sweep.held():
        sweep.save()
        say(f"{sweep_report.summary(sweep)}, in {sweep.folder}")
        say(sweep_report.logs(sweep))
        begun, interrupted = time.monotonic(), None
        try:
            launch = _Launch(checked)
            if search is None:
                launch.run(list(sweep.jobs.values()))
            else:
                run_search(search, launch.run_drawn)
        except Interrupted as stop:
            interrupted = stop
        finally:
            sweep.save()
        say(sweep_report.table(sweep) + f", in {(time.monotonic() - begun) / 60:.1f} min")
        for line in sweep_report.next_steps(sweep, again=not interrupted):
            say(line)
        config = checked.runs[0].config
        assert config is not None
        _publish(sweep, config)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {sweep_report.command_of(sweep)}")
    return (
        0
        if all(job.status == "done" for job in sweep.jobs.values())
        else PgtoolkitError.exit_status
    )


class _Launch:
    """Runs jobs of a sweep by its launcher, which is started once, with the first job that is not
    done."""

    def __init__(self, checked: Checked):
        assert checked.sweep is not None
        assert checked.plan is not None
        assert checked.sweep_config is not None
        assert checked.sweep_config.launcher is not None
        self._sweep = checked.sweep
        self._plan = checked.plan
        self._launcher = checked.sweep_config.launcher
        self._engine = functools.cache(self._start_engine)

    def _start_engine(self) -> Engine:
        return engine_of(self._launcher)

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs that are not done."""
        for job in jobs:
            job.update_from(self._sweep.folder)
            job.seconds = self._sweep.earlier.get(job.directory, {}).get("seconds", 0.0)
        if any(job.status != "done" for job in jobs):
            Jobs(self._sweep, jobs, self._launcher.settings["fail_fast"]).run(self._engine)

    def run_drawn(self, overrides: list[list[str]], first: int) -> list[float | None]:
        """Run the jobs of values that a search has drawn, by their overrides; returns what each has
        reached.

        first: number of the first job. Raises ConfigError for values that make no job.
        """
        jobs: list[Job] = []
        for number, of_job in enumerate(overrides, start=first):
            run = self._plan(of_job, number)
            if run.report.problems:
                raise ConfigError("\n".join(run.report.problems))
            assert run.job is not None
            jobs.append(run.job)
        # the same configuration runs once
        self.run(list({job.directory: job for job in jobs}.values()))
        rewards = []
        for job in jobs:
            is_done = job.status == "done"
            rewards.append(
                sweep_report.reached(self._sweep.folder / job.directory) if is_done else None
            )
        return rewards


@dataclass
class _Running:
    job: Job
    handle: JobHandle
    started: float
    log_start: int


class Jobs:
    """The jobs of one launch, of which those that are not done are run: waiting, running, ended."""

    def __init__(self, sweep: Sweep, jobs: list[Job], fail_fast: bool):
        self._sweep, self._count, self._fail_fast = sweep, len(jobs), fail_fast
        self._line = SweepLine(sweep.folder, jobs)
        self._waiting = deque(job for job in jobs if job.status != "done")
        self._running: list[_Running] = []
        self._stopped_by: str | None = None
        self._ended = len(jobs) - len(self._waiting)

    def run(self, start_engine: Callable[[], Engine]) -> None:
        """Raises Interrupted after one of STOP_SIGNALS, once the running jobs have saved and
        stopped."""
        arrived: list[int] = []
        engine = None

        def stop(number: int, _frame) -> None:
            arrived.append(number)
            if engine is None:
                raise Interrupted(
                    f"the sweep was stopped as asked ({signal.Signals(number).name}) before a job "
                    "began."
                )

        with answered_by(stop):
            try:
                engine = start_engine()
                self._line.begin()
                while self._waiting or self._running:
                    while arrived:
                        self._stop(arrived.pop(0))
                    if self._waiting and len(self._running) < engine.at_a_time:
                        self._start(engine)
                    self._line.show(self._waiting, [running.job for running in self._running])
                    time.sleep(0.05)
                    for running in list(self._running):
                        if (status := running.handle.poll()) is not None:
                            self._end(running, status)
            finally:
                # After a defect of the launcher itself the jobs must not run on unseen.
                self._stop_all(signal.SIGTERM)
                self._line.close()
        if self._stopped_by:
            raise Interrupted(f"the sweep was stopped as asked ({self._stopped_by}).")

    def _start(self, engine: Engine) -> None:
        """As many of the waiting jobs as there is room for."""
        free = min(len(self._waiting), engine.at_a_time - len(self._running))
        chosen = [self._waiting.popleft() for _ in range(free)]
        files, sizes = [], []
        for job in chosen:
            directory = (self._sweep.folder / job.directory).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            content = {
                "command": self._sweep.command,
                "sweep": self._sweep.name,
                "directory": str(directory),
            }
            content |= {"overrides": job.overrides, "config": plain_config(job.config)}
            write_atomically(file := directory / ".job.json", json.dumps(content, indent=1) + "\n")
            log = str(self._sweep.folder.resolve() / job.log)
            files.append((str(file), log))
            sizes.append(os.path.getsize(log) if os.path.exists(log) else 0)
        for job, handle, size in zip(chosen, engine.start(files), sizes, strict=True):
            self._running.append(_Running(job, handle, time.monotonic(), size))
            say(sweep_report.started(job, self._ended + len(self._running), self._count))
            job.status, job.reason = "running", None
        self._sweep.add(*chosen)

    def _end(self, running: _Running, status: int) -> None:
        self._running.remove(running)
        self._ended += 1
        job, taken = running.job, time.monotonic() - running.started
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
            job.reason = job.reason or running.handle.reason or "stopped before it began"
        elif status != 0:
            if job.status != "failed" or not job.reason:
                log = self._sweep.folder / job.log
                job.reason = running.handle.reason or sweep_report.last_line(log, running.log_start)
                job.reason = job.reason or f"exit status {status}"
            job.status = "failed"
        self._sweep.add(job)
        say(sweep_report.ended(job, self._sweep.folder, self._ended, self._count, taken))
        if (
            job.status != "done"
            and self._fail_fast
            and not self._stopped_by
            and (self._waiting or self._running)
        ):
            say("--fail-fast: no further job is started; running ones save and stop")
            self._waiting.clear()
            self._stop_all(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopped_by = signal.Signals(number).name
        self._waiting.clear()
        say(
            f"{self._stopped_by}: {len(self._running)} running jobs finish their step, save and "
            "stop"
        )
        self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        for running in self._running:
            running.handle.stop(number)


def _publish(sweep: Sweep, config: Config) -> None:
    """Tell MLflow of the sweep as a whole; its folder has everything, so that a store which fails
    is a warning."""
    if config.tracking.name != "mlflow":
        return
    from pgtoolkit.comparison.sweep_summary import publish

    assert config.tracking.experiment is not None
    try:
        publish(sweep.folder, config.tracking.uri, config.tracking.experiment)
    except PgtoolkitError as error:
        say(f"pgtk: warning: {error}", error=True)
