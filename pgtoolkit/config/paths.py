"""The places that a configuration names: made to mean the same from every directory, and what lies there."""

from __future__ import annotations

import glob
import os
import tempfile
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.keys import keys_of, resolved
from pgtoolkit.errors import first_line
from pgtoolkit.runs.directory import occupied, occupied_by
from pgtoolkit.system.report import refusal

NO_FOLDER = ("initial", "recorded")
"""Values of kl.reference that name no model: the run's first weights, and log-probs recorded with the rollouts."""


def make_absolute(config: DictConfig | dict) -> None:
    """Let a run's configuration mean the same files from every directory; its relative paths are seen from this one."""
    for key in keys_of(config):
        if (key.reads or key.writes) and isinstance(value := resolved(config, key.name), str):
            config[key.group][key.leaf] = absolute(value, key.reads)
    for given in config["evaluation"]["sets"].values():
        if (OmegaConf.is_dict(given) or isinstance(given, dict)) and isinstance(value := given.get("path"), str):
            given["path"] = absolute(value, "data")
    if config["tracking"]["name"] == "mlflow":
        config["tracking"]["uri"] = absolute_uri(config["tracking"]["uri"])


def absolute(value: str, reads: str | None) -> str:
    """The value of a key that names a place, without the current directory's help; reads: see `Key`."""
    if reads == "reference" and value in NO_FOLDER:
        return value
    place = Path(value).expanduser()
    if value == "" or place.is_absolute():
        return value and str(place)
    if reads and not place.exists():
        if reads != "data" and not value.startswith("."):
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


def problems_of_folder(config: DictConfig, key: str, more: tuple[str, ...] = ()) -> list[str]:
    """Problems with the folder of a run, or of a sweep: it leads nowhere else, no run or any of `more` is in it, and it
    can be made.

    config: with its node `hydra`. key: hydra.run.dir or hydra.sweep.dir.
    """
    for name in ("hydra.output_subdir", key):
        try:
            path = str(OmegaConf.select(config, name, throw_on_missing=True))
        except OmegaConfBaseException as error:
            return [refusal(name, "a value that resolves", first_line(error), _NAMES_A_FOLDER, f"{name}=FOLDER")]
        leads_out = ".." in PurePath(path).parts or (name != key and os.path.isabs(path))
        if leads_out or not path.isprintable():  # it also stands in the scripts of SLURM's jobs
            needs = "a path of printable characters without '..'"
            return [refusal(name, needs, repr(path), _NAMES_A_FOLDER, f"{name}=FOLDER")]
    if by := occupied_by(Path(path), more):
        return [occupied(f"{key}={path}", Path(path), by)]
    if why := cannot_hold_files(Path(path)):
        needs = "a place where folders can be made"
        return [refusal(f"{key}={path}", needs, why, "It names a folder.", f"{key}=outputs/FOLDER")]
    return []


def cannot_hold_files(folder: Path) -> str | None:
    """Return why a folder can neither be made there nor take files, by trying it; None where it can."""
    place = folder.absolute()
    nearest = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    try:  # some file systems refuse what they allow
        with tempfile.TemporaryDirectory(prefix=".pgtk-", dir=nearest) as trial:
            Path(trial, place.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{nearest}: {error.strerror}"
    return None


def problems_of_job(directory: str) -> list[str]:
    """Problems with the folder of a job, which lies in that of its sweep."""
    if (parts := PurePath(directory).parts) and ".." not in parts and not os.path.isabs(directory):
        return []
    needs, use = "a folder inside hydra.sweep.dir", "the default"
    return [refusal(f"hydra.sweep.subdir={directory}", needs, directory, _NAMES_A_FOLDER, use)]


_NAMES_A_FOLDER = "It names a folder; a value in it could otherwise write anywhere."


def occupied_by_rollouts(save_path: str | None) -> str | None:
    """The problem of a run that begins where another one has recorded its rollouts."""
    if not save_path or not (batches := batches_in(save_path)):
        return None
    needs, got = "a new or empty folder", f"one with {batches} batches of rollouts"
    reason, use = "The rollouts of two runs would mix.", "another folder, or remove this one"
    return refusal(f"rollout.save_path={save_path}", needs, got, reason, use)


def batches_in(save_path: str) -> int | None:
    """How many batches of rollouts a folder holds; None where it is no folder, or one with other files."""
    try:
        names = os.listdir(os.path.expanduser(save_path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):  # another file, unreadable, or no path at all
        return None
    own = all(name.startswith(("batch-", ".batch-")) for name in names)
    return sum(name.startswith("batch-") for name in names) if own else None
