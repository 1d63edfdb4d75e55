"""The record of a run in MLflow, which `pgtk sync` completes."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from pgtoolkit.runs.records import TIME, read_status
from pgtoolkit.system.background import in_background
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking import next_commands, store
from pgtoolkit.tracking.description import EVALUATION, Dataset, Description, Point, main_name
from pgtoolkit.tracking.progress import entry
from pgtoolkit.tracking.record import Record
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

_log = logging.getLogger("pgtoolkit")

_IN_EACH_ROW = ("documents_seen", "loss")
"""Either of these metrics shows which rows are delivered: each arrives whole, in one
transaction."""

_PARAMS_PER_CALL = 100  # MLflow's own limit
_END_STATUS = {
    "done": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "pruned": "KILLED",
}


class MlflowRecord(Record):
    """A run in MLflow, known by its tag `pgtk.id`.

    Rows arrive in order, so the last step that the store has shows which are missing. MLflow's
    parameters never change: a continued run keeps its first ones, and drift.jsonl has the changes.
    A store that is too busy at the start is asked again for some time, see `patiently`.

    uri: an MLflow tracking URI; None: `sqlite:///outputs/mlflow.db` below the current directory,
        with artifacts in outputs/artifacts.
    experiment: its name; made if there is none.
    system_metrics: whether MLflow measures the machine.

    Once it is started, `info` has uri, experiment_id and run_id.
    """

    title = "MLflow"
    remedy = "Start the server or mend tracking.uri"

    def __init__(self, uri: str | None, experiment: str, system_metrics: bool = False):
        super().__init__()
        self.uri = absolute_uri(uri)
        self.experiment = experiment
        self._measures_system = system_metrics
        self._system: SystemMetricsMonitor | None = None
        self._first_artifacts = _FIRST_ARTIFACTS

    def entries(self) -> list[str]:
        command = next_commands.ui_command(self.info["uri"])
        page = next_commands.ui_url(
            self.info["uri"], self.info["experiment_id"], self.info["run_id"]
        )
        if command is None:
            return [entry(self.title, page)]
        return [entry(self.title, command), entry("", page)]

    def charts(self) -> str:
        return next_commands.ui_url(self.info["uri"], self.info["experiment_id"])

    def _open(self, description: Description) -> tuple[int, Mapping[str | None, int]]:
        status = read_status(self._run_dir)
        run = store.patiently(self.uri, lambda: self._open_run(description, status))
        self.info = {
            "uri": redact(self.uri),
            "experiment_id": run.info.experiment_id,
            "run_id": self._run_id,
        }
        if self._measures_system:
            self._system = _system_monitor(self._run_id, self.uri)
        steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        name_of_average = re.compile(EVALUATION.format("(.*)", "avg"))
        last_of_sets: dict[str | None, int] = {}
        for name, step in steps.items():
            match = name_of_average.fullmatch(name)
            if match:
                last_of_sets[match[1]] = step
        return max(steps.get(name, 0) for name in _IN_EACH_ROW), last_of_sets

    def _open_run(self, description: Description, status: JsonObject) -> MlflowRun:
        """Return the directory's MLflow run, from any experiment of the store, or a new one.

        The tag `pgtk.id` shows which run it is, even if a killed process could not record its
        number, or if the store's answer came too late.
        """
        self._client, experiment_id = store.open_store(self.uri, self.experiment)
        # Imported after the client: it has turned MLflow's telemetry off.
        from mlflow.entities import Param, RunTag

        store.offer_view(self._client, experiment_id, store.VIEW, [])
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
                experiment_id, start_time, first_tags, description.run_name
            )
        self._run_id = run.info.run_id
        params = []
        if not run.data.params:
            params = [Param(key, value) for key, value in description.params.items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(
                self._run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True
            )
        tags = [RunTag(store.parameter_name(key), value) for key, value in description.tags.items()]
        if description.note and store.NOTE not in run.data.tags:  # the user may have written one
            tags.append(RunTag(store.NOTE, description.note))
        sweep = description.tags.get("sweep")
        if sweep and store.PARENT not in run.data.tags:
            parent = store.run_of_sweep(self._client, experiment_id, sweep)
            if parent is not None:
                tags.append(RunTag(store.PARENT, parent.info.run_id))
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        if description.dataset is not None and not (run.inputs and run.inputs.dataset_inputs):
            self._log_dataset(description.dataset)
        return run

    def _log_dataset(self, dataset: Dataset) -> None:
        """Name what the run trains on, where the server knows datasets."""
        from mlflow.entities import Dataset as MlflowDataset
        from mlflow.entities import DatasetInput, InputTag

        source = {} if dataset.source is None else {"uri": dataset.source}
        entity = MlflowDataset(
            name=dataset.name[:500],
            digest=dataset.digest,
            source_type="code" if dataset.source is None else "local",
            source=json.dumps(source),
        )
        tag = InputTag("mlflow.data.context", "training")
        try:
            self._client.log_inputs(self._run_id, [DatasetInput(entity, [tag])])
        except Exception as error:  # an older server has no such call, and the run needs none
            _log.warning(f"{self._failure(error)}. The run has no dataset there.")

    def _log_artifacts(self, names: Iterable[str]) -> None:
        for name in names:
            if (self._run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(self._run_dir / name))

    def _after_rows(self) -> None:
        # At the start, so that MLflow has them even if the run is killed.
        self._log_artifacts(self._first_artifacts)
        self._first_artifacts = ()

    def _send(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(store.parameter_name(shown), value, point.time, point.position)
            for point in points
            for name, value in point.metrics.items()
            for shown in (name, main_name(name))
            if shown is not None
        ]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def _last_parts(self) -> dict[str, Callable[[], None]]:
        return {"artifacts": lambda: self._log_artifacts(ARTIFACTS), **super()._last_parts()}

    def _close(self) -> None:
        if self._system is not None:
            with contextlib.suppress(TimeoutError):  # where the store does not answer any more
                in_background(self._system.finish).result(store.request_seconds())
        reason = read_status(self._run_dir).get("reason")
        if reason:
            self._client.set_tag(self._run_id, "reason", store.text_of("reason", reason))
        self._client.set_terminated(
            self._run_id,
            status=_END_STATUS[self._state],
            # So a delivery long after the end does not make the run longer.
            end_time=self._metrics.last_time,
        )

    def _seconds_to_finish(self) -> float:
        return 6 * store.request_seconds()

    def _failure(self, error: Exception) -> str:
        return store.failure(self.uri, error)


def _system_monitor(run_id: str, uri: str) -> SystemMetricsMonitor:
    """Start MLflow's own measurements of the machine, which reach the store every ten seconds."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    # It would warn of each metric that the machine does not have.
    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    monitor.start()
    return monitor
