"""The rules on what runs the jobs of a sweep."""

from __future__ import annotations

from pgtoolkit.config.launchers import SEARCH, Launcher, Search
from pgtoolkit.config.rules.named import installed
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.system.report import Report

_EXTRAS = {
    "slurm": ("submitit", "submitit"),
    "ray_cluster": ("ray", "ray"),
    SEARCH: ("optuna", "optuna"),
}
"""Kind of launcher or sweeper -> the package that it needs, and the extra of pgtk that installs
it."""


def launcher(launcher: Launcher, sweeper: str, report: Report) -> None:
    """Refuse unknown or uninstalled launchers and sweepers, and impossible numbers of jobs."""
    if launcher.kind is None:
        report.refuse_value(
            key="hydra/launcher",
            value=launcher.choice,
            needs="one of local, slurm and ray_cluster",
            reason="pgtk cannot stop, continue or leave out the jobs of Hydra's other launchers.",
            better="local",
        )
    kinds = {
        f"hydra/launcher={launcher.choice}": launcher.kind,
        f"hydra/sweeper={sweeper}": sweeper,
    }
    for setting, kind in kinds.items():
        if kind in _EXTRAS:
            installed(report, setting, *_EXTRAS[kind])
    _numbers_of_jobs(launcher.settings, report)


def search(search: Search, report: Report) -> None:
    """Refuse impossible numbers of a search."""
    lowest = {"n_startup_trials": 0, "n_trials": 1, "n_jobs": 1, "prune_after": 0}
    for name, low in lowest.items():
        value = search.settings.get(name)
        is_off = value is None and name == "prune_after"
        if is_off or (isinstance(value, int) and not isinstance(value, bool) and value >= low):
            continue
        report.refuse_value(
            key=f"hydra.sweeper.{name}",
            value=value,
            needs=f"a whole number >= {low}",
            reason="It is a number of runs." if name != "prune_after" else "It is a step.",
            better=max(low, 1) if name != "prune_after" else 100,
        )


def _numbers_of_jobs(settings: Dictionary, report: Report) -> None:
    n_jobs = settings.get("n_jobs")
    jobs_per_gpu = settings.get("jobs_per_gpu")
    if n_jobs is not None and n_jobs < 1:
        report.refuse_value(
            key="hydra.launcher.n_jobs",
            value=n_jobs,
            needs="a whole number >= 1",
            reason="It is the number of jobs at a time.",
            better=1,
        )
    if jobs_per_gpu is not None and jobs_per_gpu < 1:
        report.refuse_value(
            key="hydra.launcher.jobs_per_gpu",
            value=jobs_per_gpu,
            needs="a whole number >= 1",
            reason="It is the number of jobs at a time on each GPU.",
            better=1,
        )
    if n_jobs is not None and jobs_per_gpu is not None and n_jobs != 1:
        needs = "hydra.launcher.n_jobs=1"
        report.refuse(
            setting=f"hydra.launcher.jobs_per_gpu={jobs_per_gpu}",
            needs=needs,
            got=n_jobs,
            reason="jobs_per_gpu alone says how many jobs run at a time.",
            use=needs,
        )
