"""The rules on where runs may write: no name and no value of a sweep leads out of the output folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.paths import is_possible
from pgtoolkit.errors import first_line
from pgtoolkit.runs.directory import occupied, occupied_by
from pgtoolkit.system.report import refusal

_REASON = "A value or a name in it could otherwise write anywhere."
_NAMED = "It names a folder."


def of_run(config: DictConfig) -> list[str]:
    """Problems with the place of a single run; config: with its node `hydra`."""
    if problems := _contained(config, "hydra.run.dir"):
        return problems
    return _free("hydra.run.dir", config.hydra.run.dir, ("sweep.json",))


def of_sweep(config: DictConfig) -> list[str]:
    """Problems with the folder of a sweep."""
    if problems := _contained(config, "hydra.sweep.dir"):
        return problems
    return _free("hydra.sweep.dir", config.hydra.sweep.dir)


def of_job(folder: Path, directory: str) -> list[str]:
    """Problems with the place of a job in its sweep's folder."""
    whole, setting = (folder / directory).resolve(), f"hydra.sweep.subdir={directory}"
    if not is_possible(str(whole)):
        return [refusal(setting, "a path that a file system can hold", directory, _NAMED, "the default")]
    if _leads_out(directory) or whole == folder.resolve() or not whole.is_relative_to(folder.resolve()):
        return [refusal(setting, "a folder inside hydra.sweep.dir", whole, _REASON, "the default")]
    return []


def _free(key: str, path: str, more: tuple[str, ...] = ()) -> list[str]:
    """Without a run, or `more`, in it."""
    if by := occupied_by(Path(path), more):
        return [occupied(f"{key}={path}", Path(path), by)]
    nearest = next(place for place in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryDirectory(prefix=".pgtk-", dir=nearest):  # some file systems refuse what they allow
            return []
    except OSError as error:
        got, use = f"{nearest}: {error.strerror or error}", f"{key}=outputs/FOLDER"
        return [refusal(f"{key}={path}", "a place where folders can be made", got, _NAMED, use)]


def _contained(config: DictConfig, key: str) -> list[str]:
    """Without dots that lead upwards, and below the part that was typed before the first interpolation."""
    try:
        inside = str(config.hydra.output_subdir)
    except OmegaConfBaseException as error:
        use = "hydra.output_subdir=.hydra"
        return [refusal("hydra.output_subdir", "a value that resolves", first_line(error), _NAMED, use)]
    node = OmegaConf.select(config, key.rpartition(".")[0])
    raw = str(OmegaConf.to_container(node, resolve=False)["dir"])
    setting, use = f"{key}={raw}", f"{key}=FOLDER"
    try:
        path = str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        return [refusal(setting, "a value that resolves", first_line(error), _NAMED, use)]
    if OmegaConf.is_missing(node, "dir") or not is_possible(path):
        return [refusal(setting, "a path that a file system can hold", raw, _NAMED, f"{key}=outputs/FOLDER")]
    if ".." in PurePath(path).parts:
        return [refusal(f"{key}={path}", "a path without '..'", path, _REASON, f"{key}={os.path.abspath(path)}")]
    if not path.isprintable():  # it also stands in the scripts of SLURM's jobs
        return [refusal(f"{key}={path!r}", "a path of printable characters", repr(path), _REASON, use)]
    fixed = raw.partition("${")[0].rpartition("/")
    root = Path(fixed[0] + fixed[1] or ".").resolve()
    if "${" in raw and not Path(path).resolve().is_relative_to(root):
        return [refusal(setting, f"a path below {root}", path, _REASON, use)]
    if _leads_out(inside):
        needs, use = "a folder in the run directory", "hydra.output_subdir=.hydra"
        return [refusal(f"hydra.output_subdir={inside}", needs, inside, _REASON, use)]
    return []


def _leads_out(path: str) -> bool:
    return PurePath(path).is_absolute() or ".." in PurePath(path).parts
