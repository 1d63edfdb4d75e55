"""Counts how far equal runs end apart by their seed alone, and how many seeds find a difference."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.measures import MEASURES, is_share
from pgtoolkit.comparison.statistics import (
    LEVEL,
    MOST_SEEDS,
    POWER,
    Sample,
    mean_and_std,
    paired_blocks,
    seeds_needed,
)
from pgtoolkit.config.keys import shown
from pgtoolkit.runs.series import without_rounding
from pgtoolkit.system.report import plural

DIFFERENCES = (0.01, 0.02, 0.05)
"""Differences of a share of right answers for which a comparison says how many seeds find them."""


@dataclass(frozen=True)
class SeedNoise:
    """The noise of a measure by the seed.

    spread: the standard deviation of a run's value between seeds, pooled over configurations.
    freedom: its degrees of freedom.
    range: the smallest and the largest such deviation of one configuration.
    paired_spread: that of the difference of two runs with the same seed, pooled over the pairs of
        configurations that are compared; None where one of these pairs does not have the same
        seeds, or there is none.
    """

    spread: float
    freedom: int
    range: tuple[float, float]
    paired_spread: float | None

    @property
    def band(self) -> float:
        """Two further runs of one configuration differ by less than this with a probability of
        1 - LEVEL, where values are normal and spread alike in all configurations."""
        from scipy.stats import t

        return float(t.isf(LEVEL / 2, self.freedom) * sqrt(2) * self.spread)

    def seeds(self, difference: float) -> int:
        """Return how many seeds of each configuration find this difference, see `seeds_needed`."""
        if self.paired_spread is not None:
            return seeds_needed(difference, [self.paired_spread**2])
        return seeds_needed(difference, [self.spread**2] * 2)


def seed_noise(
    samples: Sequence[Sample], pairs: Collection[tuple[int, int]] | None = None
) -> SeedNoise | None:
    """Return the noise in the values of configurations, each by block; None where none has two
    seeds, or their values do not differ.

    pairs: the places of the configurations that are compared; None for every pair.
    """
    groups = [values for sample in samples for values in sample.strata.values() if len(values) > 1]
    if not groups:
        return None
    freedom = sum(len(values) - 1 for values in groups)
    deviations = [mean_and_std(values.tolist())[1] or 0.0 for values in groups]
    squares = zip(groups, deviations, strict=True)
    spread = sqrt(sum((len(values) - 1) * std**2 for values, std in squares) / freedom)
    if spread == 0:
        return None
    with_values = [sample for sample in samples if sample.values]
    kinds = {
        (tuple(sorted(sample.values)), repr(sample.prompts), repr(sample.measure))
        for sample in with_values
    }
    if pairs is not None:
        paired = _spread_of_pairs((samples[first], samples[second]) for first, second in pairs)
    elif len(kinds) == 1:
        paired = _spread_of_all_pairs(with_values)
    else:
        paired = _spread_of_pairs(itertools.combinations(with_values, 2))
    return SeedNoise(spread, freedom, (min(deviations), max(deviations)), paired)


def _spread_of_pairs(pairs: Iterable[tuple[Sample, Sample]]) -> float | None:
    """Return the standard deviation of the difference of two runs with the same block, pooled over
    pairs of configurations of which each has its own mean difference; None where one of them is
    tested and not paired."""
    squares = 0.0
    freedom = 0
    for first, second in pairs:
        if not first.values or not second.values or first.measure != second.measure:
            continue
        blocks = paired_blocks(first, second)
        if not blocks:
            return None
        x = first.only(blocks).in_order
        y = second.only(blocks).in_order
        changes = without_rounding(y - x - (y - x).mean(), max(abs(x).max(), abs(y).max()))
        squares += float((changes**2).sum())
        freedom += len(blocks) - 1
    return sqrt(squares / freedom) if squares else None


def _spread_of_all_pairs(samples: Sequence[Sample]) -> float | None:
    """Return what `_spread_of_pairs` returns of every pair of samples that have the same blocks.

    It is that of two values without the means of their configurations and of their blocks.
    """
    values = np.array([sample.in_order for sample in samples])
    if min(values.shape) < 2:
        return None
    largest = abs(values).max()
    values = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    if not without_rounding(values, largest).any():
        return None
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return sqrt(2 * float((values**2).sum()) / freedom)


def noise_of(compared: Compared) -> SeedNoise | None:
    """Return the noise of the value at the end of runs, or of their area where that is compared.

    Configurations whose runs recorded the same numbers count once.
    """
    samples = []
    for group, sample in zip(compared.groups, compared.comparisons.samples, strict=True):
        values = [run.final for run in group.reached]
        if compared.goal.measure == "area":
            values = compared.tested_values(group)
        samples.append(replace(sample, values=dict(zip(sample.values, values, strict=True))))
    kept: dict[str, int] = {}
    for place, sample in enumerate(samples):
        kept.setdefault(sample.numbers or str(place), place)
    pairs = compared.comparisons.primary
    if pairs is not None:
        places = {place: number for number, place in enumerate(kept.values())}
        pairs = {
            (places[first], places[second])
            for first, second in (
                [kept[samples[place].numbers or str(place)] for place in pair] for pair in pairs
            )
            if first != second
        }
    return seed_noise([samples[place] for place in kept.values()], pairs)


def noise_sentences(
    compared: Compared, noise: SeedNoise | None, differences: Sequence[float] = DIFFERENCES
) -> list[str]:
    """Return sentences on the noise of compared runs, and on the seeds that find differences.

    Only differences of a share of right answers are spoken of, since the size of others depends on
    their unit.
    """
    if noise is None:
        return []
    measure = "mean" if compared.goal.measure == "area" else MEASURES["final"].lower()
    spreads = f"their spread is {noise.spread:.2g}"
    if len(compared.groups) > 1:
        smallest, largest = noise.range
        pooled = " and ".join(["configurations", *map(shown, compared.over)])
        spreads += f", pooled over {pooled}, which have from {smallest:.2g} to {largest:.2g}"
    sentences = [
        f"Two runs that differ in the seed alone end less than {noise.band:.2g} apart in 95 of 100 "
        f"cases ({measure} {compared.metric}; {spreads})."
    ]
    if is_share(compared.metric):
        counted = compared.counted.removesuffix("s")
        sentences.append(f"{seeds_of_each(noise, differences, counted, compared.blocks)}.")
    return sentences


def seeds_of_each(
    noise: SeedNoise, differences: Sequence[float], counted: str = "seed", blocks: str = "seed"
) -> str:
    """Return how many seeds of each configuration find these differences, in words.

    counted: what is counted, if not seeds. blocks: what a pair has in common.
    """
    counts = [f"{number_of_seeds(noise.seeds(size), counted)} for {size:g}" for size in differences]
    pairs = f"paired by {blocks}, " if noise.paired_spread is not None else ""
    return (
        f"To find a difference, each configuration needs {', '.join(counts)} (t-test, {pairs}"
        f"level {LEVEL}, power {POWER}, one pair alone)"
    )


def number_of_seeds(count: int, counted: str = "seed") -> str:
    """Return a number of seeds in words. counted: another noun, in the singular."""
    if count > MOST_SEEDS:
        return f"more than {MOST_SEEDS} {counted}s"
    return plural(count, counted)


def as_numbers(noise: SeedNoise | None) -> dict[str, object] | None:
    """Return the noise for JSON, with the seeds by the difference that they find."""
    if noise is None:
        return None
    seeds = {f"{size:g}": noise.seeds(size) for size in DIFFERENCES}
    return {**vars(noise), "band": noise.band, "seeds_to_find": seeds}
