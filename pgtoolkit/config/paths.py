"""The places that a configuration names: made to mean the same from every directory, and what lies
there."""

from __future__ import annotations

import glob
import os
import tempfile
from pathlib import Path
from typing import Any

from pgtoolkit.config.key import value_of, with_values
from pgtoolkit.config.keys import keys_of
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_tasks import is_data_set_name
from pgtoolkit.runs.directory import occupied, occupied_by
from pgtoolkit.system.report import refusal

NO_FOLDER = ("initial", "recorded")
"""Values of kl.reference that name no model: the run's first weights, and log-probs recorded with
the rollouts."""


def absolute_paths(config: Config) -> Config:
    """Return a run's configuration that means the same files from every directory; its paths are
    seen from this one."""
    values: dict[str, Any] = {}
    for key in keys_of(config):
        value = value_of(config, key.name)
        if (key.reads or key.writes) and isinstance(value, str):
            values[key.name] = absolute(value, key.reads)
    sets = {}
    for name, given in config.evaluation.sets.items():
        has_path = isinstance(given, dict) and isinstance(given.get("path"), str)
        sets[name] = given | {"path": absolute(given["path"], "data")} if has_path else given
    values["evaluation.sets"] = sets
    if config.tracking.name == "mlflow":
        values["tracking.uri"] = absolute_uri(config.tracking.uri)
    return with_values(config, values)


def absolute(value: str, reads: str | None) -> str:
    """The value of a key that names a place, without the current directory's help; reads: see
    `Key`."""
    if reads == "reference" and value in NO_FOLDER:
        return value
    place = Path(value).expanduser()
    if value == "" or place.is_absolute():
        return value and str(place)
    if reads and not place.exists():
        if reads == "data" and is_data_set_name(value):
            return value
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


def problems_of_folder(key: str, path: Path, more: tuple[str, ...] = ()) -> list[str]:
    """Return the problem with the folder of a run, or of a sweep: no run or any of `more` is in it,
    and it can be made.

    key: hydra.run.dir or hydra.sweep.dir.
    """
    if by := occupied_by(path, more):
        return [occupied(f"{key}={path}", path, by)]
    if why := cannot_hold_files(path):
        return [
            refusal(
                setting=f"{key}={path}",
                needs="a place where folders can be made",
                got=why,
                reason="It names a folder.",
                use=f"{key}=outputs/FOLDER",
            )
        ]
    return []


def cannot_hold_files(folder: Path) -> str | None:
    """Return why a folder can neither be made there nor take files, by trying it; None where it
    can."""
    place = folder.absolute()
    nearest = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    try:  # some file systems refuse what they allow
        with tempfile.TemporaryDirectory(prefix=".pgtk-", dir=nearest) as trial:
            Path(trial, place.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{nearest}: {error.strerror}"
    return None


def occupied_by_rollouts(save_path: str | None) -> str | None:
    """The problem of a run that begins where another one has recorded its rollouts."""
    if not save_path or not (batches := batches_in(save_path)):
        return None
    return refusal(
        setting=f"rollout.save_path={save_path}",
        needs="a new or empty folder",
        got=f"one with {batches} batches of rollouts",
        reason="The rollouts of two runs would mix.",
        use="another folder, or remove this one",
    )


def batches_in(save_path: str) -> int | None:
    """How many batches of rollouts a folder holds; None where it is no folder, or one with other
    files."""
    try:
        names = os.listdir(os.path.expanduser(save_path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):  # another file, unreadable, or no path at all
        return None
    own = all(name.startswith(("batch-", ".batch-")) for name in names)
    return sum(name.startswith("batch-") for name in names) if own else None
