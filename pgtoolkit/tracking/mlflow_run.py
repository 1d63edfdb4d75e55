"""MLflow as a replica of the run directory: delivered by a thread, completed by `pgtk sync`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.runs.records import TIME, Row, read_status
from pgtoolkit.system.background import in_background
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking import description, store
from pgtoolkit.tracking.description import RowFile, evaluation_metrics_of, metrics_of
from pgtoolkit.tracking.store_address import absolute_uri

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

_FIRST_ARTIFACTS = ("config.yaml", "overrides.yaml", "provenance.json", "data.json", "drift.jsonl")
ARTIFACTS = (
    *_FIRST_ARTIFACTS,
    "status.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "curves.png",
    "run.log",
)
"""Files of the run directory that MLflow gets, as far as they exist: the first ones at the start,
all of them at the end."""

_IN_EACH_ROW = ("documents_seen", "loss")
"""Either of these metrics shows which rows are delivered: each arrives whole, in one
transaction."""

_PARAMS_PER_CALL = 100  # MLflow's own limit
_SECONDS_BETWEEN_DELIVERIES = 1.0
_LONGEST_PAUSE = 30.0
_END_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_log = logging.getLogger("pgtoolkit")


class MlflowTracker:
    """An MLflow run that follows a run directory.

    The directory is the only source: a thread delivers what is appended to its metrics.jsonl, in
    batches, within about a second. While the store does not answer, training continues and the
    thread tries again. The next `start` for the same directory delivers what is still missing. Rows
    arrive in order, so the last step that the store has shows which are missing. The run is known
    by its tag `pgtk.id`.

    uri: an MLflow tracking URI; None: `sqlite:///outputs/mlflow.db` below the current directory,
        with artifacts in outputs/artifacts.
    experiment: its name; made if there is none.
    system_metrics: whether MLflow measures the machine.
    """

    def __init__(self, uri: str | None, experiment: str, system_metrics: bool = False):
        self.uri = absolute_uri(uri)
        self.experiment = experiment
        self.info: dict[str, str] = {}
        self.rows_delivered = 0
        self.last_failure = ""
        self._measures_system = system_metrics
        self._system: SystemMetricsMonitor | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, run_dir: Path, described: description.Description, consequence: str = ""
    ) -> None:
        """Open or make the MLflow run of this directory, and begin to deliver.

        The directory has its config.yaml and status.json. MLflow's parameters never change: a
        continued run keeps its first ones, and drift.jsonl has the changes. On a resume it is
        called after `drop_metrics_after`. Afterwards `info` has uri, experiment_id and run_id.

        Raises StorageError, whose message ends with `consequence`: at once if the store refuses,
        and after some time, see `patiently`, if it does not answer.
        """
        self._run_dir = Path(run_dir)
        status = read_status(self._run_dir)
        with store.raising_storage_errors(self.uri, consequence):
            run = store.patiently(self.uri, lambda: self._open(described, status))
        self.info = {
            "uri": redact(self.uri),
            "experiment_id": run.info.experiment_id,
            "run_id": self._run_id,
        }
        steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        delivered: dict[str | None, int] = {None: max(steps.get(name, 0) for name in _IN_EACH_ROW)}
        delivered_of_sets: dict[str | None, int] = {}
        name_of_average = re.compile(description.EVALUATION.format("(.*)", "avg"))
        for name, step in steps.items():
            match = name_of_average.fullmatch(name)
            if match:
                delivered_of_sets[match[1]] = step
        self._metrics = RowFile(self._run_dir / "metrics.jsonl", delivered, metrics_of)
        evaluations_path = self._run_dir / "evaluations.jsonl"
        self._files = [
            self._metrics,
            RowFile(evaluations_path, delivered_of_sets, evaluation_metrics_of),
        ]
        self._thread = threading.Thread(
            target=self._deliver_until_stopped, name="mlflow", daemon=True
        )
        self._thread.start()
        if self._measures_system:
            self._system = _system_monitor(self._run_id, self.uri)
        # The interpreter does not wait for a daemon thread, which may still have rows to deliver.
        atexit.register(self.finish, "failed")

    def _open(self, run_description: description.Description, status: Row) -> MlflowRun:
        """Return the directory's MLflow run, from any experiment of the store, or a new one.

        The tag `pgtk.id` shows which run it is, even if a killed process could not record its
        number, or if the store's answer came too late.
        """
        self._client, experiment_id = store.open_store(self.uri, self.experiment)
        # Imported after the client: it has turned MLflow's telemetry off.
        from mlflow.entities import Param, RunTag

        experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
        tag = f"tags.`pgtk.id` = {store.search_literal(str(status.get('id')))}"
        run = next(iter(self._client.search_runs(experiments, tag, max_results=1)), None)
        if run is not None:
            self._client.update_run(run.info.run_id, status="RUNNING")
            if "reason" in run.data.tags:  # the run has not ended after all
                self._client.delete_tag(run.info.run_id, "reason")
        else:
            start_time = None
            if status.get("started"):
                start_time = int(1000 * datetime.strptime(status["started"], TIME).timestamp())
            first_tags = {"pgtk.id": status["id"]} if status.get("id") else {}
            run = self._client.create_run(
                experiment_id, start_time, first_tags, run_description.run_name
            )
        self._run_id = run.info.run_id
        params = []
        if not run.data.params:
            params = [Param(key, value) for key, value in run_description.params.items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(
                self._run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True
            )
        tags = [
            RunTag(store.parameter_name(key), value) for key, value in run_description.tags.items()
        ]
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        return run

    def finish(self, state: str, limited: bool = True) -> list[str]:
        """Deliver the rest and close the run; return the names of parts that MLflow did not get.

        After a call that has returned, another does nothing.
        state: done, failed or interrupted.
        limited: whether to give up after 6 * MLFLOW_HTTP_REQUEST_TIMEOUT seconds in all. Otherwise
            only each call has a limit.
        """
        thread = self._thread
        if thread is None:
            return []
        if not self._ended.is_set():
            self._missing = ["metrics", "artifacts", "the end of the run"]
            self._end_status = _END_STATUS[state]
            self._ended.set()
        if self._system is not None:
            with contextlib.suppress(TimeoutError):  # where the store does not answer any more
                in_background(self._system.finish).result(
                    store.request_seconds() if limited else None
                )
        thread.join(6 * store.request_seconds() if limited else None)
        # Where a signal has ended the wait, the interpreter's end waits again.
        self._thread = None
        atexit.unregister(self.finish)
        return list(self._missing)

    def _log_artifacts(self, names: Iterable[str]) -> None:
        for name in names:
            if (self._run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(self._run_dir / name))

    def _deliver_until_stopped(self) -> None:
        pause = _SECONDS_BETWEEN_DELIVERIES
        has_failed = False
        first_artifacts = _FIRST_ARTIFACTS
        while True:
            is_last = self._ended.is_set()
            lacks_metrics = True
            try:
                self._deliver()
                lacks_metrics = False
                # At the start, so that MLflow has them even if the run is killed.
                self._log_artifacts(first_artifacts)
                first_artifacts = ()
                if has_failed:
                    _log.info("MLflow answers again: metrics are complete")
                pause = _SECONDS_BETWEEN_DELIVERIES
                has_failed = False
            except Exception as error:
                # Whatever MLflow, its HTTP client or its database raise, training continues.
                self.last_failure = store.failure(self.uri, error)
                if not has_failed:
                    _log.warning(
                        f"{self.last_failure}. Nothing is lost: metrics are kept in "
                        f"{self._run_dir / 'metrics.jsonl'}"
                    )
                pause = min(2 * pause, _LONGEST_PAUSE)
                has_failed = True
            if is_last:
                if not lacks_metrics:
                    self._missing.remove("metrics")
                self._close()
                return
            self._ended.wait(pause)

    def _deliver(self) -> None:
        for file in self._files:
            while True:
                num_rows, metrics, offset = file.next_batch()
                if metrics:
                    self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)
                    self.rows_delivered += num_rows
                if offset == file.offset:
                    break
                file.offset = offset

    def _close(self) -> None:
        with self._delivering("artifacts"):
            self._log_artifacts(ARTIFACTS)
        with self._delivering("the end of the run"):
            reason = read_status(self._run_dir).get("reason")
            if reason:
                self._client.set_tag(self._run_id, "reason", store.text_of("reason", reason))
            # So a delivery long after the end does not make the run longer.
            end_time = self._metrics.last_time
            self._client.set_terminated(self._run_id, status=self._end_status, end_time=end_time)

    @contextlib.contextmanager
    def _delivering(self, name: str) -> Iterator[None]:
        """Remove a part from those that are missing, unless the block raises an error.

        The error stops nothing else.
        """
        try:
            yield
            self._missing.remove(name)
        except Exception as error:  # as in the thread
            self.last_failure = store.failure(self.uri, error)
            _log.debug(f"{name} did not reach MLflow: {self.last_failure}")


def _system_monitor(run_id: str, uri: str) -> SystemMetricsMonitor:
    """Start MLflow's own measurements of the machine, which reach the store every ten seconds."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    # It would warn of each metric that the machine does not have.
    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    monitor.start()
    return monitor
