"""A metric's values over the steps of a run, in a number or as a smooth curve."""

from __future__ import annotations

from itertools import accumulate


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def final(values: list[float]) -> float:
    """The mean over the last tenth of a run's steps."""
    return mean(values[-_tenth(values) :])


def first(values: list[float]) -> float:
    """The mean over the first tenth."""
    return mean(values[: _tenth(values)])


def best(values: list[float]) -> float:
    """The highest mean over any tenth of a run's steps in a row: one lucky step is not a peak."""
    tenth, sums = _tenth(values), [0.0, *accumulate(values)]
    return max(end - begin for begin, end in zip(sums, sums[tenth:], strict=False)) / tenth


def smooth(values: list[float], half: int) -> list[float]:
    """The moving mean over each value and `half` of them on either side, twice.

    One pass leaves teeth where the metric has a period, such as the steps of one batch of rollouts.
    """
    for _ in range(2):
        sums = [0.0, *accumulate(values)]
        ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
        values = [(sums[end] - sums[begin]) / (end - begin) for begin, end in ends]
    return values


def _tenth(values: list[float]) -> int:
    return max(1, len(values) // 10)
