"""Runs gathered by configuration: which keys vary, which runs differ in the seed alone, what each group reached."""

from __future__ import annotations

import difflib
import statistics
from dataclasses import dataclass, field
from math import inf

import numpy as np

from pgtoolkit.comparison.measures import (
    AXES,
    DOCUMENTS,
    Goal,
    Reached,
    chosen_metric,
    goal_of,
    parse_reach,
    reached,
)
from pgtoolkit.comparison.statistics import Comparisons, Sample, mean_and_std
from pgtoolkit.config.keys import changes_learning, key_named, shown
from pgtoolkit.config.schema import POSITION
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.system.report import text

_SCALES_APART = 2
"""By how much gradients may differ in length before it is noted."""


@dataclass
class Group:
    """Runs of one configuration but for their seed. counted: one per seed; reached: what each of these did."""

    values: dict[str, object]
    runs: list[Run]
    counted: list[Run] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The values of the varying keys in a few words."""
        return ", ".join(text(value) for value in self.values.values()) or "all runs"

    @property
    def final(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds."""
        return mean_and_std([one.final for one in self.reached])

    @property
    def mean(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds of the mean over documents."""
        return mean_and_std([one.mean for one in self.reached if one.mean is not None])


@dataclass
class Compared:
    """All that a report shows.

    goal: what the runs are compared by. limits: {axis: how far is looked for the threshold}, as far as every run has
    been that did not reach it, infinite where all did; an axis is in it if all the counted runs have it. keys: the
    varying keys that tell the groups apart, as shown. following: varying keys that follow from those. common: the
    configuration that all share. groups: the best first. comparisons: every pair of groups, by their place in `groups`.
    left_out: (run, why) for each run that is excluded from averages. notes: what to know besides.
    """

    goal: Goal
    limits: dict[str, float]
    keys: list[str]
    following: list[str]
    common: dict[str, object]
    groups: list[Group]
    comparisons: Comparisons
    left_out: list[tuple[Run, str]]
    notes: list[str]

    @property
    def metric(self) -> str:
        """What is compared."""
        return self.goal.metric

    @property
    def by_documents(self) -> bool:
        """Whether groups are sorted and tested by the documents to the threshold; else by their final value."""
        return DOCUMENTS in self.limits

    def spent(self, group: Group, axis: str) -> list[float]:
        """What each counted run spent until it reached the threshold, the limit where it did not within it."""
        return [min(one.to.get(axis, inf), self.limits[axis]) for one in group.reached]

    def arrived(self, group: Group, axis: str) -> int:
        """How many of the counted runs reached the threshold within the limit."""
        return sum(one.to.get(axis, inf) <= self.limits[axis] for one in group.reached)


def compare(
    runs: list[Run], metric: str | None = None, best_of: str | None = None, reach: str | None = None
) -> Compared:
    """Gather the runs and compare what they reached. Raises ConfigError if no run has the metric.

    metric: None for the one that `chosen_metric` finds, or the one of `reach`. best_of: a varying key; of groups that
    differ in it alone only the best one is compared. reach: METRIC=THRESHOLD, in the place of `metric`.
    """
    readable = [run for run in runs if run.config]
    left_out = [(run, run.why_not_counted()) for run in runs if not run.config]
    if not readable:
        listing = "; ".join(f"{run.name}: {why}" for run, why in left_out)
        raise ConfigError(f"pgtk compare needs a run that can be read (got none). {listing}. Use other folders.")
    option, threshold, notes = "--metric", None, []
    if reach is not None:
        option, (metric, threshold) = "--reach", parse_reach(reach)
    elif metric is None:
        metric, notes = chosen_metric(readable)
    _refuse_unknown(readable, metric, option)
    keys, following, common = _varying([run.config for run in readable])
    by_values: dict[tuple, Group] = {}
    for run in readable:
        values = {key: run.config.get(key) for key in keys}
        group = by_values.setdefault(tuple(map(repr, values.values())), Group(values, []))
        group.runs.append(run)
    groups = list(by_values.values())
    for group in groups:
        left_out += _count(group, metric)
        group.values = {shown(key): value for key, value in group.values.items()}
    goal = goal_of([group.counted for group in groups], metric, threshold)
    for group in groups:
        group.reached = [reached(run, goal) for run in group.counted]
    limits = _limits(goal, [one for group in groups for one in group.reached])
    names = [*map(shown, keys)], [*map(shown, following)]
    compared = Compared(goal, limits, *names, common, groups, Comparisons([]), left_out, notes)
    groups.sort(key=lambda group: _rank(compared, group))
    if best_of is not None:
        _keep_best(compared, best_of)
    compared.comparisons = Comparisons([_sample(compared, group, keys + following) for group in compared.groups])
    compared.notes += _notes(compared)
    return compared


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
    final = -group.final[0]
    if not compared.by_documents:
        return 0, final
    return 0, statistics.fmean(compared.spent(group, DOCUMENTS)), -(group.mean[0] or 0.0), final


def _sample(compared, group, varying):
    values = compared.spent(group, DOCUMENTS) if compared.by_documents else [one.final for one in group.reached]
    config, prompts = group.runs[0].config, {}
    for name in varying:
        declared = key_named(name, config) if name in config else None
        if declared is not None and declared.fixed == POSITION:
            prompts[name] = config[name]
    return Sample(dict(zip((run.config["seed"] for run in group.counted), values, strict=True)), prompts)


def _keep_best(compared, best_of):
    """Of the sorted groups that differ in one key alone the first stays."""
    if best_of not in compared.keys:
        names = ", ".join(compared.keys) or "none"
        raise ConfigError(f"--best-of={best_of} needs a key that tells the runs apart. These are {names}. Use another.")
    chosen: dict[tuple, Group] = {}
    for group in compared.groups:
        arm = tuple(repr(value) for key, value in group.values.items() if key != best_of)
        if chosen.setdefault(arm, group) is not group:
            why = f"{best_of}={text(group.values[best_of])} is not the best"
            compared.left_out += [(run, why) for run in group.counted]
    compared.groups, goal = list(chosen.values()), compared.goal
    _, following, _ = _varying([run.config for group in compared.groups for run in group.runs])
    compared.following = [name for name in map(shown, following) if name not in compared.keys]
    fewest = f"fewest documents to {goal.metric} {goal.threshold:g}" if compared.by_documents else ""
    compared.notes.append(
        f"of each configuration the {best_of} with the {fewest or f'highest {goal.metric}'} is shown. It was chosen by "
        "the same runs that are compared, which flatters a configuration that has more values of it, or noisier ones: "
        "further seeds of the chosen ones tell"
    )


def _varying(configs):
    """(keys that tell the configurations apart, keys that follow from those, what all share)."""
    present = dict.fromkeys(key for config in configs for key in config if key != "seed")  # makes the runs of a group
    names = [key for key in present if any(changes_learning(key, config) for config in configs if key in config)]
    keys, following, common = [], [], {}
    classes = [()] * len(configs)
    for name in names:
        values = [repr(config.get(name)) for config in configs]
        if len(set(values)) == 1:
            common[name] = configs[0].get(name)
            continue
        finer = [(*old, value) for old, value in zip(classes, values, strict=True)]
        if len(set(finer)) > len(set(classes)):
            classes = finer
            keys.append(name)
        else:
            following.append(name)
    return keys, following, common


def _count(group, metric):
    """Take up the runs that count, one per seed; return the others with the reason."""
    by_seed, others = {}, []
    for run in group.runs:
        if run.state != "done" or not run.values(metric):
            others.append((run, run.why_not_counted(metric)))
            continue
        seed = run.config["seed"]
        if seed in by_seed:
            older, run = sorted((by_seed[seed], run), key=lambda run: run.last("time"))
            others.append((older, f"same configuration and seed as {run.name}, which is newer"))
        by_seed[seed] = run
    group.counted = [by_seed[seed] for seed in sorted(by_seed)]
    return others


def _refuse_unknown(runs, metric, option):
    no_metrics = {"step", "time", "seconds", "tokens_seen"}
    known = sorted({name for run in runs for name in (*run.columns, *run.names)} - no_metrics)
    if metric not in known:
        nearest = (difflib.get_close_matches(metric, known, n=1) or known[:1] or ["reward"])[0]
        names = ", ".join(known) or "the metrics of a run that has finished a step"
        raise ConfigError(f"{option}={metric} needs one of {names}. No run has recorded it. Use {option}={nearest}.")


def _notes(compared):
    """What makes the runs hard to compare, each in a sentence without its full stop."""
    notes, counted = [], [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append("the runs come from different code: `pgtk diff RUN_A RUN_B` says what changed")
    lengths = {run.step for run in counted}
    if len(lengths) > 1:
        steps = ", ".join(map(str, sorted(lengths)))
        notes.append(f"the runs are of different length ({steps} steps): their ends do not compare, the mean does")
    if compared.metric.startswith(HELD_OUT):
        keys = {key for run in counted for key in run.config if key.startswith("evaluation.")} - {"evaluation.best"}
        if names := sorted(key for key in keys if len({repr(run.config.get(key)) for run in counted}) > 1):
            notes.append(
                f"the runs were evaluated differently ({', '.join(names)}): on other prompts, with other "
                "settings, or at other steps"
            )
    return notes + _scale_notes(compared.groups)


def _scale_notes(groups):
    """What is to know of gradients of different lengths."""
    norms = {}
    for group in groups:
        if values := [run.values("grad_norm") for run in group.counted if "grad_norm" in run.columns]:
            norms[group.label] = float(np.median(np.concatenate(values)))
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low, high = min(norms, key=norms.get), max(norms, key=norms.get)
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with {low} and "
        f"{norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and AdamW's epsilon then act on "
        "them differently, and one learning rate need not suit both: docs/comparing.md"
    ]
