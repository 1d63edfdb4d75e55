"""A comparison of configurations with the results of their runs: all that a report shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from pgtoolkit.comparison.measures import DOCUMENTS, MEASURES, Goal, Reached, is_score
from pgtoolkit.comparison.statistics import Comparisons, mean_and_std
from pgtoolkit.config.defaults import Computed
from pgtoolkit.config.keys import declared, key_named, shown
from pgtoolkit.runs.find import Run
from pgtoolkit.system.report import is_number, text


def learned(run: Run, name: str) -> object:
    """Return the value with which a run learned, of a key or a name in `run.trained_with`; of a key
    that is younger than the run and added nothing by itself, the default."""
    if name not in run.trained_with:
        if name in run.config:
            return run.config[name]
        key = key_named(name, run.config)
        if key is None or not key.added or key.name != name or isinstance(key.default, Computed):
            return None
        return key.default
    key = key_named(name, run.config) if name in run.config else None
    last_counts = key is not None and declared(key.last_counts, run.config)
    return run.config[name] if last_counts else run.trained_with[name]


@dataclass
class RunGroup:
    """Runs of one configuration, which differ in their block alone (their seed, and the keys of
    --over).

    values: of the keys that tell the groups apart.
    counted: one run per block.
    reached: the measures of each counted run.
    tried: with --best-of, all finished groups that differ from this one in that key alone, by its
        value in words.
    labels: the user's names for values, by (key, value in words).
    folders: key -> the folder with a slash in which all of its values lie, which are paths; words
        begin after it.
    label: a few words that tell the group from the others; see `name_groups`.
    """

    values: dict[str, object]
    runs: list[Run]
    counted: list[Run] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)
    tried: dict[str, RunGroup] = field(default_factory=dict)
    labels: dict[tuple[str, str], str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def words(self) -> list[str]:
        """The values of the varying keys, under the user's names for them where there are some."""
        words = []
        for key, value in self.values.items():
            short = text(value).removeprefix(self.folders.get(key, ""))
            words.append(self.labels.get((key, text(value)), short))
        return words

    @property
    def telling_words(self) -> list[str]:
        """The words of the keys that this group has."""
        return [
            word
            for value, word in zip(self.values.values(), self.words, strict=True)
            if value is not None
        ]

    @property
    def final(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds."""
        return mean_and_std([run.final for run in self.reached])

    @property
    def mean(self) -> tuple[float | None, float | None]:
        """(mean, standard deviation) over seeds of the mean over documents."""
        return mean_and_std([run.mean for run in self.reached if run.mean is not None])


@dataclass
class Compared:
    """All that a report shows.

    goal: the metric, and the threshold if there is one.
    axes: those in which the way to the threshold is counted, which all counted runs have. Without
        a threshold there is none.
    limit: documents within which the threshold is looked for. That is as far as every run was
        measured that did not reach it, and infinite if all reached it.
    after_limit: documents that a run counts as that did not reach it. They are a lower bound for
        each of these runs: those at the first measurement that any of them has behind the limit.
        All count as the same, since runs that never came to it would else differ by how often
        they are measured. So they count as worse than one that came to it at the limit.
    keys: the varying keys that tell the groups apart, as shown.
    axis: those of `keys` that the planned comparisons are about.
    following: varying keys that tell no further groups apart.
    common: the configuration that all share.
    groups: the bases of the comparisons, then the others, the best first.
    first: the group of the sweep's first values, the base if the user names none.
    comparisons: every pair of groups, by their place in `groups`.
    left_out: (run, reason) for each run that is excluded from averages. notes: sentences without
        their full stop.
    over: keys that belong to a run's block, as the seed does. asked: those of `keys` in which runs
        were evaluated differently, and not trained. best_of: the key of which each group
        has its best value. ignore_code: whether runs of other code of the user's are of one
        configuration.
    """

    goal: Goal
    axes: list[str]
    limit: float
    after_limit: float
    keys: list[str]
    following: list[str]
    common: dict[str, object]
    groups: list[RunGroup]
    first: RunGroup
    comparisons: Comparisons
    left_out: list[tuple[Run, str]]
    notes: list[str]
    axis: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    best_of: str | None = None
    ignore_code: bool = False

    @property
    def metric(self) -> str:
        return self.goal.metric

    @property
    def by_documents(self) -> bool:
        """True if groups are sorted and tested by the documents to the threshold, not by a value of
        the metric."""
        return DOCUMENTS in self.axes

    @property
    def blocks(self) -> str:
        """The names of the keys that runs are paired by and averaged over."""
        return " and ".join([*map(shown, self.over), "seed"])

    @property
    def counted(self) -> str:
        """What a configuration has several of: seeds, or runs where each seed may have several."""
        return "runs" if self.over else "seeds"

    @property
    def sign(self) -> int:
        """1 where a higher tested value is better, -1 where a lower one is, 0 where the metric's
        name does not tell."""
        return -1 if self.by_documents else int(is_score(self.metric))

    @property
    def measured(self) -> str:
        """The tested quantity in words."""
        if self.by_documents:
            return f"Documents to {self.metric} {self.goal.threshold:g}"
        return f"{MEASURES[self.goal.measure]} {self.metric}"

    @property
    def margin(self) -> str | None:
        """The margin in words, as the verdicts name it; None without one."""
        margin = self.comparisons.margin
        in_documents = self.by_documents and margin is not None and not margin.endswith("%")
        return f"{margin} documents" if in_documents else margin

    @property
    def tried(self) -> list[str]:
        """All values of the --best-of key in words: numbers by their size, then the others."""
        if self.best_of is None:
            return []
        values = {
            name: group.values[self.best_of]
            for best in self.groups
            for name, group in best.tried.items()
        }
        return sorted(
            values, key=lambda name: (0, values[name]) if is_number(values[name]) else (1, name)
        )

    def name_groups(self) -> None:
        """Give each group its label: its telling words, or all of its words where another group has
        the same."""
        names = [", ".join(group.telling_words) for group in self.groups]
        for group, name in zip(self.groups, names, strict=True):
            is_unique = name and names.count(name) == 1
            group.label = name if is_unique else ", ".join(group.words) or "all runs"

    def arm(self, group: RunGroup) -> str:
        """Return the values of a group in words, without that of the --best-of key."""
        return ", ".join(text(value) for key, value in group.values.items() if key != self.best_of)

    def tested_values(self, group: RunGroup) -> list[float]:
        """Return the tested value of each counted run: documents to the threshold, or a measure."""
        if self.by_documents:
            return self.spent(group, DOCUMENTS)
        if self.goal.measure == "area":
            return [run.mean for run in group.reached if run.mean is not None]
        return [run.final for run in group.reached]

    @property
    def is_bounded(self) -> bool:
        """Whether a run did not reach the threshold, so that means are lower bounds."""
        return self.by_documents and self.limit < inf

    def spent(self, group: RunGroup, axis: str) -> list[float]:
        """Return what each counted run spent to reach the threshold.

        Of a run that did not reach it within the limit, these are `after_limit` documents, and what
        it had spent at the limit of all else.
        """
        values = []
        for run, reached in zip(group.counted, group.reached, strict=True):
            if self._has_arrived(reached):
                values.append(reached.to[axis])
            elif axis == DOCUMENTS:
                values.append(self.after_limit)
            else:
                documents, column = run.columns[DOCUMENTS], run.columns[axis]
                known = ~np.isnan(documents + column)
                values.append(float(np.interp(self.limit, documents[known], column[known])))
        return values

    def arrived(self, group: RunGroup) -> int:
        """Return how many of the counted runs reached the threshold within the limit."""
        return sum(map(self._has_arrived, group.reached))

    def _has_arrived(self, reached: Reached) -> bool:
        return reached.to.get(DOCUMENTS, inf) <= self.limit
