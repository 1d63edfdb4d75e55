"""MLflow stores: how one is opened, the error where that fails, and names and values as MLflow takes them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.paths import sqlite_path
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.background import in_background
from pgtoolkit.system.imports import without
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import text

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


def client_of(uri: str):
    """An MlflowClient that fails in seconds where MLflow would try for minutes, and sends no telemetry.

    MLflow limits the wait for each byte alone; here each whole call is limited, to 4 such waits.
    """
    # What the user has set wins.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # Its language models' gateway is not used here, nor are its tables.
    with without(pandas=(), fastapi=("HTTPException",)):
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        # It logs each failure with its whole traceback; `failure` says it in one line.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        client = MlflowClient(uri)
    return _ClientWithTimeouts(client)


def request_seconds() -> float:
    """The longest wait for a server's next byte; what is set in the environment wins, once `client_of` was called."""
    return float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])


def patiently(uri: str, call: Callable[[], Result]) -> Result:
    """What `call` returns, which is called again where the store is there but too busy to answer in time.

    It says so once, and gives up after 12 * MLFLOW_HTTP_REQUEST_TIMEOUT seconds with the error of the last call.
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
                _log.warning("%s; asking again for %g s", failure(uri, error), 12 * request_seconds())
            time.sleep(1)


_BUSY = re.compile("read timed out|database is locked|error code (429|502|503|504)", re.IGNORECASE)


class _ClientWithTimeouts:
    """A client whose calls run in threads of their own, which are given up when their time is over."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        found = getattr(self._client, name)
        return functools.partial(_call_within, 4 * request_seconds(), found) if callable(found) else found


def _call_within(seconds, function, *arguments, **keywords):
    try:
        return in_background(functools.partial(function, *arguments, **keywords)).result(seconds)
    except TimeoutError as error:
        if error.args:  # the call's own
            raise
        raise TimeoutError(f"no whole answer within {seconds:g} s, which is 4 * MLFLOW_HTTP_REQUEST_TIMEOUT") from None


def open_store(uri: str, experiment: str):
    """(client, id of the experiment), both made if there are none. Of several processes one at a time is let in."""
    path = sqlite_path(uri)
    artifacts = None if uri.startswith("http") else (path.parent if path else Path("outputs").resolve()) / "artifacts"
    with _creation_lock(path):
        client = client_of(uri)
        found = client.get_experiment_by_name(experiment)
        if found and found.lifecycle_stage == "deleted":
            raise StorageError(
                f"tracking.experiment={experiment} needs an experiment that is not deleted. MLflow keeps the name of "
                f"a deleted one. Use another name, or `mlflow experiments restore -x {found.experiment_id}`."
            )
        if found:
            return client, found.experiment_id
        return client, client.create_experiment(experiment, artifact_location=artifacts and artifacts.as_uri())


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
    """Raise ConfigError if an absolute sqlite URI names no MLflow store; MLflow itself would make an empty one.

    setting: what the user typed. use: the end of the message.
    """
    path = sqlite_path(uri)
    if path is None:
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            database.execute("select 1 from experiments limit 1")
        return
    except sqlite3.Error as error:
        got = str(error) if path.exists() else "no such file"
    shortest = min(os.path.relpath(path), str(path), key=len)
    raise ConfigError(
        f"{setting} needs an MLflow store (got {shortest}: {got}). Runs with tracking=mlflow make outputs/mlflow.db "
        f"where they are started. Use {use}."
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
    # What the HTTP client says of a server that is down: the address twice, and the cause at the very end.
    if cause := re.search(r"Caused by \w+\((.*?)\)*$", message):
        message = cause[1].strip("\"'")
    return f"MLflow at tracking.uri={redact(uri)} failed: {message[:300]}"


def flatten(config: dict) -> dict[str, str]:
    """The nested configuration as MLflow parameters: keys and values as overrides have them, long text cut.

    What tells no runs apart is left out; the artifact config.yaml has it all.
    """
    pairs = ((key, value) for key, value in leaves(config) if changes_learning(key, config))
    return {parameter_name(key): text_of(key, value) for key, value in pairs}


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
