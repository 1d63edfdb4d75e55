"""The rules on where metrics go."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from pgtoolkit.config.rules.named import installed
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report, text
from pgtoolkit.tracking.settings import TrackingSettings

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
    _experiment(tracking, report)
    _further_trackers(tracking, report)
    if tracking.name == "mlflow" and tracking.uri is not None:
        address_of_store("tracking.uri", str(tracking.uri), report)


def _experiment(tracking: TrackingSettings, report: Report) -> None:
    """Refuse Weights & Biases beside another tracker without a name for its runs."""
    if "wandb" in tracking.also and not tracking.experiment:
        report.refuse(
            setting=f"tracking.also={text(tracking.also)}",
            needs="tracking.experiment",
            got=tracking.experiment,
            reason="Weights & Biases keeps runs in projects.",
            use="tracking.experiment=pgtoolkit",
        )


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
    """Refuse an address that no store of MLflow can have. key: the key or flag that holds it."""
    try:
        scheme = urlsplit(uri).scheme.partition("+")[0]
    except ValueError:  # such as a bracket that is not closed
        scheme = None
    default_uri = "sqlite:///outputs/mlflow.db"
    if scheme not in ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks"):
        report.refuse_value(
            key=key,
            value=uri,
            needs="sqlite:///FILE, http(s)://HOST:PORT or a database",
            reason="MLflow refuses plain files as a store.",
            better=default_uri,
        )
    elif scheme == "sqlite" and os.path.isdir(uri.partition(":///")[2] or "."):
        report.refuse_value(
            key=key,
            value=uri,
            needs="a file, not a folder",
            reason="SQLite keeps a store in one file.",
            better=default_uri,
        )
