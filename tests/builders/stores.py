"""Run directories that are followed into MLflow stores, for the tests."""

from __future__ import annotations

import socket
import time

from mlflow import MlflowClient

from pgtoolkit.tracking.mlflow_run import MlflowTracker

CONFIG = {
    "seed": 1,
    "loss": {"name": "gspo", "epsilon_low": 3e-4},
    "aggregation": {"mode": "sample_mean"},
}


def metric_history(uri, run_id, name="loss"):
    found = MlflowClient(uri).get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in sorted(found, key=lambda metric: metric.step)]


def append_steps(run, first, last, pause=0.0):
    for step in range(first, last + 1):
        run.append_metrics(
            step, {"loss": step / 8, "reward": 0.5, "num_tokens": 7, "documents_seen": 64 * step}
        )
        time.sleep(pause)


def start_tracker(uri, run, experiment="tests", config=None, **keywords):
    """Open the run as training does. A second call on the same directory is a resume."""
    run.write_config(config or CONFIG, ["loss=gspo"])
    run.set_status("running", 0, **keywords)
    tracker = MlflowTracker(uri, experiment)
    tracker.start(run.path, "Training has not started. Use tracking=none.")
    run.set_status("running", 0, mlflow=tracker.info)
    return tracker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
