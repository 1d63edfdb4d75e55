"""Runs gathered by configuration: which keys vary, which runs differ in the seed alone, what each group reached."""

from __future__ import annotations

import difflib
import statistics
from dataclasses import dataclass, field

from pgtoolkit.comparison.runs import Run
from pgtoolkit.comparison.statistics import Comparison, compare_all, mean_and_std
from pgtoolkit.config.names import NO_EFFECT_ON_LEARNING
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.series import best, final
from pgtoolkit.system.report import text

_NOT_COMPARED = ("seed", *NO_EFFECT_ON_LEARNING)
"""The seed makes the runs of a group."""

_SCALES_APART = 2
"""By how much gradients may differ in length before it is noted."""

_SHORT = (".name", ".mode", ".implementation", ".estimator")
"""Ends of the keys that hold a group's option, left out when they are shown: `loss`, not `loss.name`."""


@dataclass
class Group:
    """Runs of one configuration but for their seed. finals and bests: of the runs that count, one per seed."""

    values: dict[str, object]
    runs: list[Run]
    counted: list[Run] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)
    bests: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The values of the varying keys in a few words."""
        return ", ".join(text(value) for value in self.values.values()) or "all runs"

    @property
    def final(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds."""
        return mean_and_std(self.finals)

    @property
    def best(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds."""
        return mean_and_std(self.bests)


@dataclass
class Compared:
    """All that a report shows.

    keys: the varying keys that tell the groups apart, as shown. following: varying keys that follow from those.
    common: the configuration that all share. groups: highest final mean first. comparisons: every pair of groups, by
    their place in `groups`. left_out: (run, why) for each run that is in no mean. notes: what to know besides.
    """

    metric: str
    keys: list[str]
    following: list[str]
    common: dict[str, object]
    groups: list[Group]
    comparisons: list[Comparison]
    left_out: list[tuple[Run, str]]
    notes: list[str]


def compare(runs: list[Run], metric: str, best_of: str | None = None) -> Compared:
    """Gather the runs and compare what they reached. Raises ConfigError if no run has the metric.

    best_of: a varying key; of groups that differ in it alone only the one with the highest final mean is compared.
    """
    readable = [run for run in runs if run.config]
    left_out = [(run, _why(run)) for run in runs if not run.config]
    if not readable:
        listing = "; ".join(f"{run.name}: {why}" for run, why in left_out)
        raise ConfigError(f"pgtk compare needs a run that can be read (got none). {listing}. Use other folders.")
    _refuse_unknown(readable, metric)
    keys, following, common = _varying([run.config for run in readable])
    by_values: dict[tuple, Group] = {}
    for run in readable:
        values = {key: run.config.get(key) for key in keys}
        group = by_values.setdefault(tuple(map(repr, values.values())), Group(values, []))
        group.runs.append(run)
    groups = list(by_values.values())
    for group in groups:
        left_out += _count(group, metric)
        group.values = {_shown(key): value for key, value in group.values.items()}
    groups.sort(key=lambda group: group.final[0] if group.finals else float("-inf"), reverse=True)
    notes = []
    if best_of is not None:
        groups, beaten = _best_of(groups, [_shown(key) for key in keys], best_of)
        left_out += [
            (run, f"{best_of}={text(group.values[best_of])} is not the best")
            for group in beaten
            for run in group.counted
        ]
        notes.append(
            f"of each configuration the {best_of} with the highest final {metric} is shown. It was chosen by the same "
            "runs that are compared, which flatters a configuration that has more values of it, or noisier ones: "
            "further seeds of the chosen ones tell"
        )
    return Compared(
        metric,
        [_shown(key) for key in keys],
        [_shown(key) for key in following],
        common,
        groups,
        compare_all([group.finals for group in groups]),
        left_out,
        notes + _notes([run for group in groups for run in group.counted]) + _scale_notes(groups),
    )


def _best_of(groups, keys, best_of):
    """(the first of the sorted groups that differ in one key alone, the others)."""
    if best_of not in keys:
        names = ", ".join(keys) or "none"
        raise ConfigError(
            f"--best-of={best_of} needs a key that tells the runs apart (got one of which they have the same value, or "
            f"that follows from others). These are {names}. Use another key, or leave the option out."
        )
    chosen, beaten = {}, []
    for group in groups:
        arm = tuple(repr(value) for key, value in group.values.items() if key != best_of)
        if chosen.setdefault(arm, group) is not group:
            beaten.append(group)
    return list(chosen.values()), beaten


def _scale_notes(groups):
    """What is to know of gradients of different lengths."""
    norms = {}
    for group in groups:
        if values := [value for run in group.counted for value in run.values("grad_norm")]:
            norms[group.label] = statistics.median(values)
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low, high = min(norms, key=norms.get), max(norms, key=norms.get)
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with {low} and "
        f"{norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and AdamW's epsilon then act on "
        "them differently, and one learning rate need not suit both: docs/comparing.md"
    ]


def _shown(key):
    for end in _SHORT:
        if key.count(".") == 1 and key.endswith(end):
            return key.removesuffix(end)
    return key


def _varying(configs):
    """(keys that tell the configurations apart, keys that follow from those, what all share)."""
    names = list(dict.fromkeys(key for config in configs for key in config if not key.startswith(_NOT_COMPARED)))
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
            others.append((run, _why(run, metric)))
            continue
        seed = run.config["seed"]
        if seed in by_seed:
            older, run = sorted((by_seed[seed], run), key=lambda run: run.rows[-1].get("time", 0))
            others.append((older, f"same configuration and seed as {run.name}, which is newer"))
        by_seed[seed] = run
    group.counted = list(by_seed.values())
    group.finals = [final(run.values(metric)) for run in group.counted]
    group.bests = [best(run.values(metric)) for run in group.counted]
    return others


def _why(run, metric=None):
    if metric and run.state == "done":
        return f"has no {metric}"
    if run.state == "pending":
        return "has not begun"
    if run.state == "unreadable":
        return f"unreadable: {run.reason}"
    why = f"{run.state} at step {run.step}"
    if "trainer.max_steps" in run.config:
        why += f" of {run.config['trainer.max_steps']}"
    so_far = run.values(metric) if metric else []
    why += f", {metric} {final(so_far):.3f} so far" if so_far else ""
    return why + (f": {' '.join(run.reason.split())}" if run.reason else "")


def _refuse_unknown(runs, metric):
    known = sorted({name for run in runs for row in run.rows[-1:] for name in row} - {"step", "time", "seconds"})
    if metric not in known:
        nearest = (difflib.get_close_matches(metric, known, n=1) or known[:1] or [None])[0]
        got = f"one of {', '.join(known)}" if known else "runs with metrics; these have finished no step yet"
        use = f" Use --metric={nearest}." if nearest else " Wait for their first step, or use other runs."
        raise ConfigError(f"--metric={metric} needs {got}. No run has recorded that name.{use}")


def _notes(counted):
    notes = []
    if len({run.code for run in counted}) > 1:
        notes.append("the runs come from different code: `pgtk diff RUN_A RUN_B` says what changed")
    lengths = {run.step for run in counted}
    if len(lengths) > 1:
        steps = ", ".join(map(str, sorted(lengths)))
        notes.append(f"the runs are of different length ({steps} steps): compare their curves, not their ends")
    return notes
