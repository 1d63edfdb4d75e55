"""The runs that a comparison over blocks pairs, and those that no other run is paired with."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.statistics import Sample, paired_blocks
from pgtoolkit.config.keys import OPTION_KEYS, shown
from pgtoolkit.config.new_run import new_run_command
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.records import read_config
from pgtoolkit.system.report import identity, listed, override, plural, text

_MOST_NAMES = 3
"""A sentence names no more configurations, or values, than this."""


def block_of(run: Run, over: Sequence[str]) -> tuple:
    """Return the values that pair a run with others: of the --over keys, and the seed."""
    return (*(identity(learned(run, key)) for key in over), run.config["seed"])


def is_of_blocks(name: str, runs: Sequence[Run], over: Sequence[str]) -> bool:
    """Return whether runs with the same values of the --over keys have the same value of a name,
    such as the digits of a task where these are tasks."""
    blocks = [block_of(run, over)[:-1] for run in runs]
    values = [identity(learned(run, name)) for run in runs]
    return bool(over) and len({*zip(blocks, values, strict=True)}) == len({*blocks})


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


def notes_on_missing(compared: Compared, left_out: Collection[Run]) -> list[str]:
    """Return a note on each configuration that has no run at all with some values of the --over
    keys, such as a task, where runs of others were left out for want of it.

    left_out: by `leave_out_unpaired`.
    """
    notes = []
    for group in compared.groups:
        known = {block_of(run, compared.over)[:-1] for run in group.runs}
        missing: dict[tuple, list[Run]] = {}
        for run in left_out:
            block = block_of(run, compared.over)[:-1]
            if group.counted and run not in group.runs and block not in known:
                missing.setdefault(block, []).append(run)
        if missing:
            runs = [run for of_block in missing.values() for run in of_block]
            values = [_values_in_words(of_block[0], compared.over) for of_block in missing.values()]
            notes.append(
                f"{group.label} has no run with {listed(values, _MOST_NAMES)}, so "
                f"{plural(len(runs), 'run')} of others cannot be paired. "
                f"{_to_train(group, runs, compared.over)}"
            )
    return notes


def without_common_block(compared: Compared, first: RunGroup, second: RunGroup) -> str:
    """Return which values of the --over keys only one of two configurations has, or that they have
    them with other seeds, and what to train."""
    theirs = [
        {block_of(run, compared.over)[:-1]: run for run in group.counted}
        for group in (first, second)
    ]
    sentences = []
    for has, lacks, lacking in ((theirs[0], theirs[1], second), (theirs[1], theirs[0], first)):
        only = [_values_in_words(has[block], compared.over) for block in has if block not in lacks]
        if only:
            sentences.append(f"{lacking.label} has no run with {listed(only, _MOST_NAMES)}")
    if not sentences:
        sentences.append(
            f"no run of {second.label} has the {compared.blocks} of one of {first.label}"
        )
    runs = [run for block, run in theirs[0].items() if block not in theirs[1]] or first.counted
    return f"{', and '.join(sentences)}. {_to_train(second, runs, compared.over)}"


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


def _to_train(group: RunGroup, runs: Sequence[Run], over: Sequence[str]) -> str:
    """Return what to type for runs of a configuration that are paired with these runs of others."""
    train = "Train it so, with the same seeds"
    run = runs[0]
    trained = max(group.counted, key=lambda of_group: of_group.step)
    if not all(Path(of.path, "overrides.yaml").is_file() for of in (trained, run)):
        return train
    values = [override(shown(key), learned(run, key)) for key in over]
    options = [shown(key) for key in over if shown(key) in OPTION_KEYS]
    for typed in read_config(run.path)[1]:
        if any(typed.startswith(f"{option}.") for option in options):
            values.append(typed)
    values.append(override("seed", run.config["seed"]))
    return f"{train}, such as by {new_run_command(trained.path, values)}"


def _values_in_words(run: Run, over: Sequence[str]) -> str:
    """Return the values of the --over keys of a run in words."""
    return " and ".join(f"{shown(key)}={text(learned(run, key))}" for key in over)


def _in_words(run: Run, over: Sequence[str]) -> str:
    """Return the block of a run in words."""
    return f"{_values_in_words(run, over)} and seed={run.config['seed']}"
