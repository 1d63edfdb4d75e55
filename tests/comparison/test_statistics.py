"""Tests, intervals and seeds needed of a comparison, against scipy, hand-computed values and
simulated runs."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats

from pgtoolkit.comparison.statistics import (
    LEVEL,
    MOST_SEEDS,
    POWER,
    Comparisons,
    Sample,
    _difference_interval,
    improvement,
    interquartile_interval,
    interquartile_mean,
    mean_and_std,
    seeds_needed,
)
from pgtoolkit.comparison.text_report import verdict


def sample(*values, seeds=None, prompts=None):
    blocks = [(seed,) for seed in seeds or range(len(values))]
    return Sample(dict(zip(blocks, values, strict=True)), prompts)


def unpaired(*samples):
    """Samples of other prompts, so that Welch's test is taken."""
    return [sample(*values, prompts=number) for number, values in enumerate(samples)]


@pytest.mark.filterwarnings("ignore:Precision loss", "error::RuntimeWarning:pgtoolkit")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0.2, 0.4, 0.6], [0.9, 0.94, 0.98]),
        ([1.0, 1.0, 1.0], [0.9, 0.91, 0.95, 0.7]),
        ([0.1, 0.2], [0.1, 0.25]),
        ([float(i) for i in range(30)], [i + 0.5 for i in range(40)]),
    ],
)
def test_samples_of_other_prompts_are_tested_by_welch(one, other):
    (found,) = Comparisons(unpaired(one, other))
    expected = scipy.stats.ttest_ind(one, other, equal_var=False)
    assert not found.paired
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.difference == pytest.approx(np.mean(other) - np.mean(one))


def test_samples_of_the_same_seeds_and_prompts_are_paired_by_seed():
    """Differences 2, 3 and 4 whatever the seeds' own level: t = 3 / (1 / sqrt 3), p = 1 - t /
    sqrt(2 + t^2)."""
    one, other = (
        sample(10.0, 20.0, 30.0, seeds=[5, 6, 7]),
        sample(34.0, 12.0, 23.0, seeds=[7, 5, 6]),
    )
    (found,) = Comparisons([one, other])
    t = 3 * math.sqrt(3)
    assert (found.paired, found.difference) == (True, 3.0)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.interval == (2.0, 4.0)
    for other_sample in (
        sample(34.0, 12.0, 23.0, seeds=[7, 5, 8]),
        Sample(other.values, "another task"),
    ):
        (found,) = Comparisons([one, other_sample])
        assert not found.paired
        assert found.p > 0.5


def test_without_any_spread_nothing_is_claimed():
    (same,) = Comparisons([sample(1.0, 1.0), sample(1.0, 1.0)])
    assert (same.p, verdict(same)) == (1.0, "unknown")
    for pair in (
        [sample(1.0, 1.0), sample(0.0, 0.0)],
        [sample(0.3, 0.4, 0.5), sample(0.2, 0.3, 0.4)],
    ):
        (found,) = Comparisons(pair)  # of the second all differences are 0.1 but for rounding
        assert (found.p, found.interval, found.seeds_needed) == (None, None, None)
        assert verdict(found) == "no noise to test by"
    (single,) = Comparisons([sample(1.0), sample(0.0, 0.5)])
    assert (single.p, verdict(single)) == (None, "needs 2 seeds")
    assert mean_and_std([2.0]) == (2.0, None)
    assert mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))


def test_p_is_adjusted_by_holm():
    samples = unpaired([5.0, 5.1, 5.2], [4.0, 4.2, 4.1], [3.9, 4.1, 4.3], [1.0])
    found = {(c.first, c.second): c for c in Comparisons(samples)}
    raw = sorted(found[pair].p for pair in ((0, 1), (0, 2), (1, 2)))
    expected = [3 * raw[0], max(3 * raw[0], 2 * raw[1]), max(2 * raw[1], raw[2])]
    assert sorted(found[pair].adjusted_p for pair in ((0, 1), (0, 2), (1, 2))) == pytest.approx(
        expected
    )
    assert found[0, 3].adjusted_p is None
    assert found[0, 3].counts == (3, 1)


def test_a_verdict_goes_by_the_adjusted_p_which_never_falls():
    """Two equal p of 0.038 beside a smaller one: 2 p for the first of them, and not less, p itself,
    for the other."""
    values = [[0.0, 1.0, 2.0], [2.5, 3.5, 4.5], [5.0, 6.0, 7.0]]
    found = {(c.first, c.second): c for c in Comparisons(unpaired(*values))}
    near, far = (
        scipy.stats.ttest_ind(values[0], other, equal_var=False).pvalue for other in values[1:]
    )
    assert far < near < LEVEL < 2 * near
    expected = {(0, 2): 3 * far, (0, 1): 2 * near, (1, 2): 2 * near}
    assert {pair: c.adjusted_p for pair, c in found.items()} == pytest.approx(expected)
    assert verdict(found[0, 2]) == "higher"
    assert verdict(found[0, 1]) == verdict(found[1, 2]) == "unknown"


@pytest.mark.parametrize("paired", [True, False])
def test_an_interval_of_few_seeds_has_the_percentiles_of_all_resamples(paired):
    """All 27 equally likely resamples of three, or 729 pairs of them: no random number is needed to
    know them."""
    first, second = np.array([1.0, 4.0, 9.0]), np.array([2.0, 8.0, 11.0])
    draws = list(product(range(3), repeat=3))
    if paired:
        means = [np.mean([second[i] - first[i] for i in draw]) for draw in draws]
    else:
        means = [second[list(a)].mean() - first[list(b)].mean() for a, b in product(draws, draws)]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert _difference_interval(first, second, paired) == pytest.approx(tuple(expected), abs=0.35)
    assert _difference_interval(first, second, paired) == _difference_interval(
        first, second, paired
    )


@pytest.mark.parametrize(("seeds", "covered"), [(3, 0.75), (5, 0.85), (10, 0.90)])
def test_an_interval_covers_as_often_as_the_page_says(seeds, covered):
    """300 simulated comparisons of equal normal distributions, two of three paired: within three
    standard errors."""
    draw, hits = np.random.default_rng(0), []
    for number in range(300):
        low, high = _difference_interval(*draw.standard_normal((2, seeds)), paired=bool(number % 3))
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
def test_seeds_needed_are_those_of_the_tables(difference, variances, seeds):
    assert seeds_needed(difference, variances) == seeds


def test_with_the_seeds_needed_the_difference_is_found_as_often_as_said():
    """2000 simulated comparisons of spreads 1 and 3, where Welch's degrees of freedom matter."""
    seeds = seeds_needed(3.0, [1.0, 9.0])
    draw = np.random.default_rng(0)
    one, other = draw.normal(0, 1, (2000, seeds)), draw.normal(3, 3, (2000, seeds))
    p = scipy.stats.ttest_ind(one, other, equal_var=False, axis=1).pvalue
    assert np.mean(p < LEVEL) == pytest.approx(POWER, abs=0.04)


# Runs x tasks. What rliable 1.2.0 makes of them: aggregate_iqm, probability_of_improvement, and
#   get_interval_estimates (percentile, 20,000 resamples) with arch 8.0.0.
ONE = [
    [0.61, 0.42],
    [0.70, 0.47],
    [0.05, 0.44],
    [0.66, 0.52],
    [0.73, 0.40],
    [0.58, 0.49],
    [0.69, 0.51],
]
OTHER = [[0.52, 0.42], [0.64, 0.35], [0.60, 0.39], [0.66, 0.45], [0.55, 0.38]]


def tasks(rows):
    return Sample(
        {(task, seed): value for seed, row in enumerate(rows) for task, value in enumerate(row)}
    )


@pytest.mark.parametrize(
    ("rows", "mean", "interval"),
    [(ONE, 0.535, (0.47125, 0.58375)), (OTHER, 0.4883333333, (0.46, 0.52666667))],
)
def test_the_interquartile_mean_and_its_interval_are_those_of_rliable(rows, mean, interval):
    assert interquartile_mean(np.ravel(rows)) == pytest.approx(mean)
    assert interquartile_mean(np.ravel(rows)) == pytest.approx(
        scipy.stats.trim_mean(rows, 0.25, axis=None)
    )
    assert interquartile_interval(tasks(rows)) == pytest.approx(interval, abs=0.003)
    assert interquartile_interval(tasks(rows[:1])) is None


def test_seeds_are_drawn_anew_within_their_stratum():
    """Two tasks that are far apart, of four equal seeds each: no resample has another mean."""
    assert interquartile_interval(tasks([[0.0, 1.0]] * 4)) == (0.5, 0.5)


def test_the_probability_of_improvement_is_that_of_rliable():
    assert improvement(tasks(OTHER), tasks(ONE)) == pytest.approx(0.78571429)
    by_task = [
        scipy.stats.mannwhitneyu(*pair).statistic / 35
        for pair in zip(*map(np.transpose, (ONE, OTHER)), strict=True)
    ]
    assert improvement(tasks(OTHER), tasks(ONE)) == pytest.approx(np.mean(by_task))
    assert improvement(tasks(ONE), tasks(ONE)) == 0.5
    assert improvement(sample(1.0, 2.0), tasks(ONE)) is None


def test_rliable_itself_agrees():
    metrics = pytest.importorskip("rliable.metrics")
    draw = np.random.default_rng(0)
    one, other = draw.normal(0, 1, (6, 3)).round(1), draw.normal(0.3, 1, (9, 3)).round(1)
    assert interquartile_mean(other.ravel()) == pytest.approx(metrics.aggregate_iqm(other))
    expected = metrics.probability_of_improvement(other, one)
    assert improvement(tasks(one), tasks(other)) == pytest.approx(expected)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("margin", "bound"), [("0.05", 0.05), ("10%", 0.1 * 0.5)])
def test_two_one_sided_tests_are_those_of_scipy(paired, margin, bound):
    one, other = [0.49, 0.53, 0.47, 0.51], [0.50, 0.52, 0.49, 0.53]
    samples = [sample(*one), sample(*other)] if paired else unpaired(one, other)
    (found,) = Comparisons(samples, margin)
    test, both = scipy.stats.ttest_rel, {}
    if not paired:
        test, both = scipy.stats.ttest_ind, {"equal_var": False}
    lower = test(np.add(other, bound), one, alternative="greater", **both).pvalue
    upper = test(np.subtract(other, bound), one, alternative="less", **both).pvalue
    assert found.equal_p == pytest.approx(max(lower, upper))
    assert found.p > LEVEL
    assert verdict(found, 1, margin) == (
        "equal within " + margin if max(lower, upper) < LEVEL else "unknown"
    )


def test_the_words_of_a_pair():
    """Sure of a difference of 0.01 within 0.02: equal; beyond it: better or worse; no spread:
    equal."""
    one = sample(0.500, 0.510, 0.520, 0.530)
    near, far, wide = (
        sample(0.511, 0.520, 0.530, 0.541),
        sample(0.60, 0.61, 0.62, 0.64),
        sample(0.5, 0.1, 0.9, 0.6),
    )
    margin, words = "0.02", []
    for other in (near, far, wide, one):
        (found,) = Comparisons([one, other], margin)
        words.append((verdict(found, 1, margin), verdict(found, -1), verdict(found)))
    assert words[0] == ("equal within 0.02", "worse", "higher")
    assert words[1] == ("better", "worse", "higher")
    assert words[2] == ("unknown",) * 3
    assert words[3] == ("equal within 0.02", "unknown", "unknown")


def test_p_is_adjusted_over_planned_pairs_alone():
    samples = unpaired([5.0, 5.1, 5.2], [4.0, 4.2, 4.1], [4.9, 5.1, 5.4])
    every = {(c.first, c.second): c for c in Comparisons(samples, "0.5")}
    found = {(c.first, c.second): c for c in Comparisons(samples, "0.5", {(0, 1), (0, 2)})}
    assert [pair for pair in found if found[pair].exploratory] == [(1, 2)]
    assert found[1, 2].adjusted_p == found[1, 2].p == every[1, 2].p < every[1, 2].adjusted_p
    assert found[0, 1].adjusted_p == pytest.approx(2 * found[0, 1].p)
    assert every[0, 1].adjusted_p == pytest.approx(3 * found[0, 1].p)
    one_sided = Comparisons([samples[0], samples[2]], "0.5")
    assert found[0, 2].equal_p == pytest.approx(2 * next(iter(one_sided)).equal_p)
    assert Comparisons(samples, None, {(0, 1), (0, 2)}).tested == 2
    assert verdict(found[1, 2]).startswith("exploratory: ")
