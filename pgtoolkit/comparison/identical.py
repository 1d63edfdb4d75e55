"""Runs that recorded the same numbers, to the last bit, or that read the same data."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pgtoolkit.comparison.compared_runs import RunGroup
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.runs.declared_metrics import OF_STEPS
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.history import CONTENTS
from pgtoolkit.runs.series import Columns, read_metrics

_CLOCK = {"seconds", *(metric.name for metric in OF_STEPS if metric.over == "rank 0")}
"""The columns in which two runs of the same numbers differ."""


def recorded_numbers(groups: Sequence[RunGroup]) -> list[str | None]:
    """Return a digest of all that the counted runs of each group recorded, run by run; None where
    no other group has the same.

    Times are left out. Files are read as a whole only of groups that agree in the columns that are
    read already.
    """
    quick = [_digest_of([run.columns for run in group.counted]) for group in groups]
    counts = Counter(quick)
    return [
        _digest_of([_all_columns(run) for run in group.counted])
        if group.counted and counts[digest] > 1
        else None
        for group, digest in zip(groups, quick, strict=True)
    ]


def are_identical(first: Run, second: Run) -> bool:
    """Return whether two runs recorded the same numbers, to the last bit, but for times."""
    if _digest_of([first.columns]) != _digest_of([second.columns]):
        return False
    return _digest_of([_all_columns(first)]) == _digest_of([_all_columns(second)])


def _all_columns(run: Run) -> Columns:
    """Return the columns of a run with all metrics of its file."""
    path = Path(run.path) / "metrics.jsonl"
    try:
        return {**run.columns, **read_metrics(path)} if path.is_file() else run.columns
    except PgtoolkitError:
        return run.columns


def _digest_of(runs: Sequence[Columns]) -> str:
    digest = hashlib.sha256()
    for columns in runs:
        for name in sorted(columns.keys() - _CLOCK):
            values = np.asarray(columns[name], float)
            digest.update(f"{name} {len(values)}".encode())
            digest.update(np.where(np.isnan(values), np.nan, values).tobytes())
    return digest.hexdigest()


def same_data(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with one path for data of the same contents, and notes on the paths that were
    replaced.

    The digests of data.json decide, where every run that names such data has them.
    """
    names = dict.fromkeys(
        name.removeprefix(CONTENTS)
        for run in runs
        for name in run.trained_with
        if name.startswith(CONTENTS)
    )
    changed: list[dict[str, object]] = [{} for _ in runs]
    notes = []
    for name in names:
        having = [run for run in runs if run.config.get(name) is not None]
        if any(CONTENTS + name not in run.trained_with for run in having):
            continue
        first: dict[object, object] = {}
        for run, values in zip(runs, changed, strict=True):
            if run.config.get(name) is None or name in run.trained_with:
                continue
            path = run.config[name]
            known = first.setdefault(run.trained_with[CONTENTS + name], path)
            if path != known:
                values[name] = known
                notes.append(f"{name}={path} has the contents of {known}, and counts as the same")
    same = [
        replace(run, config={**run.config, **values}) if values else run
        for run, values in zip(runs, changed, strict=True)
    ]
    return same, list(dict.fromkeys(notes))
