"""The statistics of a comparison: means with their spreads and intervals, and tests of pairs.

One test asks whether a difference is more than noise, another whether it is less than a margin.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pgtoolkit.comparison.bootstrap import ends, resampled
from pgtoolkit.comparison.measures import margin_of
from pgtoolkit.runs.series import without_rounding

LEVEL = 0.05
"""The level of the tests: a difference whose adjusted p is below it is called more than noise.
Intervals are made to hold the true value with a probability of 1 - LEVEL; of few seeds they do so
less often, see HELD."""

_TAILS = (LEVEL / 2, 1 - LEVEL / 2)
"""The shares below the two ends of an interval."""

HELD = {2: 50, 3: 75, 5: 85, 10: 90}
"""Seeds -> in how many of 100 cases a bootstrap interval of these holds the true value, of normal
values that are paired; of independent ones of 2 or 3 seeds it is 65 and 80. Two or three values
have the lowest and the highest as their interval, which miss on one side with a probability of 1/2
to the power of their number."""

POWER = 0.8
"""With `seeds_needed` seeds in each sample, a test finds a difference as large as the one seen with
this probability."""

MOST_SEEDS = 1000
"""If more seeds than this are needed, their number is not computed."""

_BCA_FROM = 5
"""An interval of at least this number of values is bias-corrected and accelerated. With fewer
values that correction would be a guess."""


@dataclass(frozen=True)
class Sample:
    """The tested values of one configuration, one for each block.

    A block is a tuple: the values of the --over keys, then the seed. The blocks that differ only in
    the seed are a stratum.
    values: the value of each block.
    prompts: whatever else decides which prompts a run gets. Only samples with equal `prompts` are
        paired; their repr is compared.
    measure: what the values measure. Only samples with equal `measure` are tested.
    is_bound: whether the true value of one of them is higher, since its run was not long enough.
        Such a sample is never found equal to another.
    only_paired: whether they measure the same only within a block, so that samples without a common
        one are not tested.
    numbers: a digest of all numbers that the runs have recorded; None where it equals no other's.
    """

    values: dict[tuple, float]
    prompts: object = None
    measure: object = None
    is_bound: bool = False
    only_paired: bool = False
    numbers: str | None = None

    @property
    def in_order(self) -> np.ndarray:
        """The values in the order of their blocks."""
        return np.array([self.values[block] for block in sorted(self.values)])

    def only(self, blocks: Collection[tuple]) -> Sample:
        """Return the sample of these blocks alone."""
        return replace(self, values={block: self.values[block] for block in blocks})

    @property
    def strata(self) -> dict[tuple, np.ndarray]:
        """The values of each stratum, which is named by its values of the --over keys."""
        strata: dict[tuple, list[float]] = {}
        for block in sorted(self.values):
            strata.setdefault(block[:-1], []).append(self.values[block])
        return {stratum: np.array(values) for stratum, values in strata.items()}


def mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """Return the mean and the standard deviation (with n - 1), which is 0 for values that differ by
    rounding alone.

    The mean is None without a value, the deviation with fewer than two.
    """
    mean = statistics.fmean(values) if values else None
    if len(values) < 2:
        return mean, None
    return mean, float(without_rounding(statistics.stdev(values), max(map(abs, values))))


def mean_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the interval of the mean, by `_bootstrap_interval`.

    If each stratum has one seed, as when each is a checkpoint that was trained from once, strata
    are drawn in place of seeds. So it is None only for fewer than two values.
    """
    if len(sample.values) == len(sample.strata):
        # One stratum with all the values, as if their numbers were seeds.
        sample = Sample({(number,): value for number, value in enumerate(sample.values.values())})
    return _bootstrap_interval(sample, lambda values: values.mean(-1))


def interquartile_interval(sample: Sample) -> tuple[float, float] | None:
    """Return the interval of the interquartile mean, by `_bootstrap_interval`."""
    return _bootstrap_interval(sample, interquartile_mean)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the means over the last axis, without the lowest and the highest quarter of its values
    (arXiv 2108.13264)."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def _bootstrap_interval(
    sample: Sample, mean_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float] | None:
    """Return the percentiles of a bootstrap that draws seeds anew within each stratum.

    mean_of: returns the means over the last axis of its argument.
    Returns None if no stratum has two values.
    """
    strata = [*sample.strata.values()]
    if max((values.size for values in strata), default=0) < 2:
        return None
    drawn, weights = resampled(strata)
    return ends(mean_of(np.concatenate(drawn, axis=1)), weights, _TAILS)


@dataclass
class Comparison:
    """The test of a pair of samples.

    first, second: the places of the samples in the list that `Comparisons` got.
    paired: whether values are compared block by block; else as independent samples. All numbers of
        a pair are then of the blocks that both have.
    counts, means: the number of values of each, and their mean.
    difference: of the means, second - first.
    interval: the bootstrap interval of the difference.
    p: of a t-test that the means differ.
    adjusted_p: the same, adjusted for the number of pairs tested.
    equal_p: of two one-sided tests that the difference is within the margin, adjusted in the same
        way; None without a margin, or where a sample is a bound.
    improvement: see `improvement`.
    exploratory: whether the pair was not planned; then neither p nor equal_p is adjusted.
    seeds_needed: see `seeds_needed`. MOST_SEEDS + 1 stands for any larger number.
    is_common: whether both measure the same; otherwise nothing is tested.
    identical: whether all that the runs recorded is equal to the last bit, block by block.

    interval, p, adjusted_p, equal_p and seeds_needed are None if a sample has a single value. They
    are None too if there is no noise, which means that all paired differences are equal, or all
    values within each of two independent samples. Only p, adjusted_p and equal_p are then still
    given for a difference of 0: as 1, 1 and 0.
    """

    first: int
    second: int
    counts: tuple[int, int]
    means: tuple[float, float]
    paired: bool
    difference: float
    interval: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    equal_p: float | None = None
    improvement: float | None = None
    exploratory: bool = False
    seeds_needed: int | None = None
    is_common: bool = True
    identical: bool = False


class Comparisons:
    """The t-tests of all pairs of samples that have values and measure the same.

    margin: the margin within which two samples are called equal, as `margin_of` reads it.
    primary: the pairs (first place, second place) that were planned before the runs. Only their p
        is adjusted, for their number; the other pairs are exploratory. None: all were planned.

    len() is the number of pairs, and iterating gives a `Comparison` of each. All are tested when
    this is made, as vectors, since a thousand configurations make half a million pairs. Intervals
    are computed when a pair is asked for.
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
            place: sample.in_order for place, sample in enumerate(samples) if sample.values
        }
        self._pairings = [_pairing_of(sample) for sample in samples]
        # Arrays over pairs of places.
        self._p, equal_p = _p_values(samples, self._values, self._pairings, margin)
        self._is_unlike = _of_other_measures(samples)
        for p in (self._p, equal_p):
            p[self._is_unlike] = np.nan
        is_bound = np.array([sample.is_bound for sample in samples], bool)
        equal_p[is_bound[:, None] | is_bound] = np.nan
        self._is_planned = np.full(equal_p.shape, primary is None)
        for pair in primary or ():
            self._is_planned[pair] = True
        self._adjusted_p = _adjust_planned(self._p, self._is_planned)
        self._equal_p = _adjust_planned(equal_p, self._is_planned)

    def __len__(self) -> int:
        return len(self._values) * (len(self._values) - 1) // 2

    def __iter__(self) -> Iterator[Comparison]:
        for first in self._values:
            yield from self.against(first)

    @property
    def num_adjusted(self) -> int:
        """The number of pairs for which p is adjusted: those that were planned and have a p."""
        return int(np.count_nonzero(~np.isnan(self._p[self._is_planned])))

    def against(self, first: int) -> list[Comparison]:
        """Return the tests of the sample at this place against each later one.

        There are none if it has no values.
        """
        if first not in self._values:
            return []
        return [self._compare(first, second) for second in self._values if second > first]

    def _compare(self, first: int, second: int) -> Comparison:
        """Return the test of the samples at these places, with its interval."""
        base, other, paired = _matched(self.samples[first], self.samples[second])
        x = base.in_order
        y = other.in_order
        largest = max(abs(x).max(), abs(y).max())
        difference = float(without_rounding(y.mean() - x.mean(), largest))
        means = (float(x.mean()), float(y.mean()))
        pair = Comparison(first, second, (x.size, y.size), means, paired, difference)
        pair.exploratory = not self._is_planned[first, second]
        numbers = self.samples[first].numbers
        pair.identical = numbers is not None and numbers == self.samples[second].numbers
        pair.is_common = not self._is_unlike[first, second]
        if not pair.is_common:
            return pair
        pair.improvement = improvement(base, other)
        if min(pair.counts) < 2:
            return pair
        p = float(self._p[first, second])
        if not np.isnan(p):
            pair.p = p
            pair.adjusted_p = float(self._adjusted_p[first, second])
            equal_p = float(self._equal_p[first, second])
            pair.equal_p = None if self.margin is None or np.isnan(equal_p) else equal_p
        noisy = [y - x] if paired else [x, y]
        if without_rounding(max(map(np.ptp, noisy)), largest):
            pair.interval = _difference_interval(x, y, paired)
            variances = [float(values.var(ddof=1)) for values in noisy]
            pair.seeds_needed = seeds_needed(pair.difference, variances)
        return pair


def _of_other_measures(samples: list[Sample]) -> np.ndarray:
    """Return (samples, samples) whether two samples measure different things."""
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault(sample.measure, len(numbers)) for sample in samples], int)
    is_unlike = kinds[:, None] != kinds
    for first, second in itertools.combinations(range(len(samples)), 2):
        if not samples[first].only_paired:
            break
        is_unlike[first, second] |= not _matched(samples[first], samples[second])[2]
    return is_unlike


def _pairing_of(sample: Sample) -> tuple:
    """Return (blocks, prompts), which must be equal for two samples to be paired.

    With --over the blocks are None: such samples are paired over those blocks that both have.
    """
    blocks = tuple(sorted(sample.values))
    has_over = bool(blocks) and len(blocks[0]) > 1
    return (None if has_over else blocks), repr(sample.prompts)


def paired_blocks(first: Sample, second: Sample) -> list[tuple]:
    """Return the blocks of which the values of two samples are paired; [] if the samples are
    independent."""
    if _pairing_of(first) != _pairing_of(second):
        return []
    return sorted(first.values.keys() & second.values)


def _matched(first: Sample, second: Sample) -> tuple[Sample, Sample, bool]:
    """Return (the first sample, the second, whether they are paired): if they are, of the blocks
    that both have."""
    blocks = paired_blocks(first, second)
    if not blocks:
        return first, second, False
    return first.only(blocks), second.only(blocks), True


def _p_values(
    samples: list[Sample], values: dict[int, np.ndarray], pairings: list[tuple], margin: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (p that the means differ, p that they are equal within the margin).

    Both are arrays (samples, samples) with the test of two samples in the row of the earlier one;
    all else is NaN. The first p is of Student's test of the differences if the samples are paired,
    else of Welch's test. The second is the higher p of two one-sided tests (Schuirmann, Journal of
    Pharmacokinetics and Biopharmaceutics 15, 1987).

    Both are NaN if a sample has a single value. If there is no noise (see `Comparison`), they are 1
    and 0 for a difference of 0, else NaN.
    """
    from scipy.special import stdtr

    p_different = np.full((len(pairings), len(pairings)), np.nan)
    p_equal = p_different.copy()
    tested = np.array([place for place, of_sample in values.items() if of_sample.size > 1], int)
    summary = _summarize([values[place] for place in tested.tolist()])
    # `i` and `other` count the tested samples; `place` and `tested` are places among all samples.
    for i, place in enumerate(tested):
        later = slice(i + 1, None)
        same_pairing = [
            other
            for other in range(i + 1, len(tested))
            if pairings[tested[other]] == pairings[place]
        ]
        has_over = pairings[place][0] is None
        with np.errstate(all="ignore"):  # without noise numbers are divided by 0
            tests = _independent_tests(summary, i)
            if has_over:
                for other in same_pairing:
                    base, second, paired = _matched(samples[place], samples[tested[other]])
                    if paired:
                        tests.pair_shared_blocks(other - i - 1, base.in_order, second.in_order)
            elif same_pairing:
                changes = np.array([values[tested[other]] for other in same_pairing])
                tests.pair_all_blocks(np.array(same_pairing) - i - 1, changes - values[place])
            standard_error = np.sqrt(tests.variance)
            p = 2 * stdtr(tests.freedom, -abs(tests.difference) / standard_error)
            of_base = abs(tests.base) if margin and margin.endswith("%") else 1
            width = margin_of(margin) * of_base if margin else 0
            p_within = stdtr(tests.freedom, (abs(tests.difference) - width) / standard_error)
        largest = np.maximum(summary.largest[later], summary.largest[i])
        no_noise = without_rounding(tests.noise, largest) == 0
        equal = without_rounding(tests.difference, largest) == 0
        p_different[place, tested[later]] = np.where(no_noise, np.where(equal, 1.0, np.nan), p)
        p_equal[place, tested[later]] = np.where(no_noise, np.where(equal, 0.0, np.nan), p_within)
    return p_different, p_equal


class _Summary(NamedTuple):
    """Vectors with a number for each tested sample, computed from its values.

    mean_variance: the variance of the mean, which is the variance of the values by their number.
    spread: the highest value - the lowest. largest: the highest absolute value.
    """

    size: np.ndarray
    mean: np.ndarray
    mean_variance: np.ndarray
    spread: np.ndarray
    largest: np.ndarray


def _summarize(values: list[np.ndarray]) -> _Summary:
    """Return the summary of samples, each of them given by its values."""
    rows = [
        [x.size, x.mean(), x.var(ddof=1) / x.size, np.ptp(x), abs(x).max()]  # as in `_Summary`
        for x in values
    ]
    return _Summary(*np.array(rows).reshape(-1, len(_Summary._fields)).T)


@dataclass
class _Tests:
    """The t-tests of one sample against each later one: vectors with a number for each of these.

    difference: of the means, later - this one. variance: of that difference. freedom: its degrees
    of freedom. noise: the highest - the lowest of the values, or of the paired differences.
    base: the mean of this one, of the blocks that are compared.
    """

    base: np.ndarray
    difference: np.ndarray
    variance: np.ndarray
    freedom: np.ndarray
    noise: np.ndarray

    def pair_all_blocks(self, at: np.ndarray, changes: np.ndarray) -> None:
        """Make the tests `at` those of paired samples with the same blocks.

        changes: (tests, blocks), the differences by block.
        """
        num_blocks = changes.shape[1]
        self.variance[at] = changes.var(1, ddof=1) / num_blocks
        self.freedom[at] = num_blocks - 1
        self.noise[at] = np.ptp(changes, axis=1)

    def pair_shared_blocks(self, at: int, x: np.ndarray, y: np.ndarray) -> None:
        """Make the test `at` that of paired samples which share some blocks.

        x, y: (blocks,), the values of this one and of the later one by shared block.
        """
        change = y - x
        self.base[at] = x.mean()
        self.difference[at] = change.mean()
        self.variance[at] = change.var(ddof=1) / change.size if change.size > 1 else np.nan
        self.freedom[at] = change.size - 1
        self.noise[at] = np.ptp(change)


def _independent_tests(summary: _Summary, i: int) -> _Tests:
    """Return Welch's tests of sample `i` against each later one, as if none were paired with it."""
    later = slice(i + 1, None)
    size, mean, mean_variance, spread, _ = summary
    variance = mean_variance[later] + mean_variance[i]
    freedom = variance**2 / (
        mean_variance[i] ** 2 / (size[i] - 1) + mean_variance[later] ** 2 / (size[later] - 1)
    )
    return _Tests(
        base=np.full(len(mean) - i - 1, mean[i]),
        difference=mean[later] - mean[i],
        variance=variance,
        freedom=freedom,
        noise=np.maximum(spread[later], spread[i]),
    )


def _adjust_planned(p: np.ndarray, is_planned: np.ndarray) -> np.ndarray:
    """Return p with the planned ones adjusted for their number, and the others as they are."""
    planned = np.where(is_planned, p, np.nan)
    return np.where(is_planned, holm(planned.ravel()).reshape(p.shape), p)


def holm(p: np.ndarray) -> np.ndarray:
    """Return (n,) the p values adjusted for their number (Holm, Scandinavian Journal of Statistics
    6, 1979).

    A NaN stays NaN and is not counted. If only a pair with an adjusted p below LEVEL is called
    different, the chance of even one wrong call among all pairs is below LEVEL. So the best pair
    may be picked after looking at them.
    """
    order = np.argsort(p, kind="stable")[: np.count_nonzero(~np.isnan(p))]
    adjusted = np.full(p.size, np.nan)
    adjusted[order] = np.maximum.accumulate(
        np.minimum(1.0, np.arange(order.size, 0, -1) * p[order])
    )
    return adjusted


def improvement(first: Sample, second: Sample) -> float | None:
    """Return the probability that a run of the second sample has a higher value than one of the
    first.

    Equal values count half, also those that differ by rounding alone. This is the mean over the
    strata that both samples have (arXiv 2108.13264); None if they have none in common.
    """
    first_strata = first.strata
    second_strata = second.strata
    shares = []
    for stratum in first_strata.keys() & second_strata:
        x, y = first_strata[stratum], second_strata[stratum]
        differences = without_rounding(y[:, None] - x, max(abs(x).max(), abs(y).max()))
        shares.append((1 + np.sign(differences).mean()) / 2)
    return statistics.fmean(shares) if shares else None


def _difference_interval(
    first: np.ndarray, second: np.ndarray, paired: bool
) -> tuple[float, float]:
    """Return the bootstrap interval of the difference of means.

    It is bias-corrected and accelerated (BCa; Efron, JASA 82, 1987) if each sample has _BCA_FROM
    values, else of percentiles. HELD says how far one of few seeds can be trusted.
    """
    largest = max(abs(first).max(), abs(second).max())
    # The difference is the sum of the means of these.
    samples = [second - first] if paired else [second, -first]
    drawn, weights = resampled(samples)
    differences = without_rounding(sum(values.mean(1) for values in drawn), largest)
    shares = _TAILS
    if min(first.size, second.size) >= _BCA_FROM:
        shares = _corrected_tails(samples, differences, weights, largest)
    return ends(differences, weights, shares)


def _corrected_tails(
    samples: list[np.ndarray], means: np.ndarray, weights: np.ndarray, largest: float
) -> tuple[float, float]:
    """Return the shares of the resampled sums of means that lie below the two ends of a BCa
    interval.

    means, weights: (resamples,). largest: the highest absolute value of what was subtracted.
    """
    from scipy.special import ndtr, ndtri

    observed = sum(values.mean() for values in samples)
    signs = np.sign(without_rounding(means - observed, largest))
    bias = ndtri((1 - np.average(signs, weights=weights)) / 2)  # resamples equal to it count half
    # By how much each value moves the sum of means.
    influence = np.concatenate([(values - values.mean()) / values.size for values in samples])
    acceleration = (influence**3).sum() / (influence**2).sum() ** 1.5 / 6
    shifted = bias + ndtri(_TAILS)
    low, high = ndtr(bias + shifted / (1 - acceleration * shifted))
    return low, high


def seeds_needed(difference: float, variances: list[float]) -> int:
    """Return how many seeds each sample needs for a t-test at LEVEL to find this difference with
    probability POWER.

    variances: those of both samples; of paired samples the variance of their differences alone.
    It is assumed that the difference and the variances are the true ones, and that the values are
    normal. p is not adjusted for other pairs (arXiv 1806.08295).
    Returns MOST_SEEDS + 1 if more than MOST_SEEDS are needed.
    """
    # Small numbers are tried first, since most comparisons need no more.
    for counts in (np.arange(2, 33), np.arange(33, MOST_SEEDS + 1)):
        freedom = (counts - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
        shift = abs(difference) / np.sqrt(sum(variances) / counts)
        enough = counts[_power(freedom, shift) >= POWER]
        if enough.size:
            return int(enough[0])
    return MOST_SEEDS + 1


def _power(freedom: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return a t-test's power at LEVEL for a difference of `shift` standard errors."""
    from scipy.stats import nct, t

    critical = t.isf(LEVEL / 2, freedom)
    # A difference of 40 standard errors is always found. For larger ones scipy's distribution is
    # not precise.
    shift = np.minimum(shift, 40.0)
    # scipy gives NaN for a tail far below 1e-16.
    lower_tail = np.nan_to_num(nct.cdf(-critical, freedom, shift))
    return nct.sf(critical, freedom, shift) + lower_tail
