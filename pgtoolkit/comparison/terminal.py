"""The comparison in words and numbers, and its page for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from pgtoolkit.comparison.charts import mean_curve
from pgtoolkit.comparison.groups import Compared
from pgtoolkit.comparison.statistics import LEVEL, Comparison
from pgtoolkit.system.report import plural, text
from pgtoolkit.tracking.progress import WIDTH, sparkline

_SCORES = ("reward", "exact_match")
"""Metrics of which more is better; of others the highest is no more than that."""

_WIDEST_CURVE = 30
_NARROWEST_CURVE = 8


def page(compared: Compared) -> str:
    """The comparison for the terminal, at most WIDTH columns wide."""
    lines = [*_folded(heading(compared)), "", *_table(compared), *_folded(definitions(compared)), ""]
    lines += _differences(compared)
    if compared.left_out:
        lines += ["", "In no mean:"]
        lines += [line for left in left_out(compared) for line in _folded(left, "  ", "      ")]
    lines += [line for note in compared.notes for line in _folded(f"Note: {note}")]
    return "\n".join(lines)


def heading(compared: Compared) -> str:
    """How many runs of how many configurations, and which keys tell them apart."""
    count = sum(len(group.runs) for group in compared.groups)
    counted = sum(len(group.counted) for group in compared.groups)
    start = f"{plural(count, 'run')} ({counted} counted) of {plural(len(compared.groups), 'configuration')}"
    if not compared.keys:
        return f"{start}: they differ in nothing but the seed"
    follows = f"; {', '.join(compared.following)} with them" if compared.following else ""
    return f"{start}, which differ in {', '.join(compared.keys)}{follows}"


def definitions(compared: Compared) -> str:
    """What the numbers of the table are."""
    return (
        f"final: mean of {compared.metric} over the last tenth of a run's steps; {best_word(compared.metric)}: the "
        "highest over any tenth; both as mean ± sample standard deviation over seeds."
    )


def best_word(metric: str) -> str:
    """The name of the highest mean over any tenth."""
    return "best" if metric in _SCORES else "highest"


def question(compared: Compared) -> str:
    """What the verdicts answer, and by which test."""
    tested = sum(comparison.p is not None for comparison in compared.comparisons)
    adjusted = f", p adjusted for {tested} pairs (Holm)" if tested > 1 else ""
    return f"More than seed noise? Final {compared.metric}, Welch's t-test, two-sided{adjusted}:"


def verdict(comparison: Comparison) -> str:
    """What can be said of a difference."""
    if min(comparison.counts) < 2:
        return "nothing can be said: it takes two seeds of each"
    if comparison.p is None:
        return "no seed differs from another: more than any noise seen, but no test applies"
    if comparison.adjusted_p < LEVEL:
        return "more than seed noise"
    return "not told apart from seed noise"


def p_value(comparison: Comparison) -> str:
    """The adjusted p, or a dash."""
    p = comparison.adjusted_p
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def left_out(compared: Compared) -> list[str]:
    """A line for each run that is in no mean."""
    return [f"{run.name}: {why}" for run, why in compared.left_out]


def number_format(compared: Compared) -> Callable[[float | None], str]:
    """How values of the metric are written: all alike, by the size of the largest final; a dash for none."""
    largest = max((abs(value) for group in compared.groups for value in group.finals), default=0)
    fixed = largest >= 0.1 or largest == 0 or compared.metric in _SCORES
    form = ".1f" if largest >= 1000 else ".3f" if fixed else ".2e"
    return lambda value: "-" if value is None or value != value else f"{value:{form}}"


def spread(pair: tuple[float | None, float | None], write: Callable[[float | None], str]) -> str:
    """mean ± standard deviation, as far as there are."""
    mean, std = pair
    return write(mean) if std is None else f"{write(mean)} ± {write(std)}"


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
    """The header and a row per group: values of the keys, number of seeds, final and best mean."""
    write = number_format(compared)
    rows = [[*compared.keys, "seeds", f"final {compared.metric}", best_word(compared.metric)]]
    for group in compared.groups:
        means = (spread(pair, write) for pair in (group.final, group.best))
        rows.append([*map(text, group.values.values()), str(len(group.counted)), *means])
    return rows


def _table(compared):
    # Only names and values of keys may be long; they give way to the numbers and the curve.
    lines = aligned(group_rows(compared), WIDTH - _NARROWEST_CURVE - 2, len(compared.keys))
    width = max(map(len, lines))
    room = min(_WIDEST_CURVE, max(0, WIDTH - width - 2))
    means = [list(mean_curve(group.counted, compared.metric, "documents_seen")[1]) for group in compared.groups]
    span = (min(map(min, filter(None, means)), default=0), max(map(max, filter(None, means)), default=0))
    bars = ["over documents seen"[:room], *(sparkline(mean, room, span) for mean in means)]
    return [f"{line:<{width}}  {bar}".rstrip()[:WIDTH] for line, bar in zip(lines, bars, strict=True)]


def _differences(compared):
    against_first = [one for one in compared.comparisons if one.first == 0]
    if not against_first:
        return _folded("Nothing to compare: one configuration has finished runs. Name more runs to compare it with.")
    write, groups = number_format(compared), compared.groups
    rows = [
        [
            f"{groups[one.second].label} (n = {one.counts[1]})",
            f"+{write(one.difference)}",
            f"p {p_value(one)}",
            verdict(one),
        ]
        for one in against_first
    ]
    return [
        *_folded(question(compared)),
        *_folded(f"{groups[0].label} (n = {against_first[0].counts[0]}) against", "  ", "    "),
        *(f"    {line}"[:WIDTH] for line in aligned(rows, WIDTH - 4)),
    ]


def _folded(sentence, indent="", further=""):
    """The sentence on lines of at most WIDTH columns."""
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=further)
