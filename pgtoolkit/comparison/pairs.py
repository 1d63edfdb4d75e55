"""The runs that a comparison over blocks pairs, and those that no other run is paired with."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.statistics import Sample, paired_blocks
from pgtoolkit.config.keys import shown
from pgtoolkit.runs.find import Run
from pgtoolkit.system.report import identity, text

_MOST_NAMES = 3
"""A reason names no more configurations than this."""


def block_of(run: Run, over: Sequence[str]) -> tuple:
    """Return the values that pair a run with others: of the --over keys, and the seed."""
    return (*(identity(learned(run, key)) for key in over), run.config["seed"])


def leave_out_unpaired(
    compared: Compared, samples: Sequence[Sample], primary: Collection[tuple[int, int]] | None
) -> list[tuple[Run, str]]:
    """Leave out of each group the runs that are in none of its pairs, so that means, differences
    and noise are of the same runs. Return them with the reason.

    A group with a pair of independent samples keeps all of its runs, since all are tested.
    samples: those of the groups. primary: the pairs that are planned; None for every pair.
    """
    partners: dict[int, list[int]] = {}
    every = itertools.combinations(range(len(samples)), 2)
    for first, second in every if primary is None else primary:
        if samples[first].measure == samples[second].measure:
            partners.setdefault(first, []).append(second)
            partners.setdefault(second, []).append(first)
    groups = [*compared.groups]
    left_out = []
    for place, others in sorted(partners.items()):
        sample = samples[place]
        others = [other for other in others if samples[other].values]
        blocks_of_pairs = [paired_blocks(sample, samples[other]) for other in others]
        paired = {block for blocks in blocks_of_pairs for block in blocks}
        if not paired or not (all(blocks_of_pairs) or sample.only_paired):
            continue
        group = groups[place]
        compared.groups[place] = of_blocks(compared, group, paired)
        if compared.first is group:
            compared.first = compared.groups[place]
        names = ", ".join(groups[other].label for other in others)
        no_run = f"{names} has no run" if len(others) == 1 else f"none of {names} has a run"
        if len(others) > _MOST_NAMES:
            no_run = "no configuration that it is compared with has a run"
        left_out += [
            (run, f"not paired: {no_run} with {_in_words(run, compared.over)}")
            for run in group.counted
            if block_of(run, compared.over) not in paired
        ]
    return left_out


def of_blocks(compared: Compared, group: RunGroup, blocks: Collection[tuple]) -> RunGroup:
    """Return the group with the counted runs of these blocks; what --best-of chose from stays as it
    is."""
    places = [
        place for place, run in enumerate(group.counted) if block_of(run, compared.over) in blocks
    ]
    return replace(
        group,
        counted=[group.counted[place] for place in places],
        reached=[group.reached[place] for place in places],
    )


def _in_words(run: Run, over: Sequence[str]) -> str:
    """Return the block of a run in words."""
    values = [f"{shown(key)}={text(learned(run, key))}" for key in over]
    return " and ".join([*values, f"seed={run.config['seed']}"])
