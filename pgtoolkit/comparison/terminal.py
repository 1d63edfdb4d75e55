"""The comparison in words and numbers, and its page for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from math import inf

from pgtoolkit.comparison.charts import mean_curve
from pgtoolkit.comparison.groups import Compared, Group
from pgtoolkit.comparison.measures import AXES, DOCUMENTS, is_score, is_share
from pgtoolkit.comparison.statistics import LEVEL, MOST_SEEDS, POWER, Comparison, mean_and_std
from pgtoolkit.runs.find import HELD_OUT
from pgtoolkit.system.report import plural, text
from pgtoolkit.tracking.progress import WIDTH, sparkline

_WIDEST_CURVE = 30
_NARROWEST_CURVE = 8


def render_comparison(compared: Compared) -> str:
    """The comparison for the terminal, at most WIDTH columns wide."""
    lines = [*folded(heading(compared)), "", *_table(compared), *_explained(definitions(compared)), ""]
    lines += _differences(compared)
    if compared.left_out:
        lines += ["", "Excluded from averages:"]
        lines += [line for left in left_out(compared) for line in folded(left, "  ", "      ")]
    lines += [line for note in compared.notes for line in folded(f"Note: {note}")]
    return "\n".join(lines)


def heading(compared: Compared) -> str:
    """How many runs of how many configurations, and which keys tell them apart."""
    count = sum(len(group.runs) for group in compared.groups)
    counted = sum(len(group.counted) for group in compared.groups)
    start = f"{plural(count, 'run')} ({counted} counted) of {plural(len(compared.groups), 'configuration')}"
    if not (apart := [key for key in compared.keys if len({repr(one.values[key]) for one in compared.groups}) > 1]):
        return f"{start}: they differ in nothing but the seed"
    follows = f"; {', '.join(compared.following)} with them" if compared.following else ""
    return f"{start}, which differ in {', '.join(apart)}{follows}"


def definitions(compared: Compared) -> list[str]:
    """What the numbers of the table are, a sentence or two for each."""
    goal, metric, said = compared.goal, compared.metric, []
    if is_score(metric):
        where = "held-out prompts" if metric.startswith(HELD_OUT) else "the prompts of training, as they were sampled"
        said.append(f"{metric} is measured on {where}; mean ± sample standard deviation over seeds.")
    if compared.by_documents:
        limit = compared.limits[DOCUMENTS]
        window = f", as mean over the last {goal.window:,.0f} documents" if goal.window else ""
        within = f", within {limit:,.0f} documents" if limit < inf else ""
        said.append(
            f"reached: seeds that came to {metric} {goal.threshold:g}{window}{within}; the threshold is {goal.why}. "
            "documents, tokens, seconds: what that took."
        )
        if any(limit < inf for limit in compared.limits.values()):
            looked = ", ".join(f"{whole(limit)} {AXES[axis]}" for axis, limit in compared.limits.items())
            said.append(
                f"≥: a seed that never reached it counts as the search limit ({looked}), so the mean is a lower "
                "bound (restricted mean, Royston and Parmar 2013)."
            )
    elif is_score(metric):
        said.append("No threshold: no configuration ends higher than the runs start. --reach sets one.")
    low, high = goal.span
    said.append(
        f"mean: of {metric} over documents {low:,.0f} to {high:,.0f}, which all have seen (the area under the curve). "
        "final: over the last tenth of a run's steps."
    )
    return said


def question(compared: Compared) -> str:
    """What the verdicts answer, and by which test."""
    goal, tested = compared.goal, sum(comparison.p is not None for comparison in compared.comparisons)
    found = {comparison.paired for comparison in compared.comparisons}
    kinds = [word for word, paired in (("paired by seed", True), ("Welch's", False)) if paired in found]
    adjusted = f", p adjusted for {tested} pairs (Holm)" if tested > 1 else ""
    what = f"Documents to {goal.metric} {goal.threshold:g}" if compared.by_documents else f"Final {goal.metric}"
    return f"More than seed noise? {what}, t-test, {' or '.join(kinds)}, two-sided{adjusted}:"


def worth(comparisons: list[Comparison]) -> list[str]:
    """How the differences are to be read."""
    said, tested = [], [one for one in comparisons if one.interval]
    if any(one.paired for one in tested):
        said.append("paired: both have the same seeds, so the same prompts; the difference of each seed is tested.")
    if tested:
        few = (
            ". It takes the few seeds for all there could be: with 3 it holds the true difference in about 75 of 100 "
            "cases, with 5 in 85, with 10 in 90"
        )
        fewest = min(min(one.counts) for one in tested)
        said.append(f"interval: of the difference, {1 - LEVEL:.0%}, by the bootstrap over seeds{few * (fewest <= 10)}.")
        said.append(
            f"seeds: of each, that this pair alone would need for a t-test (level {LEVEL}, power {POWER}), were the "
            "difference and the spread as seen and the values normal (arXiv 1806.08295)."
        )
    return said


def verdict(comparison: Comparison) -> str:
    """What can be said of a difference."""
    if min(comparison.counts) < 2:
        return "needs 2 seeds per configuration"
    if comparison.p is None:
        return "no noise to test by"
    if comparison.adjusted_p < LEVEL:
        return "more than seed noise"
    return "not told apart"


def p_value(comparison: Comparison) -> str:
    """The adjusted p, or a dash."""
    p = comparison.adjusted_p
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


DIFFERENCES = ("difference", "interval", "p", "seeds")
"""What is said in numbers of each pair."""


def difference_row(comparison: Comparison, write: Callable[[float | None], str]) -> list[str]:
    """The verdict, by which test, and the fields of DIFFERENCES. write: of values of what is compared."""

    def signed(value):
        return f"+{write(value)}" if value > 0 else write(value)

    interval, seeds = comparison.interval, comparison.seeds_needed
    return [
        verdict(comparison),
        "paired" if comparison.paired else "Welch",
        signed(comparison.difference),
        f"[{', '.join(map(signed, interval))}]" if interval else "-",
        p_value(comparison),
        "-" if seeds is None else f">{MOST_SEEDS}" if seeds > MOST_SEEDS else str(seeds),
    ]


def left_out(compared: Compared) -> list[str]:
    """A line for each run that is excluded from averages."""
    return [f"{run.name}: {why}" for run, why in compared.left_out]


def number_format(compared: Compared) -> Callable[[float | None], str]:
    """How values of the metric are written: all alike, by the size of the largest final; a dash for none."""
    largest = max((abs(one.final) for group in compared.groups for one in group.reached), default=0)
    fixed = largest >= 0.1 or largest == 0 or is_score(compared.metric)
    form = ".1f" if largest >= 1000 else ".3f" if fixed else ".2e"
    return lambda value: "-" if value is None or value != value else f"{value:{form}}"


def tested_format(compared: Compared) -> Callable[[float | None], str]:
    """How values are written of what is tested: documents, or the metric."""
    return whole if compared.by_documents else number_format(compared)


def whole(value: float | None) -> str:
    """A count, such as 12,345; from 100,000 on with three digits, such as 123k or 1.23M."""
    if value is None or value != value:
        return "-"
    if abs(value) < 99_999.5:
        return f"{value:,.0f}"
    size, unit = (1e3, "k") if abs(value) < 999_500 else (1e6, "M")
    return f"{value / size:.3g}{unit}"


def spread(pair: tuple[float | None, float | None], write: Callable[[float | None], str]) -> str:
    """mean ± standard deviation, as far as there are."""
    mean, std = pair
    return write(mean) if std is None else f"{write(mean)} ± {write(std)}"


def spent(compared: Compared, group: Group, axis: str) -> str:
    """What it took to reach the threshold; ≥ the mean where a seed did not."""
    values = compared.spent(group, axis)
    mean, std = mean_and_std(values)
    if compared.arrived(group, axis) < len(values):
        return f"≥{whole(mean)}"
    return spread((mean, std if axis == DOCUMENTS else None), whole)


def aligned(rows: list[list[str]], room: int, shrinking: int = 1) -> list[str]:
    """Each row as a line, in columns; where they take more than `room`, the longest of the first `shrinking` are cut.

    They are cut in their middle: paths, and lists of values, often differ at their end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > room and max(widths[:shrinking], default=0) > 4:
        widths[widths.index(max(widths[:shrinking]))] -= 1
    return ["  ".join(map(_cut, row, widths)).rstrip() for row in rows]


def _cut(field, width):
    end = (width - 1) // 2
    shown = field if len(field) <= width else f"{field[: width - 1 - end]}…{field[len(field) - end :]}"
    return shown.ljust(width)


def group_rows(compared: Compared) -> list[list[str]]:
    """The header and a row per group: values of the keys, seeds, what they spent and reached."""
    write, axes = number_format(compared), list(compared.limits)
    reach = ["reached", *(AXES[axis] for axis in axes)] if compared.by_documents else ["seeds"]
    rows = [[*compared.keys, *reach, "mean", "final"]]
    for group in compared.groups:
        count = len(group.counted)
        took = [str(count)]
        if compared.by_documents:
            took = [f"{compared.arrived(group, DOCUMENTS)} of {count}", *(spent(compared, group, a) for a in axes)]
        rows.append([*map(text, group.values.values()), *took, spread(group.mean, write), spread(group.final, write)])
    return rows


def _table(compared):
    # Only names and values of keys may be long; they give way to the numbers and the curve.
    lines = aligned(group_rows(compared), WIDTH - _NARROWEST_CURVE - 2, len(compared.keys))
    width = max(map(len, lines))
    room = min(_WIDEST_CURVE, max(0, WIDTH - width - 2))
    means = [list(mean_curve(group.counted, compared.metric, DOCUMENTS)[1]) for group in compared.groups]
    span = (min(map(min, filter(None, means)), default=0), max(map(max, filter(None, means)), default=0))
    if is_share(compared.metric):  # against 0 and 1: one success in fifty is not a peak
        span = (0, 1)
    bars = ["over documents seen"[:room], *(sparkline(mean, room, span) for mean in means)]
    return [f"{line:<{width}}  {bar}".rstrip()[:WIDTH] for line, bar in zip(lines, bars, strict=True)]


def _differences(compared):
    against_first = [one for one in compared.comparisons if one.first == 0]
    if not against_first:
        return folded("Nothing to compare: one configuration has finished runs. Name more runs to compare it with.")
    write, groups = tested_format(compared), compared.groups
    rows = [["", "n", *DIFFERENCES, "test", "verdict"]]
    for one in against_first:
        said, test, *numbers = difference_row(one, write)
        rows.append([groups[one.second].label, str(one.counts[1]), *numbers, test, said])
    first = f"against {groups[0].label} (n = {against_first[0].counts[0]})"
    table = (f"  {line}"[:WIDTH] for line in [first, *aligned(rows, WIDTH - 2)])
    return [*folded(question(compared)), *table, *_explained(worth(against_first))]


def _explained(sentences):
    return [line for sentence in sentences for line in folded(sentence, "", "  ")]


def folded(sentence, indent="", further=""):
    """The sentence on lines of at most WIDTH columns."""
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=further)
