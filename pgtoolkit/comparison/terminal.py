"""The comparison in words and numbers, and its page for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from pgtoolkit.comparison.groups import Compared, Group, text
from pgtoolkit.comparison.mean_curves import mean_curve
from pgtoolkit.comparison.statistics import LEVEL, Comparison
from pgtoolkit.tracking.progress import WIDTH, sparkline

_SCORES = ("reward", "exact_match")
"""Metrics of which more is better; of others the highest is no more than that."""

_WIDEST_CURVE = 30
_NARROWEST_CURVE = 8


def page(compared: Compared) -> str:
    """The comparison for the terminal, at most WIDTH columns wide."""
    lines = [*_folded(heading(compared)), "", *_table(compared), *_folded(definitions(compared)), ""]
    lines += _verdicts(compared)
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


def writer(compared: Compared) -> Callable[[float | None], str]:
    """How values of the metric are written: all alike, by the size of the largest final."""
    largest = max((abs(value) for group in compared.groups for value in group.finals), default=0)
    fixed = largest >= 0.1 or largest == 0 or compared.metric in _SCORES
    form = ".1f" if largest >= 1000 else ".3f" if fixed else ".2e"
    return lambda value: "-" if value is None else f"{value:{form}}"


def spread(pair: tuple[float | None, float | None], write) -> str:
    """mean ± standard deviation, as far as there are."""
    mean, std = pair
    return write(mean) if std is None else f"{write(mean)} ± {write(std)}"


def plural(count: int, noun: str) -> str:
    """The count with its noun."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _table(compared):
    write = writer(compared)
    header = [*compared.keys, "seeds", f"final {compared.metric}", best_word(compared.metric)]
    rows = [
        [*(text(value) for value in group.values.values()), str(len(group.counted)), *_means(group, write)]
        for group in compared.groups
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    keys = len(compared.keys)
    # Only names and values of keys may be long; they give way to the numbers and the curve.
    while keys and sum(widths) + 2 * len(widths) + _NARROWEST_CURVE > WIDTH and max(widths[:keys]) > 4:
        widths[widths.index(max(widths[:keys]))] -= 1
    room = min(_WIDEST_CURVE, WIDTH - sum(widths) - 2 * len(widths))
    curves = [mean_curve(group.counted, compared.metric, "documents_seen") for group in compared.groups]
    span = [mean for curve in curves for _, mean, *_ in curve]
    bars = [sparkline([mean for _, mean, *_ in curve], max(0, room), _span(span)) for curve in curves]
    lines = []
    for row, bar in zip([header, *rows], ["over documents seen"[: max(0, room)], *bars], strict=True):
        fields = [_cut(field, width).ljust(width) for field, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*fields, bar]).rstrip()[:WIDTH])
    return lines


def _means(group: Group, write):
    return spread(group.final, write), spread(group.best, write)


def _span(values):
    return (min(values), max(values)) if values else None


def _cut(field, width):
    # In the middle: paths, and lists of values, often differ at their end.
    end = (width - 1) // 2
    return field if len(field) <= width else f"{field[: width - 1 - end]}…{field[len(field) - end :]}"


def _verdicts(compared):
    against = [c for c in compared.comparisons if c.first == 0]
    if not against:
        return _folded("Nothing to compare: one configuration has finished runs. Name more runs to compare it with.")
    write = writer(compared)
    lines = _folded(question(compared))
    lines += _folded(f"{compared.groups[0].label} (n = {against[0].counts[0]}) against", "  ", "    ")
    rows = [
        [
            f"{compared.groups[c.second].label} (n = {c.counts[1]})",
            f"+{write(c.difference)}",
            f"p {p_value(c)}",
            verdict(c),
        ]
        for c in against
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if 4 + sum(widths) + 2 * 3 > WIDTH:
        widths[0] = max(10, WIDTH - 4 - 2 * 3 - sum(widths[1:]))
    for row in rows:
        fields = [_cut(field, width).ljust(width) for field, width in zip(row, widths, strict=True)]
        lines.append(("    " + "  ".join(fields)).rstrip()[:WIDTH])
    return lines


def _folded(sentence, indent="", further="  "):
    """The sentence on lines of at most WIDTH columns."""
    import textwrap

    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=indent and further)
