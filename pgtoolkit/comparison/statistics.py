"""Means and spreads, and tests whether a difference is more than noise, or less than a margin."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pgtoolkit.comparison.measures import margin_of

LEVEL = 0.05
"""A difference with an adjusted p below this is called more than seed noise; intervals are of 1 -
LEVEL."""

POWER = 0.8
"""The probability with which `seeds_needed` seeds of each sample show a difference as large as the
one seen."""

MOST_SEEDS = 1000
"""Where more seeds would be needed, their number is not computed."""

_BCA_FROM = 5
"""Values from which on the interval is bias-corrected and accelerated; from fewer that correction
is a guess."""

_RESAMPLES = 9999

_EQUAL = 1e-12
"""Values whose difference is a smaller share of the largest are equal but for rounding."""


@dataclass(frozen=True)
class Sample:
    """The tested values of one configuration by block, (values of the --over keys, ..., seed).

    prompts: what decides about the prompts besides the block.
    """

    values: dict[tuple, float]
    prompts: object = None

    @property
    def strata(self) -> dict[tuple, np.ndarray]:
        """The values of the seeds, by the values of the --over keys."""
        strata: dict[tuple, list[float]] = {}
        for block in sorted(self.values):
            strata.setdefault(block[:-1], []).append(self.values[block])
        return {stratum: np.array(values) for stratum, values in strata.items()}


@dataclass
class Comparison:
    """The test of two samples, which are known by their places.

    counts: values of each. paired: whether values are compared block by block, or as independent
        samples.
    difference: of the means, second - first. interval: of the difference, by the bootstrap.
    p: of a t-test. adjusted_p: the same, adjusted for the number of pairs tested.
    equal_p: of two one-sided tests that the difference is within the margin, adjusted in the same
        way.
    improvement, seeds_needed: see the functions. MOST_SEEDS + 1 stands for any larger number of
        seeds.
    exploratory: whether the pair was not planned; p and equal_p are then not adjusted.

    interval, p, adjusted_p, equal_p and seeds_needed are None where a sample has one value, or no
    seed differs from another.
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
    """Return (mean, sample standard deviation with n - 1), None for each that needs more values."""
    mean = statistics.fmean(values) if values else None
    std = statistics.stdev(values) if len(values) > 1 else None
    return mean, std


class Comparisons:
    """A t-test of every pair of samples that have values, p adjusted over all the pairs tested.

    margin: for the test that a pair is equal, see `margin_of`.
    primary: the pairs (first place, second place) that were planned before the runs; p is adjusted
        over these alone, and the others are exploratory.

    len() is the number of pairs, and iterating gives a `Comparison` of each. All are tested at
    once, since a thousand configurations make half a million pairs; intervals are computed when a
    pair is asked for.
    """

    def __init__(
        self,
        samples: list[Sample],
        margin: str | None = None,
        primary: set[tuple[int, int]] | None = None,
    ):
        self.samples = samples
        self.margin = margin
        self.primary = primary
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
        self._adjusted = _adjusted(self._p, self._counted)
        self._equal = _adjusted(equal, self._counted)

    def __len__(self) -> int:
        return len(self._values) * (len(self._values) - 1) // 2

    def __iter__(self) -> Iterator[Comparison]:
        for first in self._values:
            yield from self.against(first)

    @property
    def tested(self) -> int:
        """The number of pairs for which p is adjusted."""
        return int((self._p == self._p)[self._counted].sum())

    @property
    def paired(self) -> set[bool]:
        """Which kinds of pairs there are: True if some are paired block by block, False if some are
        independent."""
        samples_by_pairing = Counter(self._pairing[place] for place in self._values)
        kinds = set()
        if any(count > 1 for count in samples_by_pairing.values()):
            kinds.add(True)
        if len(samples_by_pairing) > 1:
            kinds.add(False)
        return kinds

    def against(self, first: int) -> list[Comparison]:
        """Return the pairs whose first sample is the one at this place."""
        return [
            self._pair(first, second)
            for second in self._values
            if first in self._values and second > first
        ]

    def _pair(self, first: int, second: int) -> Comparison:
        """Return the test of two samples: Student's of their differences where they are paired,
        else Welch's."""
        x, y, paired = _matched(self.samples[first], self.samples[second])
        pair = Comparison(first, second, (x.size, y.size), paired, float(y.mean() - x.mean()))
        pair.improvement = improvement(self.samples[first], self.samples[second])
        pair.exploratory = not self._counted[first, second]
        if min(pair.counts) < 2:
            return pair
        p = float(self._p[first, second])
        if p == p:
            pair.p = p
            pair.adjusted_p = float(self._adjusted[first, second])
            pair.equal_p = None if self.margin is None else float(self._equal[first, second])
        noise = [y - x] if paired else [x, y]
        if max(map(np.ptp, noise)) > _EQUAL * max(abs(x).max(), abs(y).max()):
            pair.interval = _interval(x, y, paired)
            pair.seeds_needed = seeds_needed(
                pair.difference, [float(values.var(ddof=1)) for values in noise]
            )
        return pair


def improvement(first: Sample, second: Sample) -> float | None:
    """Return the probability that a run of the second sample has a higher value than one of the
    first.

    Equal values count half. It is the mean over the strata that both have (arXiv 2108.13264), None
    if there are none.
    """
    strata = first.strata
    others = second.strata
    shares = [
        (1 + np.sign(others[name][:, None] - strata[name]).mean()) / 2
        for name in strata
        if name in others
    ]
    return float(np.mean(shares)) if shares else None


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis without its lowest and its highest quarter (arXiv
    2108.13264)."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def interquartile_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the interval of the interquartile mean, None if no stratum has two values.

    It has the percentiles of a bootstrap over the seeds of each stratum.
    """
    return _bootstrap_interval(sample, interquartile_mean)


def mean_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the interval of the mean by the same bootstrap, None for a single value.

    Where each stratum has one seed, such as one for each checkpoint, the strata themselves are
    drawn.
    """
    if len(sample.values) == len(sample.strata):
        sample = Sample({(number,): value for number, value in enumerate(sample.values.values())})
    return _bootstrap_interval(sample, lambda values: values.mean(-1))


def _bootstrap_interval(
    sample: Sample, mean_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float] | None:
    strata = sample.strata.values()
    if max((values.size for values in strata), default=0) < 2:
        return None
    random = np.random.default_rng(0)
    resampled = [
        values[random.integers(values.size, size=(_RESAMPLES, values.size))] for values in strata
    ]
    low, high = np.quantile(mean_of(np.concatenate(resampled, axis=1)), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def holm(p: np.ndarray) -> np.ndarray:
    """Return (n,) p adjusted for the number of tests; a NaN stays one and is not counted.

    The chance of even one false difference among all pairs stays below LEVEL, so that the best may
    be picked after looking (Holm, Scandinavian Journal of Statistics 6, 1979).
    """
    order = np.argsort(p, kind="stable")[: np.count_nonzero(p == p)]
    adjusted = np.full(p.size, np.nan)
    adjusted[order] = np.maximum.accumulate(
        np.minimum(1.0, np.arange(order.size, 0, -1) * p[order])
    )
    return adjusted


def _adjusted(p: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Adjust each counted p for the number of those; the others stay as they are."""
    return np.where(counted, holm(np.where(counted, p, np.nan).ravel()).reshape(p.shape), p)


def _pairing(sample: Sample) -> tuple:
    """Return what must be equal for two samples to be paired: (seeds, prompts).

    The seeds are None with --over: those samples are paired over the blocks that both have.
    """
    blocks = tuple(sorted(sample.values))
    has_over = bool(blocks) and len(blocks[0]) > 1
    return None if has_over else blocks, repr(sample.prompts)


def _matched(first: Sample, second: Sample) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the values of both samples and whether they are paired; if so they have the same
    blocks in one order."""
    shared = first.values.keys() & second.values
    paired = bool(shared) and _pairing(first) == _pairing(second)
    x = np.array([first.values[block] for block in sorted(shared if paired else first.values)])
    y = np.array([second.values[block] for block in sorted(shared if paired else second.values)])
    return x, y, paired


def _p_values(
    samples: list[Sample], values: dict[int, np.ndarray], pairings: list[tuple], margin: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return two (samples, samples) arrays over pairs of places, the earlier place first; NaN
    elsewhere.

    The first has the p of the difference: of Student's test of the differences where the samples
    are paired, else of Welch's. The second has the p that they are equal within the margin, the
    higher of two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15,
    1987). Both are NaN where a sample has a single value, or no seed differs from another. Of
    samples without any spread p is 1 if they are equal, and NaN if they are not.
    """
    from scipy.special import stdtr

    p_different = np.full((len(pairings), len(pairings)), np.nan)
    p_equal = p_different.copy()
    tested = np.array([place for place, of_sample in values.items() if of_sample.size > 1], int)
    facts = [
        [x.size, x.mean(), x.var(ddof=1) / x.size, np.ptp(x), abs(x).max()]
        for x in (values[place] for place in tested.tolist())
    ]
    size, mean, mean_variance, spread, largest = np.array(facts).reshape(-1, 5).T
    for i, place in enumerate(tested):
        # Vectors over the samples behind this one, at first as if all were independent of it.
        later = slice(i + 1, None)
        difference = mean[later] - mean[i]
        variance = mean_variance[later] + mean_variance[i]
        noise = np.maximum(spread[later], spread[i])
        with np.errstate(all="ignore"):  # of samples without spread
            freedom = variance**2 / (
                mean_variance[i] ** 2 / (size[i] - 1)
                + mean_variance[later] ** 2 / (size[later] - 1)
            )
            same = [
                other
                for other in range(i + 1, len(tested))
                if pairings[tested[other]] == pairings[place]
            ]
            has_over = pairings[place][0] is None
            if same and not has_over:
                changes = np.array([values[tested[other]] for other in same]) - values[place]
                at = np.array(same) - i - 1
                variance[at] = changes.var(1, ddof=1) / size[i]
                freedom[at] = size[i] - 1
                noise[at] = np.ptp(changes, axis=1)
            for other in same if has_over else ():
                x, y, paired = _matched(samples[place], samples[tested[other]])
                if paired:
                    change = y - x
                    at = other - i - 1
                    difference[at] = change.mean()
                    variance[at] = change.var(ddof=1) / change.size if change.size > 1 else np.nan
                    freedom[at] = change.size - 1
                    noise[at] = np.ptp(change)
            p = 2 * stdtr(freedom, -abs(difference) / np.sqrt(variance))
            beyond_margin = abs(difference) - (margin_of(margin, mean[i]) if margin else 0)
            p_within = stdtr(freedom, beyond_margin / np.sqrt(variance))
        no_noise = noise <= _EQUAL * np.maximum(largest[later], largest[i])
        equal = abs(difference) <= _EQUAL * largest[i]
        p_different[place, tested[later]] = np.where(no_noise, np.where(equal, 1.0, np.nan), p)
        p_equal[place, tested[later]] = np.where(no_noise, np.where(equal, 0.0, np.nan), p_within)
    return p_different, p_equal


def _interval(first: np.ndarray, second: np.ndarray, paired: bool) -> tuple[float, float]:
    """Return the bootstrap interval of the difference of means, the same for the same values.

    It is bias-corrected and accelerated from five seeds on (BCa; Efron, JASA 82, 1987), else of
    percentiles. What an interval of few seeds is worth says `worth` in text_report.py.
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
    """Return how many seeds of each sample a t-test at LEVEL needs to find this difference with
    probability POWER.

    variances: of both samples, or, where they are paired, of their differences alone. The
        difference and the variances are taken for the true ones and the values for normal, and p is
        not adjusted for other pairs (arXiv 1806.08295).
    Returns MOST_SEEDS + 1 for any larger number.
    """
    for counts in (np.arange(2, 33), np.arange(33, MOST_SEEDS + 1)):  # most comparisons need few
        freedom = (counts - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
        enough = counts[
            _power(freedom, abs(difference) / np.sqrt(sum(variances) / counts)) >= POWER
        ]
        if enough.size:
            return int(enough[0])
    return MOST_SEEDS + 1


def _power(freedom: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return the probability that a t-test at LEVEL finds a difference of `shift` standard
    errors."""
    from scipy.stats import nct, t

    critical = t.isf(LEVEL / 2, freedom)
    # Beyond 40 standard errors the difference is found, and the distribution is no longer computed
    # well.
    shift = np.minimum(shift, 40.0)
    # NaN where it is far below 1e-16
    lower_tail = np.nan_to_num(nct.cdf(-critical, freedom, shift))
    return nct.sf(critical, freedom, shift) + lower_tail
