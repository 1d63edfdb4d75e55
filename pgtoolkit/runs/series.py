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
    """The moving mean over each value and `half` of them on either side, twice; half: less than half of the values.

    One pass leaves teeth where the metric has a period, such as the steps of one batch of rollouts.
    """
    import numpy as np

    window = np.ones(2 * half + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    for _ in range(2):
        values = np.convolve(values, window, "same") / counts
    return values.tolist()


def _tenth(values: list[float]) -> int:
    return max(1, len(values) // 10)
