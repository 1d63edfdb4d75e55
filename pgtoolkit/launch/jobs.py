"""Runs the jobs of a sweep on this machine, each in a fresh process, so many at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.sweep import Job, Sweep, plan
from pgtoolkit.runs.directory import is_held
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import say

STOPPED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which someone ends a process; by others it ends itself."""


def launch(master: DictConfig, configs: list[DictConfig], first: int, n_jobs: int, fail_fast: bool) -> list[JobReturn]:
    """Run the jobs of these configurations, but for those that are done; what each returns is its final reward.

    master: the sweep's own configuration. first: number of the first job. Raises Interrupted after SIGINT or SIGTERM,
    once the running jobs have saved and stopped.
    """
    folder, unnamed = Path(master.hydra.sweep.dir), master.hydra.job.config.override_dirname.exclude_keys
    sweep = Sweep.load(folder)
    planned = []
    for number, config in enumerate(configs, start=first):
        job = plan(config, list(config.hydra.overrides.task), number, folder, unnamed)
        job.update_from(folder)
        if (before := sweep.jobs.get(job.directory)) is not None:
            job.seconds = before.seconds
        sweep.jobs[job.directory] = job
        planned.append(job.directory)
    jobs = [sweep.jobs[directory] for directory in dict.fromkeys(planned)]  # the same configuration runs once
    sweep.save()
    _Jobs(sweep, jobs, n_jobs, fail_fast).run()
    return [_returned(config, sweep.jobs[name], folder) for config, name in zip(configs, planned, strict=True)]


def _returned(config, job, folder):
    directory = folder / job.directory
    done = JobReturn(job.overrides, config, working_dir=str(directory), status=JobStatus.COMPLETED)
    # Failures are told by the table and the exit status; Hydra would raise the first alone.
    done.return_value = sweep_report.reached(directory) if job.status == "done" else None
    return done


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen
    started: float
    log_start: int


class _Jobs:
    """The jobs of one launch: waiting, running, ended."""

    def __init__(self, sweep: Sweep, jobs: list[Job], n_jobs: int, fail_fast: bool):
        self._sweep, self._jobs, self._n_jobs, self._fail_fast = sweep, jobs, n_jobs, fail_fast
        self._waiting = [job for job in jobs if job.status != "done"]
        self._running: list[_Running] = []
        self._stopped_by: str | None = None
        self._announced: set[str] = set()
        self._ended = len(jobs) - len(self._waiting)

    def run(self) -> None:
        arrived: list[int] = []
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda got, _: arrived.append(got)) for number in numbers}
        try:
            while self._waiting or self._running:
                while arrived:
                    self._stop(arrived.pop(0))
                while self._waiting and len(self._running) < self._n_jobs and (job := self._next()):
                    self._start(job)
                time.sleep(0.05)
                for one in [one for one in self._running if one.process.poll() is not None]:
                    self._end(one)
        finally:
            # After a defect of the launcher itself the jobs must not run on unseen.
            self._signal_all(signal.SIGTERM)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._stopped_by:
            raise Interrupted(f"the sweep was stopped by {self._stopped_by}.")

    def _next(self) -> Job | None:
        """The first waiting job whose directory is free: a process of a killed launcher may still be saving."""
        for job in self._waiting:
            if not is_held(self._sweep.folder / job.directory):
                self._waiting.remove(job)
                return job
        name = self._waiting[0].name
        if not self._running and name not in self._announced:
            self._announced.add(name)
            say(f"waiting for another process that still runs {name}")
        return None

    def _start(self, job: Job) -> None:
        job.update_from(self._sweep.folder)  # it may have ended meanwhile
        if job.status == "done":
            self._ended += 1
            return
        directory = self._sweep.folder / job.directory
        directory.mkdir(parents=True, exist_ok=True)
        content = {"command": self._sweep.command, "sweep": self._sweep.name, "directory": str(directory.resolve())}
        content |= {"overrides": job.overrides, "config": job.config}
        write_atomically(file := directory / ".job.json", json.dumps(content, indent=1) + "\n")
        command = [sys.executable, "-P", "-m", "pgtoolkit.launch.job", str(file)]
        with (self._sweep.folder / job.log).open("a+", encoding="utf-8") as output:
            # A session of its own: Ctrl-C in the terminal reaches the jobs through this process alone, once.
            session = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output, "start_new_session": True}
            process = subprocess.Popen(command, **session)
            self._running.append(_Running(job, process, time.monotonic(), output.tell()))
        say(sweep_report.started(job, self._ended + len(self._running), len(self._jobs)))
        job.status, job.reason = "running", None
        self._sweep.save()

    def _end(self, one: _Running) -> None:
        self._running.remove(one)
        self._ended += 1
        one.process.stdin.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)  # what a killed job may have left of its own processes
        job, status, taken = one.job, one.process.returncode, time.monotonic() - one.started
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
            job.reason = job.reason or "stopped before it began"
        elif status != 0:
            if job.status != "failed" or not job.reason:
                said = sweep_report.last_line(self._sweep.folder / job.log, one.log_start)
                job.reason = said or f"exit status {status}"
            job.status = "failed"
        self._sweep.save()
        say(sweep_report.ended(job, self._sweep.folder, self._ended, len(self._jobs), taken))
        if job.status != "done" and self._fail_fast and not self._stopped_by and self._waiting + self._running:
            say("--fail-fast: no further job is started; running ones save and stop")
            self._waiting.clear()
            self._signal_all(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._stopped_by = signal.Signals(number).name
        self._waiting.clear()
        say(f"{self._stopped_by}: {len(self._running)} running jobs finish their step, save and stop")
        self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for one in self._running:
            one.process.send_signal(number)
