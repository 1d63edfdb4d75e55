"""The significance tests of a comparison, its intervals and its needed seeds: against scipy,
rliable, published tables, values worked out by hand and simulated runs."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from pgtoolkit.comparison.bootstrap import ends
from pgtoolkit.comparison.statistics import (
    HELD,
    LEVEL,
    MOST_SEEDS,
    POWER,
    Comparison,
    Comparisons,
    Sample,
    _difference_interval,
    improvement,
    interquartile_interval,
    interquartile_mean,
    mean_and_std,
    mean_interval,
    seeds_needed,
)
from pgtoolkit.comparison.text_report import verdict
from pgtoolkit.runs.series import ranks


def sample(*values: float, seeds: Sequence[int] | None = None, prompts: object = None) -> Sample:
    """Return a sample of these seeds, by default 0, 1, 2 and so on."""
    blocks = [(seed,) for seed in seeds or range(len(values))]
    return Sample(dict(zip(blocks, values, strict=True)), prompts)


def unpaired(*samples: Sequence[float]) -> list[Sample]:
    """Return samples that differ in their prompts, so that Welch's test is taken."""
    return [sample(*values, prompts=number) for number, values in enumerate(samples)]


def by_pair(comparisons: Comparisons) -> dict[tuple[int, int], Comparison]:
    """Return the comparisons by the places of their two samples."""
    return {(pair.first, pair.second): pair for pair in comparisons}


@pytest.mark.filterwarnings("ignore:Precision loss", "error::RuntimeWarning:pgtoolkit")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0.2, 0.4, 0.6], [0.9, 0.94, 0.98]),
        ([1.0, 1.0, 1.0], [0.9, 0.91, 0.95, 0.7]),
        ([0.1, 0.2], [0.1, 0.25]),
        ([float(i) for i in range(30)], [i + 0.5 for i in range(40)]),
    ],
)
def test_samples_of_other_prompts_are_tested_by_welch(first, second):
    (pair,) = Comparisons(unpaired(first, second))
    expected = scipy.stats.ttest_ind(first, second, equal_var=False)
    assert not pair.paired
    assert pair.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert pair.difference == pytest.approx(np.mean(second) - np.mean(first))


def test_samples_of_the_same_seeds_and_prompts_are_paired_by_seed():
    first = sample(10.0, 20.0, 30.0, seeds=[5, 6, 7])
    second = sample(34.0, 12.0, 23.0, seeds=[7, 5, 6])
    (pair,) = Comparisons([first, second])
    assert (pair.paired, pair.difference) == (True, 3.0)
    assert pair.interval == (2.0, 4.0)
    # The differences are 2, 3 and 4, with a standard deviation of 1. The closed form of Student's
    # distribution with two degrees of freedom.
    t = 3 * math.sqrt(3)
    assert pair.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    other_seeds = sample(34.0, 12.0, 23.0, seeds=[7, 5, 8])
    other_prompts = Sample(second.values, "another task")
    for second in (other_seeds, other_prompts):
        (pair,) = Comparisons([first, second])
        assert not pair.paired
        assert pair.p > 0.5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (sample(1.0, 1.0), sample(0.0, 0.0)),
        # All differences are 0.1, but for rounding.
        (sample(0.3, 0.4, 0.5), sample(0.2, 0.3, 0.4)),
    ],
)
def test_a_difference_without_spread_is_not_tested(first, second):
    (pair,) = Comparisons([first, second])
    assert (pair.p, pair.interval, pair.seeds_needed) == (None, None, None)
    assert verdict(pair) == "no noise to test by"


def test_equal_samples_without_spread_do_not_differ():
    (pair,) = Comparisons([sample(1.0, 1.0), sample(1.0, 1.0)])
    assert (pair.p, verdict(pair)) == (1.0, "unknown")


def test_values_that_only_rounding_tells_apart_are_equal():
    """53/448, summed in two orders."""
    low, high = 0.11830357142857148, 0.1183035714285715
    assert low < high
    assert improvement(sample(low, 0.2), sample(0.1, high)) == 0.125  # one tie of four, no win
    assert improvement(sample(high, 0.2), sample(0.1, low)) == 0.125
    assert improvement(sample(high, high), sample(low, 0.3)) == 0.75
    (pair,) = Comparisons([sample(high, 0.25, 0.5), sample(low, 0.125, 0.25)])
    assert (pair.interval[1], math.copysign(1, pair.interval[1])) == (0, 1)
    (pair,) = Comparisons([sample(high, 0.25), sample(0.25, low)])
    assert (pair.difference, pair.p) == (0, 1)
    assert mean_and_std([low, high]) == (pytest.approx(low), 0)
    assert ranks([0.5, high, low, 0.1]) == [2, 1, 1, 0]
    assert ranks([1e6 + 1e-7, 1e6, -1e6]) == [1, 1, 0]
    assert ranks([]) == []


def test_a_single_seed_has_no_standard_deviation_and_is_not_tested():
    (pair,) = Comparisons([sample(1.0), sample(0.0, 0.5)])
    assert (pair.p, verdict(pair)) == (None, "needs 2 seeds")
    assert mean_and_std([2.0]) == (2.0, None)
    assert mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))


def test_p_is_adjusted_by_holm_over_the_pairs_that_can_be_tested():
    pairs = by_pair(Comparisons(unpaired([5.0, 5.1, 5.2], [4.0, 4.2, 4.1], [3.9, 4.1, 4.3], [1.0])))
    tested = [pairs[0, 1], pairs[0, 2], pairs[1, 2]]
    raw = sorted(pair.p for pair in tested)
    expected = [3 * raw[0], max(3 * raw[0], 2 * raw[1]), max(2 * raw[1], raw[2])]
    assert sorted(pair.adjusted_p for pair in tested) == pytest.approx(expected)
    assert pairs[0, 3].adjusted_p is None
    assert pairs[0, 3].counts == (3, 1)


def test_a_verdict_is_by_the_adjusted_p_which_is_equal_for_equal_p():
    """Beside a smaller p there are two of 0.038. The first becomes 2 p, and so does the other,
    which would be p alone."""
    values = [[0.0, 1.0, 2.0], [2.5, 3.5, 4.5], [5.0, 6.0, 7.0]]
    pairs = by_pair(Comparisons(unpaired(*values)))
    near = scipy.stats.ttest_ind(values[0], values[1], equal_var=False).pvalue
    far = scipy.stats.ttest_ind(values[0], values[2], equal_var=False).pvalue
    assert far < near < LEVEL < 2 * near
    expected = {(0, 2): 3 * far, (0, 1): 2 * near, (1, 2): 2 * near}
    assert {place: pair.adjusted_p for place, pair in pairs.items()} == pytest.approx(expected)
    assert verdict(pairs[0, 2]) == "higher"
    assert verdict(pairs[0, 1]) == verdict(pairs[1, 2]) == "unknown"


def every_mean(values: Sequence[int]) -> Counter[Fraction]:
    """Return the means of all n^n equally likely draws of n from these values, counted exactly."""
    sums = Counter({0: 1})
    for _ in values:
        further: Counter[int] = Counter()
        for (total, count), value in product(sums.items(), values):
            further[total + value] += count
        sums = further
    return Counter({Fraction(total, len(values)): count for total, count in sums.items()})


def every_difference(
    first: Sequence[int], second: Sequence[int], paired: bool
) -> Counter[Fraction]:
    """Return the differences of means of all resamples, counted exactly."""
    if paired:
        return every_mean([y - x for x, y in zip(first, second, strict=True)])
    differences: Counter[Fraction] = Counter()
    for (x, ways_x), (y, ways_y) in product(every_mean(first).items(), every_mean(second).items()):
        differences[y - x] += ways_x * ways_y
    return differences


def quantile(counts: Counter[Fraction], share: float) -> float:
    """Return the lowest value with at least this share of the counts at or below it."""
    values = sorted(counts)
    below = np.cumsum([counts[value] for value in values])
    return float(values[np.flatnonzero(below >= share * counts.total())[0]])


def bca_shares(samples: Sequence[Sequence[int]], counts: Counter[Fraction]) -> np.ndarray:
    """Return the shares below the ends of a BCa interval as Efron and Tibshirani (An Introduction
    to the Bootstrap, 14.3) have them: the acceleration by leaving out each value."""
    observed = sum(Fraction(sum(values), len(values)) for values in samples)
    below = sum(count for value, count in counts.items() if value < observed)
    bias = scipy.stats.norm.ppf((below + counts[observed] / 2) / counts.total())
    influences = []
    for values in samples:
        without = [np.mean(np.delete(values, place)) for place in range(len(values))]
        moved = (np.mean(without) - without) * (len(values) - 1) / len(values)
        influences += moved.tolist()
    acceleration = np.sum(np.power(influences, 3)) / (6 * np.sum(np.square(influences)) ** 1.5)
    shifted = bias + scipy.stats.norm.ppf([0.025, 0.975])
    return scipy.stats.norm.cdf(bias + shifted / (1 - acceleration * shifted))


SKEWED = [3, 1, 9, 5, 31, 6, 7, 2, 40, 4, 8]
OTHERS = [2, 12, 4, 41, 9, 8, 15, 7, 5, 6, 3]


@pytest.mark.parametrize(
    ("seeds", "paired"), [(3, True), (4, True), (5, True), (10, True), (3, False), (5, False)]
)
def test_an_interval_of_few_seeds_has_the_ends_of_all_resamples(seeds, paired):
    first = SKEWED[:seeds]
    second = OTHERS[:seeds]
    counts = every_difference(first, second, paired)
    assert counts.total() == seeds ** (seeds if paired else 2 * seeds)
    shares = [0.025, 0.975]
    if seeds >= 5:
        changes = [[y - x for x, y in zip(first, second, strict=True)]]
        shares = bca_shares(changes if paired else [second, [-x for x in first]], counts)
    expected = tuple(quantile(counts, share) for share in shares)
    values = np.array([first, second]) / 64
    interval = _difference_interval(*values, paired)
    assert np.multiply(interval, 64) == pytest.approx(expected)
    assert _difference_interval(*values, paired) == interval
    # Compared the other way round, the difference and both ends have the other sign.
    assert _difference_interval(*values[::-1], paired) == pytest.approx(
        (-interval[1], -interval[0])
    )


def test_scipy_s_bca_interval_of_the_same_resamples_has_the_same_ends():
    first = np.array([0.25, 0.5, 1.0, 0.125, 2.0, 0.75])
    second = np.array([1.0, 0.25, 3.0, 0.5, 0.5, 4.0])
    draws = (second - first)[list(product(range(6), repeat=6))]
    # Rounded, so that resamples with the mean that was seen are equal to it.
    expected = scipy.stats.bootstrap(
        (second - first,),
        lambda values, axis: values.mean(axis).round(12),
        n_resamples=0,
        bootstrap_result=SimpleNamespace(bootstrap_distribution=draws.mean(1).round(12)),
    ).confidence_interval
    assert _difference_interval(first, second, True) == pytest.approx(tuple(expected), abs=1e-9)


def test_an_interval_has_both_values_between_which_a_share_falls():
    assert ends(np.arange(40.0), np.ones(40), [0.025, 0.975]) == (0, 39)


def test_the_ends_of_random_resamples_are_near_those_of_all():
    """Eleven seeds have more different resamples than are taken."""
    counts = every_difference(SKEWED, OTHERS, True)
    changes = [y - x for x, y in zip(SKEWED, OTHERS, strict=True)]
    expected = [quantile(counts, share) for share in bca_shares([changes], counts)]
    values = np.array([SKEWED, OTHERS], float)
    interval = _difference_interval(*values, True)
    assert interval == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))
    assert _difference_interval(*values, True) == interval


@pytest.mark.parametrize("values", [[3.0, 5.0], [3.0, 5.0, 4.0]])
def test_an_interval_of_two_or_three_seeds_is_all_that_was_seen(values):
    """So the true difference is outside where all values are on the same side of it, with a
    probability of 2 * 0.5 ** n."""
    assert _difference_interval(np.zeros(len(values)), np.array(values), True) == (3, 5)
    assert HELD[len(values)] == 100 * (1 - 2 * 0.5 ** len(values))


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "covered"), [*HELD.items()])
def test_an_interval_holds_the_true_difference_as_often_as_the_page_says(seeds, covered):
    """300 comparisons of equal normal distributions are simulated, paired. Their share is within
    three standard errors."""
    covered /= 100
    draw = np.random.default_rng(0)
    hits = []
    for _ in range(300):
        low, high = _difference_interval(*draw.standard_normal((2, seeds)), paired=True)
        hits.append(low <= 0 <= high)
    assert np.mean(hits) == pytest.approx(
        covered, abs=3 * math.sqrt(covered * (1 - covered) / len(hits))
    )


@pytest.mark.parametrize(
    ("difference", "variances", "seeds"),
    [
        # Cohen, Statistical Power Analysis (1988): 64 and 26 of each for effects of 0.5 and 0.8;
        # paired 34 and 15.
        (0.5, [1.0, 1.0], 64),
        (-0.8, [1.0, 1.0], 26),
        (0.5, [1.0], 34),
        (0.8, [1.0], 15),
        (1e9, [1.0, 1.0], 2),
        (1e-9, [1.0, 1.0], MOST_SEEDS + 1),
    ],
)
def test_seeds_needed_are_those_of_cohen_s_tables(difference, variances, seeds):
    assert seeds_needed(difference, variances) == seeds


def test_with_the_seeds_needed_the_difference_is_significant_as_often_as_the_power_says():
    """2000 comparisons with standard deviations 1 and 3 are simulated, where Welch's degrees of
    freedom matter."""
    seeds = seeds_needed(3.0, [1.0, 9.0])
    draw = np.random.default_rng(0)
    first = draw.normal(0, 1, (2000, seeds))
    second = draw.normal(3, 3, (2000, seeds))
    p = scipy.stats.ttest_ind(first, second, equal_var=False, axis=1).pvalue
    assert np.mean(p < LEVEL) == pytest.approx(POWER, abs=0.04)


# Runs x tasks. The expected values below are those of rliable 1.2.0: aggregate_iqm,
# probability_of_improvement, and get_interval_estimates (percentile, 20,000 resamples) with
# arch 8.0.0.
FIRST = [
    [0.61, 0.42],
    [0.70, 0.47],
    [0.05, 0.44],
    [0.66, 0.52],
    [0.73, 0.40],
    [0.58, 0.49],
    [0.69, 0.51],
]
SECOND = [[0.52, 0.42], [0.64, 0.35], [0.60, 0.39], [0.66, 0.45], [0.55, 0.38]]


def task_sample(rows: Sequence[Sequence[float]]) -> Sample:
    """Return a sample whose blocks are tasks and seeds. rows: of each seed the values of the
    tasks."""
    return Sample(
        {(task, seed): value for seed, row in enumerate(rows) for task, value in enumerate(row)}
    )


@pytest.mark.parametrize(
    ("rows", "mean", "interval"),
    [(FIRST, 0.535, (0.47125, 0.58375)), (SECOND, 0.4883333333, (0.46, 0.52666667))],
)
def test_the_interquartile_mean_and_its_interval_are_those_of_rliable(rows, mean, interval):
    assert interquartile_mean(np.ravel(rows)) == pytest.approx(mean)
    assert interquartile_mean(np.ravel(rows)) == pytest.approx(
        scipy.stats.trim_mean(rows, 0.25, axis=None)
    )
    assert interquartile_interval(task_sample(rows)) == pytest.approx(interval, abs=0.003)
    assert interquartile_interval(task_sample(rows[:1])) is None


def test_the_intervals_of_few_runs_have_the_ends_of_all_resamples():
    """Of two tasks with three runs each there are 27 x 27 resamples."""
    rows = np.array([[0.1, 0.9], [0.4, 0.5], [0.2, 0.95]])
    draws = [list(draw) for draw in product(range(3), repeat=3)]
    drawn = np.array([[*rows[a, 0], *rows[b, 1]] for a, b in product(draws, draws)])
    for interval, means in (
        (mean_interval, drawn.mean(1)),
        (interquartile_interval, scipy.stats.trim_mean(drawn, 0.25, axis=1)),
    ):
        expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
        assert interval(task_sample(rows)) == pytest.approx(tuple(expected))


def test_resamples_draw_seeds_within_each_task():
    # Every resample of equal seeds has the same mean, though the two tasks are far apart.
    assert interquartile_interval(task_sample([[0.0, 1.0]] * 4)) == (0.5, 0.5)


def test_the_probability_of_improvement_is_that_of_rliable():
    assert improvement(task_sample(SECOND), task_sample(FIRST)) == pytest.approx(0.78571429)
    by_task = [
        scipy.stats.mannwhitneyu(first, second).statistic / (len(FIRST) * len(SECOND))
        for first, second in zip(np.transpose(FIRST), np.transpose(SECOND), strict=True)
    ]
    assert improvement(task_sample(SECOND), task_sample(FIRST)) == pytest.approx(np.mean(by_task))
    assert improvement(task_sample(FIRST), task_sample(FIRST)) == 0.5
    assert improvement(sample(1.0, 2.0), task_sample(FIRST)) is None


def test_rliable_itself_gives_the_same_numbers():
    metrics = pytest.importorskip("rliable.metrics")
    draw = np.random.default_rng(0)
    first = draw.normal(0, 1, (6, 3)).round(1)
    second = draw.normal(0.3, 1, (9, 3)).round(1)
    assert interquartile_mean(second.ravel()) == pytest.approx(metrics.aggregate_iqm(second))
    expected = metrics.probability_of_improvement(second, first)
    assert improvement(task_sample(first), task_sample(second)) == pytest.approx(expected)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("margin", "bound"), [("0.05", 0.05), ("10%", 0.1 * 0.5)])
def test_equality_is_tested_by_two_one_sided_tests_as_in_scipy(paired, margin, bound):
    first = [0.49, 0.53, 0.47, 0.51]
    second = [0.50, 0.52, 0.49, 0.53]
    if paired:
        samples = [sample(*first), sample(*second)]
        test = scipy.stats.ttest_rel
    else:
        samples = unpaired(first, second)
        test = partial(scipy.stats.ttest_ind, equal_var=False)
    (pair,) = Comparisons(samples, margin)
    lower = test(np.add(second, bound), first, alternative="greater").pvalue
    upper = test(np.subtract(second, bound), first, alternative="less").pvalue
    assert pair.equal_p == pytest.approx(max(lower, upper))
    assert pair.p > LEVEL
    assert verdict(pair, 1, margin) == (
        "equal within " + margin if max(lower, upper) < LEVEL else "unknown"
    )


BASE = sample(0.500, 0.510, 0.520, 0.530)


@pytest.mark.parametrize(
    ("second", "within_margin", "if_lower_is_better", "without_direction"),
    [
        # A difference of 0.01, which is significant and within the margin.
        (sample(0.511, 0.520, 0.530, 0.541), "equal within 0.02", "worse", "higher"),
        # A significant difference beyond the margin.
        (sample(0.60, 0.61, 0.62, 0.64), "better", "worse", "higher"),
        # A wide spread.
        (sample(0.5, 0.1, 0.9, 0.6), "unknown", "unknown", "unknown"),
        # No difference and no spread.
        (BASE, "equal within 0.02", "unknown", "unknown"),
    ],
)
def test_verdict_says_equal_within_the_margin_first_and_then_better_worse_or_unknown(
    second, within_margin, if_lower_is_better, without_direction
):
    (pair,) = Comparisons([BASE, second], "0.02")
    assert verdict(pair, 1, "0.02") == within_margin
    assert verdict(pair, -1) == if_lower_is_better
    assert verdict(pair) == without_direction


def test_p_is_adjusted_over_planned_pairs_alone():
    samples = unpaired([5.0, 5.1, 5.2], [4.0, 4.2, 4.1], [4.9, 5.1, 5.4])
    unplanned = by_pair(Comparisons(samples, "0.5"))
    planned = by_pair(Comparisons(samples, "0.5", {(0, 1), (0, 2)}))
    assert [place for place, pair in planned.items() if pair.exploratory] == [(1, 2)]
    assert planned[1, 2].adjusted_p == planned[1, 2].p == unplanned[1, 2].p
    assert planned[1, 2].p < unplanned[1, 2].adjusted_p
    assert planned[0, 1].adjusted_p == pytest.approx(2 * planned[0, 1].p)
    assert unplanned[0, 1].adjusted_p == pytest.approx(3 * unplanned[0, 1].p)
    (alone,) = Comparisons([samples[0], samples[2]], "0.5")
    assert planned[0, 2].equal_p == pytest.approx(2 * alone.equal_p)
    assert Comparisons(samples, None, {(0, 1), (0, 2)}).num_adjusted == 2
    assert verdict(planned[1, 2]).startswith("exploratory: ")
