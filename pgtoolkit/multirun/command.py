"""`pgtk -m` and `pgtk sweep`: from the checked jobs to the table at the end and the exit status."""

from __future__ import annotations

import time
from collections.abc import Callable

from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.multirun import report
from pgtoolkit.multirun.sweep import Sweep

LOCAL = "hydra_plugins.pgtk_launcher.LocalLauncher"


def start(sweep: Sweep, run_hydra: Callable[[], object], local: bool) -> int:
    """Run a planned sweep through Hydra; returns the exit status: 1 if a job failed.

    local: whether our own launcher runs the jobs; of another's, the run directories alone say what became of them.
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
        print(f"{report.summary(sweep.name, [sweep.jobs[name] for name in planned])}, in {sweep.folder}", flush=True)
        begun, interrupted = time.monotonic(), None
        try:
            run_hydra()
        except Interrupted as stop:
            interrupted = stop
        ended = Sweep.load(sweep.folder)
        jobs = [job for name, job in ended.jobs.items() if name in planned or name not in earlier.jobs]
        if not local:
            for job in jobs:
                job.config = sweep.jobs[job.directory].config
                job.update_from(sweep.folder)
            ended.save()
        print(report.table(ended, jobs) + f", in {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        for line in report.next_steps(ended, jobs):
            print(line, flush=True)
        if interrupted:
            raise Interrupted(f"{interrupted} Continue with: {report.command_of(ended)}")
    return 0 if all(job.status == "done" for job in jobs) else PgtoolkitError.exit_status
