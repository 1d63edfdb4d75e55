"""Rows of a run's files as MLflow's metrics, a call's worth at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from pgtoolkit.tracking.store import parameter_name

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `by_documents/NAME`, with documents_seen in the place of the step."""

EVALUATION = "evaluation/{}/{}"
"""Name of a metric of an evaluation: of which set, and what."""

_NOT_MEASURED = ("step", "time", "documents", "set", "prompts", "completions_per_prompt")
_METRICS_PER_CALL = 1000  # MLflow's own limit


class RowFile:
    """A file of rows, each with its step, and how far it has been delivered.

    delivered: the steps whose rows are in the store, of evaluations each with its set before it. metrics_of: a row as
    MLflow's metrics.
    """

    def __init__(self, path: Path, delivered: Container, metrics_of: Callable[[dict], list]):
        self.offset = 0
        self.last_time: int | None = None  # of the last row, in milliseconds
        self.delivered = delivered
        self._path, self._metrics_of = path, metrics_of

    def next_batch(self) -> tuple[int, list, int]:
        """(rows, metrics of the rows from the current offset on, at most one call's worth; offset after them)."""
        rows, metrics, offset = 0, [], self.offset
        if not self._path.exists():
            return rows, metrics, offset
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                row = json.loads(line)
                known = (row["set"], row["step"]) if "set" in row else row["step"]
                new = self._metrics_of(row) if known not in self.delivered else []
                if metrics and len(metrics) + len(new) > _METRICS_PER_CALL:
                    break
                metrics += new
                rows += bool(new)
                offset += len(line)
                self.last_time = _milliseconds(row) or None
        return rows, metrics, offset


def metrics_of(row: dict) -> list:
    """A row of metrics.jsonl: all its metrics, and some of them once more over the documents seen."""
    metrics = _as_metrics(row, "", row["step"], row)
    if math.isfinite(row.get("documents_seen", math.nan)):
        metrics += _as_metrics(row, "by_documents/", int(row["documents_seen"]), BY_DOCUMENTS)
    return metrics


def evaluation_metrics_of(row: dict) -> list:
    """Of a row of evaluations.jsonl what it measured, as evaluation/SET/NAME, in whose names pass@k is pass_at_k."""
    measured = {name.replace("@", "_at_"): value for name, value in row.items() if name not in _NOT_MEASURED}
    return _as_metrics(row | measured, EVALUATION.format(row["set"], ""), row["step"], measured)


def _as_metrics(row: dict, prefix: str, step: int, names: Iterable[str]) -> list:
    """The finite values of these names, at the time of the row: a row that is sent again is the same row to MLflow."""
    from mlflow.entities import Metric

    return [
        Metric(parameter_name(prefix + name), row[name], _milliseconds(row), step)
        for name in names
        if name in row and name not in ("step", "time") and math.isfinite(row[name])
    ]


def _milliseconds(row):
    return round(1000 * row.get("time", 0))
