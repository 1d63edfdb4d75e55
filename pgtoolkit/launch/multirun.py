"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.check import Checked
from pgtoolkit.launch.engines import Engine
from pgtoolkit.launch.jobs import Jobs
from pgtoolkit.system.report import say


def run_sweep(checked: Checked) -> int:
    """Run the checked jobs, each if it is not done; returns the exit status: 1 if a job failed.

    Raises Interrupted after a signal.
    """
    sweep, config = checked.sweep, checked.runs[0].config
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
        say(sweep_report.table(sweep) + f", in {(time.monotonic() - begun) / 60:.1f} min")
        for line in sweep_report.next_steps(sweep, again=not interrupted):
            say(line)
        _publish(sweep.folder, config.tracking)
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
        self._sweep, self._compose = checked.sweep, checked.compose_job
        self._configs = {tuple(run.overrides): run.config for run in checked.runs}

    def load_sweep_config(self, master_config: DictConfig | None, sweep_overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job, with the node `hydra`."""
        if (config := self._configs.get(tuple(sweep_overrides))) is not None:
            return config
        composed = self._compose(list(sweep_overrides))  # of values that a searching sweeper has drawn
        if composed.problems:
            raise ConfigError("\n".join(composed.problems))
        return composed.config

    def run(
        self, overrides: Sequence[Sequence[str]], first: int, engine: Callable[[], Engine], fail_fast: bool
    ) -> list[JobReturn]:
        """Run the jobs of these overrides, but for those that are done; what each returns is its final reward.

        first: number of the first job. engine: starts what runs them, if any is left to do.
        """
        sweep, planned = self._sweep, []
        for number, of_job in enumerate(overrides, start=first):
            config = self.load_sweep_config(None, of_job)
            job = sweep.plan(config, number)
            job = sweep.jobs.setdefault(job.directory, job)
            job.update_from(sweep.folder)
            job.seconds = sweep.earlier.get(job.directory, {}).get("seconds", 0.0)
            planned.append((config, job))
        jobs = {job.directory: job for _, job in planned}  # the same configuration runs once
        sweep.save()
        if any(job.status != "done" for job in jobs.values()):
            Jobs(sweep, [*jobs.values()], fail_fast).run(engine)
        returned = []
        for config, job in planned:
            directory = sweep.folder / job.directory
            done = JobReturn(job.overrides, config, working_dir=str(directory), status=JobStatus.COMPLETED)
            # Failures are told by the table and the exit status; Hydra would raise the first alone.
            done.return_value = sweep_report.reached(directory) if job.status == "done" else None
            returned.append(done)
        return returned


def _publish(folder: Path, tracking: DictConfig) -> None:
    """Tell MLflow of the sweep as a whole; its folder has everything, so that a store which fails is a warning."""
    if tracking.name != "mlflow":
        return
    from pgtoolkit.comparison.stored import publish

    try:
        publish(folder, tracking.uri, tracking.experiment)
    except PgtoolkitError as error:
        say(f"pgtk: warning: {error}", error=True)
