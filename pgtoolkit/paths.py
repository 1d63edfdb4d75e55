"""Where runs may write: no name and no value of a sweep leads out of the output folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.errors import first_line
from pgtoolkit.rules.report import Report

REASON = "A value or a name in it could otherwise write anywhere."


def of_run(config: DictConfig) -> list[str]:
    """Problems with the place of a single run; config: with its node `hydra`."""
    report = Report()
    _contained(config, "hydra.run.dir", report)
    inside = config.hydra.output_subdir
    if inside is not None and _leaves(str(inside)):
        use = "hydra.output_subdir=.hydra"
        report.refuse(f"hydra.output_subdir={inside}", "a folder in the run directory", inside, REASON, use)
    return report.problems


def of_sweep(config: DictConfig) -> list[str]:
    """Problems with the folder of a sweep."""
    report = Report()
    _contained(config, "hydra.sweep.dir", report)
    return report.problems


def of_job(folder: Path, directory: str) -> list[str]:
    """Problems with the place of a job in its sweep's folder."""
    report = Report()
    whole = (folder / directory).resolve()
    if _leaves(directory) or whole == folder.resolve() or not whole.is_relative_to(folder.resolve()):
        needs = "a folder inside hydra.sweep.dir"
        report.refuse(f"hydra.sweep.subdir={directory}", needs, whole, REASON, "the default")
    return report.problems


def _contained(config: DictConfig, key: str, report: Report) -> None:
    """Without dots that lead upwards, and below the part that was typed before the first interpolation."""
    raw = str(OmegaConf.to_container(OmegaConf.select(config, key.rpartition(".")[0]), resolve=False)["dir"])
    try:
        path = str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        report.refuse(f"{key}={raw}", "a value that resolves", first_line(error), "It names a folder.", f"{key}=FOLDER")
        return
    fixed = raw.partition("${")[0].rpartition("/")
    root = Path(fixed[0] + fixed[1] or ".")
    if ".." in PurePath(path).parts:
        report.refuse(f"{key}={path}", "a path without '..'", path, REASON, f"{key}={os.path.abspath(path)}")
    elif not path.isprintable():  # it also stands in the scripts of SLURM's jobs
        report.refuse(f"{key}={path!r}", "a path of printable characters", repr(path), REASON, f"{key}=FOLDER")
    elif "${" in raw and not Path(path).resolve().is_relative_to(root.resolve()):
        report.refuse(f"{key}={raw}", f"a path below {root.resolve()}", path, REASON, f"{key}=FOLDER")


def _leaves(path: str) -> bool:
    return PurePath(path).is_absolute() or ".." in PurePath(path).parts
