"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.launch import sweep_report
from pgtoolkit.launch.sweep import LOCAL, Sweep


def start(sweep: Sweep, run_hydra: Callable[[], object], config: DictConfig) -> int:
    """Run a planned sweep through Hydra; returns the exit status: 1 if a job failed.

    config: of one of the jobs, with the node `hydra`. Where our own launcher does not run the jobs, the run
    directories alone say what became of them.
    Raises Interrupted after a signal.
    """
    with sweep.held():
        earlier = Sweep.load(sweep.folder)
        for directory, job in earlier.jobs.items():
            if directory in sweep.jobs:
                sweep.jobs[directory].seconds = job.seconds
        planned = list(sweep.jobs)
        # Jobs of an earlier command that chose the same folder stay listed.
        sweep.jobs = {**{name: job for name, job in earlier.jobs.items() if name not in sweep.jobs}, **sweep.jobs}
        sweep.save()
        print(
            f"{sweep_report.summary(sweep.name, [sweep.jobs[name] for name in planned])}, in {sweep.folder}", flush=True
        )
        begun, interrupted = time.monotonic(), None
        try:
            run_hydra()
        except Interrupted as stop:
            interrupted = stop
        ended = Sweep.load(sweep.folder)
        # A search plans nothing, and repeats what it finds done.
        jobs = [job for name, job in ended.jobs.items() if name in planned or not planned]
        if config.hydra.launcher._target_ != LOCAL:
            for job in jobs:
                job.config = sweep.jobs[job.directory].config
                job.update_from(sweep.folder)
            ended.save()
        print(sweep_report.table(ended, jobs) + f", in {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        for line in sweep_report.next_steps(ended, jobs, again=not interrupted):
            print(line, flush=True)
        _publish(sweep.folder, config.tracking)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {sweep_report.command_of(ended)}")
    return 0 if all(job.status == "done" for job in jobs) else PgtoolkitError.exit_status


def _publish(folder: Path, tracking: DictConfig) -> None:
    """Tell MLflow of the sweep as a whole; its folder has everything, so that a store which fails is a warning."""
    if tracking.name != "mlflow":
        return
    from pgtoolkit.comparison.sweep_summary import publish

    try:
        publish(folder, tracking.uri, tracking.experiment)
    except PgtoolkitError as error:
        print(f"pgtk: warning: {error}", file=sys.stderr)
