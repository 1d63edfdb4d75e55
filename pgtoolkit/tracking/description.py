"""What trackers are told of a run, from its directory alone: its settings, and rows as metrics."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.runs import records
from pgtoolkit.runs.provenance import code_of, commit_text
from pgtoolkit.runs.records import leaves
from pgtoolkit.tracking.store import flatten, parameter_name, text_of

_LONGEST_TAG = 4000

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `NAME_by_documents`, with documents_seen in the place of
the step.

The name comes first, since MLflow cuts the titles of its charts after a few letters.
"""

EVALUATION = "evaluation/{}/{}"
"""Name of a metric of an evaluation: of which set, and which number."""

_NOT_MEASURED = ("step", "time", "documents", "set", "prompts", "completions_per_prompt")
_METRICS_PER_CALL = 1000  # MLflow's own limit
_BEGIN = re.compile(rb'{"step": (\d+), "time": (\d+\.\d+),')


class Description(NamedTuple):
    """What trackers are told of one run, without secrets.

    settings: the configuration by dotted keys, numbers as numbers. params: the same as MLflow takes
        it, as texts.
    """

    run_name: str
    settings: dict[str, str | float]
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
        # the column "Version" of MLflow's table
        "mlflow.source.git.commit": code[0][0] if code else None,
        "resumed": " ".join(start["time"] for start in provenance.get("resumed", [])) or None,
    }
    # In a sweep the folder's name ends with digits that stand for the configuration; here the
    # parameters say it.
    folder = re.sub("-[0-9a-f]{8}$", "", run_dir.name) if status.get("sweep") else run_dir.name
    return Description(
        run_name=settings.get("tracking.run_name") or folder,
        settings=_typed_settings(config),
        params=flatten(config),
        tags={
            key: text_of(key, value, _LONGEST_TAG)
            for key, value in tags.items()
            if value is not None
        },
    )


def _typed_settings(config: dict) -> dict[str, str | float]:
    """Return what tells runs apart by its keys: numbers and truth values as they are, the rest as
    texts."""
    pairs = ((key, value) for key, value in leaves(config) if changes_learning(key, config))
    return {
        key: value if isinstance(value, int | float) else text_of(key, value)
        for key, value in pairs
    }


class RowFile:
    """A file of rows, each with its step, and how far it has been delivered.

    delivered: {set of prompts, None for metrics: the last step that the store has}. metrics_of: a
        row as what the
    tracker takes.
    """

    def __init__(
        self, path: Path, delivered: dict[str | None, int], metrics_of: Callable[[dict], list]
    ):
        self.offset = 0
        self.last_time: int | None = None  # of the last row, in milliseconds
        self._path, self._delivered, self._metrics_of = path, delivered, metrics_of

    def next_batch(self) -> tuple[int, list, int]:
        """(rows, metrics of the rows from the current offset on, at most one call's worth; offset
        after them)."""
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
                    new = (
                        self._metrics_of(row)
                        if row["step"] > self._delivered.get(row.get("set"), -1)
                        else []
                    )
                if metrics and len(metrics) + len(new) > _METRICS_PER_CALL:
                    break
                metrics += new
                rows += bool(new)
                offset += len(line)
                self.last_time = _milliseconds(row) or None
        return rows, metrics, offset


def metrics_of(row: dict) -> list:
    """A row of metrics.jsonl: all its metrics, and some of them once more over the documents
    seen."""
    metrics = _as_metrics(row, row["step"], values_of(row, row))
    if "documents_seen" in row:
        metrics += _as_metrics(row, row["documents_seen"], by_documents_of(row))
    return metrics


def evaluation_metrics_of(row: dict) -> list:
    """A row of evaluations.jsonl: see `evaluation_values_of`."""
    return _as_metrics(row, row["step"], evaluation_values_of(row))


def evaluation_values_of(row: dict) -> dict[str, float]:
    """Return what a row of evaluations.jsonl measured, as evaluation/SET/NAME, in whose names
    pass@k is pass_at_k."""
    measured = {
        name.replace("@", "_at_"): value for name, value in row.items() if name not in _NOT_MEASURED
    }
    return {
        EVALUATION.format(row["set"], name): value
        for name, value in values_of(measured, measured).items()
    }


def by_documents_of(row: dict) -> dict[str, float]:
    """Return the values that are logged over the documents seen, under their names there."""
    return {f"{name}_by_documents": value for name, value in values_of(row, BY_DOCUMENTS).items()}


def values_of(row: dict, names: Iterable[str]) -> dict[str, float]:
    """Return the finite values of these names, as far as the row has them."""
    return {
        name: row[name]
        for name in names
        if name in row and name not in ("step", "time") and math.isfinite(row[name])
    }


def _as_metrics(row: dict, step: int, measured: dict[str, float]) -> list:
    """Return MLflow's metrics at the time of the row: a row that is sent again is the same row to
    MLflow."""
    from mlflow.entities import Metric

    time = _milliseconds(row)
    return [Metric(parameter_name(name), value, time, step) for name, value in measured.items()]


def _milliseconds(row):
    return round(1000 * row.get("time", 0))
