"""The comparison in words and tables, and its page for the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from pgtoolkit.comparison import statistics
from pgtoolkit.comparison.beside import follows, more_than_the_axis, without_following
from pgtoolkit.comparison.charts import mean_curve
from pgtoolkit.comparison.compared_runs import Compared, RunGroup
from pgtoolkit.comparison.measures import AXES, DOCUMENTS, apart_of, is_score, is_share
from pgtoolkit.comparison.no_verdict import without_verdict
from pgtoolkit.comparison.seed_noise import noise_of, noise_sentences
from pgtoolkit.comparison.statistics import (
    HELD,
    LEVEL,
    MOST_SEEDS,
    POWER,
    Comparison,
    Sample,
    mean_and_std,
)
from pgtoolkit.config.keys import shown
from pgtoolkit.runs.find import HELD_OUT
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import identity, plural
from pgtoolkit.system.terminal import output
from pgtoolkit.tracking.progress import WIDTH, sparkline

DOCUMENTS_COUNTED = "documents that were sampled, those that were dropped too, and trained tokens"

UNKNOWN = "unknown: nothing was shown, not even that there is no difference."

NO_NOISE = "no noise to test by"
"""The verdict on values without a spread."""

_CURVE = 9
"""Columns of a row's curve."""

_SHARED = 20
"""Of the pairs of fewer runs than a side has, at most this number is described."""

_PLACES = 120
"""Places over documents of which a row's curve shows means."""


def render_comparison(compared: Compared, keys_are_shown: bool = False) -> str:
    """Return the comparison as text: its sentences at most WIDTH columns wide, its tables as wide
    as a terminal or, where the text goes into a pipe or a file, as they are.

    keys_are_shown: whether the keys that differ stand above it, as of two runs.
    """
    room = _room()
    shown = planned(compared)
    is_numbered = _needs_numbers(compared, shown, room)
    lines = [] if keys_are_shown else [*folded(heading(compared)), ""]
    lines += _groups_with_curves(compared, is_numbered, room)
    for sentence in definitions(compared):
        lines += folded(sentence, "", "  ")
    rows = tried_rows(compared)
    if rows:
        over = f"mean over {compared.blocks}s (number of runs)"
        lines += ["", *folded(f"{compared.measured} by {compared.best_of}, {over}:")]
        if is_numbered:
            rows = _numbered(rows, range(len(compared.groups)), len(compared.keys) - 1)
        lines += [f"  {row}" for row in aligned(rows)]
    pairs_shown = [pair for pairs in shown for pair in pairs]
    lines += ["", *folded(question(compared, pairs_shown))]
    for pairs in shown:
        base = compared.groups[pairs[0].first]
        number = f"{pairs[0].first + 1}: " if is_numbered else ""
        against = f"against {number}{base.label} (n = {len(base.counted)})"
        lines += folded(against, "  ", "    ")
        rows = difference_rows(compared, pairs)
        if is_numbered:
            rows = _numbered(rows, [pair.second for pair in pairs], 1)
        lines += [f"  {line}" for line in aligned(rows)]
    sentences = [
        *more_than_the_axis(compared, pairs_shown),
        *without_verdict(compared, pairs_shown),
        *worth(compared, pairs_shown),
        *noise_sentences(compared, noise_of(compared)),
    ]
    for sentence in sentences:
        lines += folded(sentence, "", "  ")
    if compared.left_out:
        lines += ["", "Excluded from averages:"]
        for excluded in left_out(compared):
            lines += folded(excluded, "  ", "      ")
    for note in compared.notes:
        lines += folded(f"Note: {note}")
    return "\n".join(lines)


def planned(compared: Compared) -> list[list[Comparison]]:
    """Return the pairs that the terminal shows, a list for each base: the planned pairs, or those
    with the first group, and with the first of each further measure."""
    primary = compared.comparisons.primary
    bases = sorted({first for first, _ in primary}) if primary else _first_of_each_measure(compared)
    pairs = [
        [
            pair
            for pair in compared.comparisons.against(place)
            if not pair.exploratory and (primary or pair.is_common or place == bases[0])
        ]
        for place in bases
    ]
    return [pairs_of_base for pairs_of_base in pairs if pairs_of_base]


def _first_of_each_measure(compared: Compared) -> list[int]:
    """Return the places of the first group, and of the best of those that have no measure in common
    with it."""
    places: dict[object, int] = {}
    for place, sample in enumerate(compared.comparisons.samples):
        places.setdefault(sample.measure, place)
    return [*places.values()]


def heading(compared: Compared) -> str:
    """Return the number of runs and configurations, and the keys that tell them apart."""
    count = sum(len(group.runs) for group in compared.groups)
    counted = sum(len(group.counted) for group in compared.groups)
    start = (
        f"{plural(count, 'run')} ({counted} counted) of "
        f"{plural(len(compared.groups), 'configuration')}"
    )
    keys = differing_keys(compared)
    over = [shown(key) for key in compared.over]
    so_in = [name for name in compared.following if follows(name, keys)]
    with_them = [
        name for name in compared.following if name not in so_in and not follows(name, over)
    ]
    if not keys:
        differ = f"they differ in nothing that counts but {' and '.join([*over, 'the seed'])}"
        if over and with_them:
            names = ", ".join(without_following(with_them))
            differ = (
                f"{' and '.join(over)} decides {names} here, so that nothing else tells them "
                "apart. Leave --over out to compare these"
            )
        return f"{start}: {differ}"
    following = f" (and so in {', '.join(so_in)})" if so_in else ""
    together = f", and together with these in {', '.join(with_them)}" if with_them else ""
    folders = compared.groups[0].folders
    names = [f"{key} (below {folders[key]})" if key in folders else key for key in keys]
    return f"{start}, which differ in {', '.join(names)}{following}{together}"


def differing_keys(compared: Compared) -> list[str]:
    """Return the keys in which the groups differ; the values of the others belong to runs that are
    not shown."""
    return [
        key
        for key in compared.keys
        if len({identity(group.values[key]) for group in compared.groups}) > 1
    ]


def definitions(compared: Compared) -> list[str]:
    """Return sentences that define the columns of the table."""
    goal = compared.goal
    metric = compared.metric
    sentences = []
    if is_score(metric):
        sentences.append(
            f"{metric} is measured on {_prompts(metric)}; ±: the sample standard deviation over "
            f"{compared.blocks}s."
        )
    if compared.by_documents:
        sentences.append(
            f"reached: {compared.counted} that came to {_threshold(compared)}. documents, tokens, "
            f"seconds: what that took; {DOCUMENTS_COUNTED}."
        )
        sentences += _definition_of_a_bound(compared)
    elif is_score(metric) and not goal.chosen:
        sentences.append(
            "No threshold: no configuration ends higher with every seed than the runs start. "
            "--reach sets one."
        )
    if goal.chosen:
        sentences.append(
            f"IQM: of the {'mean' if goal.measure == 'area' else 'final'} values, without the "
            f"lowest and the highest quarter of the runs (of 3 or fewer: none, it is their mean); "
            f"its interval, {1 - LEVEL:.0%}, by the "
            "bootstrap over seeds, is too narrow with few of them (arXiv 2108.13264)."
        )
    sentences.append(f"mean: of {metric} {_area(compared)}. final: {_end(metric)}.")
    return sentences


def definition_of_tested_mean(compared: Compared) -> list[str]:
    """Return sentences that define a column `mean` of the tested quantity."""
    metric = compared.metric
    over = f"mean: over {compared.blocks}s, of"
    if compared.by_documents:
        sentences = [
            f"{over} the documents that it took to come to {_threshold(compared)}.",
            *_definition_of_a_bound(compared),
        ]
    elif compared.goal.measure == "area":
        sentences = [f"{over} {metric} {_area(compared)}."]
    else:
        sentences = [f"{over} {metric} {_end(metric)}."]
    if is_score(metric):
        sentences.append(f"{metric} is measured on {_prompts(metric)}.")
    return sentences


def _prompts(metric: str) -> str:
    if metric.startswith(HELD_OUT):
        return "held-out prompts"
    return "the prompts of training, as they were sampled"


def _area(compared: Compared) -> str:
    low, high = compared.goal.span
    return (
        f"over documents {low:,.0f} to {high:,.0f}, which all have seen (the area under the curve)"
    )


def _end(metric: str) -> str:
    if metric.startswith(HELD_OUT):
        return "over the last three evaluations, of fewer than nine the last third"
    return "over the last tenth of a run's steps"


def _threshold(compared: Compared) -> str:
    """Return the threshold, how a run comes to it, how far it is looked for, and why it is this."""
    goal = compared.goal
    runs = [run for group in compared.groups for run in group.counted]
    # A shorter window holds one measurement.
    is_mean = any(goal.window > apart_of(run, goal.metric) for run in runs)
    window = f", as mean over the last {goal.window:,.0f} documents" if is_mean else ""
    within = f", within {compared.limit:,.0f} documents" if compared.is_bounded else ""
    return f"{goal.metric} {goal.threshold:g}{window}{within}; the threshold is {goal.why}"


def _definition_of_a_bound(compared: Compared) -> list[str]:
    """Return the sentence on means of which a seed never reached the threshold; [] without one."""
    if not compared.is_bounded:
        return []
    return [
        f"≥: a seed that did not reach it counts as {compared.after_limit:,.0f} documents, before "
        "which none of these is measured again, with its cost until the limit. So the "
        "mean is a lower bound (restricted mean, Royston and Parmar 2013). A difference with one "
        "such mean is a bound, too (≥ or ≤); with two (~) it may be larger or smaller."
    ]


def question(compared: Compared, pairs: Sequence[Comparison]) -> str:
    """Return the question that the verdicts on these pairs answer, with the test that answers
    it."""
    if not compared.comparisons:
        has_finished = any(group.counted for group in compared.groups)
        number = "one" if has_finished else "no"
        return (
            f"Nothing to compare: {number} configuration has runs that count. Name more runs to "
            "compare."
        )
    tests = compared.comparisons
    kinds = {pair.paired for pair in pairs if pair.is_common}
    test = "t-test"
    if True in kinds:
        test += f", paired by {compared.blocks}"
    if len(kinds) == 2:
        test += " where both sides have the same, else Welch's"
    elif False in kinds:
        test += ", Welch's"
    equal = ""
    if compared.margin is not None:
        equal = f", and two one-sided ones for equality within {compared.margin}"
    planned_pairs = "pairs" if tests.primary is None else "planned pairs"
    adjusted = ""
    if tests.num_adjusted > 1:
        adjusted = f", p adjusted for {tests.num_adjusted} {planned_pairs} (Holm)"
    return f"More than seed noise? {compared.measured}, {test}, two-sided{equal}{adjusted}:"


def tried_rows(compared: Compared) -> list[list[str]]:
    """Return the header and a row per group with the tested values at each value of the --best-of
    key, and the number of runs there unless it is the same everywhere; [] without such a key."""
    key = compared.best_of
    if not key:
        return []
    write = number_format(compared)
    rows = [[*(name for name in compared.keys if name != key), *compared.tried]]
    counts = {len(tried.counted) for group in compared.groups for tried in group.tried.values()}
    for group in compared.groups:
        cells = {}
        for value, tried in group.tried.items():
            if compared.by_documents:
                cells[value] = spent(compared, tried, DOCUMENTS)
            else:
                mean, _ = mean_and_std(compared.tested_values(tried))
                cells[value] = write(mean)
            if len(counts) > 1:
                cells[value] += f" ({len(tried.counted)})"
        words = [word for name, word in zip(group.values, group.words, strict=True) if name != key]
        rows.append([*words, *(cells.get(value, "-") for value in compared.tried)])
    return rows


def worth(compared: Compared, pairs: list[Comparison]) -> list[str]:
    """Return sentences on how to read the rows of these pairs; [] if none could be tested."""
    sentences = []
    tested = [pair for pair in pairs if pair.interval]
    if any(pair.paired for pair in tested):
        sentences.append(
            f"paired: a run of one side and one of the other have the same {compared.blocks}, so "
            "the prompts in the same order; the difference of each two is tested."
        )
    sentences += of_shared_runs(compared, pairs)
    sentences += worth_of_intervals(pairs)
    if tested:
        more = _more(compared)
        sentences += [
            f"{more}: the probability that one run is {more} than one of the other side (arXiv "
            f"2108.13264). {UNKNOWN}",
            f"{compared.counted}: of each, that this pair alone would need for a t-test (level "
            f"{LEVEL}, power {POWER}), were the difference and the spread as seen and the values "
            "normal (arXiv 1806.08295).",
        ]
    if compared.margin is not None and any(pair.equal_p is not None for pair in pairs):
        sentences.append(
            f"equal: p of the test that the difference is within {compared.margin}, of two "
            f"one-sided t-tests (Schuirmann 1987); below {LEVEL} it is shown to be."
        )
    if compared.margin is not None and compared.is_bounded:
        sentences.append("A mean with ≥ is never shown to be equal to another.")
    sentences += without_noise(compared, pairs)
    unplanned = len(compared.comparisons) - len(
        compared.comparisons.primary or compared.comparisons
    )
    if tested and unplanned:
        sentences.append(
            f"{plural(unplanned, 'other pair')}: exploratory, p not adjusted; --html lists them."
        )
    return sentences


def of_shared_runs(compared: Compared, pairs: Sequence[Comparison]) -> list[str]:
    """Return a sentence on each pair of which a side has more runs than are paired: how many the
    difference is of, and the means of these."""
    write = short_count if compared.by_documents else number_format(compared)
    sentences = []
    for pair in pairs:
        sides = [compared.groups[place] for place in (pair.first, pair.second)]
        larger = [
            f"{side.label} has {len(side.counted)}"
            for side in sides
            if pair.paired and pair.is_common and pair.counts[0] < len(side.counted)
        ]
        if larger:
            means = [
                f"{write(mean)} of {side.label}"
                for side, mean in zip(sides, pair.means, strict=True)
            ]
            sentences.append(
                f"{sides[1].label} against {sides[0].label}: {' and '.join(larger)} runs, and the "
                f"difference is of the {pair.counts[0]} pairs with the same {compared.blocks}, "
                f"whose means are {' and '.join(means)}."
            )
    more = len(sentences) - _SHARED
    if more > 0:
        sentences[_SHARED:] = [
            f"{plural(more, 'further pair')}: of fewer runs than a side has, as column n says."
        ]
    return sentences


def worth_of_intervals(pairs: list[Comparison]) -> list[str]:
    """Return the sentence on the intervals of these pairs; [] if they have none."""
    tested = [pair for pair in pairs if pair.interval]
    if not tested:
        return []
    made_for = f"interval: of the difference, {1 - LEVEL:.0%}, by the bootstrap over seeds"
    fewest = min(min(pair.counts) for pair in tested)
    if fewest > max(HELD):
        return [f"{made_for}."]
    shares = [f"with {seeds} in {share}" for seeds, share in HELD.items() if seeds > fewest]
    known = max(seeds for seeds in HELD if seeds <= fewest)
    from_to = ", from the lowest to the highest that was seen," if fewest == 2 else ""
    first = (
        f"with {known}{from_to} it holds the true difference in about {HELD[known]} of 100 cases"
    )
    return [
        f"{made_for}. It knows these few seeds alone and is too narrow: "
        f"{', '.join([first, *shares])}. The verdict does not use it."
    ]


def without_noise(compared: Compared, pairs: list[Comparison]) -> list[str]:
    """Return the sentence on pairs whose values have no spread; [] without such a pair."""
    if all(verdict(pair).removeprefix("exploratory: ") != NO_NOISE for pair in pairs):
        return []
    instead = ""
    if compared.by_documents:
        instead = (
            f" Documents are counted from one measurement to the next: --metric=area:"
            f"{compared.metric} or --metric=final:{compared.metric} tells seeds apart."
        )
    return [
        f"{NO_NOISE}: all seeds of both have the same value, or all differences of a seed are the "
        f"same; a t-test needs values that differ.{instead}"
    ]


def _more(compared: Compared) -> str:
    return "better" if compared.sign else "higher"


def verdict(pair: Comparison, sign: int = 0, margin: str | None = None) -> str:
    """Return the verdict on a difference in words. sign: see `Compared.sign`."""
    if pair.identical:
        return "equal to the bit"
    if not pair.is_common:
        return "no common measure"
    if min(pair.counts) < 2:
        return "needs 2 seeds"
    if pair.p is None:
        return NO_NOISE
    answer = "unknown"
    if margin is not None and pair.equal_p is not None and pair.equal_p < LEVEL:
        answer = f"equal within {margin}"
    elif pair.adjusted_p is not None and pair.adjusted_p < LEVEL:
        up, down = ("better", "worse") if sign else ("higher", "lower")
        answer = up if pair.difference * (sign or 1) > 0 else down
    return f"exploratory: {answer}" if pair.exploratory else answer


def difference_rows(compared: Compared, pairs: list[Comparison]) -> list[list[str]]:
    """Return the header and a row for each pair of one configuration with others."""
    equal = [] if compared.margin is None else ["equal"]
    header = [
        "",
        "n",
        "difference",
        "interval",
        "p",
        compared.counted,
        _more(compared),
        *equal,
        "test",
        "verdict",
    ]
    return [
        header,
        *([compared.groups[pair.second].label, *_difference(compared, pair)] for pair in pairs),
    ]


def _difference(compared: Compared, pair: Comparison) -> list[str]:
    """Return the cells of `difference_rows` behind the label."""
    write = short_count if compared.by_documents else number_format(compared)
    margin = compared.margin

    if not pair.is_common:
        missing = ["-"] * (len(difference_rows(compared, [])[0]) - 3)
        return [str(pair.counts[1]), *missing, verdict(pair)]
    seeds = "-"
    if pair.seeds_needed is not None:
        too_many = pair.seeds_needed > MOST_SEEDS
        seeds = f">{MOST_SEEDS}" if too_many else str(pair.seeds_needed)
    better = probability_of_better(pair, compared.sign)
    return [
        str(pair.counts[1]),
        *difference_and_interval(pair, write, bound_of(compared, pair)),
        p_value(pair.adjusted_p) or "-",
        seeds,
        "-" if better is None else f"{better:.2f}",
        *([] if margin is None else [p_value(pair.equal_p) or "-"]),
        "paired" if pair.paired else "Welch",
        verdict(pair, compared.sign, margin),
    ]


def probability_of_better(pair: Comparison, sign: float) -> float | None:
    """Return the probability that a run of the second is better than one of the first.

    sign: -1 where a lower value of the measure is better.
    """
    if pair.improvement is None or sign >= 0:
        return pair.improvement
    return 1 - pair.improvement


def bound_of(compared: Compared, pair: Comparison) -> str:
    """Return the mark of a difference where a mean is a lower bound: "≥" or "≤" if the difference
    is a bound, "~" if both means are and it may be larger or smaller; "" elsewhere."""
    if pair.identical:
        return ""
    samples = compared.comparisons.samples
    if samples[pair.first].is_bound:
        return "~" if samples[pair.second].is_bound else "≤"
    return "≥" if samples[pair.second].is_bound else ""


def difference_and_interval(
    pair: Comparison, write: Callable[[float | None], str], bound: str = ""
) -> tuple[str, str]:
    """Return the difference of a pair and its interval, with its sign unless it is written as 0.

    The interval is a dash where there is none. The ends of one that does not hold 0 have their sign
    also where they are written as 0. write: see `number_format`. bound: the mark of the difference,
    see `bound_of`.
    """

    def signed(value: float) -> str:
        written = write(value)
        return f"+{written}" if value > 0 and written != write(0) else written

    if not pair.interval:
        return bound + signed(pair.difference), "-"
    low, high = pair.interval
    ends = [signed(low), signed(high)]
    if low > 0:
        ends = [f"+{write(low)}", f"+{write(high)}"]
    elif high < 0:
        ends = [f"-{write(abs(low))}", f"-{write(abs(high))}"]
    return bound + signed(pair.difference), f"[{', '.join(ends)}]"


def p_value(p: float | None) -> str:
    """Return p with three decimals, an empty text for None."""
    if p is None:
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def left_out(compared: Compared) -> list[str]:
    """Return a line for each run that is excluded from averages."""
    return [f"{run.name}: {reason}" for run, reason in compared.left_out]


def number_format(compared: Compared) -> Callable[[float | None], str]:
    """Return a function that writes values of the metric, all in the format that suits the largest
    final value.

    The function writes a dash for None and NaN, and no minus before a zero.
    """
    largest = max(
        (abs(reached.final) for group in compared.groups for reached in group.reached), default=0
    )
    if largest >= 1000:
        form = ".1f"
    elif largest >= 0.1 or largest == 0 or is_score(compared.metric):
        form = ".3f"
    else:
        form = ".2e"
    return lambda value: "-" if value is None or value != value else f"{value:z{form}}"


def short_count(value: float | None) -> str:
    """Return a count such as 12,345; from 100,000 on with three digits, such as 123k or 1.23M."""
    if value is None or value != value:
        return "-"
    if abs(value) < 99_999.5:
        return f"{value:z,.0f}"
    size, unit = (1e3, "k") if abs(value) < 999_500 else (1e6, "M")
    return f"{value / size:.3g}{unit}"


def _mean_and_spread(
    mean: float | None, std: float | None, write: Callable[[float | None], str]
) -> str:
    return write(mean) if std is None else f"{write(mean)} ± {write(std)}"


def spent(compared: Compared, group: RunGroup, axis: str) -> str:
    """Return what it took to reach the threshold: mean ± standard deviation, or ≥ the mean if a
    seed did not."""
    values = compared.spent(group, axis)
    mean, std = mean_and_std(values)
    if compared.arrived(group) < len(values):
        return f"≥{short_count(mean)}"
    return _mean_and_spread(mean, std if axis == DOCUMENTS else None, short_count)


def group_rows(compared: Compared) -> list[list[str]]:
    """Return the header and a row per group: values of the keys, how many seeds there are or
    reached the threshold, what that took, and the metric's values."""
    write = number_format(compared)
    header = list(compared.keys)
    if compared.by_documents:
        header += ["reached", *(AXES[axis] for axis in compared.axes)]
    else:
        header.append(compared.counted)
    if compared.goal.chosen:
        header.append("IQM")
    rows = [[*header, "mean", "final"]]
    for group, sample in zip(compared.groups, compared.comparisons.samples, strict=True):
        count = len(group.counted)
        if compared.by_documents:
            cells = [f"{compared.arrived(group)} of {count}"]
            cells += [spent(compared, group, axis) for axis in compared.axes]
        else:
            cells = [str(count)]
        if compared.goal.chosen:
            cells.append(_interquartile(sample, write))
        values = [_mean_and_spread(*group.mean, write), _mean_and_spread(*group.final, write)]
        rows.append([*group.words, *cells, *values])
    return rows


def _interquartile(sample: Sample, write: Callable[[float | None], str]) -> str:
    """Return the interquartile mean of a group's runs, with its interval if there is one."""
    if not sample.values:
        return "-"
    mean = write(float(statistics.interquartile_mean(np.array([*sample.values.values()]))))
    interval = statistics.interquartile_interval(sample)
    if not interval:
        return mean
    return f"{mean} [{', '.join(map(write, interval))}]"


def _room() -> float:
    """Return the columns that a table may take: those of a terminal; a pipe has no end."""
    if not output().isatty():
        return inf
    return max(WIDTH, shutil.get_terminal_size().columns)


def _needs_numbers(compared: Compared, shown: list[list[Comparison]], room: float) -> bool:
    """Return whether a table is too wide with its labels in full, so that rows have numbers in
    their place. shown: see `planned`."""
    tables = [_with_curves(compared), tried_rows(compared)]
    tables += [difference_rows(compared, pairs) for pairs in shown]
    # The names of keys above a column may be shortened, since the heading has them in full.
    fewest = [_fewest(compared, tables[0]), *([] for _ in tables[1:])]
    return any(
        _width(aligned(rows, room - 2, least)) > room - 2
        for rows, least in zip(tables, fewest, strict=True)
        if rows
    )


def _fewest(compared: Compared, rows: list[list[str]]) -> list[int]:
    """Return the width of each column of a key below which a value would be shortened."""
    columns = [[row[place] for row in rows[1:]] for place in range(len(compared.keys))]
    return [max([4, *map(len, column)]) for column in columns]


def _width(lines: list[str]) -> int:
    return max(map(len, lines))


def _numbered(rows: list[list[str]], places: Sequence[int], num_labels: int) -> list[list[str]]:
    """Return the rows of a table with a number in the place of the first `num_labels` columns.

    places: of the group of each row below the header.
    """
    numbers = ["", *(str(place + 1) for place in places)]
    return [[number, *row[num_labels:]] for number, row in zip(numbers, rows, strict=True)]


def _with_curves(compared: Compared) -> list[list[str]]:
    """Return `group_rows`, each with a small curve of the metric."""
    means = [_evenly(group, compared.metric) for group in compared.groups]
    values = [value for curve in means for value in curve]
    span = (min(values, default=0), max(values, default=0))
    if is_share(compared.metric):
        span = (0, 1)  # or one success in fifty would be drawn as a peak
    curves = ["curve", *(sparkline(mean, _CURVE, span) for mean in means)]
    return [[*row, curve] for row, curve in zip(group_rows(compared), curves, strict=True)]


def _groups_with_curves(compared: Compared, is_numbered: bool, room: float) -> list[str]:
    """Return the groups with their curves in aligned columns.

    With numbers that the other tables use, the values of a group follow its number, or, where there
    is no room for them, the table.
    """
    rows = _with_curves(compared)
    fewest = _fewest(compared, rows)
    if not is_numbered:
        return aligned(rows, room, fewest)
    places = range(len(compared.groups))
    lines = aligned(_numbered(rows, places, 0), room, [1, *fewest])
    if _width(lines) <= room:
        return lines
    lines = aligned(_numbered(rows, places, len(compared.keys)))
    for place, group in enumerate(compared.groups):
        values = zip(group.values, group.values.values(), group.words, strict=True)
        words = ", ".join(f"{key}={word}" for key, value, word in values if value is not None)
        lines += folded(f"{place + 1}: {words}", "", "   ")
    return lines


def _evenly(group: RunGroup, metric: str) -> list[float]:
    """Return the values of the group's mean curve at even distances over documents."""
    x, mean, *_ = mean_curve(group.counted, metric, DOCUMENTS)
    if x.size < 2:
        return list(mean)
    return list(np.interp(np.linspace(x[0], x[-1], _PLACES), x, mean))


def folded(sentence: str, indent: str = "", further: str = "") -> list[str]:
    """Return the sentence on lines of at most WIDTH columns.

    indent: of the first line. further: of the others.
    """
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=further)
