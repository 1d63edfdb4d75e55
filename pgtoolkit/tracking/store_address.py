"""Addresses of MLflow stores, and the names of experiments and projects: as typed, else by the
variables of the trackers."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_STORE = "sqlite:///outputs/mlflow.db"
STORE_VARIABLE = "MLFLOW_TRACKING_URI"

EXPERIMENT_VARIABLES = {"mlflow": "MLFLOW_EXPERIMENT_NAME", "wandb": "WANDB_PROJECT"}
"""Tracker -> the variable with the experiment or project of runs that name none."""


def experiment_of(tracker: str, experiment: str | None) -> str:
    """Return the name under which a tracker collects runs. experiment: as typed; None for none."""
    return experiment or os.environ.get(EXPERIMENT_VARIABLES[tracker]) or "pgtoolkit"


def absolute_uri(uri: str | None) -> str:
    """Return the tracking URI, with an absolute path of SQLite.

    uri: None for the store that MLFLOW_TRACKING_URI names, or else the default one.
    """
    uri = uri or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    path = sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of an sqlite URI's file; None for any other URI."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).resolve()
