"""The rules on where metrics go."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from pgtoolkit.config.refusals import holds_secret
from pgtoolkit.config.rules.named import installed
from pgtoolkit.config.schema import Config
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, text
from pgtoolkit.tracking.settings import TrackingSettings
from pgtoolkit.tracking.store_address import (
    DEFAULT_STORE,
    EXPERIMENT_VARIABLES,
    STORE_VARIABLE,
)

_FURTHER = ("wandb", "tensorboard")
"""Trackers that tracking.also may name; their packages, and the extras that install them, have the
same names."""


def tracking(c: Config, report: Report) -> None:
    tracking = c.tracking
    run_name = tracking.run_name
    if run_name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", str(run_name)):
        report.refuse_value(
            key="tracking.run_name",
            value=run_name,
            needs="1 to 80 letters, digits, '.', '_' or '-', a letter or digit first",
            reason="It is also the name of the run directory.",
            better=re.sub(r"[^A-Za-z0-9._-]+", "-", str(run_name)).strip("-._")[:80] or "run",
        )
    _further_trackers(tracking, report)
    if tracking.name == "mlflow":
        _store(tracking.uri, report)
    for name in (tracking.name, *tracking.also):
        _note_variables(name, tracking, report)


def _store(uri: str | None, report: Report) -> None:
    """Check the address of MLflow's store, and note where the environment names it."""
    of_environment = os.environ.get(STORE_VARIABLE)
    if uri is not None:
        address_of_store("tracking.uri", str(uri), report)
    elif of_environment and redact(of_environment) != of_environment:
        report.problems.append(holds_secret(STORE_VARIABLE))
    elif of_environment:
        address_of_store(STORE_VARIABLE, of_environment, report)
        report.note(f"{STORE_VARIABLE}: metrics go to {of_environment}.")


_NOT_FOLLOWED = {
    "MLFLOW_EXPERIMENT_ID": ("mlflow", "MLFLOW_EXPERIMENT_NAME or tracking.experiment"),
    "MLFLOW_RUN_ID": ("mlflow", "pgtk resume RUN, since a run is its directory"),
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": ("mlflow", "tracking.system_metrics=true"),
    "WANDB_RUN_ID": ("wandb", "pgtk resume RUN, since a run is its directory"),
    "WANDB_RESUME": ("wandb", "pgtk resume RUN, since a run is its directory"),
    "WANDB_DISABLED": ("wandb", "tracking=none"),
    "WANDB_DIR": ("wandb", "hydra.run.dir=FOLDER, since the record lies in the run's directory"),
}
"""Variable -> the tracker that would follow it elsewhere, and what to use here."""


def _note_variables(tracker: str, tracking: TrackingSettings, report: Report) -> None:
    """Note the variables of a tracker that name the run's experiment, and those that do nothing."""
    variable = EXPERIMENT_VARIABLES.get(tracker)
    if variable and os.environ.get(variable) and not tracking.experiment:
        kind = "experiment" if tracker == "mlflow" else "project"
        report.note(f"{variable}: the {kind} is {redact(os.environ[variable])}.")
    for name, (of_tracker, use) in _NOT_FOLLOWED.items():
        if of_tracker == tracker and os.environ.get(name):
            report.note(f"{name} is not followed here. Use {use}.")


def _further_trackers(tracking: TrackingSettings, report: Report) -> None:
    setting = f"tracking.also={text(tracking.also)}"
    for name in tracking.also:
        if name not in _FURTHER:
            report.refuse(
                setting=setting,
                needs="wandb or tensorboard",
                got=name,
                reason="Other trackers are not known; MLflow goes first: tracking=mlflow.",
                use="tracking.also=[tensorboard]",
            )
    others = {*tracking.also} - {tracking.name}
    if all(name in _FURTHER for name in tracking.also) and len(others) < len(tracking.also):
        report.refuse(
            setting=setting,
            needs="each tracker once",
            got=f"tracking={tracking.name}",
            reason="A run has one record with each tracker.",
            use=f"tracking.also={text([name for name in _FURTHER if name in others])}",
        )
    for name in _FURTHER:
        if name == tracking.name:
            installed(report, f"tracking={name}", name, name)
        elif name in tracking.also:
            installed(report, setting, name, name)


def address_of_store(key: str, uri: str, report: Report) -> None:
    """Refuse an address that no store of MLflow can have.

    key: the key, flag or variable that holds it.
    """
    try:
        scheme = (urlsplit(uri).scheme or uri).partition("+")[0]
    except ValueError:  # such as a bracket that is not closed
        scheme = None
    use = f"{'tracking.uri' if key == STORE_VARIABLE else key}={DEFAULT_STORE}"
    if scheme not in ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks"):
        report.refuse(
            setting=f"{key}={uri}",
            needs="sqlite:///FILE, http(s)://HOST:PORT or a database",
            got=uri,
            reason="MLflow knows no other stores, and refuses plain files.",
            use=use,
        )
    elif scheme == "sqlite" and os.path.isdir(uri.partition(":///")[2] or "."):
        report.refuse(
            setting=f"{key}={uri}",
            needs="a file, not a folder",
            got=uri,
            reason="SQLite keeps a store in one file.",
            use=use,
        )
