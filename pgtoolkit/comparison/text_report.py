"""The comparison in words and tables, and its page for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from math import inf

import numpy as np

from pgtoolkit.comparison import statistics
from pgtoolkit.comparison.charts import mean_curve
from pgtoolkit.comparison.compared import Compared, Group
from pgtoolkit.comparison.measures import AXES, DOCUMENTS, is_score, is_share
from pgtoolkit.comparison.statistics import LEVEL, MOST_SEEDS, POWER, Comparison, Sample, mean_and_std
from pgtoolkit.runs.find import HELD_OUT
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import plural
from pgtoolkit.tracking.progress import WIDTH, sparkline

_CURVE = 9
"""Columns of a row's curve."""


def render_comparison(compared: Compared) -> str:
    """The comparison for the terminal, at most WIDTH columns wide."""
    lines = [*folded(heading(compared)), "", *_groups_with_curves(compared)]
    lines += [line for sentence in definitions(compared) for line in folded(sentence, "", "  ")]
    if rows := tried_rows(compared):
        lines += ["", *folded(f"{compared.measured} by {compared.best_of}, mean over {compared.blocks}s:")]
        lines += [f"  {row}"[:WIDTH] for row in aligned(rows, WIDTH - 2)]
    lines += ["", *folded(question(compared))]
    shown = planned(compared)
    for pairs in shown:
        base = compared.groups[pairs[0].first]
        lines.append(f"  against {base.label} (n = {len(base.counted)})"[:WIDTH])
        lines += [f"  {line}"[:WIDTH] for line in aligned(difference_rows(compared, pairs), WIDTH - 2)]
    sentences = worth(compared, [pair for pairs in shown for pair in pairs])
    lines += [line for sentence in sentences for line in folded(sentence, "", "  ")]
    if compared.left_out:
        lines += ["", "Excluded from averages:"]
        lines += [line for excluded in left_out(compared) for line in folded(excluded, "  ", "      ")]
    lines += [line for note in compared.notes for line in folded(f"Note: {note}")]
    return "\n".join(lines)


def planned(compared: Compared) -> list[list[Comparison]]:
    """The pairs that the terminal shows, by what they are against: the planned ones, else those with the best."""
    primary = compared.comparisons.primary
    pairs = [compared.comparisons.against(place) for place in sorted({first for first, _ in primary or [(0, 0)]})]
    return [chosen for of_base in pairs if (chosen := [pair for pair in of_base if not pair.exploratory])]


def heading(compared: Compared) -> str:
    """How many runs of how many configurations, and which keys tell them apart."""
    count = sum(len(group.runs) for group in compared.groups)
    counted = sum(len(group.counted) for group in compared.groups)
    start = f"{plural(count, 'run')} ({counted} counted) of {plural(len(compared.groups), 'configuration')}"
    apart = [key for key in compared.keys if len({repr(group.values[key]) for group in compared.groups}) > 1]
    if not apart:
        return f"{start}: they differ in nothing but the seed"
    follows = f" (and so in {', '.join(compared.following)})" if compared.following else ""
    return f"{start}, which differ in {', '.join(apart)}{follows}"


def definitions(compared: Compared) -> list[str]:
    """What the numbers of the table are, a sentence or two for each."""
    goal, metric, sentences = compared.goal, compared.metric, []
    if is_score(metric):
        where = "held-out prompts" if metric.startswith(HELD_OUT) else "the prompts of training, as they were sampled"
        sentences.append(f"{metric} is measured on {where}; mean ± sample standard deviation over {compared.blocks}s.")
    if compared.by_documents:
        limit = compared.limits[DOCUMENTS]
        window = f", as mean over the last {goal.window:,.0f} documents" if goal.window else ""
        within = f", within {limit:,.0f} documents" if limit < inf else ""
        sentences.append(
            f"reached: seeds that came to {metric} {goal.threshold:g}{window}{within}; the threshold is {goal.why}. "
            "documents, tokens, seconds: what that took."
        )
        if any(limit < inf for limit in compared.limits.values()):
            looked = ", ".join(f"{whole(limit)} {AXES[axis]}" for axis, limit in compared.limits.items())
            sentences.append(
                f"≥: a seed that never reached it counts as the search limit ({looked}), so the mean is a lower "
                "bound (restricted mean, Royston and Parmar 2013)."
            )
    elif is_score(metric) and not goal.chosen:
        sentences.append("No threshold: no configuration ends higher than the runs start. --reach sets one.")
    if goal.chosen:
        sentences.append(
            f"IQM: of the {'mean' if goal.measure == 'area' else 'final'} values, without the lowest and the highest "
            f"quarter of the runs; its interval, {1 - LEVEL:.0%}, by the bootstrap over seeds (arXiv 2108.13264)."
        )
    low, high = goal.span
    ends = "the last tenth of a run's steps"
    if metric.startswith(HELD_OUT):
        ends = "the last three evaluations, of fewer than nine the last third"
    sentences.append(
        f"mean: of {metric} over documents {low:,.0f} to {high:,.0f}, which all have seen (the area under the curve). "
        f"final: over {ends}."
    )
    return sentences


def question(compared: Compared) -> str:
    """What the verdicts answer, and by which test."""
    if not compared.comparisons:
        return "Nothing to compare: one configuration has finished runs. Name more runs to compare it with."
    found = compared.comparisons
    kinds = sorted(f"paired by {compared.blocks}" if paired else "Welch's" for paired in found.paired)
    equal = "" if found.margin is None else f", and two one-sided ones for equality within {found.margin}"
    which = "pairs" if found.primary is None else "planned pairs"
    adjusted = f", p adjusted for {found.tested} {which} (Holm)" if found.tested > 1 else ""
    return f"More than seed noise? {compared.measured}, t-test, {' or '.join(kinds)}, two-sided{equal}{adjusted}:"


def tried_rows(compared: Compared) -> list[list[str]]:
    """The header and a row per group: what is tested with every value of the key of which it has its best, if any."""
    key, write = compared.best_of, number_format(compared)
    rows = [[*(name for name in compared.keys if name != key), *compared.tried]]
    for group in compared.groups:
        cells = {value: write(mean_and_std(compared.tested(one))[0]) for value, one in group.tried.items()}
        if compared.by_documents:
            cells = {value: spent(compared, one, DOCUMENTS) for value, one in group.tried.items()}
        names = [word for name, word in zip(group.values, group.words, strict=True) if name != key]
        rows.append([*names, *(cells.get(value, "-") for value in compared.tried)])
    return rows if key else []


def worth(compared: Compared, pairs: list[Comparison]) -> list[str]:
    """How the differences are to be read."""
    tested = [pair for pair in pairs if pair.interval]
    if not tested:
        return []
    few = ""
    if min(min(pair.counts) for pair in tested) <= 10:
        few = (
            ". It knows these few seeds alone and is too narrow: with 3 it holds the true difference in about 75 of "
            "100 cases, with 5 in 85, with 10 in 90"
        )
    paired = "paired: both have the same seeds, so the same prompts; the difference of each seed is tested."
    more = "better" if compared.sign else "higher"
    sentences = [
        *([paired] if any(pair.paired for pair in tested) else []),
        f"interval: of the difference, {1 - LEVEL:.0%}, by the bootstrap over seeds{few}.",
        f"{more}: the probability that one run is {more} than one of the other side (arXiv 2108.13264). unknown: "
        "nothing was shown, not even that there is no difference.",
        f"seeds: of each, that this pair alone would need for a t-test (level {LEVEL}, power {POWER}), were the "
        "difference and the spread as seen and the values normal (arXiv 1806.08295).",
    ]
    if compared.comparisons.margin is not None:
        sentences.append("equal: p that the difference is as large as the margin (Schuirmann 1987).")
    if rest := len(compared.comparisons) - len(compared.comparisons.primary or compared.comparisons):
        sentences.append(f"{plural(rest, 'other pair')}: exploratory, p not adjusted; --html lists them.")
    return sentences


def verdict(pair: Comparison, sign: int = 0, margin: str | None = None) -> str:
    """What can be said of a difference; sign: `Compared.sign`."""
    if min(pair.counts) < 2:
        return "needs 2 seeds"
    if pair.p is None:
        return "no noise to test by"
    found = "unknown"
    if margin is not None and pair.equal_p is not None and pair.equal_p < LEVEL:
        found = f"equal within {margin}"
    elif pair.adjusted_p is not None and pair.adjusted_p < LEVEL:
        up = pair.difference * (sign or 1) > 0
        found = ("better" if up else "worse") if sign else ("higher" if up else "lower")
    return f"exploratory: {found}" if pair.exploratory else found


def difference_rows(compared: Compared, pairs: list[Comparison]) -> list[list[str]]:
    """The header and a row per pair of one configuration with others."""
    rows = [[compared.groups[pair.second].label, *_difference(compared, pair)] for pair in pairs]
    more, equal = "better" if compared.sign else "higher", ["equal"] * (compared.comparisons.margin is not None)
    return [["", "n", "difference", "interval", "p", "seeds", more, *equal, "test", "verdict"], *rows]


def _difference(compared, pair):
    write, margin = whole if compared.by_documents else number_format(compared), compared.comparisons.margin

    def signed(value):
        return f"+{write(value)}" if value > 0 else write(value)

    def probability(p):
        return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"

    seeds, more = pair.seeds_needed, pair.improvement
    if more is not None and compared.sign < 0:
        more = 1 - more
    return [
        str(pair.counts[1]),
        signed(pair.difference),
        f"[{', '.join(map(signed, pair.interval))}]" if pair.interval else "-",
        probability(pair.adjusted_p),
        "-" if seeds is None else f">{MOST_SEEDS}" if seeds > MOST_SEEDS else str(seeds),
        "-" if more is None else f"{more:.2f}",
        *([] if margin is None else [probability(pair.equal_p)]),
        "paired" if pair.paired else "Welch",
        verdict(pair, compared.sign, margin),
    ]


def left_out(compared: Compared) -> list[str]:
    """A line for each run that is excluded from averages."""
    return [f"{run.name}: {why}" for run, why in compared.left_out]


def number_format(compared: Compared) -> Callable[[float | None], str]:
    """How values of the metric are written: all alike, by the size of the largest final; a dash for none."""
    largest = max((abs(reached.final) for group in compared.groups for reached in group.reached), default=0)
    fixed = largest >= 0.1 or largest == 0 or is_score(compared.metric)
    form = ".1f" if largest >= 1000 else ".3f" if fixed else ".2e"
    return lambda value: "-" if value is None or value != value else f"{value:{form}}"


def whole(value: float | None) -> str:
    """A count, such as 12,345; from 100,000 on with three digits, such as 123k or 1.23M."""
    if value is None or value != value:
        return "-"
    if abs(value) < 99_999.5:
        return f"{value:,.0f}"
    size, unit = (1e3, "k") if abs(value) < 999_500 else (1e6, "M")
    return f"{value / size:.3g}{unit}"


def _spread(pair, write):
    """mean ± standard deviation, as far as there are."""
    mean, std = pair
    return write(mean) if std is None else f"{write(mean)} ± {write(std)}"


def spent(compared: Compared, group: Group, axis: str) -> str:
    """What it took to reach the threshold; ≥ the mean where a seed did not."""
    values = compared.spent(group, axis)
    mean, std = mean_and_std(values)
    if compared.arrived(group, axis) < len(values):
        return f"≥{whole(mean)}"
    return _spread((mean, std if axis == DOCUMENTS else None), whole)


def group_rows(compared: Compared) -> list[list[str]]:
    """The header and a row per group: values of the keys, seeds, what they spent and reached."""
    write, axes = number_format(compared), list(compared.limits)
    reach = ["reached", *(AXES[axis] for axis in axes)] if compared.by_documents else ["seeds"]
    reach += ["IQM"] * compared.goal.chosen
    rows = [[*compared.keys, *reach, "mean", "final"]]
    for group, sample in zip(compared.groups, compared.comparisons.samples, strict=True):
        count = len(group.counted)
        took = [str(count), *([_interquartile(sample, write)] if compared.goal.chosen else [])]
        if compared.by_documents:
            took = [f"{compared.arrived(group, DOCUMENTS)} of {count}", *(spent(compared, group, a) for a in axes)]
        rows.append([*group.words, *took, _spread(group.mean, write), _spread(group.final, write)])
    return rows


def _interquartile(sample: Sample, write: Callable[[float | None], str]) -> str:
    if not sample.values:
        return "-"
    mean = statistics.interquartile_mean(np.array([*sample.values.values()]))
    interval = statistics.interquartile_interval(sample)
    return write(float(mean)) + (f" [{', '.join(map(write, interval))}]" if interval else "")


def _groups_with_curves(compared):
    means = [list(mean_curve(group.counted, compared.metric, DOCUMENTS)[1]) for group in compared.groups]
    span = (min(map(min, filter(None, means)), default=0), max(map(max, filter(None, means)), default=0))
    if is_share(compared.metric):  # against 0 and 1: one success in fifty is not a peak
        span = (0, 1)
    curves = ["curve", *(sparkline(mean, _CURVE, span) for mean in means)]
    rows = [[*row, curve] for row, curve in zip(group_rows(compared), curves, strict=True)]
    # Names and values of keys alone may be long.
    return [line[:WIDTH] for line in aligned(rows, WIDTH, len(compared.keys))]


def folded(sentence: str, indent: str = "", further: str = "") -> list[str]:
    """The sentence on lines of at most WIDTH columns."""
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=further)
