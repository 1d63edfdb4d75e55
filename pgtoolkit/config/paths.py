"""Where runs may write: no name and no value of a sweep leads out of the output folder. Paths from any directory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.system.plain_files import refuse_other, refuse_other_than_folder
from pgtoolkit.system.report import refusal

REASON = "A value or a name in it could otherwise write anywhere."
NAMED = "It names a folder."

_OF_HYDRA = ("config.yaml", "hydra.yaml", "overrides.yaml")
"""What Hydra writes of a job that it runs itself."""

DATA = ("model.path", "task.path", "rollout.path")
"""Keys that name what a run reads from outside of its directory."""


def make_absolute(config: DictConfig | dict) -> None:
    """Let a run's configuration mean the same files from every directory; its relative paths are seen from this one."""
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


def absolute_uri(uri: str | None) -> str:
    """The tracking URI, with None as the default store and a relative sqlite path made absolute."""
    uri = uri or "sqlite:///outputs/mlflow.db"
    path = sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri


def sqlite_path(uri: str) -> Path | None:
    """The database file of an sqlite URI, absolute; None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def of_run(config: DictConfig) -> list[str]:
    """Problems with the place of a single run; config: with its node `hydra`."""
    problems, inside = _contained(config, "hydra.run.dir") + _inside(config), config.hydra.output_subdir
    if not problems:
        # Hydra writes there before the run itself looks.
        problems += _free(
            "hydra.run.dir", config.hydra.run.dir, ("sweep.json", *([] if inside is None else [str(inside)]))
        )
    return problems


def of_sweep(config: DictConfig) -> list[str]:
    """Problems with the folder of a sweep."""
    problems = _contained(config, "hydra.sweep.dir") + _inside(config)
    folder = config.hydra.sweep.dir if not problems else None
    # Hydra writes the second itself.
    return problems or [*_free("hydra.sweep.dir", folder, ()), *_links(refuse_other, Path(folder, "multirun.yaml"))]


def of_job(folder: Path, directory: str, inside: str | None = None) -> list[str]:
    """Problems with the place of a job in its sweep's folder; inside: hydra.output_subdir, where Hydra runs the job."""
    whole, setting = (folder / directory).resolve(), f"hydra.sweep.subdir={directory}"
    if not _is_possible(str(whole)):
        return [refusal(setting, "a path that a file system can hold", directory, NAMED, "the default")]
    if _leaves(directory) or whole == folder.resolve() or not whole.is_relative_to(folder.resolve()):
        return [refusal(setting, "a folder inside hydra.sweep.dir", whole, REASON, "the default")]
    if inside is None:
        return []
    return _links(refuse_other_than_folder, whole / inside) or _links(
        refuse_other, *(whole / inside / name for name in _OF_HYDRA)
    )


def _inside(config: DictConfig) -> list[str]:
    inside, use = config.hydra.output_subdir, "hydra.output_subdir=.hydra"
    if inside is None or not _leaves(str(inside)):
        return []
    return [refusal(f"hydra.output_subdir={inside}", "a folder in the run directory", inside, REASON, use)]


def _links(refuse: Callable[[Path], None], *places: Path) -> list[str]:
    """Hydra would follow a link that lies where it writes."""
    try:
        for place in places:
            refuse(place)
    except StorageError as error:
        return [str(error)]
    return []


def _free(key: str, path: str, more: tuple[str, ...]) -> list[str]:
    """Without a run, or `more`, in it."""
    from pgtoolkit.runs.directory import occupied, occupied_by

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
