"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pgtoolkit.config.keys import OPTION_KEYS
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.check import check_job
from pgtoolkit.launch.engines import Engine, JobHandle, engine_of
from pgtoolkit.launch.final_number import final_value, number_of, points_of
from pgtoolkit.launch.search import Result, Watched, run_search
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.launch.sweep_line import SweepLine
from pgtoolkit.runs.directory import record_end
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import say
from pgtoolkit.tracking.next_commands import start_url, ui_command
from pgtoolkit.tracking.signals import STOP_SIGNALS, answered_by
from pgtoolkit.tracking.store_address import experiment_of

_ENDING_SIGNALS = (signal.SIGKILL, *STOP_SIGNALS)
"""Signals that somebody sends to end a process; those that are not among them come from its own
failure."""

_SECONDS_BETWEEN_LOOKS = 1.0
"""Between two looks of a search at the numbers of a job that runs."""

_NOBODY: Mapping[str, Watched] = {}
"""What watches the jobs of a sweep that stops none early."""


def run_sweep(sweep: Sweep) -> int:
    """Run the jobs of a sweep that are not done; return the exit status: 1 if a job failed.

    Raises Interrupted after a signal.
    """
    search = sweep.config.search
    if search is not None:
        sweep.jobs.clear()  # a search makes its own jobs as it goes
    with sweep.held():
        sweep.save()
        say(f"{sweep_report.count_jobs(sweep)}, in {sweep.folder}")
        say(sweep_report.logs(sweep))
        begun = time.monotonic()
        interrupted = None
        _in_mlflow(sweep, is_begin=True)
        try:
            launch = _Launch(sweep)
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
        _in_mlflow(sweep, is_begin=False)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {sweep_report.command_of(sweep)}")
    all_ended = all(job.status in ("done", "pruned") for job in sweep.jobs.values())
    return 0 if all_ended else PgtoolkitError.exit_status


class _Launch:
    """Runs jobs of a sweep by its launcher.

    The launcher starts once, before the first job that is not done.
    """

    def __init__(self, sweep: Sweep):
        assert sweep.config.launcher is not None
        self._sweep = sweep
        self._launcher = sweep.config.launcher
        self._engine = functools.cache(self._start_engine)

    def _start_engine(self) -> Engine:
        return engine_of(self._launcher)

    def run(self, jobs: list[PlannedRun], watched: Mapping[str, Watched] = _NOBODY) -> None:
        """Run the jobs that are not done.

        watched: what watches a job, by its directory. A job that a search has stopped early is not
            run again.
        """
        for job in jobs:
            job.update_from(self._sweep.folder)
            job.seconds = self._sweep.earlier.get(job.directory, {}).get("seconds", 0.0)
        waiting = [job for job in jobs if not _has_ended(job, watched)]
        if waiting:
            fail_fast = self._launcher.settings["fail_fast"]
            Jobs(self._sweep, jobs, waiting, fail_fast, watched).run(self._engine)

    def run_drawn(
        self, overrides: list[list[str]], first: int, watched: list[Watched]
    ) -> list[Result]:
        """Run jobs whose values a search has drawn; return what became of each.

        overrides: those of each job.
        first: the number of the first job.
        watched: what watches each job.
        Raises ConfigError for values that make no valid job.
        """
        jobs: list[PlannedRun] = []
        for number, job_overrides in enumerate(overrides, start=first):
            run = check_job(self._sweep, job_overrides, number)
            if run.report.problems:
                raise ConfigError("\n".join(run.report.problems))
            jobs.append(self._sweep.jobs[run.directory])
        # Jobs of one configuration share a directory, and run once.
        by_directory = {job.directory: place for place, job in enumerate(jobs)}
        prunes = any(job.prunes for job in watched)
        self.run(
            [jobs[place] for place in by_directory.values()],
            {name: watched[place] for name, place in by_directory.items()} if prunes else _NOBODY,
        )
        return [self._result(job) for job in jobs]

    def _result(self, job: PlannedRun) -> Result:
        directory = self._sweep.folder / job.directory
        metric = number_of(job.config)
        points = points_of(directory, metric, job.config.trainer.max_steps)
        value = final_value(directory, metric) if job.status == "done" else None
        return Result(value, points, is_pruned=job.status == "pruned")


def _has_ended(job: PlannedRun, watched: Mapping[str, Watched]) -> bool:
    """Return whether a job need not run: it is done, or was stopped early by this search."""
    return job.status == "done" or (job.status == "pruned" and job.directory in watched)


@dataclass
class _Running:
    """A job that runs.

    started: time.monotonic() at its start.
    log_start: size of its log in bytes, before it began.
    looked_at: time.monotonic() when the search has last seen its numbers.
    pruned: why the search has stopped it early; None where it has not.
    """

    job: PlannedRun
    handle: JobHandle
    started: float
    log_start: int
    looked_at: float = 0.0
    pruned: str | None = None


class Jobs:
    """Runs jobs of one launch: they wait, run, and end.

    jobs: all of them. waiting: those that are to run. watched: see `_Launch.run`.
    """

    def __init__(
        self,
        sweep: Sweep,
        jobs: list[PlannedRun],
        waiting: list[PlannedRun],
        fail_fast: bool,
        watched: Mapping[str, Watched] = _NOBODY,
    ):
        self._sweep = sweep
        self._watched = watched
        self._count = len(jobs)
        self._fail_fast = fail_fast
        self._line = SweepLine(sweep.folder, jobs)
        self._waiting = deque(waiting)
        self._running: list[_Running] = []
        self._stopped_by: str | None = None
        self._ended = len(jobs) - len(self._waiting)

    def run(self, start_engine: Callable[[], Engine]) -> None:
        """Run the jobs until all have ended.

        Raises Interrupted after one of STOP_SIGNALS, once the running jobs have saved and stopped.
        """
        arrived: list[int] = []
        engine = None

        def stop(number: int, _frame: FrameType | None) -> None:
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
                        status = running.handle.poll()
                        if status is not None:
                            self._end(running, status)
                        elif not self._stopped_by:
                            self._prune(running)
            finally:
                # After an error of this process the jobs must not run on unseen.
                self._stop_all(signal.SIGTERM)
                self._line.close()
        if self._stopped_by:
            raise Interrupted(f"the sweep was stopped as asked ({self._stopped_by}).")

    def _start(self, engine: Engine) -> None:
        """Start as many of the waiting jobs as there is room for."""
        free = min(len(self._waiting), engine.at_a_time - len(self._running))
        chosen = [self._waiting.popleft() for _ in range(free)]
        files = []
        log_sizes = []
        for job in chosen:
            log = str(self._sweep.folder.resolve() / job.log)
            files.append((str(self._write_job(job)), log))
            log_sizes.append(os.path.getsize(log) if os.path.exists(log) else 0)
        for job, handle, size in zip(chosen, engine.start(files), log_sizes, strict=True):
            self._running.append(_Running(job, handle, time.monotonic(), size))
            say(sweep_report.started(job, self._ended + len(self._running), self._count))
            job.status = "running"
            job.reason = None
        self._sweep.add(*chosen)

    def _write_job(self, job: PlannedRun) -> Path:
        """Write the file that `ranks.run_job` reads, and return its path."""
        directory = (self._sweep.folder / job.directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        content = {
            "command": self._sweep.command,
            "sweep": self._sweep.name,
            "directory": str(directory),
            "overrides": job.composed.overrides,
            "config": plain_config(job.named_config),
        }
        file = directory / ".job.json"
        write_atomically(file, json.dumps(content, indent=1) + "\n")
        return file

    def _end(self, running: _Running, status: int) -> None:
        """Record and print how a job has ended; with --fail-fast stop the others if it failed.

        status: its exit status, negative where a signal ended it.
        """
        self._running.remove(running)
        self._ended += 1
        job = running.job
        seconds = time.monotonic() - running.started
        if running.pruned is not None:
            directory = self._sweep.folder / job.directory
            record_end(directory, "pruned", running.pruned, after=("interrupted",))
        try:
            job.update_from(self._sweep.folder)
        except PgtoolkitError as error:  # a damaged file in its directory ends no other job
            job.status = "failed"
            job.reason = str(error)
            status = status or 1
        job.seconds = round(job.seconds + seconds, 1)
        self._explain_end(running, status)
        self._sweep.add(job)
        say(sweep_report.ended(job, self._sweep.folder, self._ended, self._count, seconds))
        others = self._waiting or self._running
        if (
            job.status not in ("done", "pruned")
            and self._fail_fast
            and not self._stopped_by
            and others
        ):
            say("--fail-fast: no further job is started; running ones save and stop")
            self._waiting.clear()
            self._stop_all(signal.SIGTERM)

    def _explain_end(self, running: _Running, status: int) -> None:
        """Set the status and the reason of a job that has not ended with exit status 0."""
        job = running.job
        if job.status == "pruned":
            return
        if status < 0:
            number = signal.Signals(-status)
            job.status = "interrupted" if number in _ENDING_SIGNALS else "failed"
            job.reason = f"killed by {number.name}"
        elif status == Interrupted.exit_status:
            job.reason = job.reason or running.handle.reason or "stopped before it began"
        elif status != 0:
            if job.status != "failed" or not job.reason:
                log = self._sweep.folder / job.log
                job.reason = running.handle.reason or sweep_report.last_line(log, running.log_start)
                job.reason = job.reason or f"exit status {status}"
            job.status = "failed"

    def _prune(self, running: _Running) -> None:
        """Stop a job that the search gives up, by its numbers so far."""
        job = running.job
        watching = self._watched.get(job.directory)
        is_early = time.monotonic() - running.looked_at < _SECONDS_BETWEEN_LOOKS
        if watching is None or running.pruned is not None or is_early:
            return
        running.looked_at = time.monotonic()
        directory = self._sweep.folder / job.directory
        points = points_of(directory, number_of(job.config), job.config.trainer.max_steps)
        running.pruned = watching.why_prune(points)
        if running.pruned is not None:
            running.handle.stop(signal.SIGTERM)

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


def _in_mlflow(sweep: Sweep, is_begin: bool) -> None:
    """Make the sweep's run in MLflow, or add its summary at the end.

    The sweep's folder holds the same, so a store that fails is a warning.
    """
    tracking = sweep.runs[0].config.tracking
    if tracking.name != "mlflow":
        return
    from pgtoolkit.comparison import sweep_summary

    experiment = experiment_of("mlflow", tracking.experiment)
    try:
        if is_begin:
            keys = [OPTION_KEYS.get(key, key) for key in sweep.config.varying]
            sweep_summary.begin(sweep.name, tracking.uri, experiment, keys)
        else:
            sweep_summary.publish(sweep.folder, tracking.uri, experiment)
            say(f"MLflow: {ui_command(tracking.uri) or start_url(tracking.uri)}")
    except PgtoolkitError as error:
        say(f"pgtk: warning: {error}", error=True)
