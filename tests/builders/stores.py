"""Run directories, and the MLflow stores that follow them, for the tests."""

from __future__ import annotations

import time

from mlflow import MlflowClient

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.mlflow_run import MlflowRecord

CONFIG = {
    "seed": 1,
    "loss": {"name": "gspo", "epsilon_low": 3e-4},
    "aggregation": {"mode": "sample_mean"},
}


def metric_history(uri: str, run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    """Return (step, value) of a metric in a store, in the order of steps."""
    history = MlflowClient(uri).get_metric_history(run_id, name)
    history = sorted(history, key=lambda metric: metric.step)
    return [(metric.step, metric.value) for metric in history]


def append_steps(run: RunDirectory, first: int, last: int, pause: float = 0.0) -> None:
    """Append metrics of the steps from first to last, and sleep `pause` seconds after each."""
    for step in range(first, last + 1):
        run.append_metrics(
            step, {"loss": step / 8, "reward": 0.5, "num_tokens": 7, "documents_seen": 64 * step}
        )
        time.sleep(pause)


def start_tracker(
    uri: str,
    run: RunDirectory,
    experiment: str = "tests",
    config: dict | None = None,
    **status: object,
) -> MlflowRecord:
    """Open the run in the store as training does; a second call on a directory is a resume."""
    run.write_config(config or CONFIG, ["loss=gspo"])
    run.set_status("running", 0, **status)
    tracker = MlflowRecord(uri, experiment)
    tracker.start(
        run.path, description_of(run.path), "Training has not started. Use tracking=none."
    )
    run.set_status("running", 0, mlflow=tracker.info)
    return tracker
