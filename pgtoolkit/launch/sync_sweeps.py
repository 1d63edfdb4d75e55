"""The sweeps of runs that `pgtk sync` delivers to MLflow, which have a run of their own there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pgtoolkit.assembly.sync import place_of
from pgtoolkit.runs.directory import lock
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system.report import shell_path


def sweeps_of(runs: Iterable[Path]) -> dict[Path, Path]:
    """Return the folder of each sweep that runs are jobs of, with one of these jobs."""
    job_of: dict[Path, Path] = {}
    for run_dir in runs:
        for folder in run_dir.parents:
            if (folder / "sweep.json").is_file():
                jobs = {job["directory"] for job in read_sweep(folder)["jobs"]}
                if os.path.relpath(run_dir, folder) in jobs:
                    job_of[folder] = run_dir
                break
    return job_of


def sync_sweep(folder: Path, job: Path, uri: str | None, experiment: str | None) -> str:
    """Bring the run of a sweep in MLflow up to date, nest its jobs below it, and return a line that
    says so.

    job: one of its runs, whose store gets it. uri, experiment: see `sync`.
    Raises ConfigError for a sweep that is still running, StorageError if the store does not answer.
    """
    from pgtoolkit.comparison.sweep_summary import publish

    reason = "Its own end delivers its summary."
    with lock(folder, "sweep", reason, "repeat pgtk sync after that"):
        info = publish(folder, *place_of(job, uri, experiment))
    return f"{shell_path(folder)}: the summary of the sweep ({info['uri']}, run {info['run_id']})"
