"""Gathers runs by configuration, and compares their results."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from pathlib import Path

import numpy as np

from pgtoolkit.comparison import measures
from pgtoolkit.comparison.bases import (
    bases_of,
    first_of_sweep,
    has_typed,
    is_typed,
    keep_best,
    keys_of,
    planned,
)
from pgtoolkit.comparison.beside import follows
from pgtoolkit.comparison.common_measure import (
    alters,
    asked_differently,
    decided_by_blocks,
    evaluated_alike,
    measure_of,
)
from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.headline import chosen_metric
from pgtoolkit.comparison.held_out_prompts import notes_on_other_prompts
from pgtoolkit.comparison.identical import are_identical, recorded_numbers, same_data
from pgtoolkit.comparison.measures import AXES, DOCUMENTS
from pgtoolkit.comparison.notes import (
    code_notes,
    is_not_configured,
    notes_of,
    notes_of_equal_numbers,
)
from pgtoolkit.comparison.pairs import block_of, is_of_blocks, leave_out_unpaired, notes_on_missing
from pgtoolkit.comparison.statistics import Comparisons, Sample
from pgtoolkit.config.keys import KEYS, OPTION_KEYS, changes_learning, is_inside, key_named, shown
from pgtoolkit.config.own_code import as_typed as keys_as_typed
from pgtoolkit.config.own_code import changed_defaults, with_defaults
from pgtoolkit.errors import ConfigError, kept, refuse_all
from pgtoolkit.rollouts.settings import POSITION
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.history import CODE, CONTENTS, EVALUATION_CODE, is_of_several
from pgtoolkit.runs.modules import COPIES
from pgtoolkit.runs.records import command_of_sweep
from pgtoolkit.runs.series import final, ranks
from pgtoolkit.system.report import identity, nearest, refusal, shell_path, text


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
    against: the base of the planned comparisons, see `planned`; None: every pair is planned.
    margin: see `margin_of`.
    ignore_code: runs that differ in the user's own modules alone are of one configuration.
    labels: KEY=VALUE=NAME, the name to show for a value.

    Raises ConfigError if no run can be read or has the metric, and for an option that does not fit
    the runs.
    """
    readable = [as_typed(run) for run in runs if run.config]
    left_out = [(run, run.why_not_counted()) for run in runs if not run.config]
    if not readable:
        listing = "; ".join(f"{run.name}: {reason}" for run, reason in left_out)
        raise ConfigError(
            f"pgtk compare needs a run that can be read (got none). {listing}. Use other folders."
        )
    problems: list[str] = []
    if margin is not None:
        with kept(problems):
            measures.margin_of(margin)  # refuses a bad one before the work
    readable, notes = same_data(readable)
    over_keys = over.split(",") if over else []
    if "seed" in over_keys:
        over_keys.remove("seed")
        use = f"--over={','.join(over_keys)}" if over_keys else "no --over"
        problems.append(
            f"--over={over} needs keys beside the seed (got seed). Runs are paired by their seed "
            f"anyway. Use {use}."
        )
    readable = _named_by_files(readable, ignore_code)
    keys, following, common = _varying(readable, over_keys, ignore_code)
    bases = [pair.partition("=")[0] for pair in (against or "").split(",")]
    if any(shown(key) in bases for key in following):
        keys, following, common = _varying(readable, [*over_keys, *bases], ignore_code)
    evaluated = dict.fromkeys(
        name for run in readable for name in run.config if name.startswith("evaluation.")
    )
    blocks: list[str] = []
    with kept(problems):
        blocks = keys_of("--over", over_keys, keys, [*common, *evaluated])
    keys = [key for key in keys if key not in blocks]

    groups = _grouped(readable, keys)
    asked: list[str] = []
    named = None
    with kept(problems):
        named = _metric(groups, metric, reach, ignore_code)
    if named is not None:
        of_blocks = decided_by_blocks(readable, named[0], ignore_code, blocks)
        groups, asked = _told_apart(groups, named[0], ignore_code, of_blocks)
    for group in groups:
        group.values = {shown(key): value for key, value in group.values.items()}
    folders = _common_folders(groups)
    names_of_values: dict[tuple[str, str], str] = {}
    # Without a metric it is not known which keys of an evaluation tell runs apart.
    known = [label for label in labels if named or not label.startswith("evaluation.")]
    with kept(problems):
        names_of_values = _labels(known, groups, folders)
    telling = [*map(shown, keys), *asked]
    first = first_of_sweep(groups, readable)
    if best_of is not None:
        with kept(problems):
            keys_of("--best-of", [best_of], telling)
    if against is not None and (named or not against.startswith("evaluation.")):
        with kept(problems):
            bases_of(groups, telling, first, against)
    refuse_all(problems)
    assert named is not None
    metric, measure, threshold, notes_of_metric = named
    notes += notes_of_metric
    for group in groups:
        left_out += _count(group, metric, blocks)
        group.labels = names_of_values
        group.folders = folders

    notes += _extend_collapsed([run for group in groups for run in group.counted], metric)
    left_out += _leave_out_apart(groups, metric)
    goal = measures.goal_of([group.counted for group in groups], metric, threshold, measure)
    for group in groups:
        group.reached = [measures.reached(run, goal) for run in group.counted]
    reached = [run for group in groups for run in group.reached]
    limit, after_limit = _limits(groups, goal)
    compared = Compared(
        goal=goal,
        axes=_axes(goal, reached),
        limit=limit,
        after_limit=after_limit,
        keys=telling,
        following=[shown(key) for key in following],
        common=common,
        groups=groups,
        first=first,
        comparisons=Comparisons([]),
        left_out=left_out,
        notes=notes,
        axis=[],
        over=blocks,
        asked=asked,
        best_of=best_of,
        ignore_code=ignore_code,
    )
    if margin is not None:
        _refuse_unfit_margin(compared, margin)
    compared.groups = _ranked(compared)
    if best_of is not None:
        keep_best(compared, best_of)
        _, following_best, _ = _varying([run for group in compared.groups for run in group.runs])
        compared.following = [
            name for name in map(shown, following_best) if name not in compared.keys
        ]
    primary = _bases_first(compared, against)
    compared.name_groups()
    if blocks:
        samples = _samples(compared, keys + following)
        unpaired = leave_out_unpaired(compared, samples, primary)
        compared.left_out += unpaired
        compared.notes += notes_on_missing(compared, [run for run, _ in unpaired])
        compared.groups = _ranked(compared)
        primary = _bases_first(compared, against)
    compared.axis = compared.axis or [key for key in compared.keys if key not in compared.asked]
    samples = _samples(compared, keys + following)
    compared.comparisons = Comparisons(samples, margin, primary)
    compared.notes += notes_of(compared)
    compared.notes += notes_of_equal_numbers(compared, [sample.numbers for sample in samples])
    compared.notes += code_notes(compared, readable, ignore_code)
    compared.notes += notes_on_other_prompts(
        [run for group in compared.groups for run in group.counted]
    )
    return compared


def as_typed(run: Run) -> Run:
    """Return the run with the user's own code as the option of its group.

    The option takes the place of the keys that name the code.
    """
    copies = Path(run.path, COPIES)
    config = with_defaults(run.config, copies, run.trained_with)
    changed = changed_defaults(run.config, copies, run.trained_with)
    return replace(run, config=config, trained_with=keys_as_typed(run.trained_with) | changed)


def _metric(
    groups: list[RunGroup], metric: str | None, reach: str | None, ignore_code: bool
) -> tuple[str, str | None, float | None, list[str]]:
    """Return (metric, measure or None, threshold or None, notes) by --metric and --reach.

    Raises ConfigError for a metric that no run has recorded.
    """
    option = "--metric={}"
    measure = None
    threshold = None
    notes = []
    if reach is not None:
        metric, threshold = measures.parse_reach(reach)
        option = f"--reach={{}}={threshold:g}"
    elif metric is None:
        metric, notes = chosen_metric([group.runs for group in groups], ignore_code)
    else:
        measure, metric = measures.parse_metric(metric)
        option = f"--metric={measure}:{{}}" if measure else option
    _refuse_unknown([run for group in groups for run in group.runs], metric, option)
    return metric, measure, threshold, notes


def _refuse_unfit_margin(compared: Compared, margin: str) -> None:
    """Raise ConfigError for a margin of documents that is below one, or finer than they are known,
    and for one that holds every difference of a share."""
    if compared.by_documents:
        _refuse_unfit_documents(compared, margin)
        return
    if margin.endswith("%"):
        return
    value = measures.margin_of(margin)
    metric = compared.metric
    if measures.is_share(metric) and value >= 1:
        hundredth = value / 100 if value < 100 else 0.02
        raise ConfigError(
            refusal(
                setting=f"--margin={margin}",
                needs=f"a number below 1, since {metric} is a share",
                got=margin,
                reason="Every difference would be equal within it.",
                use=f"--margin={hundredth:g}",
            )
        )


def _refuse_unfit_documents(compared: Compared, margin: str) -> None:
    """Raise ConfigError for a margin below one document, or below the documents between two
    measurements."""
    metric = compared.metric
    means = [
        statistics.fmean(compared.spent(group, DOCUMENTS))
        for group in compared.groups
        if group.counted
    ]
    apart = max(1, ceil(compared.goal.apart))
    use = "--margin=3%" if 0.03 * min(means) >= apart else f"--margin={apart}"
    if not margin.endswith("%") and measures.margin_of(margin) < 1:
        raise ConfigError(
            refusal(
                setting=f"--margin={margin}",
                needs="a number of documents, at least 1, or a share of the base such as 3%",
                got=margin,
                reason=f"What is compared is: {compared.measured}.",
                use=f"--metric=final:{metric} for a margin of {metric}, or {use}",
            )
        )
    if min(measures.margin_of(margin, mean) for mean in means) < apart:
        raise ConfigError(
            refusal(
                setting=f"--margin={margin}",
                needs=f"at least {apart:,} documents",
                got=margin,
                reason=f"{metric} is measured every {apart:,} documents, so what it takes to "
                "come to the threshold is known no better.",
                use=f"{use}, or --metric=final:{metric}",
            )
        )


def _grouped(runs: list[Run], keys: list[str]) -> list[RunGroup]:
    """Return a group for each combination of values that runs have learned with, in their order."""
    by_values: dict[tuple, RunGroup] = {}
    for run in runs:
        values = {key: learned(run, key) for key in keys}
        group = by_values.setdefault(tuple(map(identity, values.values())), RunGroup(values, []))
        group.runs.append(run)
    return list(by_values.values())


def _told_apart(
    groups: list[RunGroup], metric: str, ignore_code: bool, blocks: Sequence[str]
) -> tuple[list[RunGroup], list[str]]:
    """Return (the groups, divided where their runs were evaluated differently, the names of the
    values in which they were).

    metric: see `asked_differently`. blocks: see `decided_by_blocks`.
    """
    settings = asked_differently([group.runs for group in groups], metric, ignore_code, blocks)
    values = iter(settings)
    divided: dict[str, RunGroup] = {}
    for place, group in enumerate(groups):
        for run in group.runs:
            of_run = next(values)
            of_group = RunGroup({**group.values, **of_run}, [])
            divided.setdefault(f"{place} {identity(of_run)}", of_group).runs.append(run)
    return [*divided.values()], [*settings[0]]


def _nearest_value(label: str, values: set[tuple[str, str]]) -> str:
    """Return the value of a run that a label most likely means, with the label's name for it."""
    value_of_label, _, name = label.rpartition("=")
    known = sorted(f"{key}={value}" for key, value in values)
    near = nearest(value_of_label or name, known, 0) or known[0]
    return f"{near}={name if value_of_label else 'NAME'}"


def _name_in(label: str, key: str, value: str) -> str | None:
    """Return the name that a label gives to a value; None where it names another value."""
    if label.startswith(f"{key}={value}="):
        return label.removeprefix(f"{key}={value}=")
    typed, _, name = label.removeprefix(f"{key}=").partition("=")
    return name if label.startswith(f"{key}=") and is_typed(typed, value) else None


def _value_of_file(label: str, groups: list[RunGroup]) -> tuple[str, str] | None:
    """Return the (key, value in words) that GROUP=OPTION=NAME names, of an option that is a file of
    the user's, as in loss=clip_0.1=NAME; None where runs with it differ in other keys, too."""
    option = label.rpartition("=")[0]
    group_of_keys = option.partition("=")[0]
    if group_of_keys not in OPTION_KEYS:
        return None
    pairs = {
        (key, text(value))
        for group in groups
        if has_typed(group, option)
        for key, value in group.values.items()
        if is_inside(key, group_of_keys)
    }
    return pairs.pop() if len(pairs) == 1 else None


def _labels(
    labels: Sequence[str], groups: list[RunGroup], folders: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """Return (key, value in words) -> name; raises ConfigError for a value that no run has, and for
    names that leave two rows alike or one of them out.

    folders: see `RunGroup`.
    """
    values = {(key, text(value)) for group in groups for key, value in group.values.items()}
    names: dict[tuple[str, str], str] = {}
    for label in labels:
        # Both a value and a name may hold equals signs, so the values that runs have decide where
        # the value ends.
        names_by_value = {pair: _name_in(label, *pair) for pair in values}
        matches = {pair: name for pair, name in names_by_value.items() if name is not None}
        of_file = None if matches else _value_of_file(label, groups)
        if not matches and of_file is None:
            listing = ", ".join(sorted(f"{key}={value}" for key, value in values))
            reason = f"It names a value of a key that tells the runs apart. These are {listing}."
            use = f"--label {_nearest_value(label, values)}" if values else ""
            if not values:
                reason = "It names a value of a key that tells the runs apart. Nothing does."
                use = "other runs, or leave --label out"
            raise ConfigError(refusal(f"--label {label}", "KEY=VALUE=NAME", label, reason, use))
        named = of_file or max(matches, key=lambda pair: len(pair[1]))
        value_named = "=".join(named)
        name = label.rpartition("=")[2] if of_file else matches[named]
        before = names.setdefault(named, name)
        if before != name:
            raise ConfigError(
                refusal(
                    setting=f"--label {label}",
                    needs=f"to be the only name of {value_named}",
                    got=f"{before} before it",
                    reason="One of the two would be ignored.",
                    use=f"--label {value_named}={before} or --label {value_named}={name}",
                )
            )
    short = {(key, value): value.removeprefix(folders.get(key, "")) for key, value in values}
    _refuse_equal_names(names, short)
    return names


def _common_folders(groups: list[RunGroup]) -> dict[str, str]:
    """Return key -> the folder, with a slash, in which all values of the key lie, of keys with
    several absolute paths as values."""
    folders = {}
    for key in groups[0].values:
        values = {text(group.values[key]) for group in groups if group.values[key] is not None}
        if len(values) > 1 and all(value.startswith("/") for value in values):
            folder = f"{os.path.commonpath(values).rstrip('/')}/"
            if folder != "/" and all(value.startswith(folder) for value in values):
                folders[key] = folder
    return folders


def _refuse_equal_names(
    names: Mapping[tuple[str, str], str], short: Mapping[tuple[str, str], str]
) -> None:
    """Raise ConfigError where two values of a key would have the same name.

    names: (key, value in words) -> name. short: the words of each without one.
    """
    owners: dict[tuple[str, str], tuple[str, str]] = {}
    # Those that are named come last, so that one of them is refused.
    for key, value in sorted(short, key=lambda pair: (pair in names, pair)):
        name = names.get((key, value), short[key, value])
        owner = owners.setdefault((key, name), (key, value))
        if owner != (key, value):
            raise ConfigError(
                refusal(
                    setting=f"--label {key}={value}={name}",
                    needs="a name that no other value has",
                    got=f"that of {'='.join(owner)}",
                    reason="Two rows of the tables would look the same.",
                    use=f"--label {key}={value}={name}-{value}",
                )
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


def _axes(goal: measures.Goal, runs: list[measures.Reached]) -> list[str]:
    """Return the axes in which the way to the threshold is counted; see `Compared.axes`."""
    if goal.threshold is None:
        return []
    return [axis for axis in AXES if all(axis in (run.to or run.seen) for run in runs)]


def _limits(groups: list[RunGroup], goal: measures.Goal) -> tuple[float, float]:
    """Return the documents within which the threshold is looked for, and those as which a run
    counts that did not reach it; see `Compared`."""
    # Rows of one's own may lack the column of documents.
    never = [
        (run, reached)
        for group in groups
        for run, reached in zip(group.counted, group.reached, strict=True)
        if DOCUMENTS not in reached.to and reached.measured_to > 0
    ]
    limit = min((reached.measured_to for _, reached in never), default=inf)
    after = [measures.measured_after(run, goal.metric, limit) for run, _ in never]
    return limit, min(after, default=inf)


def _ranked(compared: Compared) -> list[RunGroup]:
    """Return the groups, the best first, those without a counted run last, equal ones as they are.

    They are sorted by the documents to the threshold, then by the area under the curve; without a
    threshold by the measure that is compared.
    """
    counted = [group for group in compared.groups if group.reached]
    areas = ranks([-(group.mean[0] or 0.0) for group in counted])
    keys = [ranks([-(group.final[0] or 0.0) for group in counted])]
    if compared.goal.measure == "area":
        keys = [areas]
    if compared.by_documents:
        spent = [statistics.fmean(compared.spent(group, DOCUMENTS)) for group in counted]
        keys = [ranks(spent), areas, *keys]
    places = {id(group): place for group, *place in zip(counted, *keys, strict=True)}
    return sorted(compared.groups, key=lambda group: places.get(id(group), [inf]))


def _bases_first(compared: Compared, against: str | None) -> set[tuple[int, int]] | None:
    """Move the bases to the front of the groups. Return the pairs that are planned, or None for
    every pair.

    against: see `compare`. Without it the sweep's first configuration is the base, or the best one
    where no run of that counts.
    """
    if against is not None:
        return planned(compared, against)
    if not compared.first.counted:
        compared.first = compared.groups[0]
    others = [group for group in compared.groups if group is not compared.first]
    compared.groups = [compared.first, *others]
    return None


def _samples(compared: Compared, varying: Sequence[str]) -> list[Sample]:
    """Return the tested values of each group, and what they measure.

    varying: see `_sample`; what has one value in each block is left out.
    """
    numbers = recorded_numbers(compared.groups)
    runs = [run for group in compared.groups for run in group.counted]
    varying = [name for name in varying if not is_of_blocks(name, runs, compared.over)]
    blocks = decided_by_blocks(runs, compared.metric, compared.ignore_code, compared.over)
    # Runs on tasks of several blocks are compared task by task.
    only_paired = any(alters(key, compared.metric) for key in blocks) or blocks != compared.over
    return [
        replace(
            _sample(compared, group, varying, compared.over),
            measure=measured,
            only_paired=only_paired,
            numbers=numbers[place],
        )
        for place, (group, measured) in enumerate(
            zip(compared.groups, _measures_of(compared, blocks), strict=True)
        )
    ]


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
            prompts[name] = sorted({identity(learned(run, name)) for run in group.counted})
    blocks_of_runs = [block_of(run, blocks) for run in group.counted]
    values = dict(zip(blocks_of_runs, compared.tested_values(group), strict=True))
    is_bound = compared.by_documents and compared.arrived(group) < len(group.counted)
    return Sample(values, prompts, is_bound=is_bound)


def _measures_of(compared: Compared, blocks: Sequence[str]) -> list[str]:
    """Return, for each group, what its tested values measure; a text that is equal for groups whose
    values mean the same.

    blocks: see `decided_by_blocks`; they are left out.
    """
    without = [
        *blocks,
        *evaluated_alike([run for group in compared.groups for run in group.counted]),
    ]
    measured = [
        measure_of(group.counted, compared.metric, compared.ignore_code, without)
        for group in compared.groups
    ]
    return [repr(place if text is None else text) for place, text in enumerate(measured)]


def _varying(
    runs: Sequence[Run], first: Sequence[str] = (), ignore_code: bool = False
) -> tuple[list[str], list[str], dict[str, object]]:
    """Return (names that tell the runs apart, other names that vary, names that all share).

    The last is {name: value}. The second divide the runs no further than the first do, and are no
    versions of code or values that changed on a run's way, which a reader has to see.
    first: names that are looked at before all others, and so follow from none.
    ignore_code: do not tell runs apart by the user's own modules.
    """
    present = list(dict.fromkeys(name for run in runs for name in (*run.config, *run.trained_with)))
    present.remove("seed")  # the runs of a group differ in it
    chosen = {name for run in runs for name in run.chosen}
    present.sort(key=lambda name: name not in chosen)
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
        if is_not_configured(name) and None in values and len({*values}) == 2:
            continue  # a run without a record of it is assumed to agree with the others
        texts = [identity(value) for value in values]
        if len({*texts}) == 1:
            if all(name in run.config or name in run.trained_with for run in runs):
                common[name] = values[0]
            continue
        finer = [
            (*values_of_run, value) for values_of_run, value in zip(classes, texts, strict=True)
        ]
        if len(set(finer)) > len(set(classes)):
            classes = finer
            keys.append(name)
        elif (name.startswith(CODE) or not follows(name, keys)) and _is_of_runs(name, runs, values):
            keys.append(name)
        else:
            following.append(name)
    return keys, following, common


def _is_of_runs(name: str, runs: Sequence[Run], values: Sequence[object]) -> bool:
    """Return whether these values of runs tell what other keys do not imply: several versions of a
    module, or values that changed on a run's way."""
    if name.startswith(CODE) and len({*map(identity, values)} - {identity(None)}) > 1:
        return True
    is_shown = is_not_configured(name) or any(name in run.config for run in runs)
    return is_shown and any(isinstance(value, str) and is_of_several(value) for value in values)


def _named_by_files(runs: list[Run], ignore_code: bool) -> list[Run]:
    """Return the runs with the names of the files that the user chose in `trained_with`, such as
    dapo of experiment=dapo, where these may name configurations.

    They do where no configuration has two, and at most one has none: that is called none.
    """
    keys, _, _ = _varying(runs, (), ignore_code)
    configurations = [tuple(identity(learned(run, key)) for key in keys) for run in runs]
    naming = []
    for group in dict.fromkeys(group for run in runs for group in run.chosen):
        options = [run.chosen.get(group, "none") for run in runs]
        pairs = {*zip(configurations, options, strict=True)}
        without = {
            of for of, run in zip(configurations, runs, strict=True) if group not in run.chosen
        }
        if len(without) <= 1 and len(pairs) == len({*configurations}):
            naming.append(group)
    return [
        replace(
            run,
            trained_with=run.trained_with
            | {group: run.chosen.get(group, "none") for group in naming},
        )
        for run in runs
    ]


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


def _count(group: RunGroup, metric: str, blocks: Sequence[str]) -> list[tuple[Run, str]]:
    """Choose the runs that count, the newest of each block; return the others with the reason."""
    by_block: dict[tuple, Run] = {}
    others = []
    for run in group.runs:
        if not (run.state == "done" or run.collapsed) or not run.values(metric):
            others.append((run, run.why_not_counted(metric)))
            continue
        block = block_of(run, blocks)
        if block in by_block:
            older, run = sorted((by_block[block], run), key=lambda run: run.last("time"))
            reason = f"same configuration and seed as {run.name}, which is newer"
            if are_identical(older, run):
                reason += ", and has the same numbers to the last bit"
            others.append((older, reason))
        by_block[block] = run
    group.counted = [by_block[block] for block in sorted(by_block)]
    return others


def _leave_out_apart(groups: list[RunGroup], metric: str) -> list[tuple[Run, str]]:
    """Leave out the runs that have no documents in common with most others; return them with the
    reason.

    A curve begins at a run's first measurement, so a run may end before others begin. Over no
    documents nothing can be compared.
    """
    counted = [run for group in groups for run in group.counted]
    spans = {}
    for run in counted:
        documents, _ = run.points(DOCUMENTS, metric)
        if documents.size:
            spans[id(run)] = (documents[0], documents[-1])
    if not spans:
        return []

    def having(place: float) -> int:
        return sum(low <= place <= high for low, high in spans.values())

    # Of two places that equally many runs have in common the later one, of longer runs.
    common = max((low for low, _ in spans.values()), key=lambda place: (having(place), place))
    left_out = []
    for run in counted:
        low, high = spans.get(id(run), (common, common))
        if low <= common <= high:
            continue
        if high < common:
            left_out.append(
                (
                    run,
                    f"too short to be compared with the others: it ends at {high:,.0f} documents, "
                    f"and another is first measured at {common:,.0f}. Leave it out, or train it "
                    "for more steps",
                )
            )
        else:
            left_out.append(
                (
                    run,
                    f"not to be compared with the others: {metric} is first measured at {low:,.0f} "
                    "documents, where others have ended. Leave it out, or measure it earlier",
                )
            )
    apart = {id(run) for run, _ in left_out}
    for group in groups:
        group.counted = [run for run in group.counted if id(run) not in apart]
    return left_out


def _refuse_unknown(runs: list[Run], metric: str, option: str) -> None:
    """Raise ConfigError for a metric that no run has recorded, with the nearest.

    option: as typed, with `{}` in the place of the metric.
    """
    no_metrics = {"step", "time", "seconds", "tokens_seen"}
    known = sorted({name for run in runs for name in (*run.columns, *run.names)} - no_metrics)
    failed = [run for run in runs if run.state == "failed" and run.reason]
    if not known and failed:
        raise ConfigError(
            f"{option.format(metric)} needs a run that has finished a step (got none). "
            f"{failed[0].name} failed: {' '.join(str(failed[0].reason).split()).rstrip('.')}. Use "
            "other runs, or train again without that fault."
        )
    if not known:
        files = ", ".join(f"{run.path}/metrics.jsonl" for run in runs[:3])
        of_sweep = command_of_sweep(Path(runs[0].path).parent)
        to_train = of_sweep or f"pgtk resume {shell_path(runs[0].path)}"
        raise ConfigError(
            f"{option.format(metric)} needs a run that has finished a step (got none). Their files "
            f"of metrics are empty or missing: {files}. Put them back, from a backup, or use "
            f"{to_train} to train."
        )
    if metric not in known:
        near = nearest(metric, known, 0)
        raise ConfigError(
            f"{option.format(metric)} needs one of {', '.join(known)}. No run has recorded it. Use "
            f"{option.format(near)}."
        )
