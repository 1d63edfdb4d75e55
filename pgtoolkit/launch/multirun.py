"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.types import HydraContext, RunMode

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.check import Checked
from pgtoolkit.launch.engines import Engine, JobHandle
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import say
from pgtoolkit.tracking.signals import STOP_SIGNALS, answered_by

STOPPED = (signal.SIGKILL, *STOP_SIGNALS)
"""Signals by which someone ends a process; by others it ends itself."""


def run_sweep(checked: Checked) -> int:
    """Run the checked jobs, each if it is not done; returns the exit status: 1 if a job failed.

    Raises Interrupted after a signal.
    """
    sweep = checked.sweep
    if checked.searches:
        sweep.jobs.clear()  # the sweeper makes its own, and repeats what it finds done
    with sweep.held():
        sweep.save()
        say(f"{sweep_report.summary(sweep)}, in {sweep.folder}")
        begun, interrupted = time.monotonic(), None
        try:
            _run_hydra(checked)
        except Interrupted as stop:
            interrupted = stop
        finally:
            sweep.save()
        say(sweep_report.table(sweep) + f", in {(time.monotonic() - begun) / 60:.1f} min")
        for line in sweep_report.next_steps(sweep, again=not interrupted):
            say(line)
        _publish(sweep, checked.runs[0].values)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {sweep_report.command_of(sweep)}")
    return 0 if all(job.status == "done" for job in sweep.jobs.values()) else PgtoolkitError.exit_status


def _run_hydra(checked: Checked) -> None:
    """Let Hydra's sweeper choose the jobs and its launcher run them, as Hydra does; callbacks of a user are refused."""
    master = checked.master
    master.hydra.mode, master.hydra.sweep.dir = RunMode.MULTIRUN, str(checked.sweep.folder)
    configure_log(master.hydra.hydra_logging, master.hydra.verbose)
    context = HydraContext(CheckedJobs(checked), Callbacks(master))
    # Our launchers need no function of Hydra's: each job is a process that reads its configuration from a file.
    sweeper = Plugins.instance().instantiate_sweeper(config=master, hydra_context=context, task_function=lambda _: None)
    sweeper.sweep(arguments=checked.arguments)


class CheckedJobs:
    """Stands in the place of Hydra's config loader: jobs as they were checked, where Hydra would compose them again."""

    def __init__(self, checked: Checked):
        self._sweep, self._plan = checked.sweep, checked.plan
        self._runs = {tuple(run.overrides): run for run in checked.runs}

    def load_sweep_config(self, *_, **__) -> None:
        """For Hydra's sweepers, which try every job first: `run` raises what is wrong with one."""

    def planned(self, overrides: Sequence[str], number: int) -> Job:
        """The job of these overrides; raises ConfigError for values that a searching sweeper has drawn in vain."""
        run = self._runs.get(tuple(overrides)) or self._plan(list(overrides), number)
        if run.report.problems:
            raise ConfigError("\n".join(run.report.problems))
        return self._sweep.jobs.setdefault(run.job.directory, run.job)

    def run(
        self, overrides: Sequence[Sequence[str]], first: int, engine: Callable[[], Engine], fail_fast: bool
    ) -> list[JobReturn]:
        """Run the jobs of these overrides, but for those that are done; what each returns is its final reward.

        first: number of the first job. engine: starts what runs them, if any is left to do.
        """
        sweep = self._sweep
        planned = [self.planned(of_job, number) for number, of_job in enumerate(overrides, start=first)]
        jobs = [*{job.directory: job for job in planned}.values()]  # the same configuration runs once
        for job in jobs:
            job.update_from(sweep.folder)
            job.seconds = sweep.earlier.get(job.directory, {}).get("seconds", 0.0)
        if any(job.status != "done" for job in jobs):
            Jobs(sweep, jobs, fail_fast).run(engine)
        # Failures are told by the table and the exit status; Hydra would raise the first alone.
        rewards = {
            job.directory: sweep_report.reached(sweep.folder / job.directory) for job in jobs if job.status == "done"
        }
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=rewards.get(job.directory)) for job in planned]


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
        self._waiting = deque(job for job in jobs if job.status != "done")
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
                raise Interrupted(f"the sweep was stopped as asked ({signal.Signals(number).name}) before a job began.")

        with answered_by(stop):
            try:
                engine = start_engine()
                while self._waiting or self._running:
                    while arrived:
                        self._stop(arrived.pop(0))
                    if self._waiting and len(self._running) < engine.at_a_time:
                        self._start(engine)
                    time.sleep(0.05)
                    for running in list(self._running):
                        if (status := running.handle.poll()) is not None:
                            self._end(running, status)
            finally:
                # After a defect of the launcher itself the jobs must not run on unseen.
                self._stop_all(signal.SIGTERM)
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
            content = {"command": self._sweep.command, "sweep": self._sweep.name, "directory": str(directory)}
            content |= {"overrides": job.overrides, "config": job.config}
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
        if job.status != "done" and self._fail_fast and not self._stopped_by and (self._waiting or self._running):
            say("--fail-fast: no further job is started; running ones save and stop")
            self._waiting.clear()
            self._stop_all(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopped_by = signal.Signals(number).name
        self._waiting.clear()
        say(f"{self._stopped_by}: {len(self._running)} running jobs finish their step, save and stop")
        self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        for running in self._running:
            running.handle.stop(number)


def _publish(sweep: Sweep, config: Config) -> None:
    """Tell MLflow of the sweep as a whole; its folder has everything, so that a store which fails is a warning."""
    if config.tracking.name != "mlflow":
        return
    from pgtoolkit.comparison.sweep_summary import publish

    try:
        publish(sweep.folder, config.tracking.uri, config.tracking.experiment)
    except PgtoolkitError as error:
        say(f"pgtk: warning: {error}", error=True)
