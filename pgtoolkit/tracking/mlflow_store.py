"""MLflow as a replica of the run directory: a background thread delivers metrics.jsonl, each row once."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

from pgtoolkit.errors import StorageError
from pgtoolkit.tracking.provenance import redact
from pgtoolkit.tracking.run_directory import leaves

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `by_documents/NAME`, with documents_seen in the place of the step."""

_METRICS_PER_CALL = 1000  # MLflow's own limits
_PARAMS_PER_CALL = 100
_LONGEST_TEXT = 500
_SECONDS_BETWEEN_DELIVERIES = 1.0
_LONGEST_PAUSE = 30.0
_END_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_log = logging.getLogger(__name__)


class MlflowTracker:
    """One MLflow run that follows one run directory.

    metrics.jsonl is the only source: what is appended there reaches MLflow within about a second, in batches, from a
    thread of its own. While the store does not answer, training goes on and the thread tries again; whatever is still
    missing stays in the file, and the next `start` with the same run_id delivers it. A row is told by its step, so
    nothing is delivered twice.

    uri: an MLflow tracking URI; None is `sqlite:///outputs/mlflow.db` under the current directory, with artifacts in
        outputs/artifacts. experiment: its name; made if there is none.
    """

    def __init__(self, uri: str | None, experiment: str):
        self.uri = absolute_uri(uri)
        self.experiment = experiment
        self.info: dict[str, str] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = None

    def start(
        self,
        run_name: str,
        params: dict[str, Any],
        tags: dict[str, str],
        metrics_path: Path,
        run_id: str | None = None,
    ) -> None:
        """Open the run, or continue run `run_id`, and begin to deliver metrics_path.

        params: flat, as `flatten` gives them; MLflow's parameters never change, so a continued run keeps its first
        ones (put what changed into a tag). A run_id that this store does not know begins a new run, with all rows.
        Call it after `drop_metrics_after` on a resume. Afterwards `info` holds uri, experiment_id and run_id.

        Raises StorageError within seconds if the store does not answer or refuses.
        """
        with _refusals(self.uri):
            self._client, experiment_id = _open_store(self.uri, self.experiment)
            run = self._known_run(run_id) if run_id else None
            if run:
                self._client.update_run(run.info.run_id, status="RUNNING")
                experiment_id = run.info.experiment_id
            else:
                run = self._client.create_run(experiment_id, run_name=run_name)
            self._run_id = run.info.run_id
            self._log_texts(tags, {} if run.data.params else params)
        self._delivered = _last_step(run)
        self._path, self._offset = Path(metrics_path), 0
        self.info = {"uri": redact(self.uri), "experiment_id": experiment_id, "run_id": self._run_id}
        self._thread = threading.Thread(target=self._deliver_until_stopped, name="mlflow", daemon=True)
        self._thread.start()
        # A daemon thread is cut off when the interpreter ends; what it still holds must not be.
        atexit.register(self.finish, "failed")

    def log_artifacts(self, paths: list[Path]) -> None:
        """Copy the files that exist into the run's artifacts; a store that does not answer is a warning."""
        with self._warning("the artifacts"):
            for path in paths:
                if Path(path).exists():
                    self._client.log_artifact(self._run_id, str(path))

    def finish(self, state: str) -> None:
        """Deliver the rest and close the run. state: done, failed or interrupted. A second call does nothing."""
        if not self._thread:
            return
        thread, self._thread = self._thread, None
        atexit.unregister(self.finish)
        self._stopping = True
        self._wake.set()
        thread.join()
        with self._warning("the end of the run"):
            self._client.set_terminated(self._run_id, status=_END_STATUS[state])

    def _known_run(self, run_id):
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage == "deleted":
            _log.warning("MLflow run %s is not in %s any more; a new one gets all metrics", run_id, redact(self.uri))
            return None
        return run

    def _log_texts(self, tags, params):
        from mlflow.entities import Param, RunTag

        items = [Param(_name(key), _text(key, value)) for key, value in params.items()]
        for first in range(0, len(items), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=items[first : first + _PARAMS_PER_CALL], synchronous=True)
        run_tags = [RunTag(_name(key), _text(key, value)) for key, value in tags.items()]
        self._client.log_batch(self._run_id, tags=run_tags, synchronous=True)

    def _deliver_until_stopped(self):
        pause, failed = _SECONDS_BETWEEN_DELIVERIES, False
        while True:
            last = self._stopping
            try:
                self._deliver()
                if failed:
                    _log.info("MLflow answers again: metrics are complete")
                pause, failed = _SECONDS_BETWEEN_DELIVERIES, False
            except Exception as error:  # whatever MLflow, its HTTP client or its database raise: training goes on
                if not failed:
                    _log.warning("%s. Training goes on; metrics are kept in %s", _reason(self.uri, error), self._path)
                pause, failed = min(2 * pause, _LONGEST_PAUSE), True
            if last:
                if failed:
                    _log.warning("not all metrics reached MLflow; resuming the run delivers the rest")
                return
            if self._wake.wait(pause):
                self._wake.clear()

    def _deliver(self):
        while True:
            metrics, offset = self._next_batch()
            if metrics:
                self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)
            if offset == self._offset:
                return
            self._offset = offset

    def _next_batch(self):
        """(metrics of the rows from the current offset on, at most one call's worth; offset after them)."""
        metrics, offset = [], self._offset
        if not self._path.exists():
            return metrics, offset
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                row = json.loads(line)
                new = _metrics_of(row) if row["step"] > self._delivered else []
                if metrics and len(metrics) + len(new) > _METRICS_PER_CALL:
                    break
                metrics += new
                offset += len(line)
        return metrics, offset

    @contextlib.contextmanager
    def _warning(self, what):
        try:
            yield
        except Exception as error:  # as in the thread
            _log.warning("%s did not reach MLflow: %s", what, _reason(self.uri, error))


def absolute_uri(uri: str | None) -> str:
    """The tracking URI, with None as the default store and a relative sqlite path made absolute."""
    uri = uri or "sqlite:///outputs/mlflow.db"
    path = _sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri


def flatten(config: dict) -> dict[str, str]:
    """The nested configuration as MLflow parameters: keys and values as overrides have them, long text cut."""
    return {_name(key): _text(key, value) for key, value in leaves(config)}


def _open_store(uri, experiment):
    """(client, id of the experiment). Of several processes only one at a time is let in."""
    # Fail in seconds where MLflow would try for minutes (the thread tries again), and send no telemetry. What the
    # user has set wins.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    path = _sqlite_path(uri)
    artifacts = None if uri.startswith("http") else (path.parent if path else Path("outputs").resolve()) / "artifacts"
    with _creation_lock(path):
        client = MlflowClient(uri)
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
    with database.with_name(f".{database.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _refusals(uri):
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # MLflow, its HTTP client and its database each raise their own
        raise StorageError(
            f"{_reason(uri, error)}. Training has not started. Start the server or mend tracking.uri, or use "
            "tracking=none to keep the metrics in the run directory only."
        ) from error


def _reason(uri, error):
    text = " ".join(redact(str(error)).split())
    return f"MLflow at tracking.uri={redact(uri)} failed: {text[:300]}"


def _last_step(run):
    """The last step whose row the run holds; -1 for a new run. A row arrives whole, in one transaction."""
    own = [metric.step for metric in run.data.to_proto().metrics if "/" not in metric.key]
    return max(own, default=-1)


def _metrics_of(row):
    from mlflow.entities import Metric

    # The time of the row, not of its delivery: a row that is sent again is then the same row to MLflow.
    milliseconds = int(1000 * row.get("time", 0))
    values = {name: value for name, value in row.items() if name not in ("step", "time") and math.isfinite(value)}
    metrics = [Metric(_name(name), value, milliseconds, row["step"]) for name, value in values.items()]
    if "documents_seen" in values:
        seen = int(values["documents_seen"])
        metrics += [
            Metric(f"by_documents/{name}", values[name], milliseconds, seen) for name in BY_DOCUMENTS if name in values
        ]
    return metrics


def _sqlite_path(uri):
    """The database file of an sqlite URI, absolute; None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _name(key):
    return re.sub(r"[^\w\-. /:]", "_", key)[:250]


def _text(key, value):
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return redact(f"{key}={value}").removeprefix(f"{key}=")[:_LONGEST_TEXT]
