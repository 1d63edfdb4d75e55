"""What two configurations differ in beside the keys that a comparison is about."""

from __future__ import annotations

from collections.abc import Sequence

from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.statistics import Comparison
from pgtoolkit.config.keys import shown
from pgtoolkit.runs.history import CODE, CONTENTS
from pgtoolkit.system.report import identity, text

_Values = tuple[object, object]


def follows(name: str, keys: Sequence[str]) -> bool:
    """Return whether a name is one of these keys, or a key of an option that one of them chooses.

    A name in another group may take its values together with a key all the same, such as where
    two experiments are compared: it is another difference then.
    """
    name = name.removeprefix(CONTENTS)
    return name.startswith(CODE) or any(f"{name}.".startswith(f"{key}.") for key in keys)


def without_following(names: Sequence[str]) -> list[str]:
    """Return the names but those that follow from another of them, such as the keys of an
    option."""
    return [
        name for name in names if not follows(name, [other for other in names if other != name])
    ]


def beside(compared: Compared, pair: Comparison) -> dict[str, _Values]:
    """Return name -> (value of the pair's first configuration, value of its second) for all that
    they differ in beside the axis of the comparison."""
    first, second = (compared.groups[place] for place in (pair.first, pair.second))
    blocks = [] if compared.best_of is None else [compared.best_of]
    known = [*compared.axis, *blocks, *map(shown, compared.over)]
    values = {
        name: (_value(first, name), _value(second, name))
        for name in [*compared.keys, *compared.following]
        if name not in compared.asked and not follows(name, known)
    }
    return {name: both for name, both in values.items() if identity(both[0]) != identity(both[1])}


def more_than_the_axis(compared: Compared, pairs: Sequence[Comparison]) -> list[str]:
    """Return a sentence on each base whose pairs differ in more than the axis of the comparison,
    one for all where they differ in keys whose values follow from the axis."""
    named: dict[tuple[str, str], list[str]] = {}
    names_of_pairs: set[tuple[str, ...]] = set()
    for pair in pairs:
        values = beside(compared, pair)
        names_of_pairs.add(tuple(values))
        differences = ", ".join(
            f"{name} ({text(there)}, not {text(here)})" for name, (here, there) in values.items()
        )
        if differences:
            first = compared.groups[pair.first].label
            second = compared.groups[pair.second].label
            named.setdefault((first, differences), []).append(second)
    axis = " and ".join(compared.axis)
    # A file that was chosen has no value of its own: it stands for the keys that it sets.
    has_files = any(key in compared.groups[0].runs[0].chosen for key in compared.axis)
    they_differ = f"{axis}, and so in" if has_files else f"more than {axis}, in"
    (names, *others) = names_of_pairs or {()}
    if len(named) > 1 and not others and {*names} <= {*compared.following}:
        return [
            f"every pair differs in {they_differ} {' and '.join(names)}: in each configuration one "
            "goes with the other. The verdicts are on all of this together."
        ]
    return [
        f"{' and '.join(seconds)} against {first}: they differ in {they_differ} "
        f"{differences}. The verdict is on all of this together."
        for (first, differences), seconds in named.items()
    ]


def _value(group: RunGroup, name: str) -> object:
    """Return the value that a group learned with, of a key by its shown name."""
    if name in group.values:
        return group.values[name]
    run = group.runs[0]
    known = {shown(key): key for key in (*run.config, *run.trained_with)}
    return learned(run, known.get(name, name))
