"""Opens MLflow stores, says what is wrong with them, and writes names and values as MLflow takes
them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import unquote, urlsplit

from pgtoolkit.errors import ConfigError, StorageError, refused_by_disk
from pgtoolkit.system.background import in_background
from pgtoolkit.system.imports import imports_skipping
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, shortest_path, text
from pgtoolkit.tracking.store_address import DEFAULT_STORE, absolute_uri, sqlite_path
from pgtoolkit.tracking.store_file import (
    deleted_experiment,
    has_other_tables,
    other_tables,
    out_of_date,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_log = logging.getLogger("pgtoolkit")

Result = TypeVar("Result")

_BUSY = re.compile("read timed out|database is locked|error code (429|502|503|504)", re.IGNORECASE)
"""Matches MLflow's errors for a store that has too much to do."""


def client_of(uri: str) -> MlflowClient:
    """Return an MlflowClient that fails in seconds, not in minutes, and sends no telemetry.

    MLflow limits only the wait for each byte. Here each call is limited, to 4 such waits.
    """
    with importing_mlflow():
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)
        # It logs each failure with a traceback, for which `failure` has one line.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        return cast("MlflowClient", _ClientWithTimeouts(MlflowClient(uri)))


@contextlib.contextmanager
def importing_mlflow() -> Iterator[None]:
    """Set MLflow up for a block that imports it, without the parts that are not used here."""
    # Variables that the user has set stay.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # Its gateway for language models is not used here, nor are its tables.
    with imports_skipping(pandas=(), fastapi=("HTTPException",)):
        yield


def request_seconds() -> float:
    """Return the longest wait for a server's next byte, from the environment.

    It is set once `client_of` was called.
    """
    return float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])


class _ClientWithTimeouts:
    """An MlflowClient whose calls run in threads, which are abandoned when their time is over."""

    def __init__(self, client: MlflowClient):
        self._client = client

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._client, name)
        return (
            functools.partial(_call_within_limit, attribute) if callable(attribute) else attribute
        )


def _call_within_limit(
    function: Callable[..., Result], *arguments: object, **keywords: object
) -> Result:
    seconds = 4 * request_seconds()
    try:
        return in_background(functools.partial(function, *arguments, **keywords)).result(seconds)
    except TimeoutError as error:
        if error.args:  # the function itself has raised it
            raise
        raise TimeoutError(
            f"no complete answer within {seconds:g} s, which is 4 * MLFLOW_HTTP_REQUEST_TIMEOUT"
        ) from None


def patiently(uri: str, call: Callable[[], Result]) -> Result:
    """Return the result of `call`, which is called again while the store is too busy to answer.

    One warning says so. After 12 * MLFLOW_HTTP_REQUEST_TIMEOUT seconds the last error is raised.
    """
    end = None
    while True:
        try:
            return call()
        except Exception as error:  # MLflow, its HTTP client and its database have errors each
            is_busy = isinstance(error, TimeoutError) or _BUSY.search(str(error))
            if not is_busy or (end is not None and time.monotonic() > end):
                raise
            if end is None:
                seconds = 12 * request_seconds()
                end = time.monotonic() + seconds
                _log.warning(f"{failure(uri, error)}; asking again for {seconds:g} s")
            time.sleep(1)


def open_store(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """Return a client and the id of the experiment; store and experiment are made if missing.

    Several processes do so one after the other. Raises StorageError for a deleted experiment.
    """
    path = sqlite_path(uri)
    artifact_location = None
    if not uri.startswith("http"):
        folder = path.parent if path else Path("outputs").resolve()
        artifact_location = (folder / "artifacts").as_uri()
    is_default = uri == absolute_uri(DEFAULT_STORE)
    if is_default and path and path.exists() and has_other_tables(path):
        raise StorageError(other_tables(f"tracking.uri=sqlite:///{shortest_path(path)}"))
    with _creation_lock(path):
        if path and not path.exists() and "?" not in path.name:
            _make_tables(path)
        client = client_of(uri)
        existing = client.get_experiment_by_name(experiment)
        if existing is None:
            number = client.create_experiment(experiment, artifact_location=artifact_location)
            return client, number
        if existing.lifecycle_stage == "deleted":
            raise StorageError(deleted_experiment(experiment, uri, existing.experiment_id))
        if is_default and path:
            _refuse_artifacts_elsewhere(existing.artifact_location, path, experiment)
        return client, existing.experiment_id


def _make_tables(database: Path) -> None:
    """Make MLflow's tables, which takes seconds, in a file that gets its name once it has all.

    Every later run would refuse the tables of a run that was stopped between two of them.
    """
    unfinished = database.with_name(f".{database.name}.unfinished")
    for suffix in ("", "-journal"):
        unfinished.with_name(unfinished.name + suffix).unlink(missing_ok=True)
    client_of(f"sqlite:///{unfinished}").search_experiments(max_results=1)
    unfinished.rename(database)


def _refuse_artifacts_elsewhere(location: str, store: Path, experiment: str) -> None:
    """Raise StorageError for an experiment of the default store that keeps its files elsewhere.

    Nobody has typed this store: it may have come with a folder of somebody else's.
    location: of the experiment's files, a URI or a path.
    """
    parts = urlsplit(location)
    folder = Path(unquote(parts.path)).resolve()
    if parts.scheme in ("", "file") and folder.is_relative_to(store.parent):
        return
    raise StorageError(
        refusal(
            setting=f"tracking.experiment={experiment}",
            needs=f"an experiment with its files below {shortest_path(store.parent)}",
            got=redact(location),
            reason="The files of the run would be sent there, and nobody has typed it.",
            use=f"tracking.uri=sqlite:///{shortest_path(store)} if they may be, or another name",
        )
    )


@contextlib.contextmanager
def _creation_lock(database: Path | None) -> Iterator[None]:
    # Two processes that create the database at once would damage it for good.
    if not database:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f".{database.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


NOTE = "mlflow.note.content"
"""The tag with a run's description."""

PARENT = "mlflow.parentRunId"
"""The tag with the id of the run below which a run is nested."""

VIEW = "pgtk"
"""The name of the view of an experiment's runs; that of a sweep is `view_of`."""

_COLUMNS = ("reward", "exact_match", "loss")


def view_of(sweep: str) -> str:
    """Return the name of the view with a sweep's keys as columns."""
    return f"{VIEW}-{sweep}"


def offer_view(
    client: MlflowClient, experiment_id: str, name: str, keys: list[str], sweep: str | None = None
) -> None:
    """Keep a view of the table of runs in an experiment: with these keys as columns, and metrics.

    MLflow itself keeps a view that somebody shares so. A view that is there stays, unless it is a
    sweep's, whose keys may be others.
    """
    tag = f"mlflow.sharedViewState.{name}"
    if sweep is None and tag in client.get_experiment(experiment_id).tags:
        return
    columns = [f"params.`{parameter_name(key)}`" for key in keys]
    columns += [f"metrics.`{metric}`" for metric in _COLUMNS]
    state: dict[str, object] = {"selectedColumns": columns}
    if sweep is not None:
        state |= {
            "searchFilter": jobs_of_sweep(sweep),
            "orderByKey": "metrics.`reward`",
            "orderByAsc": False,
        }
    client.set_experiment_tag(experiment_id, tag, json.dumps(state))


def jobs_of_sweep(sweep: str) -> str:
    """Return the condition of MLflow's search for the jobs of a sweep, without the sweep's run."""
    return f"tags.sweep = {search_literal(sweep)} and tags.seed LIKE '%'"


def run_of_sweep(client: MlflowClient, experiment_id: str, sweep: str) -> Run | None:
    """Return the run below which the jobs of a sweep are nested, if there is one."""
    condition = f"tags.sweep = {search_literal(sweep)} and tags.sweep_summary = 'true'"
    return next(iter(client.search_runs([experiment_id], condition, max_results=1)), None)


def require_store(uri: str, setting: str, use: str) -> None:
    """Raise ConfigError for a sqlite URI whose file is missing, where MLflow would make a store.

    uri: absolute. setting: as the user typed it. use: the end of the message.
    """
    path = sqlite_path(uri)
    if path and not path.exists():
        raise ConfigError(
            f"{setting} needs an MLflow store (got {shortest_path(path)}: no such file). Runs with "
            "tracking=mlflow make outputs/mlflow.db in the directory that they are started from. "
            f"Use {use}."
        )


@contextlib.contextmanager
def raising_storage_errors(uri: str, consequence: str) -> Iterator[None]:
    """Raise errors of MLflow in the block as a StorageError that ends with `consequence`."""
    try:
        yield
    except (StorageError, ConfigError):
        raise
    except Exception as error:  # MLflow, its HTTP client and its database have errors each
        raise StorageError(f"{failure(uri, error)}. {consequence}") from error


def failure(uri: str, error: BaseException) -> str:
    """Return in one line what failed, without credentials."""
    if isinstance(error, OSError) and error.filename:  # a file of the run
        return str(refused_by_disk(error.filename, error)).rstrip(".")
    message = " ".join(redact(str(error)).split())
    schema = re.search(r"database schema \(found version (\w+)", message)
    if schema:
        return out_of_date(f"tracking.uri={redact(uri)}", uri, schema[1]).rstrip(".")
    # For a server that is down the HTTP client repeats the address, and has the cause at the end.
    cause = re.search(r"Caused by \w+\((.*?)\)*$", message)
    if cause:
        message = cause[1].strip("\"'")
    return (
        f"MLflow at tracking.uri={redact(uri)} failed: "
        f"{textwrap.shorten(message, 300, placeholder=' …')}"
    )


def parameter_name(key: str) -> str:
    """Return a key with an underscore for each character that MLflow does not allow."""
    return re.sub(r"[^\w\-. /:]", "_", key)[:250]


def text_of(key: str, value: object, longest: int = 500) -> str:
    """Return a value as an override has it, with secrets hidden, cut to `longest` characters."""
    value_text = value if isinstance(value, float) else text(value)
    return redact(f"{key}={value_text}").removeprefix(f"{key}=")[:longest]


def search_literal(value: str) -> str:
    """Return a text as a literal of MLflow's search filters."""
    quote = '"' if "'" in value else "'"
    return f"{quote}{value}{quote}"
