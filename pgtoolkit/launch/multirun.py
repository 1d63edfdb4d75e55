"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import copy
import time
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from pgtoolkit.config.compose import name_directories
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.check import Checked
from pgtoolkit.launch.sweep import Sweep, plan
from pgtoolkit.system.report import say


def run_sweep(checked: Checked) -> int:
    """Run the checked jobs, each if it is not done; returns the exit status: 1 if a job failed.

    Raises Interrupted after a signal.
    """
    sweep, config = checked.sweep, checked.runs[0].config
    if checked.searches:
        sweep.jobs = {}
    with sweep.held():
        earlier = Sweep.load(sweep.folder)
        for directory, job in earlier.jobs.items():
            if directory in sweep.jobs:
                sweep.jobs[directory].seconds = job.seconds
        planned = list(sweep.jobs)
        # Jobs of an earlier command that chose the same folder stay listed.
        sweep.jobs = {**{name: job for name, job in earlier.jobs.items() if name not in sweep.jobs}, **sweep.jobs}
        sweep.save()
        summary = sweep_report.summary(sweep.name, [sweep.jobs[name] for name in planned])
        say(f"{summary}, in {sweep.folder}")
        begun, interrupted = time.monotonic(), None
        try:
            _run_hydra(checked)
        except Interrupted as stop:
            interrupted = stop
        ended = Sweep.load(sweep.folder)
        # A search plans nothing, and repeats what it finds done.
        jobs = [job for name, job in ended.jobs.items() if name in planned or not planned]
        say(sweep_report.table(ended, jobs) + f", in {(time.monotonic() - begun) / 60:.1f} min")
        for line in sweep_report.next_steps(ended, jobs, again=not interrupted):
            say(line)
        _publish(sweep.folder, config.tracking)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {sweep_report.command_of(ended)}")
    return 0 if all(job.status == "done" for job in jobs) else PgtoolkitError.exit_status


def _run_hydra(checked: Checked) -> None:
    """Let Hydra's sweeper choose the jobs and its launcher run them, as Hydra does; callbacks of a user are refused."""
    master = checked.master
    master.hydra.mode, master.hydra.sweep.dir = RunMode.MULTIRUN, str(checked.sweep.folder)
    name_directories(master.hydra, checked.unnamed)
    configure_log(master.hydra.hydra_logging, master.hydra.verbose)
    context = HydraContext(_CheckedJobs(checked), Callbacks(master))
    # Our launchers need no function of Hydra's: each job is a process that reads its configuration from a file.
    sweeper = Plugins.instance().instantiate_sweeper(config=master, hydra_context=context, task_function=lambda _: None)
    sweeper.sweep(arguments=checked.arguments)


class _CheckedJobs:
    """Gives launchers the configurations of jobs as they were checked; Hydra's loader would compose them again."""

    def __init__(self, checked: Checked):
        self._configs = {tuple(run.overrides): run.config for run in checked.runs}
        self._compose, self._unnamed, self._folder = checked.compose_job, checked.unnamed, checked.sweep.folder

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration of one job, with the node `hydra`."""
        if (config := self._configs.get(tuple(sweep_overrides))) is not None:
            return copy.deepcopy(config)
        # Of values that a searching sweeper has drawn.
        composed = self._compose(list(sweep_overrides))
        if composed.problems:
            raise ConfigError("\n".join(composed.problems))
        plan(composed.config, list(sweep_overrides), 0, self._folder, self._unnamed)
        return composed.config


def _publish(folder: Path, tracking: DictConfig) -> None:
    """Tell MLflow of the sweep as a whole; its folder has everything, so that a store which fails is a warning."""
    if tracking.name != "mlflow":
        return
    from pgtoolkit.comparison.stored import publish

    try:
        publish(folder, tracking.uri, tracking.experiment)
    except PgtoolkitError as error:
        say(f"pgtk: warning: {error}", error=True)
