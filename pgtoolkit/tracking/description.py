"""What MLflow is told of a run, from its directory alone: texts, and rows as metrics."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.config.own_code import as_typed
from pgtoolkit.runs import records
from pgtoolkit.runs.provenance import code_of, commit_text
from pgtoolkit.runs.records import leaves
from pgtoolkit.tracking.store import flatten, parameter_name, text_of

_LONGEST_TAG = 4000

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `by_documents/NAME`, with documents_seen in the place of the step."""

EVALUATION = "evaluation/{}/{}"
"""Name of a metric of an evaluation: of which set, and which number."""

_NOT_MEASURED = ("step", "time", "documents", "set", "prompts", "completions_per_prompt")
_METRICS_PER_CALL = 1000  # MLflow's own limit
_BEGIN = re.compile(rb'{"step": (\d+), "time": (\d+\.\d+),')


class Description(NamedTuple):
    """Of one run, as texts."""

    run_name: str
    params: dict[str, str]
    tags: dict[str, str]


def description_of(run_dir: Path) -> Description:
    """The description of a run that has written its configuration."""
    config, _ = records.read_config(run_dir)
    status = records.read_status(run_dir)
    provenance = records.known_provenance(run_dir)
    settings, code = as_typed(dict(leaves(config))), code_of(provenance)
    tags = {
        "family": settings.get("loss.name"),
        "aggregation": settings.get("aggregation.reducer") or settings.get("aggregation.mode"),
        "seed": settings.get("seed"),
        "sweep": status.get("sweep"),
        "parent": status.get("parent"),
        "run_directory": str(run_dir),
        "pgtk.id": status.get("id"),
        "git_commit": " ".join(commit_text(*pair) for pair in code) or None,
        "mlflow.source.git.commit": code[0][0] if code else None,  # the column "Version" of MLflow's table
        "resumed": " ".join(start["time"] for start in provenance.get("resumed", [])) or None,
    }
    # In a sweep the folder's name ends with digits that stand for the configuration; here the parameters say it.
    folder = re.sub("-[0-9a-f]{8}$", "", run_dir.name) if status.get("sweep") else run_dir.name
    return Description(
        run_name=settings.get("tracking.run_name") or folder,
        params=flatten(config),
        tags={key: text_of(key, value, _LONGEST_TAG) for key, value in tags.items() if value is not None},
    )


class RowFile:
    """A file of rows, each with its step, and how far it has been delivered.

    delivered: {set of prompts, None for metrics: the last step that the store has}. metrics_of: a row as MLflow's
    metrics.
    """

    def __init__(self, path: Path, delivered: dict[str | None, int], metrics_of: Callable[[dict], list]):
        self.offset = 0
        self.last_time: int | None = None  # of the last row, in milliseconds
        self._path, self._delivered, self._metrics_of = path, delivered, metrics_of

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
                begin = _BEGIN.match(line)
                if begin and int(begin[1]) <= self._delivered.get(None, -1):
                    row, new = {"time": float(begin[2])}, []  # of half a million no more is read
                else:
                    row = json.loads(line)
                    new = self._metrics_of(row) if row["step"] > self._delivered.get(row.get("set"), -1) else []
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
    if "documents_seen" in row:
        metrics += _as_metrics(row, "by_documents/", row["documents_seen"], BY_DOCUMENTS)
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
