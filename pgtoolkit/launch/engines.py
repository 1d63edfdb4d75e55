"""Runs the jobs of a sweep: as processes of this machine, on a Ray cluster, or through
submitit on SLURM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from pgtoolkit.assembly.machine import visible_gpus
from pgtoolkit.config.launchers import Launcher
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, first_line
from pgtoolkit.launch.forks import Forks, JobProcess
from pgtoolkit.ranks.environment import JOBS_ON_GPU
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.system.report import refusal, say

if TYPE_CHECKING:
    import ray
    import submitit

_SECONDS_TO_CONNECT = 30
_SECONDS_BETWEEN_CANCELS = 10
"""Ray may cancel a task before `_run_job` has set its handler, so it is asked again."""
_SECONDS_TO_CANCEL = 60
"""SLURM kills a cancelled job after its KillWait, usually 30 s. A job that never began reports
nothing, so we stop waiting for it then."""


class LocalEngine:
    """Runs n_jobs at a time on this machine, or jobs_per_gpu on each of its GPUs.

    The CPU cores are divided among them.
    """

    def __init__(self, n_jobs: int, jobs_per_gpu: int | None):
        self._gpus = visible_gpus() * jobs_per_gpu if jobs_per_gpu else [None] * n_jobs
        self.at_a_time = len(self._gpus)
        environment = dict(os.environ)
        if self.at_a_time > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // self.at_a_time)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            # Jobs that choose no GPU all use the first one.
            environment[JOBS_ON_GPU] = str(jobs_per_gpu or n_jobs)
        self._running: dict[int, JobProcess] = {}  # by slot, an index of _gpus
        self._forks = Forks(environment)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[JobProcess]:
        """Start jobs, each given as the absolute paths of its file (of `multirun`) and its log."""
        return [self._start(file, log) for file, log in jobs]

    def _start(self, file: str, log: str) -> JobProcess:
        taken = {slot for slot, process in self._running.items() if process.poll() is None}
        slot = next(slot for slot in range(self.at_a_time) if slot not in taken)
        self._running[slot] = self._forks.start(file, log, self._gpus[slot])
        return self._running[slot]


class RayEngine:
    """Runs every job as a task of Ray, which starts it again elsewhere if its worker is lost.

    init: arguments of ray.init.
    remote: arguments of ray.remote.
    Raises ConfigError where there is no such cluster.
    """

    at_a_time = sys.maxsize

    def __init__(self, init: Dictionary, remote: Dictionary):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        import ray

        self._ray = ray
        address = init.get("address")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:  # nothing listens to the network
                init = {"_node_ip_address": "127.0.0.1", "include_dashboard": False} | init
            elif ":" in address and "://" not in address:
                _check_ray_answers(address)
            ray.init(**{"log_to_driver": False, "logging_level": "ERROR"} | init)
        except PgtoolkitError:  # raised by the handler of a signal
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
            signal.signal(signal.SIGTERM, handler)  # Ray's handler would end this process at once
        self._task = ray.remote(**remote)(_run_job)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[_RayTask]:
        return [
            _RayTask(self._ray, self._task.remote(os.getcwd(), file, log)) for file, log in jobs
        ]


def _check_ray_answers(address: str) -> None:
    """Raise an error if no Ray cluster answers at HOST:PORT.

    ray.init would wait for minutes, and would not react to signals.
    """
    say(f"connecting to Ray at {address}, for at most {_SECONDS_TO_CONNECT} s")
    module = "ray.scripts.scripts"
    command = [sys.executable, "-P", "-m", module, "health-check", f"--address={address}"]
    subprocess.run(command, capture_output=True, timeout=_SECONDS_TO_CONNECT, check=True)


class _RayTask:
    """A job that runs as a task of Ray."""

    def __init__(self, ray: ModuleType, reference: ray.ObjectRef):
        self._ray = ray
        self._reference = reference
        self._cancelled: float | None = None
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
    """Run a job on a worker of Ray; return its exit status.

    Ray cancels a task by calling its handler of SIGINT.
    """
    cancelled: list[int] = []
    # Python sets no such handler where a script has started the cluster in the background, since
    # SIGINT is ignored there.
    signal.signal(signal.SIGINT, lambda number, _: cancelled.append(number))
    os.chdir(folder)
    process = Forks().start(file, log)
    while not cancelled and process.poll() is None:
        time.sleep(0.05)
    process.stop(signal.SIGTERM)
    return process.wait()


class SubmititEngine:
    """Runs every job through submitit: on SLURM as an element of one array.

    A preempted job saves and is queued again.
    cluster: slurm, or local for processes that submitit starts on this machine.
    parameters: those of submitit's executor, by the names of conf/hydra/launcher/slurm.yaml.
    Raises ConfigError where submitit refuses them, or there is no SLURM.
    """

    at_a_time = sys.maxsize

    def __init__(
        self, cluster: str, submitit_folder: str, max_num_timeout: int, parameters: Dictionary
    ):
        import submitit

        with self._refused():
            limit = {f"{cluster}_max_num_timeout": max_num_timeout}
            self._executor = submitit.AutoExecutor(submitit_folder, cluster=cluster, **limit)
            of_any_cluster = submitit.AutoExecutor._typed_parameters()
            named = {
                name if name in of_any_cluster else f"slurm_{name}": value
                for name, value in parameters.items()
            }
            self._executor.update_parameters(**named)

    def start(self, jobs: Sequence[tuple[str, str]]) -> list[_SubmittedJob]:
        # submitit starts Python on a node in this directory, whose files must not hide a library.
        os.environ["PYTHONSAFEPATH"] = "1"
        with self._refused():
            submitted = self._executor.map_array(_JobOfSubmitit(), *zip(*jobs, strict=True))
            return [_SubmittedJob(job) for job in submitted]

    @staticmethod
    @contextlib.contextmanager
    def _refused() -> Iterator[None]:
        """Inside the block, an error of submitit becomes a ConfigError."""
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
    """A job that submitit has queued."""

    def __init__(self, job: submitit.Job[int]):
        self._job = job
        self._cancelled: float | None = None
        self.reason: str | None = None

    def poll(self) -> int | None:
        if self._cancelled and time.monotonic() > self._cancelled + _SECONDS_TO_CANCEL:
            return Interrupted.exit_status
        if not self._job.done():
            return None
        try:
            return max(self._job.results())
        except Exception as error:  # it was cancelled or killed, or ran out of time too often
            if self._cancelled is None:
                cluster = self._job.cluster  # pyright: ignore[reportAttributeAccessIssue]  (set by AutoExecutor)
                self.reason = f"{cluster}: {_last_line(error)}"
            else:
                self.reason = None
            return Interrupted.exit_status

    def stop(self, _number: int) -> None:
        if self._cancelled is None:
            self._cancelled = time.monotonic()
            self._job.cancel(check=False)


class _JobOfSubmitit:
    """The function that submitit runs on a node: starts the job's process, and forwards signals."""

    _process: JobProcess | None = None

    def __call__(self, file: str, log: str) -> int:
        process = Forks().start(file, log)
        self._process = process
        signal.signal(signal.SIGTERM, lambda number, _: process.stop(number))
        return process.wait()

    def checkpoint(self, file: str, log: str) -> submitit.helpers.DelayedSubmission:
        """Queue the job again; submitit calls it when the job is preempted or its time is up."""
        import submitit

        if self._process is not None:
            self._process.stop(signal.SIGUSR2)
            self._process.wait()
        return submitit.helpers.DelayedSubmission(_JobOfSubmitit(), file, log)


def engine_of(launcher: Launcher) -> Engine:
    """Return the engine that a launcher configures; raises ConfigError where it cannot start."""
    settings = dict(launcher.settings)
    for name in ("kind", "fail_fast"):
        settings.pop(name, None)
    if launcher.kind == "local":
        return LocalEngine(**settings)
    if launcher.kind == "ray_cluster":
        return RayEngine(**settings["ray"])
    return SubmititEngine(
        cluster=settings.pop("cluster"),
        submitit_folder=settings.pop("submitit_folder"),
        max_num_timeout=settings.pop("max_num_timeout"),
        parameters=settings,
    )


Engine = LocalEngine | RayEngine | SubmititEngine
"""Starts jobs and has room for `at_a_time` of them; `LocalEngine` documents the methods."""

JobHandle = JobProcess | _RayTask | _SubmittedJob
"""A job that was started; `JobProcess` documents the methods."""


def _last_line(error: BaseException) -> str:
    """Return the last line of an exception that quotes the traceback of another process."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
