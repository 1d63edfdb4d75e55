"""The bases of comparisons, and of each configuration the best value of a key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from pgtoolkit.comparison.common_measure import (
    why_unlike,
)
from pgtoolkit.comparison.compared_runs import Compared, RunGroup
from pgtoolkit.comparison.no_verdict import what_to_run
from pgtoolkit.config.keys import OPTION_KEYS, is_inside, shown
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.history import CODE
from pgtoolkit.runs.records import read_config, read_sweep
from pgtoolkit.system.report import identity, nearest, text


def keys_of(
    option: str, names: Sequence[str], keys: list[str], others: Collection[str] = ()
) -> list[str]:
    """Return the keys of the names that the user typed.

    keys: those that tell the runs apart; a refusal lists them.
    Raises ConfigError for a name that is not in `keys` or `others`.
    """
    known = {shown(key): key for key in (*keys, *others)}
    unknown = [name for name in names if name not in known]
    if unknown:
        setting = f"{option}={','.join(unknown)}"
        if not keys:
            raise ConfigError(
                f"{setting} needs a key that tells the runs apart. These runs differ in no key. "
                f"Use runs that do, or leave {option} out."
            )
        raise ConfigError(
            f"{setting} needs a key that tells the runs apart. These are "
            f"{', '.join(map(shown, keys))}. Use {option}={shown(keys[0])}."
        )
    return [known[name] for name in names]


def first_of_sweep(groups: list[RunGroup], runs: Sequence[Run]) -> RunGroup:
    """Return the group of the sweep's first job; outside of a sweep that of the first run.

    runs: in the order in which the user named them.
    """
    typed = {run.path: place for place, run in enumerate(runs)}
    orders: dict[Path, dict[str, int]] = {}

    def place(run: Run) -> tuple[int, int]:
        folder = Path(run.path).parent
        if folder not in orders:
            jobs = read_sweep(folder).get("jobs", [])
            orders[folder] = {job["directory"]: number for number, job in enumerate(jobs)}
        return orders[folder].get(Path(run.path).name, len(orders[folder])), typed[run.path]

    return min(groups, key=lambda group: min(map(place, group.runs)))


def planned(compared: Compared, against: str) -> set[tuple[int, int]]:
    """Return the pairs of each base with the groups that differ from it only in keys of `against`;
    of a single base with all other groups.

    A base is a group that has all values of `against`. The bases are moved to the front of
    `compared.groups`.
    against: KEY=VALUE,...; a KEY alone has the value of the sweep's first configuration, and with
        "" that configuration is the base. An option that is a file of the user's, as in
        loss=clip_0.1, stands for the keys of its group that the runs differ in.
    """
    bases, along = bases_of(compared.groups, compared.keys, compared.first, against)
    compared.axis = along if against else []
    compared.groups = bases + [group for group in compared.groups if group not in bases]
    others = [key for key in compared.keys if key not in (*along, compared.best_of)]
    after = range(len(bases), len(compared.groups))
    if len(bases) == 1:
        pairs = {(0, j) for j in after}
    else:
        pairs = {
            (i, j)
            for i, base in enumerate(bases)
            for j in after
            if _agree(base, compared.groups[j], others)
        }
    _refuse_nothing_to_compare(compared, against, bases, pairs)
    return pairs


def _agree(base: RunGroup, other: RunGroup, keys: Sequence[str]) -> bool:
    """Return whether two groups have the same values of these keys; a base that uses no module of
    the user's agrees with every version of it."""
    return all(
        identity(base.values[key]) == identity(other.values[key])
        or (key.startswith(CODE) and base.values[key] is None)
        for key in keys
    )


def bases_of(
    groups: list[RunGroup], keys: Sequence[str], first: RunGroup, against: str
) -> tuple[list[RunGroup], list[str]]:
    """Return (the groups that have all values of `against`, the keys that it names).

    keys: those that tell the groups apart. first: the sweep's first group. against: see `planned`.
    Raises ConfigError where no group has them.
    """
    bases = groups
    along: list[str] = []
    for pair in against.split(",") if against else keys:
        key, is_given, value = pair.partition("=")
        of_pair = [key]
        fitting = []
        if key in keys:
            value = value if is_given else text(first.values[key])
            fitting = [group for group in bases if is_typed(value, text(group.values[key]))]
        if not fitting and is_given and key in OPTION_KEYS:
            of_pair = [name for name in keys if is_inside(name, key)]
            fitting = [group for group in bases if of_pair and has_typed(group, pair)]
        if not fitting:
            _refuse_against(groups, keys, against)
        bases = fitting
        along += of_pair
    return bases, along


def _refuse_nothing_to_compare(
    compared: Compared, against: str, bases: list[RunGroup], pairs: set[tuple[int, int]]
) -> None:
    """Raise ConfigError where no planned pair would be shown: its bases have no counted run, or
    none of the others differs from one of them in the named keys alone."""
    option = f"--against={against}" if against else "--against"

    def named(group: RunGroup) -> str:
        return ",".join(f"{key}={text(value)}" for key, value in group.values.items())

    counted = [group for group in compared.groups if group.counted]
    of_bases = "; ".join(map(named, bases))
    if counted and not any(group.counted for group in bases):
        paths = {run.path for group in bases for run in group.runs}
        reasons = [reason for run, reason in compared.left_out if run.path in paths]
        raise ConfigError(
            f"{option} needs a base with a run that counts for {compared.metric} (got {of_bases}, "
            f"of which a run {reasons[0] if reasons else 'is not finished'}). There would be "
            f"nothing to compare with. Use --against={named(counted[0])}."
        )
    if not pairs and len(compared.groups) > len(bases):
        raise ConfigError(
            f"{option} needs configurations that differ from a base in no other key (got the bases "
            f"{of_bases}, of which every other configuration differs in more). There would be "
            f"nothing to compare. Use --against={named(bases[0])} for one base."
        )


def is_typed(typed: str, value: str) -> bool:
    """Return whether a typed text is a value, in words; numbers in any form, such as 1e-3."""
    try:
        return typed == value or float(typed) == float(value)
    except ValueError:
        return False


def has_typed(group: RunGroup, option: str) -> bool:
    """Return whether GROUP=OPTION was typed for every run of the group."""
    return all(
        (Path(run.path) / "overrides.yaml").is_file() and option in read_config(run.path)[1]
        for run in group.runs
    )


def _refuse_against(groups: list[RunGroup], keys: Sequence[str], against: str) -> NoReturn:
    """Raise ConfigError with all that --against takes."""
    values = dict.fromkeys(f"{key}={text(group.values[key])}" for key in keys for group in groups)
    if not values:
        keys_of("--against", [against], [])
    meant = [value for value in values if is_typed(against, value.partition("=")[2])]
    meant = meant or [nearest(against, [*values], 0) or next(iter(values))]
    raise ConfigError(
        f"--against={against} needs what a configuration has: KEY=VALUE, or KEY alone for the "
        f"value of the first. These are {', '.join(values)}. Use --against={meant[0]}."
    )


def keep_best(compared: Compared, best_of: str) -> None:
    """Keep the first of the sorted groups that differ in one key; its `tried` has all.

    The sweep's first group gives its place to the one that is kept of it.
    """
    keys_of("--best-of", [best_of], compared.keys)
    chosen: dict[tuple, RunGroup] = {}
    for group in compared.groups:
        other_values = tuple(
            identity(value) for key, value in group.values.items() if key != best_of
        )
        best = chosen.setdefault(other_values, group)
        if group is compared.first:
            compared.first = best
        if group.counted:
            best.tried[text(group.values[best_of])] = group
    compared.groups = list(chosen.values())


def refuse_other_measures(compared: Compared) -> None:
    """Raise ConfigError if the compared metric means something else at each value of the --best-of
    key, and cannot say which value is best."""
    for group in compared.groups:
        tried = [other.counted for other in group.tried.values() if other.counted]
        for runs in tried[1:]:
            reasons = why_unlike(tried[0], runs, compared.metric, compared.ignore_code)
            if reasons:
                use = what_to_run([tried[0][0], runs[0]], reasons)
                raise ConfigError(
                    f"--best-of={compared.best_of} needs a metric that means the same at each "
                    f"value (got {compared.metric}). {reasons[0]}. {use}"
                )
