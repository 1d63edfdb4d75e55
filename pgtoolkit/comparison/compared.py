"""The configurations of a comparison with what their runs reached: all that a report shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pgtoolkit.comparison.measures import DOCUMENTS, MEASURES, Goal, Reached, is_score
from pgtoolkit.comparison.statistics import Comparisons, mean_and_std
from pgtoolkit.config.key import holds
from pgtoolkit.config.keys import key_named, shown
from pgtoolkit.runs.find import Run
from pgtoolkit.system.report import is_number, text


def learned(run: Run, name: str) -> object:
    """Return the value of a key, or of another name in `trained_with`, that a run has learned with."""
    if name not in run.trained_with:
        return run.config.get(name)
    key = key_named(name, run.config) if name in run.config else None
    last_counts = False if key is None else key.last_counts
    if isinstance(last_counts, str):
        last_counts = holds(last_counts, run.config)
    return run.config[name] if last_counts else run.trained_with[name]


@dataclass
class Group:
    """Runs of one configuration but for their block. counted: one per block; reached: what each of these did;
    tried: of the best of a key, all finished groups that differ in that key alone, by its value in words. labels: the
    user's names for values of keys, by (key, value in words). label: what tells the group from the others, in a few
    words; see `name_groups`."""

    values: dict[str, object]
    runs: list[Run]
    counted: list[Run] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list)
    tried: dict[str, Group] = field(default_factory=dict)
    labels: dict[tuple[str, str], str] = field(default_factory=dict)
    label: str = ""

    @property
    def words(self) -> list[str]:
        """The values of the varying keys, each by the user's name for it where there is one."""
        return [self.labels.get((key, text(value)), text(value)) for key, value in self.values.items()]

    @property
    def telling_words(self) -> list[str]:
        """The same without what follows: a key that this group does not have, and that a value is custom beside its
        path."""
        paths = {key.rpartition(".")[0] for key, value in self.values.items() if key.endswith(".path") and value}
        pairs = zip(self.values.items(), self.words, strict=True)
        return [word for (key, value), word in pairs if value is not None and (value != "custom" or key not in paths)]

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
    configuration that all share. groups: the best first, but for the base of planned contrasts before it. comparisons:
    every pair of groups, by their place in `groups`. left_out: (run, why) for each run that is excluded from averages.
    notes: what to know besides. over: keys that belong to a run's block, as the seed does. best_of: the key of which
    each group has its best value.
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
    over: list[str] = field(default_factory=list)
    best_of: str | None = None

    @property
    def metric(self) -> str:
        """What is compared."""
        return self.goal.metric

    @property
    def by_documents(self) -> bool:
        """Whether groups are sorted and tested by the documents to the threshold; else by their final value."""
        return DOCUMENTS in self.limits

    @property
    def blocks(self) -> str:
        """What runs are paired by, and averaged over."""
        return " and ".join([*map(shown, self.over), "seed"])

    @property
    def sign(self) -> int:
        """1 where more of what is tested is better, -1 where less is, 0 where nobody knows."""
        return -1 if self.by_documents else int(is_score(self.metric))

    @property
    def measured(self) -> str:
        """What is tested, in words."""
        if self.by_documents:
            return f"Documents to {self.metric} {self.goal.threshold:g}"
        return f"{MEASURES[self.goal.measure]} {self.metric}"

    @property
    def tried(self) -> list[str]:
        """All values of the key of which each group has its best: numbers by their size, then the others."""
        if self.best_of is None:
            return []
        values = {name: group.values[self.best_of] for best in self.groups for name, group in best.tried.items()}
        return sorted(values, key=lambda name: (0, values[name]) if is_number(values[name]) else (1, name))

    def name_groups(self) -> None:
        """Give each group its label: the words that tell it from the others, all of its words where those do not."""
        names = [", ".join(group.telling_words) for group in self.groups]
        for group, name in zip(self.groups, names, strict=True):
            unlike = name and names.count(name) == 1
            group.label = name if unlike else ", ".join(group.words) or "all runs"

    def arm(self, group: Group) -> str:
        """The values of a group but for the key of which it has its best."""
        return ", ".join(text(value) for key, value in group.values.items() if key != self.best_of)

    def tested(self, group: Group) -> list[float]:
        """What the tests are of, of each counted run: documents to the threshold, area or final value."""
        if self.by_documents:
            return self.spent(group, DOCUMENTS)
        if self.goal.measure == "area":
            return [run.mean for run in group.reached if run.mean is not None]
        return [run.final for run in group.reached]

    def spent(self, group: Group, axis: str) -> list[float]:
        """What each counted run spent until it reached the threshold, the limit where it did not within it."""
        return [min(one.to.get(axis, inf), self.limits[axis]) for one in group.reached]

    def arrived(self, group: Group, axis: str) -> int:
        """How many of the counted runs reached the threshold within the limit."""
        return sum(one.to.get(axis, inf) <= self.limits[axis] for one in group.reached)
