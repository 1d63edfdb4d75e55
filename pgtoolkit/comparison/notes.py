"""Notes on differences that make runs hard to compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pgtoolkit.comparison.compared_runs import Compared, RunGroup
from pgtoolkit.comparison.measures import DOCUMENTS, apart_of
from pgtoolkit.comparison.pairs import block_of
from pgtoolkit.comparison.seed_noise import noise_of
from pgtoolkit.runs.find import DROPPED, Run
from pgtoolkit.runs.history import CODE, CONTENTS, EVALUATION_CODE
from pgtoolkit.system.report import identity, is_number, text

_SCALES_APART = 2
"""A note is made where the median gradient norms of two groups differ by more than this factor."""

_DEVIATIONS = 2
"""A note is made where the threshold is above the start by fewer standard deviations over seeds."""

_FEW_MEASUREMENTS = 10
"""A note is made where a configuration came to the threshold in fewer measurements than this."""


def notes_of(compared: Compared) -> list[str]:
    """Return notes on differences that make the runs hard to compare, without their full stops."""
    notes = []
    counted = [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append(
            "the runs come from different code: `pgtk compare RUN_A RUN_B` of two of them says "
            "what changed"
        )
    notes += length_notes([run for run in counted if not run.collapsed])
    if compared.by_documents:
        notes += _threshold_notes(compared)
    if compared.best_of is not None:
        notes += _best_of_notes(compared, compared.best_of)
    return notes + _scale_notes(compared.groups)


def _threshold_notes(compared: Compared) -> list[str]:
    """Return a note if no run reached the threshold, or if it is known only roughly when."""
    goal = compared.goal
    if not any(compared.arrived(group) for group in compared.groups):
        reached = f"{goal.metric} {goal.threshold:g}"
        if any(DOCUMENTS in run.to for group in compared.groups for run in group.reached):
            # A run is only compared as far as those went that did not reach it.
            reached += (
                f" within {compared.limit:,.0f} documents, as far as all without it were measured"
            )
        return [
            f"no seed reached {reached}, so documents tell nothing here: "
            f"--metric=final:{goal.metric} compares the ends, and a lower --reach the way to it"
        ]
    notes = _threshold_in_noise(compared)
    spent = [compared.spent(group, DOCUMENTS) for group in compared.groups if group.counted]
    if min(map(np.mean, spent)) >= _FEW_MEASUREMENTS * goal.apart:
        return notes
    closest = min(apart_of(run, goal.metric) for group in compared.groups for run in group.counted)
    every = f"{closest:,.0f} to " if round(closest) < round(goal.apart) else ""
    return [
        *notes,
        f"{goal.metric} is measured every {every}{goal.apart:,.0f} documents, so what it takes to "
        f"come to {goal.threshold:g} is known to within {goal.apart:,.0f}; a smaller difference "
        "may come from that alone. Runs that measure more often tell, and "
        f"--metric=area:{goal.metric} depends less on it",
    ]


def _threshold_in_noise(compared: Compared) -> list[str]:
    """Return a note where the threshold is no further above the start of runs than their ends are
    apart by the seed."""
    goal = compared.goal
    noise = noise_of(compared)
    if noise is None or goal.threshold is None or goal.start is None:
        return []
    above = goal.threshold - goal.start
    if above >= _DEVIATIONS * noise.spread:
        return []
    return [
        f"the threshold {goal.threshold:g} is {above:.2g} above the mean start, less than "
        f"{_DEVIATIONS} standard deviations of a run's end over seeds ({noise.spread:.2g}): "
        "whether and when a run comes to it is largely chance. "
        f"--metric=final:{goal.metric} compares the ends"
    ]


def length_notes(runs: list[Run]) -> list[str]:
    """Return a note on runs of different length, by the documents that they have seen.

    Where prompts are dropped each run has sampled another number of them, and steps are counted:
    where batches have several passes, those of one pass.
    """
    unit = "documents"
    lengths = sorted({int(run.last("documents_seen")) for run in runs})
    if any(name in run.columns for run in runs for name in DROPPED):
        unit = "steps" if {_passes(run) for run in runs} == {1} else "steps of one pass"
        lengths = sorted({int(run.last("step")) // _passes(run) for run in runs})
    if len(lengths) < 2:
        return []
    return [
        f"the runs are of different length ({', '.join(map(str, lengths))} {unit}): their ends do "
        "not compare, the mean does"
    ]


def _passes(run: Run) -> int:
    """Return how often the run has trained each batch."""
    passes = run.config.get("rollout.passes")
    return passes if isinstance(passes, int) else 1


def _best_of_notes(compared: Compared, key: str) -> list[str]:
    """Return notes on the choice by --best-of.

    It flatters, and the best value of a group may be the lowest or the highest that was tried.
    """
    best = "fewest" if compared.by_documents else "highest"
    notes = [
        f"of each configuration the {key} with the {best} "
        f"{compared.measured[0].lower()}{compared.measured[1:]} is shown. It was chosen by the "
        "same runs that are compared, which flatters a configuration that has more values of it, "
        "or noisier ones: further seeds of the chosen ones tell"
    ]
    for group in compared.groups:
        counts = {value: len(group.tried[value].counted) for value in group.tried}
        blocks = [
            sorted(block_of(run, compared.over) for run in tried.counted)
            for tried in group.tried.values()
        ]
        if any(others != blocks[0] for others in blocks[1:]):
            numbers = ", ".join(f"{count} with {value}" for value, count in counts.items())
            notes.append(
                f"{group.label}: the {compared.blocks}s are not the same at each {key} "
                f"({numbers}), so its choice compares means of different ones"
            )
        tried = [value for value in compared.tried if value in group.tried]
        chosen = text(group.values[key])
        if len(tried) > 1 and is_number(group.values[key]) and chosen in (tried[0], tried[-1]):
            end = "lowest" if chosen == tried[0] else "highest"
            notes.append(
                f"{group.label}: this is the {end} {key} tried, and one beyond may be better"
            )
    return notes


def notes_of_equal_numbers(compared: Compared, numbers: Sequence[str | None]) -> list[str]:
    """Return a note for each set of configurations whose runs recorded the same numbers.

    numbers: see `recorded_numbers`.
    """
    alike: dict[str, list[RunGroup]] = {}
    for group, digest in zip(compared.groups, numbers, strict=True):
        if digest is not None:
            alike.setdefault(digest, []).append(group)
    notes = []
    for groups in alike.values():
        if len(groups) < 2:
            continue
        keys = [
            key
            for key in compared.keys
            if len({identity(group.values[key]) for group in groups}) > 1
        ]
        notes.append(
            f"{' and '.join(group.label for group in groups)} recorded the same numbers to the "
            f"last bit: {' and '.join(keys)} changed nothing between them"
        )
    return notes


def _scale_notes(groups: list[RunGroup]) -> list[str]:
    """Return a note where the gradients of two groups differ much in length."""
    norms = {}
    for group in groups:
        values = [run.values("grad_norm") for run in group.counted if "grad_norm" in run.columns]
        if values:
            norms[group.label] = float(np.median(np.concatenate(values)))
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low = min(norms, key=lambda label: norms[label])
    high = max(norms, key=lambda label: norms[label])
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with "
        f"{low} and {norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and "
        "AdamW's epsilon then act on them differently, and one learning rate need not suit both: "
        "docs/comparing.md"
    ]


def code_notes(compared: Compared, runs: list[Run], ignore_code: bool) -> list[str]:
    """Return a note of the user's own modules where runs have used different versions of them."""
    if ignore_code:
        names = dict.fromkeys(
            name for run in runs for name in run.trained_with if name.startswith(CODE)
        )
        differing = [
            name for name in names if len({run.trained_with.get(name) for run in runs} - {None}) > 1
        ]
        if not differing:
            return []
        return [f"--ignore=code counts as the same what differs: {', '.join(differing)}"]
    differing = [key for key in compared.keys if key.startswith(CODE)]
    if not differing:
        return []
    return [
        f"{' and '.join(differing)} differs, not in comments or docstrings alone, and so these "
        "runs are not counted as seeds of one configuration; --ignore=code counts them as such"
    ]


def is_not_configured(name: str) -> bool:
    """Return True for a name of the contents of data or of code, which is no key."""
    return name.startswith((CONTENTS, CODE, EVALUATION_CODE))
