"""Describes a run to trackers, from its directory alone: its settings, and its rows as metrics."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pgtoolkit.runs.records import Row
from pgtoolkit.tracking.store import parameter_name

if TYPE_CHECKING:
    from mlflow.entities import Metric

Item = TypeVar("Item")

LONGEST_TAG = 4000

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `NAME_by_documents`, over documents_seen instead of the
step.

The name comes first, since MLflow cuts the titles of its charts after a few letters.
"""

EVALUATION = "evaluation/{}/{}"
"""The name of an evaluation's metric, of its set and its number."""

_NOT_MEASURED = ("step", "time", "documents", "set", "prompts", "completions_per_prompt")
_METRICS_PER_CALL = 1000  # MLflow's own limit
_BEGIN = re.compile(rb'{"step": (\d+), "time": (\d+\.\d+),')


class Description(NamedTuple):
    """The description of a run that trackers get, without secrets.

    settings: the configuration by dotted keys, with numbers as numbers.
    params: the same as texts, as MLflow takes them.
    """

    run_name: str
    settings: dict[str, str | float]
    params: dict[str, str]
    tags: dict[str, str]


class RowFile(Generic[Item]):
    """A file of rows, and how much of it was delivered to a tracker.

    delivered: for each set of prompts, or None for metrics, the last step that the tracker has.
    items_of: turns a row into the items that the tracker takes.
    """

    def __init__(
        self,
        path: Path,
        delivered: Mapping[str | None, int],
        items_of: Callable[[Row], list[Item]],
    ):
        self.offset = 0
        self.last_time: int | None = None  # of the last row, in milliseconds
        self._path = path
        self._delivered = delivered
        self._items_of = items_of

    def next_batch(self) -> tuple[int, list[Item], int]:
        """Return rows from the current offset on, no more than a tracker takes at once.

        Returns the number of rows with new items, their items, and the offset after them.
        """
        num_rows = 0
        items: list[Item] = []
        offset = self.offset
        if not self._path.exists():
            return num_rows, items, offset
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                time, new_items = self._new_items(line)
                if items and len(items) + len(new_items) > _METRICS_PER_CALL:
                    break
                items += new_items
                num_rows += bool(new_items)
                offset += len(line)
                self.last_time = time or None
        return num_rows, items, offset

    def _new_items(self, line: bytes) -> tuple[int, list[Item]]:
        """Return the time of a row, in milliseconds, and its items that are not delivered yet."""
        begin = _BEGIN.match(line)
        if begin and int(begin[1]) <= self._delivered.get(None, -1):
            # Not parsed, since there may be half a million of them.
            return _milliseconds({"time": float(begin[2])}), []
        row = json.loads(line)
        is_new = row["step"] > self._delivered.get(row.get("set"), -1)
        return _milliseconds(row), self._items_of(row) if is_new else []


def metrics_of(row: Row) -> list[Metric]:
    """Return the metrics of a row of metrics.jsonl, some of them also over the documents seen."""
    metrics = _as_metrics(row, row["step"], values_of(row, row))
    if "documents_seen" in row:
        metrics += _as_metrics(row, row["documents_seen"], by_documents_of(row))
    return metrics


def evaluation_metrics_of(row: Row) -> list[Metric]:
    """Return the metrics of a row of evaluations.jsonl, by `evaluation_values_of`."""
    return _as_metrics(row, row["step"], evaluation_values_of(row))


def evaluation_values_of(row: Row) -> dict[str, float]:
    """Return the values of a row of evaluations.jsonl, named evaluation/SET/NAME.

    In the names pass@k becomes pass_at_k.
    """
    measured = {
        name.replace("@", "_at_"): value for name, value in row.items() if name not in _NOT_MEASURED
    }
    return {
        EVALUATION.format(row["set"], name): value
        for name, value in values_of(measured, measured).items()
    }


def by_documents_of(row: Row) -> dict[str, float]:
    """Return the values that are logged over the documents seen, under their names there."""
    return {f"{name}_by_documents": value for name, value in values_of(row, BY_DOCUMENTS).items()}


def values_of(row: Row, names: Iterable[str]) -> dict[str, float]:
    """Return the finite values of these names, as far as the row has them."""
    return {
        name: row[name]
        for name in names
        if name in row and name not in ("step", "time") and math.isfinite(row[name])
    }


def _as_metrics(row: Row, step: int, values: dict[str, float]) -> list[Metric]:
    """Return MLflow's metrics at the time of the row, so that a row sent twice counts once."""
    from mlflow.entities import Metric

    time = _milliseconds(row)
    return [Metric(parameter_name(name), value, time, step) for name, value in values.items()]


def _milliseconds(row: Row) -> int:
    return round(1000 * row.get("time", 0))
