"""Runs gathered by configuration: which keys vary, which differ in the seed alone, what makes them hard to compare."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from math import inf

import numpy as np

from pgtoolkit.comparison import measures
from pgtoolkit.comparison.compared import Compared, Group, learned
from pgtoolkit.comparison.measures import AXES, DOCUMENTS
from pgtoolkit.comparison.statistics import Comparisons, Sample
from pgtoolkit.config.keys import KEYS, changes_learning, key_named, shown
from pgtoolkit.config.schema_rollouts import POSITION
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.history import CODE, CONTENTS, EVALUATION_CODE
from pgtoolkit.runs.series import final
from pgtoolkit.system.report import is_number, nearest, refusal, text

_SCALES_APART = 2
"""By how much gradients may differ in length before it is noted."""


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
    """Gather the runs and compare what they reached. Raises ConfigError if no run has the metric.

    metric: see `parse_metric`; None for the one that `chosen_metric` finds, or the one of `reach`. best_of: a varying
    key; of groups that differ in it alone only the best one is compared. reach: METRIC=THRESHOLD, in the place of
    `metric`. over: KEY,..., varying keys that belong to a run's block, as the seed does. against: KEY=VALUE,..., the
    base that the planned contrasts are with; None: every pair is planned. margin: see `margin_of`.
    ignore_code: runs whose own modules differ are of one configuration where nothing else differs.
    labels: KEY=VALUE=NAME, how a value is called.
    """
    readable = [run for run in runs if run.config]
    left_out = [(run, run.why_not_counted()) for run in runs if not run.config]
    if not readable:
        listing = "; ".join(f"{run.name}: {why}" for run, why in left_out)
        raise ConfigError(f"pgtk compare needs a run that can be read (got none). {listing}. Use other folders.")
    if margin is not None:
        measures.margin_of(margin)
    option, measure, threshold, notes = "--metric", None, None, []
    if reach is not None:
        option, (metric, threshold) = "--reach", measures.parse_reach(reach)
    elif metric is None:
        metric, notes = measures.chosen_metric(readable)
    else:
        measure, metric = measures.parse_metric(metric)
    _refuse_unknown(readable, metric, option)
    keys, following, common = _varying(readable, over.split(",") if over else (), ignore_code)
    blocks = _keys("--over", over.split(",") if over else (), keys, common)
    keys = [key for key in keys if key not in blocks]
    by_values: dict[tuple, Group] = {}
    for run in readable:
        values = {key: learned(run, key) for key in keys}
        group = by_values.setdefault(tuple(map(repr, values.values())), Group(values, []))
        group.runs.append(run)
    groups = list(by_values.values())
    for group in groups:
        left_out += _count(group, metric, blocks)
        group.values = {shown(key): value for key, value in group.values.items()}
    named = _labels(labels, groups)
    for group in groups:
        group.labels = named
    notes += _carry_on([run for group in groups for run in group.counted], metric)
    goal = measures.goal_of([group.counted for group in groups], metric, threshold, measure)
    for group in groups:
        group.reached = [measures.reached(run, goal) for run in group.counted]
    limits = _limits(goal, [one for group in groups for one in group.reached])
    names = [*map(shown, keys)], [*map(shown, following)]
    compared = Compared(goal, limits, *names, common, groups, Comparisons([]), left_out, notes, blocks, best_of)
    groups.sort(key=lambda group: _rank(compared, group))
    if best_of is not None:
        _keep_best(compared, best_of)
    primary = None if against is None else _planned(compared, against)
    compared.name_groups()
    samples = [_sample(compared, group, keys + following, blocks) for group in compared.groups]
    compared.comparisons = Comparisons(samples, margin, primary)
    compared.notes += notes_of(compared)
    compared.notes += _code_notes(compared, readable, ignore_code)
    return compared


def _keys(option: str, named: Sequence[str], keys: list[str], besides: Collection[str] = ()) -> list[str]:
    """The keys of these names, as they are typed. Raises ConfigError for one that neither varies nor is in besides."""
    known = {shown(key): key for key in (*keys, *besides)}
    for name in named:
        if name not in known:
            names = ", ".join(map(shown, keys)) or "none"
            raise ConfigError(f"{option}={name} needs a key that tells the runs apart. These are {names}. Use another.")
    return [known[name] for name in named]


def _labels(labels: Sequence[str], groups: list[Group]) -> dict[tuple[str, str], str]:
    """Return (key, value in words) -> name. Raises ConfigError for a name of a value that no run has."""
    values = {(key, text(value)) for group in groups for key, value in group.values.items()}
    named = {}
    for label in labels:
        # A value may have equals signs in it, and so may a name: what runs have decides.
        ends = [(key, value) for key, value in values if label.startswith(f"{key}={value}=")]
        if not ends:
            known = ", ".join(sorted(f"{key}={value}" for key, value in values)) or "none, as nothing varies"
            reason = "It names a value of a key that tells the runs apart."
            raise ConfigError(
                refusal(f"--label {label}", "KEY=VALUE=NAME", label, f"{reason} These are {known}.", "one")
            )
        key, value = max(ends, key=lambda pair: len(pair[1]))
        named[key, value] = label.removeprefix(f"{key}={value}=")
    return named


def _planned(compared: Compared, against: str) -> set[tuple[int, int]]:
    """The pairs of a base with each group that differs from it in the keys of `against` alone, the bases first."""
    base: dict[str, str] = {}
    for pair in against.split(","):
        key, _, value = pair.partition("=")
        base[key] = value
    _keys("--against", [*base], compared.keys)
    bases = [group for group in compared.groups if all(text(group.values[key]) == base[key] for key in base)]
    if not bases:
        key = next(iter(base))
        values = ", ".join(dict.fromkeys(text(group.values[key]) for group in compared.groups))
        reason = f"No configuration has it; of {key} there are {values}."
        raise ConfigError(refusal(f"--against={against}", "values that runs have", against, reason, "one of them"))
    compared.groups = bases + [group for group in compared.groups if group not in bases]
    others = [key for key in compared.keys if key not in (*base, compared.best_of)]
    rests = [[repr(group.values[key]) for key in others] for group in compared.groups]
    after = range(len(bases), len(rests))
    return {(i, j) for i in range(len(bases)) for j in after if rests[i] == rests[j]}


def _carry_on(runs: list[Run], metric: str) -> list[str]:
    """Let each run that collapsed stay where it ended, as far as the others have been; returns a note of them."""
    ends = {axis: max((run.last(axis) for run in runs if not run.collapsed), default=0.0) for axis in ("step", *AXES)}
    collapsed = [run for run in runs if run.collapsed]
    for run in collapsed:
        found = run.values(metric)
        stays_at = found[-1] if metric.startswith(HELD_OUT) else final(found)
        here = {axis: run.last(axis) for axis in ends}
        rows = [here, {axis: max(end, here[axis]) for axis, end in ends.items()}]
        for row in rows:
            row[metric] = stays_at
            run.columns = {name: np.append(column, row.get(name, np.nan)) for name, column in run.columns.items()}
    names = ", ".join(run.name for run in collapsed)
    why = "numbers that were not finite ended them, and they count with what they had reached, to the end"
    return [f"collapsed, and not dropped: {names}; {why}"] if collapsed else []


def _limits(goal, found):
    """{axis: as far as every run that has not reached the threshold has been}, of axes that all have."""
    if goal.threshold is None:
        return {}
    return {
        axis: min((one.seen[axis] for one in found if axis not in one.to), default=inf)
        for axis in AXES
        if all(axis in (one.to or one.seen) for one in found)
    }


def _rank(compared, group):
    """What groups are sorted by: documents to the threshold, of equal ones the area; else the final value."""
    if not group.reached:
        return (1,)
    final = -(group.mean[0] if compared.goal.measure == "area" else group.final[0])
    if not compared.by_documents:
        return 0, final
    return 0, statistics.fmean(compared.spent(group, DOCUMENTS)), -(group.mean[0] or 0.0), final


def _sample(compared, group, varying, blocks=()):
    config, prompts = group.runs[0].config, {}
    for name in varying:
        of_key = name.removeprefix(CONTENTS)
        declared = key_named(of_key, config) if of_key in config else None
        if declared is not None and declared.fixed == POSITION:
            prompts[name] = sorted({repr(learned(run, name)) for run in group.counted})
    values = zip((_block(run, blocks) for run in group.counted), compared.tested(group), strict=True)
    return Sample(dict(values), prompts)


def _block(run, blocks):
    return (*(repr(learned(run, key)) for key in blocks), run.config["seed"])


def _keep_best(compared, best_of):
    """Of the sorted groups that differ in one key alone the first stays."""
    _keys("--best-of", [best_of], compared.keys)
    chosen: dict[tuple, Group] = {}
    for group in compared.groups:
        arm = tuple(repr(value) for key, value in group.values.items() if key != best_of)
        chosen.setdefault(arm, group).tried.update({text(group.values[best_of]): group} if group.counted else {})
    compared.groups = list(chosen.values())
    _, following, _ = _varying([run for group in compared.groups for run in group.runs])
    compared.following = [name for name in map(shown, following) if name not in compared.keys]


def _varying(
    runs: Sequence[Run], first: Sequence[str] = (), ignore_code: bool = False
) -> tuple[list[str], list[str], dict[str, object]]:
    """Return (names that tell the runs apart, names that follow from those, what all share).

    first: names that follow from no others. ignore_code: the user's own modules tell none apart.
    """
    present = dict.fromkeys(name for run in runs for name in (*run.config, *run.trained_with))
    del present["seed"]  # makes the runs of a group
    if ignore_code:
        present = [name for name in present if not name.startswith(CODE)]
    names = [name for name in present if any(_changes_learning(name, run) for run in runs)]
    names.sort(key=lambda name: shown(name) not in first)
    keys, following, common = [], [], {}
    classes = [()] * len(runs)
    for name in names:
        values = [learned(run, name) for run in runs]
        if _is_beside(name) and None in values and len({*values}) == 2:
            continue  # runs that do not say it differ from no others
        texts = [repr(value) for value in values]
        if len({*texts}) == 1:
            common[name] = values[0]
            continue
        finer = [(*old, value) for old, value in zip(classes, texts, strict=True)]
        if len(set(finer)) > len(set(classes)):
            classes = finer
            keys.append(name)
        else:
            following.append(name)
    return keys, following, common


def _is_beside(name: str) -> bool:
    """Return whether a name stands for what no configuration says: contents of data, or code."""
    return name.startswith((CONTENTS, CODE, EVALUATION_CODE))


def _changes_learning(name: str, run: Run) -> bool:
    """Return whether the run would have learned something else with another value of this name."""
    if name.startswith(EVALUATION_CODE):
        return False
    key = name.removeprefix(CONTENTS)
    if key in run.config or key not in run.trained_with:
        return (key in run.config or name in run.trained_with) and changes_learning(key, run.config)
    # A resume has chosen an option without this key.
    declared = [known for known in KEYS if known.name == key]
    return not declared or any(known.learns is not False for known in declared)


def _code_notes(compared: Compared, runs: list[Run], ignore_code: bool) -> list[str]:
    """Return what is to know of the user's own modules, of which runs have used different ones."""
    if ignore_code:
        names = dict.fromkeys(name for run in runs for name in run.trained_with if name.startswith(CODE))
        differing = [name for name in names if len({run.trained_with.get(name) for run in runs} - {None}) > 1]
        return [f"--ignore=code counts as the same what differs: {', '.join(differing)}"] if differing else []
    told_by = [key for key in compared.keys if key.startswith(CODE)]
    if not told_by:
        return []
    return [
        f"{' and '.join(told_by)} differs, not in comments or docstrings alone, and so these runs are not counted as "
        "seeds of one configuration; --ignore=code counts them as such"
    ]


def _count(group, metric, blocks):
    """Take up the runs that count, one per block; return the others with the reason."""
    by_block, others = {}, []
    for run in group.runs:
        if not (run.state == "done" or run.collapsed) or not run.values(metric):
            others.append((run, run.why_not_counted(metric)))
            continue
        block = _block(run, blocks)
        if block in by_block:
            older, run = sorted((by_block[block], run), key=lambda run: run.last("time"))
            others.append((older, f"same configuration and seed as {run.name}, which is newer"))
        by_block[block] = run
    group.counted = [by_block[block] for block in sorted(by_block)]
    return others


def _refuse_unknown(runs, metric, option):
    no_metrics = {"step", "time", "seconds", "tokens_seen"}
    known = sorted({name for run in runs for name in (*run.columns, *run.names)} - no_metrics)
    if metric not in known:
        near = nearest(metric, known, 0) or "reward"
        names = ", ".join(known) or "the metrics of a run that has finished a step"
        raise ConfigError(f"{option}={metric} needs one of {names}. No run has recorded it. Use {option}={near}.")


def notes_of(compared: Compared) -> list[str]:
    """What makes the runs hard to compare, each in a sentence without its full stop."""
    notes, counted = [], [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append("the runs come from different code: `pgtk compare RUN_A RUN_B` of two of them says what changed")
    lengths = {run.step for run in counted if not run.collapsed}
    if len(lengths) > 1:
        steps = ", ".join(map(str, sorted(lengths)))
        notes.append(f"the runs are of different length ({steps} steps): their ends do not compare, the mean does")
    names = _evaluated_differently(counted) if compared.metric.startswith(HELD_OUT) else []
    if names:
        notes.append(
            f"the runs were evaluated differently ({', '.join(names)}): on other prompts, with other "
            "settings, or at other steps"
        )
    if key := compared.best_of:
        most = "fewest" if compared.by_documents else "highest"
        notes.append(
            f"of each configuration the {key} with the {most} {compared.measured[0].lower()}{compared.measured[1:]} "
            "is shown. It was chosen by the same runs that are compared, which flatters a configuration that has more "
            "values of it, or noisier ones: further seeds of the chosen ones tell"
        )
        for group in compared.groups:
            ran, best = [value for value in compared.tried if value in group.tried], text(group.values[key])
            if len(ran) > 1 and is_number(group.values[key]) and best in (ran[0], ran[-1]):
                end = "lowest" if best == ran[0] else "highest"
                notes.append(f"{group.label}: this is the {end} {key} tried, and one beyond may be better")
    return notes + _scale_notes(compared.groups)


def _evaluated_differently(runs: list[Run]) -> list[str]:
    """Return the names of what an evaluation depends on and runs differ in."""
    beginnings = ("evaluation.", EVALUATION_CODE, f"{CONTENTS}evaluation.")
    present = {name for run in runs for name in (*run.config, *run.trained_with) if name.startswith(beginnings)}
    names = []
    for name in sorted(present - {"evaluation.best"}):
        values = {repr(value) for run in runs if (value := learned(run, name)) is not None or not _is_beside(name)}
        if len(values) > 1:
            names.append(name)
    return names


def _scale_notes(groups):
    """What is to know of gradients of different lengths."""
    norms = {}
    for group in groups:
        if values := [run.values("grad_norm") for run in group.counted if "grad_norm" in run.columns]:
            norms[group.label] = float(np.median(np.concatenate(values)))
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low = min(norms, key=lambda label: norms[label])
    high = max(norms, key=lambda label: norms[label])
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with {low} and "
        f"{norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and AdamW's epsilon then act on "
        "them differently, and one learning rate need not suit both: docs/comparing.md"
    ]
