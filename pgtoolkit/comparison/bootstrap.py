"""The resamples of a bootstrap, all of them where they are few, and the ends of its intervals."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

MOST_RESAMPLES = 100_000
"""Of samples that have at most this number of different resamples all of them are taken, each
weighted by the number of ways in which it is drawn. These are samples of up to 10 values, and two
of 5."""

RANDOM_RESAMPLES = 9999
"""Of larger samples this number of random resamples is taken, which are always the same."""


def resampled(samples: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (of each sample what is drawn from it, (resamples, values); weights, (resamples,)).

    Each resample draws as many values as there are from each of the samples, with replacement.
    """
    sizes = [sample.size for sample in samples]
    numbers = [math.comb(2 * size - 1, size) for size in sizes]
    if math.prod(numbers) > MOST_RESAMPLES:
        random = np.random.default_rng(0)
        places = [random.integers(size, size=(RANDOM_RESAMPLES, size)) for size in sizes]
        weights = np.ones(RANDOM_RESAMPLES)
    else:
        every = [_every_resample(size) for size in sizes]
        combined = np.unravel_index(np.arange(math.prod(numbers)), numbers)
        draws = list(zip(every, combined, strict=True))
        places = [of_sample[chosen] for (of_sample, _), chosen in draws]
        weights = np.prod([ways[chosen] for (_, ways), chosen in draws], axis=0)
    return [sample[drawn] for sample, drawn in zip(samples, places, strict=True)], weights


@functools.lru_cache
def _every_resample(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the different resamples of `size` values (resamples, size), as places among them; in
    how many ways each is drawn (resamples,))."""
    chosen = itertools.combinations_with_replacement(range(size), size)
    places = np.fromiter(itertools.chain.from_iterable(chosen), np.intp).reshape(-1, size)
    factorials = np.array([math.factorial(count) for count in range(size + 1)], float)
    ways = np.full(len(places), factorials[size])
    for place in range(size):
        ways /= factorials[(places == place).sum(1)]
    return places, ways


def ends(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> tuple[float, float]:
    """Return (low, high) of weighted values by two shares of their weights.

    At `low` and below it is at least the first share, at `high` and below it more than the second.
    So a share that falls between two values widens the interval, and negated values have the same.
    """
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    first, second = np.multiply(shares, cumulative[-1])
    low = np.searchsorted(cumulative, first)
    high = min(np.searchsorted(cumulative, second, side="right"), values.size - 1)
    return float(values[order[low]]), float(values[order[high]])
