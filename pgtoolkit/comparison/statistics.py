"""Means, spreads, and whether a difference is more than noise, less than a margin, or neither is known."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pgtoolkit.comparison.measures import margin_of

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
    """What the runs of one configuration reached, by block: (values of what they are averaged over, ..., seed).

    prompts: what else than the block decides about their prompts.
    """

    values: dict[tuple, float]
    prompts: object = None

    @property
    def strata(self) -> dict[tuple, np.ndarray]:
        """The values of the seeds, by what else they are averaged over."""
        found: dict[tuple, list[float]] = {}
        for block in sorted(self.values):
            found.setdefault(block[:-1], []).append(self.values[block])
        return {stratum: np.array(values) for stratum, values in found.items()}


@dataclass
class Comparison:
    """Two samples, compared.

    paired: by seed, or else as independent samples. difference: of the means, second - first. interval: of it, by the
    bootstrap. seeds_needed: of each, see the function; MOST_SEEDS + 1 stands for more than those. p is of a t-test,
    equal_p of two one-sided tests that the difference is within the margin; adjusted_p and equal_p are adjusted for the
    number of pairs, but for an exploratory pair. improvement: see there.
    interval, p, adjusted_p, equal_p and seeds_needed are None where a sample has one value, or no seed differs from
    another.
    """

    first: int
    second: int
    counts: tuple[int, int]
    paired: bool
    difference: float
    interval: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    equal_p: float | None = None
    improvement: float | None = None
    exploratory: bool = False
    seeds_needed: int | None = None


def mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """(mean, sample standard deviation with n - 1), None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


class Comparisons:
    """Every pair of samples that have values, by a t-test; p is adjusted over all the pairs tested.

    margin: see `margin_of`, for the test that a pair is equal. primary: pairs of places (first, second) over which
    alone p is adjusted, planned before the runs; the others are exploratory.

    len() is their number, and iterating gives a `Comparison` each. They are tested all at once, since a thousand
    configurations make half a million pairs; intervals are computed as they are asked for.
    """

    def __init__(self, samples: list[Sample], margin: str | None = None, primary: set[tuple[int, int]] | None = None):
        self.samples, self.margin, self.primary = samples, margin, primary
        self._values = {
            place: np.array([sample.values[block] for block in sorted(sample.values)])
            for place, sample in enumerate(samples)
            if sample.values
        }
        self._pairing = [_pairing(sample) for sample in samples]
        self._p, equal = _p_values(samples, self._values, self._pairing, margin)
        self._counted = np.full(equal.shape, primary is None)
        for pair in primary or ():
            self._counted[pair] = True
        self._adjusted, self._equal = _adjusted(self._p, self._counted), _adjusted(equal, self._counted)

    def __len__(self) -> int:
        return len(self._values) * (len(self._values) - 1) // 2

    def __iter__(self) -> Iterator[Comparison]:
        for first in self._values:
            yield from self.against(first)

    @property
    def tested(self) -> int:
        """How many pairs have a p that counts."""
        return int((self._p == self._p)[self._counted].sum())

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
        one, other, paired = _matched(self.samples[first], self.samples[second])
        found = Comparison(first, second, (one.size, other.size), paired, float(other.mean() - one.mean()))
        found.improvement = improvement(self.samples[first], self.samples[second])
        found.exploratory = not self._counted[first, second]
        if min(found.counts) > 1:
            noise = [other - one] if paired else [one, other]
            if (p := self._p[first, second]) == p:
                found.p, found.adjusted_p = float(p), float(self._adjusted[first, second])
                found.equal_p = None if self.margin is None else float(self._equal[first, second])
            if max(map(np.ptp, noise)) > _EQUAL * max(abs(one).max(), abs(other).max()):
                found.interval = _interval(one, other, paired)
                found.seeds_needed = seeds_needed(found.difference, [float(values.var(ddof=1)) for values in noise])
        return found


def improvement(first: Sample, second: Sample) -> float | None:
    """The probability that a run of the second has more than one of the first, equal ones counted half: the mean over
    the strata that both have (arXiv 2108.13264), None where they share none."""
    ours, theirs = first.strata, second.strata
    shares = [(1 + np.sign(theirs[name][:, None] - ours[name]).mean()) / 2 for name in ours if name in theirs]
    return float(np.mean(shares)) if shares else None


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis without its lowest and its highest quarter (arXiv 2108.13264)."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def interquartile_interval(sample: Sample) -> tuple[float, float] | None:
    """The interval of its interquartile mean: percentiles of a bootstrap over the seeds of each stratum."""
    return _resampled(sample, interquartile_mean)


def mean_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the interval of its mean, by the same bootstrap; None of a single value.

    Where each stratum has one seed, such as one for each checkpoint, the strata themselves are drawn.
    """
    if len(sample.values) == len(sample.strata):
        sample = Sample({(number,): value for number, value in enumerate(sample.values.values())})
    return _resampled(sample, lambda values: values.mean(-1))


def _resampled(sample: Sample, mean: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float] | None:
    strata, draw = sample.strata.values(), np.random.default_rng(0)
    if max((values.size for values in strata), default=0) < 2:
        return None
    again = [values[draw.integers(values.size, size=(_RESAMPLES, values.size))] for values in strata]
    low, high = np.quantile(mean(np.concatenate(again, axis=1)), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def holm(p: np.ndarray) -> np.ndarray:
    """p adjusted for how many there are, NaN of none (Scandinavian Journal of Statistics 6, 1979): the chance of even
    one false difference among all pairs stays below LEVEL, so that the best may be picked after looking."""
    order = np.argsort(p, kind="stable")[: np.count_nonzero(p == p)]
    adjusted = np.full(p.size, np.nan)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(order.size, 0, -1) * p[order]))
    return adjusted


def _adjusted(p: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Each p adjusted for those that are counted, which the others are not."""
    return np.where(counted, holm(np.where(counted, p, np.nan).ravel()).reshape(p.shape), p)


def _pairing(sample: Sample) -> tuple:
    """What two samples need in common to be paired: prompts and seeds; of larger blocks those count that both have."""
    seeds = tuple(sorted(sample.values))
    return None if seeds and len(seeds[0]) > 1 else seeds, repr(sample.prompts)


def _matched(first: Sample, second: Sample) -> tuple[np.ndarray, np.ndarray, bool]:
    """The values of both, and whether they are paired, block by block."""
    shared = first.values.keys() & second.values
    paired = bool(shared) and _pairing(first) == _pairing(second)
    one, other = (np.array([x.values[of] for of in sorted(shared if paired else x.values)]) for x in (first, second))
    return one, other, paired


def _p_values(
    of: list[Sample], samples: dict[int, np.ndarray], pairings: list[tuple], margin: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """(all, all) by the places of two samples, the earlier first: the p of their difference; NaN where no seed differs
    from another, or one of them has a single value.

    And the p that they are equal within the margin: the higher of two one-sided tests (Schuirmann, JPB 15, 1987).
    """
    from scipy.special import stdtr

    found = np.full((2, len(pairings), len(pairings)), np.nan)
    tested = np.array([place for place, x in samples.items() if x.size > 1], int)
    values = [samples[place] for place in tested.tolist()]
    facts = [[x.size, x.mean(), x.var(ddof=1) / x.size, np.ptp(x), abs(x).max()] for x in values]
    size, mean, share, spread, largest = np.array(facts).reshape(-1, 5).T
    for i, place in enumerate(tested):
        later = slice(i + 1, None)
        difference, variance = mean[later] - mean[i], share[later] + share[i]
        with np.errstate(all="ignore"):  # of samples without spread
            freedom = variance**2 / (share[i] ** 2 / (size[i] - 1) + share[later] ** 2 / (size[later] - 1))
            noise = np.maximum(spread[later], spread[i])
            same = [other for other in range(i + 1, len(tested)) if pairings[tested[other]] == pairings[place]]
            for at in (other - i - 1 for other in same if pairings[place][0] is None):
                one, other, paired = _matched(of[place], of[tested[i + 1 + at]])
                if paired:
                    change = other - one
                    difference[at], freedom[at], noise[at] = change.mean(), one.size - 1, np.ptp(change)
                    variance[at] = change.var(ddof=1) / one.size if one.size > 1 else np.nan
            if same and pairings[place][0] is not None:
                differences = np.array([samples[tested[other]] for other in same]) - samples[place]
                at = np.array(same) - i - 1
                variance[at], freedom[at] = differences.var(1, ddof=1) / size[i], size[i] - 1
                noise[at] = np.ptp(differences, axis=1)
            p = 2 * stdtr(freedom, -abs(difference) / np.sqrt(variance))
            within = abs(difference) - (margin_of(margin, mean[i]) if margin else 0)
            beyond = stdtr(freedom, within / np.sqrt(variance))
        none, equal = noise <= _EQUAL * np.maximum(largest[later], largest[i]), abs(difference) <= _EQUAL * largest[i]
        found[0, place, tested[later]] = np.where(none, np.where(equal, 1.0, np.nan), p)
        found[1, place, tested[later]] = np.where(none, np.where(equal, 0.0, np.nan), beyond)
    return found[0], found[1]


def _interval(first: np.ndarray, second: np.ndarray, paired: bool) -> tuple[float, float]:
    """Bootstrap interval of the difference of means: BCa (Efron, JASA 82, 1987) from five seeds on, else percentiles.

    The same values give the same interval. What an interval of few seeds is worth: `worth` in text_report.py.
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
    low, high = resampled.confidence_interval
    return float(low), float(high)


def seeds_needed(difference: float, variances: list[float]) -> int:
    """Seeds of each with which a t-test at LEVEL finds this difference with probability POWER.

    variances: of both samples, or of the differences alone where they are paired. It takes them and the difference as
    the true ones and the values as normal, and counts no other pair (arXiv 1806.08295).
    """
    for counts in (np.arange(2, 33), np.arange(33, MOST_SEEDS + 1)):  # most comparisons need few
        freedom = (counts - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
        enough = counts[_power(freedom, abs(difference) / np.sqrt(sum(variances) / counts)) >= POWER]
        if enough.size:
            return int(enough[0])
    return MOST_SEEDS + 1


def _power(freedom: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The probability that a t-test at LEVEL finds a difference of so many standard errors."""
    from scipy.stats import nct, t

    # Beyond 40 standard errors the difference is found, and the distribution is no longer computed well.
    beyond, shift = t.isf(LEVEL / 2, freedom), np.minimum(shift, 40.0)
    return nct.sf(beyond, freedom, shift) + np.nan_to_num(nct.cdf(-beyond, freedom, shift))  # NaN far below 1e-16
