"""Means, spreads, and whether a difference is more than the seeds' noise."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""A difference with an adjusted p below this is called more than seed noise; intervals are of 1 - LEVEL."""

POWER = 0.8
"""With `seeds_needed` seeds of each a difference as large as the one seen is found with this probability."""

MOST_SEEDS = 1000
"""Where more would be needed, that is all that is said."""

_BCA_FROM = 5  # with fewer values its correction is a guess of its own
_RESAMPLES = 9999
_EQUAL = 1e-12
"""Values whose difference is a smaller share of the largest are equal but for rounding."""


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


class Comparisons:
    """Every pair of samples that have values, by a t-test; p is adjusted over all the pairs tested.

    len() is their number, and iterating gives a `Comparison` each. They are tested all at once, since a thousand
    configurations make half a million pairs; intervals are computed as they are asked for.
    """

    def __init__(self, samples: list[Sample]):
        self._values = {
            place: np.array([sample.values[seed] for seed in sorted(sample.values)])
            for place, sample in enumerate(samples)
            if sample.values
        }
        self._pairing = [_pairing(sample) for sample in samples]
        tested = [place for place, values in self._values.items() if values.size > 1]
        self._row = {place: number for number, place in enumerate(tested)}
        by_first = _p_values([self._values[place] for place in tested], [self._pairing[place] for place in tested])
        ends = np.cumsum([row.size for row in by_first])[:-1]
        self._p, self._adjusted = by_first, np.split(holm(np.concatenate(by_first)), ends) if tested else []

    def __len__(self) -> int:
        return len(self._values) * (len(self._values) - 1) // 2

    def __iter__(self) -> Iterator[Comparison]:
        for first in self._values:
            yield from self.against(first)

    @property
    def tested(self) -> int:
        """How many pairs have a p."""
        return sum(int((row == row).sum()) for row in self._p)

    @property
    def paired(self) -> set[bool]:
        """Whether there are pairs that are paired by seed, and such that are not."""
        kinds = Counter(self._pairing[place] for place in self._values)
        return {True for count in kinds.values() if count > 1} | {False for _ in [*kinds][1:]}

    def against(self, first: int) -> list[Comparison]:
        """The pairs with the sample at this place as the first."""
        return [self._pair(first, second) for second in self._values if first in self._values and second > first]

    def _pair(self, first: int, second: int) -> Comparison:
        """Paired where both have the same seeds and so the same prompts (Student's test), else by Welch's test."""
        one, other = self._values[first], self._values[second]
        paired = self._pairing[first] == self._pairing[second]
        found = Comparison(first, second, (one.size, other.size), paired, float(other.mean() - one.mean()))
        if min(found.counts) > 1:
            place = self._row[second] - self._row[first] - 1
            p, adjusted = self._p[self._row[first]][place], self._adjusted[self._row[first]][place]
            noise = [other - one] if paired else [one, other]
            if p == p:
                found.p, found.adjusted_p = float(p), float(adjusted)
            if max(map(np.ptp, noise)) > _EQUAL * max(abs(one).max(), abs(other).max()):
                found.interval = _interval(one, other, paired)
                found.seeds_needed = _seeds_needed(found.difference, [float(values.var(ddof=1)) for values in noise])
        return found


def holm(p: np.ndarray) -> np.ndarray:
    """p adjusted for how many there are, NaN of none (Scandinavian Journal of Statistics 6, 1979): the chance of even
    one false difference among all pairs stays below LEVEL, so that the best may be picked after looking."""
    order = np.argsort(p, kind="stable")[: np.count_nonzero(p == p)]
    adjusted = np.full(p.size, np.nan)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(order.size, 0, -1) * p[order]))
    return adjusted


def _pairing(sample: Sample) -> tuple:
    """What two samples need to have in common to be paired."""
    return tuple(sorted(sample.values)), repr(sample.prompts)


def _p_values(samples: list[np.ndarray], pairings: list[tuple]) -> list[np.ndarray]:
    """Of each sample the p of its difference from each of the later ones; NaN where no seed differs from another."""
    from scipy.special import stdtr

    size, mean = np.array([x.size for x in samples]), np.array([x.mean() for x in samples])
    share = np.array([x.var(ddof=1) for x in samples]) / size
    spread, largest = np.array([np.ptp(x) for x in samples]), np.array([abs(x).max() for x in samples])
    kinds = {pairing: number for number, pairing in enumerate(dict.fromkeys(pairings))}
    kind = np.array([kinds[pairing] for pairing in pairings])
    rows = []
    for i in range(len(samples)):
        later = slice(i + 1, None)
        difference, variance = mean[later] - mean[i], share[later] + share[i]
        with np.errstate(all="ignore"):  # of samples without spread
            freedom = variance**2 / (share[i] ** 2 / (size[i] - 1) + share[later] ** 2 / (size[later] - 1))
            noise = np.maximum(spread[later], spread[i])
            if (same := np.flatnonzero(kind[later] == kind[i])).size:
                differences = np.array([samples[i + 1 + place] for place in same]) - samples[i]
                variance[same], freedom[same] = differences.var(1, ddof=1) / size[i], size[i] - 1
                noise[same] = np.ptp(differences, axis=1)
            p = 2 * stdtr(freedom, -abs(difference) / np.sqrt(variance))
        equal = np.where(abs(difference) <= _EQUAL * largest[i], 1.0, np.nan)
        rows.append(np.where(noise <= _EQUAL * np.maximum(largest[later], largest[i]), equal, p))
    return rows


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

    for counts in (np.arange(2, 33), np.arange(33, MOST_SEEDS + 1)):  # most comparisons need few
        freedom = (counts - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
        # Beyond 40 standard errors the difference is found, and the distribution is no longer computed well.
        shift = np.minimum(abs(difference) / np.sqrt(sum(variances) / counts), 40.0)
        beyond = t.isf(LEVEL / 2, freedom)
        enough = counts[nct.sf(beyond, freedom, shift) + nct.cdf(-beyond, freedom, shift) >= POWER]
        if enough.size:
            return int(enough[0])
    return MOST_SEEDS + 1
