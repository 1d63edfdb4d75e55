"""The rules on what runs the jobs of a sweep."""

from __future__ import annotations

import importlib.util
from typing import Any

from pgtoolkit.system.report import Report, is_whole, text

EXTRAS = {
    "hydra_plugins.hydra_submitit_launcher": "submitit",
    "hydra_plugins.hydra_ray_launcher": "ray",
    "hydra_plugins.hydra_optuna_sweeper": "optuna",
}
"""Plug-in of Hydra -> the extra of pgtoolkit that installs it."""


def launcher(hydra: Any, report: Report) -> None:
    """The plug-ins that the configuration names are there, and our own has sensible settings."""
    for kind in ("launcher", "sweeper"):
        plugin = ".".join(str(hydra[kind].get("_target_")).split(".")[:2])
        extra = EXTRAS.get(plugin)
        if extra and not _is_installed(plugin):
            setting = f"hydra/{kind}={hydra.runtime.choices.get(f'hydra/{kind}')}"
            reason = f"Hydra's plug-in for it comes with the extra {extra}, not by default."
            report.refuse(setting, f"the package {plugin[14:]}", "not installed", reason, _install(extra))
    if "n_jobs" in hydra.launcher and "fail_fast" in hydra.launcher:
        n_jobs, key = hydra.launcher.n_jobs, "hydra.launcher.n_jobs"
        if not (is_whole(n_jobs) and n_jobs >= 1):
            report.refuse(
                f"{key}={text(n_jobs)}", "a whole number >= 1", n_jobs, "It counts jobs at a time.", f"{key}=1"
            )


def _is_installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:
        return False


def _install(extra: str) -> str:
    return f"pip install 'pgtoolkit[{extra}]'"
