"""Curves of several seeds as one: their mean and range against the documents seen or the time."""

from __future__ import annotations

from bisect import bisect_left

from pgtoolkit.comparison.runs import Run
from pgtoolkit.runs.series import smooth

POINTS = 120
"""How many points a mean curve has."""


def curve(run: Run, metric: str, axis: str) -> tuple[list[float], list[float]]:
    """(x, y) of a run, y smoothed over about a twentieth of its points; axis: documents_seen or seconds."""
    points = [(row[axis], row[metric]) for row in run.rows if axis in row and metric in row]
    if not points:
        return [], []
    x, y = (list(side) for side in zip(*points, strict=True))
    return x, smooth(y, len(y) // 80)


def mean_curve(runs: list[Run], metric: str, axis: str) -> list[tuple[float, float, float, float]]:
    """(x, mean, lowest, highest run), as far as all the runs have been."""
    curves = [(x, y) for x, y in (curve(run, metric, axis) for run in runs) if x]
    if not curves:
        return []
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    count = POINTS if high > low else 1
    places = [low + (high - low) * i / max(1, count - 1) for i in range(count)]
    points = []
    for place in places:
        values = [_at(x, y, place) for x, y in curves]
        points.append((place, sum(values) / len(values), min(values), max(values)))
    return points


def _at(x, y, place):
    """Linear interpolation; the ends go on as they are."""
    after = bisect_left(x, place)
    if after == 0:
        return y[0]
    if after == len(x):
        return y[-1]
    share = (place - x[after - 1]) / ((x[after] - x[after - 1]) or 1)
    return y[after - 1] + share * (y[after] - y[after - 1])
