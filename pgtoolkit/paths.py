"""Where runs may write: no name and no value of a sweep leads out of the output folder. Paths from any directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.errors import first_line
from pgtoolkit.rules.report import refusal

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
    problems = _contained(config, "hydra.run.dir")
    inside = config.hydra.output_subdir
    if inside is not None and _leaves(str(inside)):
        use = "hydra.output_subdir=.hydra"
        problems.append(refusal(f"hydra.output_subdir={inside}", "a folder in the run directory", inside, REASON, use))
    elif not problems:
        # Hydra writes there before the run itself looks.
        problems += _free(
            "hydra.run.dir", config.hydra.run.dir, ("sweep.json", *([] if inside is None else [str(inside)]))
        )
    return problems


def of_sweep(config: DictConfig) -> list[str]:
    """Problems with the folder of a sweep."""
    return _contained(config, "hydra.sweep.dir") or _free("hydra.sweep.dir", config.hydra.sweep.dir, ())


def of_job(folder: Path, directory: str) -> list[str]:
    """Problems with the place of a job in its sweep's folder."""
    whole, setting = (folder / directory).resolve(), f"hydra.sweep.subdir={directory}"
    if not _is_possible(str(whole)):
        return [refusal(setting, "a path that a file system can hold", directory, NAMED, "the default")]
    if _leaves(directory) or whole == folder.resolve() or not whole.is_relative_to(folder.resolve()):
        return [refusal(setting, "a folder inside hydra.sweep.dir", whole, REASON, "the default")]
    return []


def _free(key: str, path: str, more: tuple[str, ...]) -> list[str]:
    """Without a run, or `more`, in it."""
    from pgtoolkit.tracking.run_directory import occupied, occupied_by

    by = occupied_by(Path(path), more)
    return [occupied(f"{key}={path}", Path(path), by)] if by else []


def _contained(config: DictConfig, key: str) -> list[str]:
    """Without dots that lead upwards, and below the part that was typed before the first interpolation."""
    node, use = OmegaConf.select(config, key.rpartition(".")[0]), f"{key}=FOLDER"
    raw = str(OmegaConf.to_container(node, resolve=False)["dir"])
    try:
        path = str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        return [refusal(f"{key}={raw}", "a value that resolves", first_line(error), NAMED, use)]
    if OmegaConf.is_missing(node, "dir") or not _is_possible(path):
        needs = "a path that a file system can hold"
        return [refusal(f"{key}={raw}", needs, raw, NAMED, f"{key}=outputs/FOLDER")]
    fixed = raw.partition("${")[0].rpartition("/")
    root = Path(fixed[0] + fixed[1] or ".").resolve()
    if ".." in PurePath(path).parts:
        return [refusal(f"{key}={path}", "a path without '..'", path, REASON, f"{key}={os.path.abspath(path)}")]
    if not path.isprintable():  # it also stands in the scripts of SLURM's jobs
        return [refusal(f"{key}={path!r}", "a path of printable characters", repr(path), REASON, use)]
    if "${" in raw and not Path(path).resolve().is_relative_to(root):
        return [refusal(f"{key}={raw}", f"a path below {root}", path, REASON, use)]
    return []


def _is_possible(path: str) -> bool:
    """Whether no part is longer than the 255 bytes that file systems allow, nor the whole than 4095."""
    parts = [*PurePath(path).parts, ""]
    return "\0" not in path and len(os.fsencode(path)) < 4096 and max(len(os.fsencode(part)) for part in parts) < 256


def _leaves(path: str) -> bool:
    return PurePath(path).is_absolute() or ".." in PurePath(path).parts
