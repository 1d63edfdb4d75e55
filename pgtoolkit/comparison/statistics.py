"""Means, spreads, and whether a difference is more than the seeds' noise."""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass
from itertools import combinations

import numpy as np

LEVEL = 0.05
"""A difference with an adjusted p below this is called more than seed noise; intervals are of 1 - LEVEL."""

POWER = 0.8
"""With `seeds_needed` seeds of each a difference as large as the one seen is found with this probability."""

MOST_SEEDS = 1000
"""Where more would be needed, that is all that is said."""

_BCA_FROM = 5  # with fewer values its correction is a guess of its own
_RESAMPLES = 9999


@dataclass(frozen=True)
class Sample:
    """What the seeds of one configuration reached. prompts: what else than the seed decides about their prompts."""

    values: dict[int, float]
    prompts: object = None


@dataclass
class Comparison:
    """Two samples, compared.

    paired: by seed, or else as independent samples. difference: of the means, second - first. interval: of it, by the
    bootstrap. seeds_needed: of each, see `_seeds_needed`; MOST_SEEDS + 1 stands for more than those. p is of a t-test.
    interval, p, adjusted_p and seeds_needed are None where a sample has one value, or no seed differs from another.
    """

    first: int
    second: int
    counts: tuple[int, int]
    paired: bool
    difference: float
    interval: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    seeds_needed: int | None = None


def mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """(mean, sample standard deviation with n - 1), None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def compare_all(samples: list[Sample]) -> list[Comparison]:
    """Every pair of samples that have values, by a t-test, p adjusted over all the pairs tested.

    The adjustment is Holm's (Scandinavian Journal of Statistics 6, 1979): the chance of even one false difference
    among all pairs stays below LEVEL, so that the best may be picked after looking.
    """
    pairs = combinations([(place, sample) for place, sample in enumerate(samples) if sample.values], 2)
    found = [_compared(i, j, one, other) for (i, one), (j, other) in pairs]
    tested = sorted((c for c in found if c.p is not None), key=lambda c: c.p)
    highest = 0.0
    for rank, comparison in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * comparison.p))
        comparison.adjusted_p = highest
    return found


def _compared(i: int, j: int, one: Sample, other: Sample) -> Comparison:
    """Paired where both have the same seeds and so the same prompts (Student's test), else by Welch's test."""
    paired = one.values.keys() == other.values.keys() and one.prompts == other.prompts
    first = np.array(list(one.values.values()))
    second = np.array([other.values[seed] for seed in one.values] if paired else list(other.values.values()))
    found = Comparison(i, j, (first.size, second.size), paired, float(second.mean() - first.mean()))
    noise = [second - first] if paired else [first, second]
    if min(found.counts) < 2:
        return found
    if max(map(np.ptp, noise)) <= 1e-12 * max(abs(first).max(), abs(second).max()):
        found.p = 1.0 if abs(found.difference) <= 1e-12 * abs(first).max() else None
        return found
    from scipy.stats import ttest_ind, ttest_rel  # takes a second, which sweeps without seeds need not pay

    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of one sample without spread
        test = ttest_rel(second, first) if paired else ttest_ind(second, first, equal_var=False)
        found.p = float(test.pvalue)
        found.interval = _interval(first, second, paired)
    found.seeds_needed = _seeds_needed(found.difference, [float(one.var(ddof=1)) for one in noise])
    return found


def _interval(first: np.ndarray, second: np.ndarray, paired: bool) -> tuple[float, float]:
    """Bootstrap interval of the difference of means: BCa (Efron, JASA 82, 1987) from five seeds on, else percentiles.

    The same values give the same interval. What an interval of few seeds is worth: `worth` in terminal.py.
    """
    from scipy.stats import bootstrap

    resampled = bootstrap(
        (first, second),
        lambda x, y, axis: y.mean(axis) - x.mean(axis),
        paired=paired,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=1 - LEVEL,
        method="BCa" if min(first.size, second.size) >= _BCA_FROM else "percentile",
        rng=np.random.default_rng(0),
    )
    return tuple(map(float, resampled.confidence_interval))


def _seeds_needed(difference: float, variances: list[float]) -> int:
    """Seeds of each with which a t-test at LEVEL finds this difference with probability POWER.

    variances: of both samples, or of the differences alone where they are paired. It takes them and the difference as
    the true ones and the values as normal, and counts no other pair (arXiv 1806.08295).
    """
    from scipy.stats import nct, t

    counts = np.arange(2, MOST_SEEDS + 1)
    freedom = (counts - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
    # Beyond 40 standard errors the difference is found, and the distribution is no longer computed well.
    shift = np.minimum(abs(difference) / np.sqrt(sum(variances) / counts), 40.0)
    beyond = t.isf(LEVEL / 2, freedom)
    enough = counts[nct.sf(beyond, freedom, shift) + nct.cdf(-beyond, freedom, shift) >= POWER]
    return int(enough[0]) if enough.size else MOST_SEEDS + 1
