"""Where runs may write: no name and no value of a sweep leads out of the output folder. Paths from any directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.errors import first_line
from pgtoolkit.rules.report import Report

REASON = "A value or a name in it could otherwise write anywhere."
NAMED = "It names a folder."

DATA = ("model.path", "task.path", "rollout.path")
"""Keys that name what a run reads from outside of its directory."""


def make_absolute(config: DictConfig | dict) -> None:
    """Let a run's configuration mean the same files from every directory; its relative paths are seen from this one."""
    from pgtoolkit.tracking.store import absolute_uri

    for key in (*DATA, "rollout.save_path"):
        group, name = key.split(".")
        if name in config[group] and isinstance(value := config[group][name], str):
            config[group][name] = absolute(key, value)
    if config["tracking"]["name"] == "mlflow":
        config["tracking"]["uri"] = absolute_uri(config["tracking"]["uri"])


def absolute(key: str, value: str) -> str:
    """The value of a key that names a place, without the current directory's help."""
    place = Path(value).expanduser()
    if value == "" or place.is_absolute():
        return value and str(place)
    if key in DATA and not place.exists():
        if key == "model.path" and not value.startswith("."):
            return value  # a name on the Hugging Face hub
        return os.path.join(glob.escape(os.getcwd()), place)  # a pattern
    return str(Path.cwd() / place)


def of_run(config: DictConfig) -> list[str]:
    """Problems with the place of a single run; config: with its node `hydra`."""
    report = Report()
    _contained(config, "hydra.run.dir", report)
    inside = config.hydra.output_subdir
    if inside is not None and _leaves(str(inside)):
        use = "hydra.output_subdir=.hydra"
        report.refuse(f"hydra.output_subdir={inside}", "a folder in the run directory", inside, REASON, use)
    elif not report.problems:
        # Hydra writes there before the run itself looks.
        _free("hydra.run.dir", config.hydra.run.dir, ("sweep.json", *([] if inside is None else [str(inside)])), report)
    return report.problems


def of_sweep(config: DictConfig) -> list[str]:
    """Problems with the folder of a sweep."""
    report = Report()
    _contained(config, "hydra.sweep.dir", report)
    if not report.problems:
        _free("hydra.sweep.dir", config.hydra.sweep.dir, (), report)
    return report.problems


def of_job(folder: Path, directory: str) -> list[str]:
    """Problems with the place of a job in its sweep's folder."""
    report = Report()
    whole = (folder / directory).resolve()
    if not _is_possible(str(whole)):
        needs, use = "a path that a file system can hold", "the default"
        report.refuse(f"hydra.sweep.subdir={directory}", needs, directory, NAMED, use)
    elif _leaves(directory) or whole == folder.resolve() or not whole.is_relative_to(folder.resolve()):
        needs = "a folder inside hydra.sweep.dir"
        report.refuse(f"hydra.sweep.subdir={directory}", needs, whole, REASON, "the default")
    return report.problems


def _free(key: str, path: str, more: tuple[str, ...], report: Report) -> None:
    """Without a run, or `more`, in it."""
    from pgtoolkit.tracking.run_directory import occupied, occupied_by

    if by := occupied_by(Path(path), more):
        report.problems.append(occupied(f"{key}={path}", Path(path), by))


def _contained(config: DictConfig, key: str, report: Report) -> None:
    """Without dots that lead upwards, and below the part that was typed before the first interpolation."""
    raw = str(OmegaConf.to_container(OmegaConf.select(config, key.rpartition(".")[0]), resolve=False)["dir"])
    try:
        path = str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        report.refuse(f"{key}={raw}", "a value that resolves", first_line(error), NAMED, f"{key}=FOLDER")
        return
    if OmegaConf.is_missing(OmegaConf.select(config, key.rpartition(".")[0]), "dir") or not _is_possible(path):
        needs, use = "a path that a file system can hold", f"{key}=outputs/FOLDER"
        report.refuse(f"{key}={raw}", needs, raw, NAMED, use)
        return
    fixed = raw.partition("${")[0].rpartition("/")
    root = Path(fixed[0] + fixed[1] or ".")
    if ".." in PurePath(path).parts:
        report.refuse(f"{key}={path}", "a path without '..'", path, REASON, f"{key}={os.path.abspath(path)}")
    elif not path.isprintable():  # it also stands in the scripts of SLURM's jobs
        report.refuse(f"{key}={path!r}", "a path of printable characters", repr(path), REASON, f"{key}=FOLDER")
    elif "${" in raw and not Path(path).resolve().is_relative_to(root.resolve()):
        report.refuse(f"{key}={raw}", f"a path below {root.resolve()}", path, REASON, f"{key}=FOLDER")


def _is_possible(path: str) -> bool:
    """Whether no part is longer than the 255 bytes that file systems allow, nor the whole than 4095."""
    parts = [*PurePath(path).parts, ""]
    return "\0" not in path and len(os.fsencode(path)) < 4096 and max(len(os.fsencode(part)) for part in parts) < 256


def _leaves(path: str) -> bool:
    return PurePath(path).is_absolute() or ".." in PurePath(path).parts
