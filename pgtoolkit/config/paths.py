"""The places that a configuration names, made to mean the same from every directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

DATA = ("model.path", "kl.reference", "task.path", "rollout.path")
"""Keys that name what a run reads from outside of its directory."""

NO_FOLDER = ("initial", "recorded")
"""Values of kl.reference that name no model: the run's first weights, and log-probs recorded with the rollouts."""


def make_absolute(config: DictConfig | dict) -> None:
    """Let a run's configuration mean the same files from every directory; its relative paths are seen from this one."""
    for key in (*DATA, "rollout.save_path", "sampler.weights_folder"):
        group, name = key.split(".")
        if name in config[group] and isinstance(value := config[group][name], str):
            config[group][name] = absolute(key, value)
    for one in (config["evaluation"]["sets"] if "evaluation" in config else {}).values():
        if (OmegaConf.is_dict(one) or isinstance(one, dict)) and isinstance(value := one.get("path"), str):
            one["path"] = absolute("task.path", value)
    if config["tracking"]["name"] == "mlflow":
        config["tracking"]["uri"] = absolute_uri(config["tracking"]["uri"])


def absolute(key: str, value: str) -> str:
    """The value of a key that names a place, without the current directory's help."""
    if key == "kl.reference" and value in NO_FOLDER:
        return value
    place = Path(value).expanduser()
    if value == "" or place.is_absolute():
        return value and str(place)
    if key in DATA and not place.exists():
        if key in ("model.path", "kl.reference") and not value.startswith("."):
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
