"""Where the jobs of a sweep run: as processes of this machine, on a Ray cluster, or through
submitit on SLURM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from pgtoolkit.config.launchers import Launcher
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, first_line
from pgtoolkit.launch.forks import Forks, JobProcess
from pgtoolkit.system.report import refusal, say
from pgtoolkit.training.machine import visible_gpus

_SECONDS_TO_CONNECT = 30
_SECONDS_BETWEEN_CANCELS = 10
"""Ray's cancelling is its best effort: one may come before `_run_job` has its handler."""
_SECONDS_TO_CANCEL = 60
"""SLURM kills a cancelled job after its KillWait, usually 30 s; one that has never begun leaves
nothing to wait for."""


class LocalEngine:
    """n_jobs at a time on this machine, or jobs_per_gpu on each of its GPUs; the CPU cores are
    divided among them."""

    def __init__(self, n_jobs: int, jobs_per_gpu: int | None):
        self._gpus = visible_gpus() * jobs_per_gpu if jobs_per_gpu else [None] * n_jobs
        self.at_a_time, environment = len(self._gpus), dict(os.environ)
        if self.at_a_time > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // self.at_a_time)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._running: dict[int, JobProcess] = {}
        self._forks = Forks(environment)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[JobProcess]:
        """jobs: absolute paths of each job's file, which `multirun` writes, and of its log."""
        return [self._start(file, log) for file, log in jobs]

    def _start(self, file: str, log: str) -> JobProcess:
        taken = {place for place, process in self._running.items() if process.poll() is None}
        place = next(place for place in range(self.at_a_time) if place not in taken)
        self._running[place] = self._forks.start(file, log, self._gpus[place])
        return self._running[place]


class RayEngine:
    """Every job a task of Ray, which starts it again on another worker where one is lost.

    init: for ray.init. remote: for ray.remote. Raises ConfigError where there is no such cluster.
    """

    at_a_time = sys.maxsize

    def __init__(self, init: dict[str, Any], remote: dict[str, Any]):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        import ray

        self._ray, address = ray, init.get("address")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:  # nothing listens to the network
                init = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} | init
            elif (
                ":" in address and "://" not in address
            ):  # for whose answer Ray would wait for minutes, deaf to signals
                say(f"connecting to Ray at {address}, for at most {_SECONDS_TO_CONNECT} s")
                command = [
                    sys.executable,
                    "-P",
                    "-m",
                    "ray.scripts.scripts",
                    "health-check",
                    f"--address={address}",
                ]
                subprocess.run(
                    command, capture_output=True, timeout=_SECONDS_TO_CONNECT, check=True
                )
            ray.init(**{"log_to_driver": False, "logging_level": "ERROR"} | init)
        except PgtoolkitError:  # of a signal
            raise
        except Exception as error:  # Ray has no common type
            raise ConfigError(
                refusal(
                    setting=f"hydra.launcher.ray.init.address={address or 'null'}",
                    needs="a Ray cluster that answers",
                    got=first_line(error),
                    reason="Jobs are sent to its head.",
                    use="ray start --head there, or hydra.launcher.ray.init.address=null",
                )
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process at once
        self._task = ray.remote(**remote)(_run_job)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[_RayTask]:
        return [
            _RayTask(self._ray, self._task.remote(os.getcwd(), file, log)) for file, log in jobs
        ]


class _RayTask:
    def __init__(self, ray, reference):
        self._ray, self._reference, self._cancelled = ray, reference, None
        self.reason: str | None = None

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            if self._cancelled and time.monotonic() > self._cancelled + _SECONDS_BETWEEN_CANCELS:
                self.stop(signal.SIGTERM)
            return None
        try:
            return self._ray.get(self._reference)
        except self._ray.exceptions.TaskCancelledError:
            return Interrupted.exit_status
        except Exception as error:  # a worker that was lost, or cannot run pgtoolkit
            self.reason = f"Ray: {_last_line(error)}"
            return PgtoolkitError.exit_status

    def stop(self, _number: int) -> None:
        self._cancelled = time.monotonic()
        self._ray.cancel(self._reference)


def _run_job(folder: str, file: str, log: str) -> int:
    """A job on a worker of Ray, which calls its handler of SIGINT to cancel; returns the exit
    status."""
    cancelled: list[int] = []
    # One of our own: Python has none where a script has started the cluster in the background,
    #   which ignores SIGINT.
    signal.signal(signal.SIGINT, lambda number, _: cancelled.append(number))
    os.chdir(folder)
    process = Forks().start(file, log)
    while not cancelled and process.poll() is None:
        time.sleep(0.05)
    process.stop(signal.SIGTERM)
    return process.wait()


class SubmititEngine:
    """Every job one of submitit's, on SLURM an element of one array; a preempted job saves and is
    queued again.

    cluster: slurm, or local for submitit's processes of this machine.
    parameters: of submitit's executor, by the names of conf/hydra/launcher/slurm.yaml.
    Raises ConfigError where submitit refuses them, or there is no SLURM.
    """

    at_a_time = sys.maxsize

    def __init__(
        self, cluster: str, submitit_folder: str, max_num_timeout: int, parameters: dict[str, Any]
    ):
        import submitit

        with self._refused():
            limit = {f"{cluster}_max_num_timeout": max_num_timeout}
            self._executor = submitit.AutoExecutor(submitit_folder, cluster=cluster, **limit)
            of_all = submitit.AutoExecutor._typed_parameters()
            named = {
                name if name in of_all else f"slurm_{name}": value
                for name, value in parameters.items()
            }
            self._executor.update_parameters(**named)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[_SubmittedJob]:
        # submitit's own process on a node begins in this directory, of which no file is to hide a
        # library.
        os.environ["PYTHONSAFEPATH"] = "1"
        with self._refused():
            return [
                _SubmittedJob(job)
                for job in self._executor.map_array(_JobOfSubmitit(), *zip(*jobs, strict=True))
            ]

    @staticmethod
    @contextlib.contextmanager
    def _refused():
        try:
            yield
        except Exception as error:  # submitit has no common type
            raise ConfigError(
                refusal(
                    setting="hydra/launcher=slurm",
                    needs="a cluster that takes such jobs",
                    got=_last_line(error),
                    reason="It takes the jobs of the sweep.",
                    use="its options in conf/hydra/launcher/slurm.yaml",
                )
            ) from error


class _SubmittedJob:
    def __init__(self, job):
        self._job, self._cancelled = job, None
        self.reason: str | None = None

    def poll(self) -> int | None:
        if self._cancelled and time.monotonic() > self._cancelled + _SECONDS_TO_CANCEL:
            return Interrupted.exit_status
        if not self._job.done():
            return None
        try:
            return max(self._job.results())
        except Exception as error:  # it was cancelled or killed, or ran out of time too often
            self.reason = (
                f"{self._job.cluster}: {_last_line(error)}" if self._cancelled is None else None
            )
            return Interrupted.exit_status

    def stop(self, _number: int) -> None:
        if self._cancelled is None:
            self._cancelled = time.monotonic()
            self._job.cancel(check=False)


class _JobOfSubmitit:
    """What submitit runs on a node: the job's process, to which it passes on what it is told."""

    _process: JobProcess | None = None

    def __call__(self, file: str, log: str) -> int:
        process = Forks().start(file, log)
        self._process = process
        signal.signal(signal.SIGTERM, lambda number, _: process.stop(number))
        return process.wait()

    def checkpoint(self, file: str, log: str):
        """submitit asks for this when the job is preempted or out of time: save, then take a place
        in the queue."""
        import submitit

        if self._process is not None:
            self._process.stop(signal.SIGUSR2)
            self._process.wait()
        return submitit.helpers.DelayedSubmission(_JobOfSubmitit(), file, log)


def engine_of(launcher: Launcher) -> Engine:
    """Start what runs the jobs of a sweep; raises ConfigError where it cannot be started."""
    settings = {
        name: value
        for name, value in launcher.settings.items()
        if name not in ("kind", "fail_fast")
    }
    if launcher.kind == "local":
        return LocalEngine(**settings)
    if launcher.kind == "ray_cluster":
        return RayEngine(**settings["ray"])
    of_submitit = ("cluster", "submitit_folder", "max_num_timeout")
    parameters = {name: value for name, value in settings.items() if name not in of_submitit}
    return SubmititEngine(*(settings[name] for name in of_submitit), parameters=parameters)


Engine = LocalEngine | RayEngine | SubmititEngine
"""Starts `Forks` for its jobs, `at_a_time` of them; `LocalEngine` says what each offers."""

JobHandle = JobProcess | _RayTask | _SubmittedJob
"""A job that was started; `JobProcess` says what each offers."""


def _last_line(error: BaseException) -> str:
    """Of an exception that quotes the traceback of another process."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
