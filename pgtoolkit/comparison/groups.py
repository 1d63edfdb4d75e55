"""Gathers runs by configuration, and notes what makes them hard to compare."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from pgtoolkit.comparison import measures
from pgtoolkit.comparison.common_measure import (
    altering,
    kinds_of,
    measure_of,
    same_data,
    what_to_run,
    why_unlike,
)
from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.headline import chosen_metric
from pgtoolkit.comparison.identical import are_identical, recorded_numbers
from pgtoolkit.comparison.measures import AXES, DOCUMENTS
from pgtoolkit.comparison.statistics import Comparisons, Sample
from pgtoolkit.config.keys import KEYS, changes_learning, key_named, shown
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.settings import POSITION
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.history import CODE, CONTENTS, EVALUATION_CODE
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.runs.series import final
from pgtoolkit.system.report import is_number, nearest, refusal, text

_SCALES_APART = 2
"""A note is made where the median gradient norms of two groups differ by more than this factor."""


def compare(
    runs: list[Run],
    metric: str | None = None,
    best_of: str | None = None,
    reach: str | None = None,
    over: str | None = None,
    against: str | None = None,
    margin: str | None = None,
    ignore_code: bool = False,
    labels: Sequence[str] = (),
) -> Compared:
    """Gather the runs by configuration, and compare their results.

    metric: see `parse_metric`; None for that of `reach`, or the one that `chosen_metric` chooses.
    best_of: a varying key; of groups that differ in it alone only the best one is compared.
    reach: METRIC=THRESHOLD, in the place of `metric`.
    over: KEY,..., varying keys that belong to a run's block, as the seed does.
    against: the base of the planned comparisons, see `_planned`; None: every pair is planned.
    margin: see `margin_of`.
    ignore_code: runs that differ in the user's own modules alone are of one configuration.
    labels: KEY=VALUE=NAME, the name to show for a value.

    Raises ConfigError if no run can be read or has the metric, and for an option that does not fit
    the runs.
    """
    readable = [_as_typed(run) for run in runs if run.config]
    left_out = [(run, run.why_not_counted()) for run in runs if not run.config]
    if not readable:
        listing = "; ".join(f"{run.name}: {reason}" for run, reason in left_out)
        raise ConfigError(
            f"pgtk compare needs a run that can be read (got none). {listing}. Use other folders."
        )
    if margin is not None:
        measures.margin_of(margin)  # refuses a bad one before the work
    readable, notes = same_data(readable)
    over_keys = over.split(",") if over else []
    keys, following, common = _varying(readable, over_keys, ignore_code)
    blocks = _keys_of("--over", over_keys, keys, common)
    keys = [key for key in keys if key not in blocks]

    groups = _grouped(readable, keys)
    metric, measure, threshold, notes_of_metric = _metric(groups, metric, reach, ignore_code)
    notes += notes_of_metric
    for group in groups:
        left_out += _count(group, metric, blocks)
        group.values = {shown(key): value for key, value in group.values.items()}
    names_of_values = _labels(labels, groups)
    for group in groups:
        group.labels = names_of_values

    notes += _extend_collapsed([run for group in groups for run in group.counted], metric)
    goal = measures.goal_of([group.counted for group in groups], metric, threshold, measure)
    for group in groups:
        group.reached = [measures.reached(run, goal) for run in group.counted]
    compared = Compared(
        goal=goal,
        limits=_limits(goal, [run for group in groups for run in group.reached]),
        keys=[shown(key) for key in keys],
        following=[shown(key) for key in following],
        common=common,
        groups=groups,
        comparisons=Comparisons([]),
        left_out=left_out,
        notes=notes,
        over=blocks,
        best_of=best_of,
        ignore_code=ignore_code,
    )
    groups.sort(key=lambda group: _rank(compared, group))
    if best_of is not None:
        _keep_best(compared, best_of)
    primary = None if against is None else _planned(compared, against)
    compared.name_groups()
    samples = [_sample(compared, group, keys + following, blocks) for group in compared.groups]
    measures_of_groups = _measures_of(compared, blocks)
    samples = [
        replace(sample, measure=measured, numbers=numbers)
        for sample, measured, numbers in zip(
            samples, measures_of_groups, recorded_numbers(compared.groups), strict=True
        )
    ]
    compared.comparisons = Comparisons(samples, margin, primary)
    compared.notes += notes_of(compared)
    compared.notes += _code_notes(compared, readable, ignore_code)
    return compared


def _as_typed(run: Run) -> Run:
    """Return the run with the user's own code as the option of its group.

    The option takes the place of the keys that name the code.
    """
    return replace(run, config=as_typed(run.config), trained_with=as_typed(run.trained_with))


def _metric(
    groups: list[RunGroup], metric: str | None, reach: str | None, ignore_code: bool
) -> tuple[str, str | None, float | None, list[str]]:
    """Return (metric, measure or None, threshold or None, notes) by --metric and --reach.

    Raises ConfigError for a metric that no run has recorded.
    """
    option = "--metric"
    measure = None
    threshold = None
    notes = []
    if reach is not None:
        option = "--reach"
        metric, threshold = measures.parse_reach(reach)
    elif metric is None:
        metric, notes = chosen_metric([group.runs for group in groups], ignore_code)
    else:
        measure, metric = measures.parse_metric(metric)
    _refuse_unknown([run for group in groups for run in group.runs], metric, option)
    return metric, measure, threshold, notes


def _grouped(runs: list[Run], keys: list[str]) -> list[RunGroup]:
    """Return a group for each combination of values that runs have learned with, in their order."""
    by_values: dict[tuple, RunGroup] = {}
    for run in runs:
        values = {key: learned(run, key) for key in keys}
        group = by_values.setdefault(tuple(map(repr, values.values())), RunGroup(values, []))
        group.runs.append(run)
    return list(by_values.values())


def _keys_of(
    option: str, names: Sequence[str], keys: list[str], others: Collection[str] = ()
) -> list[str]:
    """Return the keys of the names that the user typed.

    keys: those that tell the runs apart; a refusal lists them.
    Raises ConfigError for a name that is not in `keys` or `others`.
    """
    known = {shown(key): key for key in (*keys, *others)}
    for name in names:
        if name not in known:
            if not keys:
                raise ConfigError(
                    f"{option}={name} needs a key that tells the runs apart. These "
                    f"runs differ in no key. Use runs that do, or leave {option} out."
                )
            listing = ", ".join(map(shown, keys))
            raise ConfigError(
                f"{option}={name} needs a key that tells the runs apart. These are "
                f"{listing}. Use {option}={shown(keys[0])}."
            )
    return [known[name] for name in names]


def _labels(labels: Sequence[str], groups: list[RunGroup]) -> dict[tuple[str, str], str]:
    """Return (key, value in words) -> name; raises ConfigError for a value that no run has."""
    values = {(key, text(value)) for group in groups for key, value in group.values.items()}
    names = {}
    for label in labels:
        # Both a value and a name may hold equals signs, so the values that runs have decide where
        # the value ends.
        matches = [(key, value) for key, value in values if label.startswith(f"{key}={value}=")]
        if not matches:
            listing = ", ".join(sorted(f"{key}={value}" for key, value in values))
            reason = f"It names a value of a key that tells the runs apart. These are {listing}."
            use = f"--label {min(f'{key}={value}' for key, value in values)}=NAME" if values else ""
            if not values:
                reason = "It names a value of a key that tells the runs apart. Nothing does."
                use = "other runs, or leave --label out"
            raise ConfigError(refusal(f"--label {label}", "KEY=VALUE=NAME", label, reason, use))
        key, value = max(matches, key=lambda pair: len(pair[1]))
        names[key, value] = label.removeprefix(f"{key}={value}=")
    return names


def _planned(compared: Compared, against: str) -> set[tuple[int, int]]:
    """Return the pairs of each base with the groups that differ from it only in keys of `against`.

    A base is a group that has all values of `against`. The bases are moved to the front of
    `compared.groups`.
    against: KEY=VALUE,...; a KEY alone has the value of the sweep's first configuration, and with
        "" that configuration is the base.
    """
    base: dict[str, str] = {}
    typed_first = _typed_first(compared.groups)
    for pair in against.split(",") if against else compared.keys:
        key, is_given, value = pair.partition("=")
        _refuse_against(compared, against, key in compared.keys)
        base[key] = value if is_given else text(typed_first.values[key])
    bases = [
        group
        for group in compared.groups
        if all(text(group.values[key]) == base[key] for key in base)
    ]
    _refuse_against(compared, against, bool(bases))
    compared.groups = bases + [group for group in compared.groups if group not in bases]
    others = [key for key in compared.keys if key not in (*base, compared.best_of)]
    rests = [[repr(group.values[key]) for key in others] for group in compared.groups]
    after = range(len(bases), len(rests))
    return {(i, j) for i in range(len(bases)) for j in after if rests[i] == rests[j]}


def _typed_first(groups: list[RunGroup]) -> RunGroup:
    """Return the group of the sweep's first job; outside of a sweep that of the first run."""
    orders: dict[Path, dict[str, int]] = {}

    def place(run: Run) -> tuple[int, str]:
        folder = Path(run.path).parent
        if folder not in orders:
            jobs = read_sweep(folder).get("jobs", [])
            orders[folder] = {job["directory"]: number for number, job in enumerate(jobs)}
        return orders[folder].get(Path(run.path).name, len(orders[folder])), str(run.path)

    return min(groups, key=lambda group: min(map(place, group.runs)))


def _refuse_against(compared: Compared, against: str, is_right: bool) -> None:
    """Raise ConfigError, with all that --against takes, unless it is right."""
    if is_right:
        return
    values = dict.fromkeys(
        f"{key}={text(group.values[key])}" for key in compared.keys for group in compared.groups
    )
    if not values:
        _keys_of("--against", [against], compared.keys)
    raise ConfigError(
        f"--against={against} needs what a configuration has: KEY=VALUE, or KEY alone for the "
        f"value of the first. These are {', '.join(values)}. Use --against={next(iter(values))}."
    )


def _extend_collapsed(runs: list[Run], metric: str) -> list[str]:
    """Extend each run that collapsed at its last value, as far as the others have run.

    Returns a note that names these runs, or an empty list.
    """
    ends = {
        axis: max((run.last(axis) for run in runs if not run.collapsed), default=0.0)
        for axis in ("step", *AXES)
    }
    collapsed = [run for run in runs if run.collapsed]
    for run in collapsed:
        values = run.values(metric)
        stays_at = values[-1] if metric.startswith(HELD_OUT) else final(values)
        here = {axis: run.last(axis) for axis in ends}
        at_end = {axis: max(end, here[axis]) for axis, end in ends.items()}
        for row in (here, at_end):
            row[metric] = stays_at
            run.columns = {
                name: np.append(column, row.get(name, np.nan))
                for name, column in run.columns.items()
            }
    if not collapsed:
        return []
    names = ", ".join(run.name for run in collapsed)
    return [
        f"collapsed, and not dropped: {names}; numbers that were not finite ended them, and they "
        "count to the end with their last values"
    ]


def _limits(goal: measures.Goal, runs: list[measures.Reached]) -> dict[str, float]:
    """Return {axis: the search limit}; see `Compared.limits`."""
    if goal.threshold is None:
        return {}
    return {
        axis: min((run.seen[axis] for run in runs if axis not in run.to), default=inf)
        for axis in AXES
        if all(axis in (run.to or run.seen) for run in runs)
    }


def _rank(compared: Compared, group: RunGroup) -> tuple[float, ...]:
    """Return the sorting key of a group, the best first and groups without a counted run last.

    Groups are sorted by the documents to the threshold, then by the area under the curve; without a
    threshold by the measure that is compared.
    """
    if not group.reached:
        return (1,)
    value = group.mean[0] if compared.goal.measure == "area" else group.final[0]
    assert value is not None  # as there is a counted run
    if not compared.by_documents:
        return 0, -value
    return 0, statistics.fmean(compared.spent(group, DOCUMENTS)), -(group.mean[0] or 0.0), -value


def _sample(
    compared: Compared, group: RunGroup, varying: Sequence[str], blocks: Sequence[str] = ()
) -> Sample:
    """Return the tested values of a group by block, with the keys that decide about its prompts."""
    config = group.runs[0].config
    prompts = {}
    for name in varying:
        key = name.removeprefix(CONTENTS)
        declared = key_named(key, config) if key in config else None
        if declared is not None and declared.fixed == POSITION:
            prompts[name] = sorted({repr(learned(run, name)) for run in group.counted})
    blocks_of_runs = [_block(run, blocks) for run in group.counted]
    values = dict(zip(blocks_of_runs, compared.tested_values(group), strict=True))
    return Sample(values, prompts)


def _measures_of(compared: Compared, blocks: Sequence[str]) -> list[str]:
    """Return, for each group, what its tested values measure; a text that is equal for groups whose
    values mean the same.

    blocks: the --over keys. Where one of them changes the number itself, only groups that share
    a block measure the same.
    """
    metric = compared.metric
    alters = any(altering(key.removeprefix(CONTENTS)) & kinds_of(metric) for key in blocks)
    components = _sharing_blocks(compared.groups, blocks) if alters else [0] * len(compared.groups)
    texts = []
    for place, (group, component) in enumerate(zip(compared.groups, components, strict=True)):
        measured = measure_of(group.counted, metric, compared.ignore_code, blocks)
        texts.append(repr((place if measured is None else measured, component)))
    return texts


def _sharing_blocks(groups: list[RunGroup], blocks: Sequence[str]) -> list[int]:
    """Return a number for each group, equal for groups that share blocks, or share some with a
    third."""
    numbers = list(range(len(groups)))
    of_groups = [{_block(run, blocks)[:-1] for run in group.counted} for group in groups]
    for place, of_group in enumerate(of_groups):
        for other in range(place):
            if of_group & of_groups[other]:
                joined = {numbers[place], numbers[other]}
                least = min(joined)
                numbers = [least if number in joined else number for number in numbers]
    return numbers


def _block(run: Run, blocks: Sequence[str]) -> tuple:
    """Return the values that pair a run with others: of the --over keys, and the seed."""
    return (*(repr(learned(run, key)) for key in blocks), run.config["seed"])


def _keep_best(compared: Compared, best_of: str) -> None:
    """Keep the first of the sorted groups that differ in one key; its `tried` has all."""
    _keys_of("--best-of", [best_of], compared.keys)
    chosen: dict[tuple, RunGroup] = {}
    for group in compared.groups:
        other_values = tuple(repr(value) for key, value in group.values.items() if key != best_of)
        best = chosen.setdefault(other_values, group)
        if group.counted:
            best.tried[text(group.values[best_of])] = group
    compared.groups = list(chosen.values())
    _, following, _ = _varying([run for group in compared.groups for run in group.runs])
    compared.following = [name for name in map(shown, following) if name not in compared.keys]


def refuse_other_measures(compared: Compared) -> None:
    """Raise ConfigError if the compared metric means something else at each value of the --best-of
    key, so that it cannot say which value is best."""
    for group in compared.groups:
        tried = [other.counted for other in group.tried.values() if other.counted]
        for runs in tried[1:]:
            found = why_unlike(tried[0], runs, compared.metric, compared.ignore_code)
            if found:
                raise ConfigError(
                    f"--best-of={compared.best_of} needs a metric that means the same at each "
                    f"value (got {compared.metric}). {found[0]}. {what_to_run(runs[0], found)}"
                )


def _varying(
    runs: Sequence[Run], first: Sequence[str] = (), ignore_code: bool = False
) -> tuple[list[str], list[str], dict[str, object]]:
    """Return (names that tell the runs apart, names that follow from those, names that all share).

    The last is {name: value}. A name follows from others if adding it divides the runs no further.
    first: names that are looked at before all others, and so follow from none.
    ignore_code: do not tell runs apart by the user's own modules.
    """
    present = list(dict.fromkeys(name for run in runs for name in (*run.config, *run.trained_with)))
    present.remove("seed")  # the runs of a group differ in it
    if ignore_code:
        present = [name for name in present if not name.startswith(CODE)]
    names = [name for name in present if any(_changes_learning(name, run) for run in runs)]
    names.sort(key=lambda name: shown(name) not in first)
    keys = []
    following = []
    common = {}
    classes = [()] * len(runs)  # for each run its values of `keys`
    for name in names:
        values = [learned(run, name) for run in runs]
        if _is_not_configured(name) and None in values and len({*values}) == 2:
            continue  # a run without a record of it is assumed to agree with the others
        texts = [repr(value) for value in values]
        if len({*texts}) == 1:
            common[name] = values[0]
            continue
        finer = [
            (*values_of_run, value) for values_of_run, value in zip(classes, texts, strict=True)
        ]
        if len(set(finer)) > len(set(classes)):
            classes = finer
            keys.append(name)
        else:
            following.append(name)
    return keys, following, common


def _is_not_configured(name: str) -> bool:
    """Return True for a name of the contents of data or of code, which is no key."""
    return name.startswith((CONTENTS, CODE, EVALUATION_CODE))


def _changes_learning(name: str, run: Run) -> bool:
    """Return True if the run would have learned something else with another value of this name."""
    if name.startswith(EVALUATION_CODE):
        return False
    key = name.removeprefix(CONTENTS)
    if key in run.config or key not in run.trained_with:
        return (key in run.config or name in run.trained_with) and changes_learning(key, run.config)
    # The key belongs to an option that a resume has replaced by another.
    declared = [known for known in KEYS if known.name == key]
    return not declared or any(known.learns is not False for known in declared)


def _code_notes(compared: Compared, runs: list[Run], ignore_code: bool) -> list[str]:
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


def _count(group: RunGroup, metric: str, blocks: Sequence[str]) -> list[tuple[Run, str]]:
    """Choose the runs that count, the newest of each block; return the others with the reason."""
    by_block: dict[tuple, Run] = {}
    others = []
    for run in group.runs:
        if not (run.state == "done" or run.collapsed) or not run.values(metric):
            others.append((run, run.why_not_counted(metric)))
            continue
        block = _block(run, blocks)
        if block in by_block:
            older, run = sorted((by_block[block], run), key=lambda run: run.last("time"))
            reason = f"same configuration and seed as {run.name}, which is newer"
            if are_identical(older, run):
                reason += ", and has the same numbers to the last bit"
            others.append((older, reason))
        by_block[block] = run
    group.counted = [by_block[block] for block in sorted(by_block)]
    return others


def _refuse_unknown(runs: list[Run], metric: str, option: str) -> None:
    """Raise ConfigError for a metric that no run has recorded, with the nearest."""
    no_metrics = {"step", "time", "seconds", "tokens_seen"}
    known = sorted({name for run in runs for name in (*run.columns, *run.names)} - no_metrics)
    if not known:
        files = ", ".join(f"{run.path}/metrics.jsonl" for run in runs[:3])
        raise ConfigError(
            f"{option}={metric} needs a run that has finished a step (got none). Their files of "
            f"metrics are empty or missing: {files}. Put them back, from a backup, or "
            "use pgtk resume to train."
        )
    if metric not in known:
        near = nearest(metric, known, 0)
        raise ConfigError(
            f"{option}={metric} needs one of {', '.join(known)}. No run has recorded it. Use "
            f"{option}={near}."
        )


def notes_of(compared: Compared) -> list[str]:
    """Return notes on differences that make the runs hard to compare, without their full stops."""
    notes = []
    counted = [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append(
            "the runs come from different code: `pgtk compare RUN_A RUN_B` of two of them says "
            "what changed"
        )
    lengths = {run.step for run in counted if not run.collapsed}
    if len(lengths) > 1:
        steps = ", ".join(map(str, sorted(lengths)))
        notes.append(
            f"the runs are of different length ({steps} steps): their ends do not compare, the "
            "mean does"
        )
    names = _evaluated_differently(counted) if compared.metric.startswith(HELD_OUT) else []
    if names:
        notes.append(
            f"the runs were evaluated differently ({', '.join(names)}): on other prompts, with "
            "other settings, or at other steps"
        )
    if compared.best_of is not None:
        notes += _best_of_notes(compared, compared.best_of)
    return notes + _scale_notes(compared.groups)


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
        tried = [value for value in compared.tried if value in group.tried]
        chosen = text(group.values[key])
        if len(tried) > 1 and is_number(group.values[key]) and chosen in (tried[0], tried[-1]):
            end = "lowest" if chosen == tried[0] else "highest"
            notes.append(
                f"{group.label}: this is the {end} {key} tried, and one beyond may be better"
            )
    return notes


def _evaluated_differently(runs: list[Run]) -> list[str]:
    """Return the names of settings, data and code of the evaluation in which the runs differ."""
    beginnings = ("evaluation.", EVALUATION_CODE, f"{CONTENTS}evaluation.")
    present = {
        name
        for run in runs
        for name in (*run.config, *run.trained_with)
        if name.startswith(beginnings)
    }
    names = []
    for name in sorted(present - {"evaluation.best"}):
        values = [learned(run, name) for run in runs]
        if _is_not_configured(name):
            values = [value for value in values if value is not None]
        if len({repr(value) for value in values}) > 1:
            names.append(name)
    return names


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
