"""The load of the machine while a run goes on: MLflow's own monitors, kept in the run directory like all metrics."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from pgtoolkit.runs.records import read_metrics, write_metrics

_SECONDS_BETWEEN_SAMPLES = 10.0

_log = logging.getLogger(__name__)


class SystemMetrics:
    """Appends a row every ten seconds from a thread of its own, from now until `stop`.

    path: becomes JSON lines of `step` (which counts the rows, on a resume from where it was), `time`, and what
    MLflow's monitors of CPU, memory, disk, network and, with nvidia-ml-py installed, GPUs give.
    """

    def __init__(self, path: Path):
        # A row torn by a kill would swallow the next one.
        rows = read_metrics(path)
        write_metrics(path, rows)
        self._path, self._step = path, rows[-1]["step"] + 1 if rows else 0
        self._monitors = _monitors()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="system metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write a last row and end the thread."""
        self._stopped.set()
        self._thread.join()

    def _sample_until_stopped(self):
        try:
            while not self._stopped.wait(_SECONDS_BETWEEN_SAMPLES):
                self._sample()
            self._sample()
        except Exception as error:  # the machine's counters are worth no run
            _log.warning("system metrics end here: %s", error)

    def _sample(self):
        row = {"step": self._step, "time": round(time.time(), 3)}
        for monitor in self._monitors:
            monitor.collect_metrics()
            row |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        with self._path.open("a+", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._step += 1


def _monitors():
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception as error:  # no driver, or its Python package is not installed: MLflow says it in several ways
        _log.debug("no GPU is measured: %s", error)
    return monitors
