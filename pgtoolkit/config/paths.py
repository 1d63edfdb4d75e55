"""The paths that a configuration names: they are made absolute, and folders to be written are
checked."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from pgtoolkit.config.keys import keys_of
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.directory import occupied, occupied_by
from pgtoolkit.system.conditions import value_of, with_values
from pgtoolkit.system.plain_files import cannot_hold_files
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.settings import is_data_set_name
from pgtoolkit.tracking.store_address import EXPERIMENT_VARIABLES, absolute_uri, experiment_of

NO_FOLDER = ("initial", "recorded")
"""Values of kl.reference that name no model: the run's first weights, and log-probs recorded with
the rollouts."""


def absolute_paths(config: Config) -> Config:
    """Return a run's configuration with absolute paths, which mean the same files from every
    directory; relative ones are seen from this directory.

    So does the record of its metrics: what the variables of trackers name becomes a value.
    """
    values: dict[str, object] = {}
    for key in keys_of(config):
        value = value_of(config, key.name)
        if (key.reads or key.writes) and isinstance(value, str):
            values[key.name] = absolute(value, key.reads)
    sets = {}
    for name, settings in config.evaluation.sets.items():
        if isinstance(settings, dict) and isinstance(settings.get("path"), str):
            settings = settings | {"path": absolute(settings["path"], "data")}
        sets[name] = settings
    values["evaluation.sets"] = sets
    if config.tracking.name == "mlflow":
        values["tracking.uri"] = absolute_uri(config.tracking.uri)
    # Where two trackers have two names, each reads its variable when the run starts.
    trackers = {config.tracking.name, *config.tracking.also} & EXPERIMENT_VARIABLES.keys()
    experiments = {experiment_of(name, config.tracking.experiment) for name in trackers}
    if len(experiments) == 1:
        values["tracking.experiment"] = experiments.pop()
    return with_values(config, values)


def absolute(value: str, reads: str | None) -> str:
    """Return the value of a key that names a path, made absolute unless it names no path.

    reads: see `Key`.
    """
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
        return os.path.join(glob.escape(os.getcwd()), place)  # it may be a glob
    return str(Path.cwd() / place)


def problems_of_folder(key: str, path: Path, more: tuple[str, ...] = ()) -> list[str]:
    """Return the problem with the folder of a run or of a sweep.

    It must be possible to make it, and it must hold no run, and none of the files `more`.

    key: hydra.run.dir or hydra.sweep.dir.
    """
    occupant = occupied_by(path, more)
    if occupant:
        return [occupied(f"{key}={path}", path, occupant)]
    reason = cannot_hold_files(path)
    if reason is not None:
        return [
            refusal(
                setting=f"{key}={path}",
                needs="a place where folders can be made",
                got=reason,
                reason="It names a folder.",
                use=f"{key}=outputs/FOLDER",
            )
        ]
    return []
