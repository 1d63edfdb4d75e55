"""Means, spreads, and whether a difference is more than the seeds' noise."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import combinations

LEVEL = 0.05
"""A difference with an adjusted p below this is called more than seed noise."""


@dataclass
class Comparison:
    """Two samples, compared. t, p and adjusted_p are None where `welch` says nothing, or a sample has one value."""

    first: int
    second: int
    counts: tuple[int, int]
    difference: float
    t: float | None = None
    p: float | None = None
    adjusted_p: float | None = None


def mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """(mean, sample standard deviation with n - 1), None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def compare_all(samples: list[list[float]]) -> list[Comparison]:
    """Every pair of samples that have values, by Welch's t-test, p adjusted over all the pairs tested.

    The adjustment is Holm's (Scandinavian Journal of Statistics 6, 1979): the chance of even one false difference
    among all pairs stays below LEVEL, so that the highest mean may be picked after looking.
    """
    found = []
    for (i, one), (j, other) in combinations([(i, s) for i, s in enumerate(samples) if s], 2):
        comparison = Comparison(i, j, (len(one), len(other)), statistics.fmean(one) - statistics.fmean(other))
        if min(len(one), len(other)) > 1:
            comparison.t, comparison.p = welch(one, other)
        found.append(comparison)
    tested = sorted((c for c in found if c.p is not None), key=lambda c: c.p)
    highest = 0.0
    for rank, comparison in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * comparison.p))
        comparison.adjusted_p = highest
    return found


def welch(one: list[float], other: list[float]) -> tuple[float, float] | tuple[None, None]:
    """(t, two-sided p) of Welch's t-test, for samples of at least two values each (Biometrika 34, 1947).

    (None, None) for two different samples without any spread: what their noise is cannot be told.
    """
    first, second = (statistics.variance(sample) / len(sample) for sample in (one, other))
    difference = statistics.fmean(one) - statistics.fmean(other)
    if first + second == 0:
        return (0.0, 1.0) if difference == 0 else (None, None)
    t = difference / math.sqrt(first + second)
    freedom = (first + second) ** 2 / (first**2 / (len(one) - 1) + second**2 / (len(other) - 1))
    from scipy.special import stdtr  # takes half a second, which sweeps without seeds need not pay

    return t, 2 * float(stdtr(freedom, -abs(t)))
