"""The places that a configuration names, made to mean the same from every directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.key import value_of
from pgtoolkit.config.keys import keys_of

NO_FOLDER = ("initial", "recorded")
"""Values of kl.reference that name no model: the run's first weights, and log-probs recorded with the rollouts."""


def make_absolute(config: DictConfig | dict) -> None:
    """Let a run's configuration mean the same files from every directory; its relative paths are seen from this one."""
    for key in keys_of(config):
        if (key.reads or key.writes) and isinstance(value := value_of(config, key.name), str):
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
