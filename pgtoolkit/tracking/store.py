"""MLflow stores: how one is opened, the error where that fails, and names and values as MLflow
takes them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.config.paths import sqlite_path
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.background import in_background
from pgtoolkit.system.imports import without
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import shortest_path, text
from pgtoolkit.tracking.store_file import deleted_experiment, out_of_date

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_BUSY = re.compile("read timed out|database is locked|error code (429|502|503|504)", re.IGNORECASE)
"""What MLflow says of a store that is there and has too much to do."""


def client_of(uri: str):
    """An MlflowClient that fails in seconds where MLflow would try for minutes, and sends no
    telemetry.

    MLflow limits the wait for each byte alone; here each whole call is limited, to 4 such waits.
    """
    with importing_mlflow():
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        # It logs each failure with its whole traceback; `failure` says it in one line.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        return _ClientWithTimeouts(MlflowClient(uri))


@contextlib.contextmanager
def importing_mlflow() -> Iterator[None]:
    """Around imports of MLflow, whose settings and parts are those that are used here."""
    # What the user has set wins.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # Its language models' gateway is not used here, nor are its tables.
    with without(pandas=(), fastapi=("HTTPException",)):
        yield


def request_seconds() -> float:
    """The longest wait for a server's next byte; what is set in the environment wins, once
    `client_of` was called."""
    return float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])


class _ClientWithTimeouts:
    """A client whose calls run in threads of their own, which are given up when their time is
    over."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        attribute = getattr(self._client, name)
        return (
            functools.partial(_call_within_limit, attribute) if callable(attribute) else attribute
        )


def _call_within_limit(function, *arguments, **keywords):
    seconds = 4 * request_seconds()
    try:
        return in_background(functools.partial(function, *arguments, **keywords)).result(seconds)
    except TimeoutError as error:
        if error.args:  # the call's own
            raise
        raise TimeoutError(
            f"no whole answer within {seconds:g} s, which is 4 * MLFLOW_HTTP_REQUEST_TIMEOUT"
        ) from None


def patiently(uri: str, call: Callable[[], Result]) -> Result:
    """What `call` returns, which is called again where the store is there but too busy to answer in
    time.

    One line says so. After 12 * MLFLOW_HTTP_REQUEST_TIMEOUT seconds the error of the last call is
    raised.
    """
    end = None
    while True:
        try:
            return call()
        except Exception as error:  # MLflow, its HTTP client and its database each raise their own
            is_busy = isinstance(error, TimeoutError) or _BUSY.search(str(error))
            if not is_busy or (end is not None and time.monotonic() > end):
                raise
            if end is None:
                end = time.monotonic() + 12 * request_seconds()
                _log.warning(
                    "%s; asking again for %g s", failure(uri, error), 12 * request_seconds()
                )
            time.sleep(1)


def open_store(uri: str, experiment: str):
    """(client, id of the experiment), both made if there are none. Of several processes one at a
    time is let in."""
    path = sqlite_path(uri)
    artifacts = (
        None
        if uri.startswith("http")
        else (path.parent if path else Path("outputs").resolve()) / "artifacts"
    )
    with _creation_lock(path):
        client = client_of(uri)
        known = client.get_experiment_by_name(experiment)
        if known and known.lifecycle_stage == "deleted":
            raise StorageError(deleted_experiment(experiment, uri, known.experiment_id))
        if known:
            return client, known.experiment_id
        return client, client.create_experiment(
            experiment, artifact_location=artifacts and artifacts.as_uri()
        )


@contextlib.contextmanager
def _creation_lock(database):
    # Two processes that create the database at once leave it damaged for good.
    if not database:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f".{database.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_store(uri: str, setting: str, use: str) -> None:
    """Raise ConfigError if an absolute sqlite URI names no file; MLflow itself would make an empty
    store.

    setting: what the user typed. use: the end of the message.
    """
    path = sqlite_path(uri)
    if path and not path.exists():
        raise ConfigError(
            f"{setting} needs an MLflow store (got {shortest_path(path)}: no such file). Runs with "
            f"tracking=mlflow make outputs/mlflow.db where they are started. Use {use}."
        )


@contextlib.contextmanager
def raising_storage_errors(uri: str, consequence: str):
    """Whatever MLflow raises in the block becomes a StorageError that ends with `consequence`."""
    try:
        yield
    except (StorageError, ConfigError):
        raise
    except Exception as error:  # MLflow, its HTTP client and its database each raise their own
        raise StorageError(f"{failure(uri, error)}. {consequence}") from error


def failure(uri: str, error: BaseException) -> str:
    """What failed, on one line and without credentials."""
    message = " ".join(redact(str(error)).split())
    if tables := re.search(r"database schema \(found version (\w+)", message):
        return out_of_date(f"tracking.uri={redact(uri)}", uri, tables[1]).rstrip(".")
    # What the HTTP client says of a server that is down: the address twice, and the cause at the
    #   very end.
    if cause := re.search(r"Caused by \w+\((.*?)\)*$", message):
        message = cause[1].strip("\"'")
    return (
        f"MLflow at tracking.uri={redact(uri)} failed: "
        f"{textwrap.shorten(message, 300, placeholder=' …')}"
    )


def flatten(config: dict) -> dict[str, str]:
    """The nested configuration as MLflow parameters: keys and values as overrides have them, long
    text cut.

    What tells no runs apart is left out; the artifact config.yaml has it all.
    """
    pairs = as_typed({key: value for key, value in leaves(config) if changes_learning(key, config)})
    return {parameter_name(key): text_of(key, value) for key, value in pairs.items()}


def parameter_name(key: str) -> str:
    """The key in the letters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", key)[:250]


def text_of(key: str, value: object, longest: int = 500) -> str:
    """The value as overrides have it, secrets hidden, at most `longest` characters."""
    written = value if isinstance(value, float) else text(value)
    return redact(f"{key}={written}").removeprefix(f"{key}=")[:longest]


def search_literal(value: str) -> str:
    """A text as a literal of MLflow's search filters."""
    mark = '"' if "'" in value else "'"
    return f"{mark}{value}{mark}"
