"""Describes a run to trackers, from its directory alone: its settings, and its rows as points."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.system.plain_files import JsonObject

LONGEST_TAG = 4000

_OF_COMPLETIONS = ("completion_length", "truncated_fraction", "tokens_per_second")

BY_DOCUMENTS = ("reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction", "entropy")
"""Metrics that are logged a second time as `NAME_by_documents`, over documents_seen instead of the
step.

The name comes first, since MLflow cuts the titles of its charts after a few letters.
"""

EVALUATION = "evaluation/{}/{}"
"""The name of an evaluation's metric, of its set and its number."""

_HELD_OUT = "pass_at_1"
_MAIN_NAME = "Main/{} {}"
_MAIN = (*BY_DOCUMENTS[:-1], _HELD_OUT, "grad_norm", *_OF_COMPLETIONS)
_PASS_OF_SET = re.compile(EVALUATION.format("(.*)", _HELD_OUT))


def main_name(metric: str) -> str | None:
    """Return the name by which MLflow gets a metric a second time; None for most.

    Its charts stand in sections by the part of a name before the slash: in the order of these
    parts, capital letters first, and behind them all those without a slash. In a section names are
    sorted.
    """
    of_set = _PASS_OF_SET.fullmatch(metric)
    if of_set:
        return _MAIN_NAME.format(_MAIN.index(_HELD_OUT), f"{of_set[1]} {_HELD_OUT}")
    return _MAIN_NAME.format(_MAIN.index(metric), metric) if metric in _MAIN else None


_NOT_MEASURED = ("step", "time", "documents", "set", "prompts", "completions_per_prompt")
_METRICS_PER_CALL = 500  # MLflow takes 1000, and gets each of _MAIN twice
_BEGIN = re.compile(rb'{"step": (\d+), "time": (\d+\.\d+),')


class Dataset(NamedTuple):
    """The prompts or rollouts that a run trains on.

    digest: of the files, or of the settings that make the prompts. source: the path of the files;
    None where the prompts are made.
    """

    name: str
    digest: str
    source: str | None


class Description(NamedTuple):
    """The description of a run that trackers get, without secrets.

    settings: the configuration by dotted keys, with numbers as numbers.
    params: the same as texts, as MLflow takes them.
    note: the equation of the loss, in Markdown; empty where there is none.
    """

    run_name: str
    settings: dict[str, str | float]
    params: dict[str, str]
    tags: dict[str, str]
    dataset: Dataset | None = None
    note: str = ""


class Point(NamedTuple):
    """Metrics of a row at one position of an axis.

    position: a step, or with `over_documents` a number of documents.
    time: of the row, in milliseconds; so a row that is sent to MLflow twice counts once.
    """

    position: int
    time: int
    metrics: dict[str, float]
    over_documents: bool = False


class RowFile:
    """A file of rows, and how much of it was delivered to a tracker.

    delivered: for each set of prompts, or None for metrics, the last step that the tracker has.
    """

    def __init__(self, path: Path, delivered: Mapping[str | None, int]):
        self.offset = 0
        self.last_time: int | None = None  # of the last row, in milliseconds
        self._path = path
        self._delivered = delivered

    def next_batch(self) -> tuple[int, list[Point], int]:
        """Return rows from the current offset on, no more than a tracker takes at once.

        Returns the number of rows with new points, their points, and the offset after them.
        """
        num_rows = 0
        num_metrics = 0
        points: list[Point] = []
        offset = self.offset
        if not self._path.exists():
            return num_rows, points, offset
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                time, new_points = self._new_points(line)
                num_metrics += sum(len(point.metrics) for point in new_points)
                if points and num_metrics > _METRICS_PER_CALL:
                    break
                points += new_points
                num_rows += bool(new_points)
                offset += len(line)
                self.last_time = time or None
        return num_rows, points, offset

    def _new_points(self, line: bytes) -> tuple[int, list[Point]]:
        """Return the time of a row, in milliseconds, and its points that are not delivered yet."""
        begin = _BEGIN.match(line)
        if begin and int(begin[1]) <= self._delivered.get(None, -1):
            # Not parsed, since there may be half a million of them.
            return _milliseconds({"time": float(begin[2])}), []
        row = json.loads(line)
        is_new = row["step"] > self._delivered.get(row.get("set"), -1)
        return _milliseconds(row), _points_of(row) if is_new else []


def _points_of(row: JsonObject) -> list[Point]:
    """Return the points of a row of metrics.jsonl or evaluations.jsonl that have a finite metric.

    Some metrics of a step are also over the documents seen.
    """
    time = _milliseconds(row)
    if "set" in row:
        points = [Point(row["step"], time, _evaluation_values_of(row))]
    else:
        points = [Point(row["step"], time, _values_of(row, row))]
        if "documents_seen" in row:
            by_documents = {
                f"{name}_by_documents": value
                for name, value in _values_of(row, BY_DOCUMENTS).items()
            }
            points.append(Point(row["documents_seen"], time, by_documents, over_documents=True))
    return [point for point in points if point.metrics]


def _evaluation_values_of(row: JsonObject) -> dict[str, float]:
    """Return the values of a row of evaluations.jsonl, named evaluation/SET/NAME.

    In the names pass@k becomes pass_at_k.
    """
    measured = {
        name.replace("@", "_at_"): value for name, value in row.items() if name not in _NOT_MEASURED
    }
    return {
        EVALUATION.format(row["set"], name): value
        for name, value in _values_of(measured, measured).items()
    }


def _values_of(row: JsonObject, names: Iterable[str]) -> dict[str, float]:
    """Return the finite values of these names, as far as the row has them."""
    return {
        name: row[name]
        for name in names
        if name in row and name not in ("step", "time") and math.isfinite(row[name])
    }


def _milliseconds(row: JsonObject) -> int:
    return round(1000 * row.get("time", 0))
