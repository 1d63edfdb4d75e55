"""MLflow as a replica of the run directory: a thread delivers what is appended there, `pgtk sync`
what it lacks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
from datetime import datetime
from pathlib import Path

from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.config.rules.executed import address_not_typed
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import TIME, read_config, read_status
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.background import in_background
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.tracking import description, store
from pgtoolkit.tracking.description import RowFile, evaluation_metrics_of, metrics_of

_AT_THE_START = ("config.yaml", "overrides.yaml", "provenance.json", "data.json", "drift.jsonl")
ARTIFACTS = (
    *_AT_THE_START,
    "status.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "curves.png",
    "run.log",
)
"""Files of the run directory that MLflow keeps a copy of, as far as they exist; at the end all of
them once more."""

_IN_EACH_ROW = ("documents_seen", "loss")
"""By either of them it is known which rows are delivered: a row arrives whole, in one
transaction."""

_PARAMS_PER_CALL = 100  # MLflow's own limit
_SECONDS_BETWEEN_DELIVERIES = 1.0
_LONGEST_PAUSE = 30.0
_END_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_log = logging.getLogger(__name__)


class MlflowTracker:
    """One MLflow run that follows one run directory.

    The directory is the only source: what is appended to its metrics.jsonl reaches MLflow within
        about a second, in
    batches, from a thread of its own. While the store does not answer, training goes on and the
    thread tries again; whatever is still missing stays in the file, and the next `start` for the
    same directory delivers it. Rows arrive in their order, so the last step that the store has says
    which are missing; the run is known by its tag `pgtk.id`.

    uri: an MLflow tracking URI; None is `sqlite:///outputs/mlflow.db` under the current directory,
        with artifacts in outputs/artifacts. experiment: its name; made if there is none.
        system_metrics: also measure the machine.
    """

    def __init__(self, uri: str | None, experiment: str, system_metrics: bool = False):
        self.uri = absolute_uri(uri)
        self.experiment = experiment
        self.info: dict[str, str] = {}
        self.rows_delivered = 0
        self._measures_system = system_metrics
        self._system = None
        self._ended = threading.Event()
        self._thread = None

    def start(self, run_dir: Path, consequence: str = "") -> None:
        """Open the MLflow run of this directory, or make it, and begin to deliver.

        The directory has its config.yaml and status.json. MLflow's parameters never change: a
        continued run keeps its first ones, and what changed is in drift.jsonl. On a resume call it
        after `drop_metrics_after`. Afterwards `info` holds uri, experiment_id and run_id.

        Raises StorageError, ending with `consequence`: at once if the store refuses, after
            `patiently` if it is there
        and does not answer in time.
        """
        self._run_dir = Path(run_dir)
        described, status = description.description_of(self._run_dir), read_status(self._run_dir)
        with store.raising_storage_errors(self.uri, consequence):
            run = store.patiently(self.uri, lambda: self._open(described, status))
        self.info = {
            "uri": redact(self.uri),
            "experiment_id": run.info.experiment_id,
            "run_id": self._run_id,
        }
        steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        delivered: dict[str | None, int] = {None: max(steps.get(name, 0) for name in _IN_EACH_ROW)}
        of_set = re.compile(description.EVALUATION.format("(.*)", "avg"))
        evaluated = {
            named[1]: step for name, step in steps.items() if (named := of_set.fullmatch(name))
        }
        self._metrics = RowFile(self._run_dir / "metrics.jsonl", delivered, metrics_of)
        self._files = [
            self._metrics,
            RowFile(self._run_dir / "evaluations.jsonl", evaluated, evaluation_metrics_of),
        ]
        self._thread = threading.Thread(
            target=self._deliver_until_stopped, name="mlflow", daemon=True
        )
        self._thread.start()
        if self._measures_system:
            self._system = _system_monitor(self._run_id, self.uri)
        # A daemon thread is cut off when the interpreter ends; what it still holds must not be.
        atexit.register(self.finish, "failed")

    def _open(self, described: description.Description, status: dict):
        """The MLflow run of the directory: the one with its tag `pgtk.id` in any experiment of the
        store, or a new one.

        By the tag a run is found that a killed process could not write down, or whose making was
        answered too late.
        """
        self._client, experiment_id = store.open_store(self.uri, self.experiment)
        everywhere = [experiment.experiment_id for experiment in self._client.search_experiments()]
        tag = f"tags.`pgtk.id` = {store.search_literal(str(status.get('id')))}"
        if run := next(iter(self._client.search_runs(everywhere, tag, max_results=1)), None):
            self._client.update_run(run.info.run_id, status="RUNNING")
            if "reason" in run.data.tags:  # of the end that is none any more
                self._client.delete_tag(run.info.run_id, "reason")
        else:
            started = status.get("started")
            start_time = (
                int(1000 * datetime.strptime(started, TIME).timestamp()) if started else None
            )
            known = {"pgtk.id": status["id"]} if status.get("id") else {}
            run = self._client.create_run(experiment_id, start_time, known, described.run_name)
        self._run_id = run.info.run_id
        from mlflow.entities import Param, RunTag

        params = (
            []
            if run.data.params
            else [Param(key, value) for key, value in described.params.items()]
        )
        for first in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(
                self._run_id, params=params[first : first + _PARAMS_PER_CALL], synchronous=True
            )
        tags = [RunTag(store.parameter_name(key), value) for key, value in described.tags.items()]
        self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        return run

    def finish(self, state: str, limited: bool = True) -> list[str]:
        """Deliver the rest and close the run; returns what did not reach MLflow, by name. A second
        call does nothing.

        state: done, failed or interrupted. limited: give up after 6 * MLFLOW_HTTP_REQUEST_TIMEOUT
            seconds in all;
        otherwise only each call has its limit.
        """
        if not self._thread:
            return []
        thread, self._thread = self._thread, None
        atexit.unregister(self.finish)
        if self._system:
            with contextlib.suppress(TimeoutError):  # of a store that does not answer any more
                in_background(self._system.finish).result(
                    store.request_seconds() if limited else None
                )
        self._missing = ["metrics", "artifacts", "the end of the run"]
        self._end_status = _END_STATUS[state]
        self._ended.set()
        thread.join(6 * store.request_seconds() if limited else None)
        return list(self._missing)

    def _log_artifacts(self, names):
        for name in names:
            if (self._run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(self._run_dir / name))

    def _deliver_until_stopped(self):
        pause, failed, first_files = _SECONDS_BETWEEN_DELIVERIES, False, _AT_THE_START
        while True:
            last = self._ended.is_set()
            try:
                # now, so that a run that is killed has them there, too
                self._log_artifacts(first_files)
                first_files = ()
                self._deliver()
                if failed:
                    _log.info("MLflow answers again: metrics are complete")
                pause, failed = _SECONDS_BETWEEN_DELIVERIES, False
            except (
                Exception
            ) as error:  # whatever MLflow, its HTTP client or its database raise: training goes on
                if not failed:
                    kept = self._run_dir / "metrics.jsonl"
                    _log.warning(
                        "%s. Nothing is lost: metrics are kept in %s",
                        store.failure(self.uri, error),
                        kept,
                    )
                pause, failed = min(2 * pause, _LONGEST_PAUSE), True
            if last:
                if not failed:
                    self._missing.remove("metrics")
                self._close()
                return
            self._ended.wait(pause)

    def _deliver(self):
        for file in self._files:
            while True:
                rows, metrics, offset = file.next_batch()
                if metrics:
                    self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)
                    self.rows_delivered += rows
                if offset == file.offset:
                    break
                file.offset = offset

    def _close(self):
        with self._delivering("artifacts"):
            self._log_artifacts(ARTIFACTS)
        with self._delivering("the end of the run"):
            if reason := read_status(self._run_dir).get("reason"):
                self._client.set_tag(self._run_id, "reason", store.text_of("reason", reason))
            # A delivery after the fact leaves the run as long as it was.
            end_time = self._metrics.last_time
            self._client.set_terminated(self._run_id, status=self._end_status, end_time=end_time)

    @contextlib.contextmanager
    def _delivering(self, name):
        """What fails in the block stays among what is missing, and stops nothing else."""
        try:
            yield
            self._missing.remove(name)
        except Exception as error:  # as in the thread
            _log.debug("%s did not reach MLflow: %s", name, store.failure(self.uri, error))


def _system_monitor(run_id: str, uri: str):
    """MLflow's own measurements of the machine, every ten seconds until `finish`, straight into the
    store."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    # of each metric that the machine lacks
    logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    monitor.start()
    return monitor


def sync(run_dir: Path, uri: str | None = None, experiment: str | None = None) -> str:
    """Deliver to MLflow what it lacks of one run and say so on one line; a second call finds
    nothing to do.

    uri: another store than the run's own, which gets the whole run; needed for a run with
        tracking=none.
    experiment: another one than the run's own. Raises ConfigError for a run that is still running
        or has no store,
    StorageError if the store does not answer or fails on the way.
    """
    refuse_links(run_dir)
    config, status = read_config(run_dir)[0], read_status(run_dir)
    tracking = config.get("tracking", {})
    if uri is None and tracking.get("name", "mlflow") != "mlflow":
        raise ConfigError(
            f"pgtk sync {run_dir} needs a store (got tracking={tracking['name']}). The run was "
            "made without MLflow. Use --uri=sqlite:///outputs/mlflow.db, or the address of a "
            "server."
        )
    # A relative address was meant from where the run was started; its status has the absolute one.
    if uri is None:
        uri = (status.get("mlflow") or {}).get("uri") or tracking.get("uri")
        if problem := address_not_typed(f"pgtk sync {shell_path(run_dir)}", uri or ""):
            raise ConfigError(problem)
    with RunDirectory(run_dir) as run:
        read_metrics(run.metrics_path, ())  # raises StorageError where they are damaged
        check_rows(run.path)
        state = status.get("state", "failed")
        tracker = MlflowTracker(uri, experiment or tracking.get("experiment") or "pgtoolkit")
        tracker.start(
            run.path,
            "Nothing was lost: the run directory keeps it. Try again when the store answers.",
        )
        # A killed run says that it runs. However much is missing, it is delivered while the store
        # answers.
        missing = tracker.finish("interrupted" if state == "running" else state, limited=False)
    if missing:
        raise StorageError(
            f"MLflow still lacks {', '.join(missing)} of {shell_path(run_dir)}. Try again later."
        )
    rows = tracker.rows_delivered
    delivered = f"{plural(rows, 'row')} delivered" if rows else "nothing was missing"
    return (
        f"{shell_path(run_dir)}: {delivered} ({tracker.info['uri']}, run {tracker.info['run_id']})"
    )
