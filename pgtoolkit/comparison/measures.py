"""What a run reached: how much it took to come to a threshold, its mean over documents, its end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan

import numpy as np

from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.series import final, first, mean
from pgtoolkit.system.report import refusal

AXES = {"documents_seen": "documents", "tokens_seen": "tokens", "seconds": "seconds"}
"""What it takes to reach a threshold is counted in these: key of a row -> its name in words."""

DOCUMENTS = "documents_seen"

_WINDOWS = 50
"""A value that is measured while training counts once the mean over a fiftieth of the documents has come to it."""

_SHARE = 0.9

_LAST_EVALUATIONS = 3

MEASURES = {"area": "Area under", "final": "Final"}
"""What of a metric is compared where --metric says so, in words."""


@dataclass(frozen=True)
class Goal:
    """What runs are compared by.

    metric: its name. threshold: what is to be reached, or None. why: how the threshold was found. window: documents
    over which a mean must reach it. span: documents (first, last) that every run has seen. measure: of MEASURES, what
    is compared where there is no threshold; chosen: whether the user has said so.
    """

    metric: str
    threshold: float | None
    why: str
    window: float
    span: tuple[float, float]
    measure: str = "final"
    chosen: bool = False


@dataclass(frozen=True)
class Reached:
    """What one run reached.

    to: {axis: its value where the run first reached the threshold}, {} if it never did. seen: {axis: its value at the
    end}. mean: of the curve over documents, None for a run that has not come as far as the others. final: `final_of`.
    """

    to: dict[str, float]
    seen: dict[str, float]
    mean: float | None
    final: float


def final_of(values: list[float], metric: str) -> float:
    """The mean over the last tenth of a run's steps; of evaluations over the last three, of fewer than nine over the
    last third."""
    if not metric.startswith(HELD_OUT):
        return final(values)
    return mean(values[-min(_LAST_EVALUATIONS, max(1, len(values) // 3)) :])


def end_of(run: Run, metric: str) -> float:
    """Return the final value of a run; one that collapsed stays where `compare` has let it stay to the end."""
    values = run.values(metric)
    return values[-1] if run.collapsed else final_of(values, metric)


def is_score(metric: str) -> bool:
    """Whether more of this metric is better, as far as its name tells."""
    return metric == "reward" or is_share(metric) or (metric.startswith(HELD_OUT) and metric.endswith("/avg"))


def is_share(metric: str) -> bool:
    """Whether the metric is a share of what could be right, so that 1 is all of it."""
    return metric == "exact_match" or re.fullmatch(rf"{HELD_OUT}.+/pass@\d+", metric) is not None


def chosen_metric(runs: list[Run]) -> tuple[str, list[str]]:
    """(what is compared where no metric is named, notes): held-out before exact_match before reward.

    A share that is 0 in all runs tells nothing apart, and is taken only where reward is no better.
    """
    done = [run for run in runs if run.state == "done"] or runs
    held_out = dict.fromkeys(name for run in done for name in run.columns if name.startswith(HELD_OUT))
    firsts = [name for name in held_out if name.endswith("/pass@1")]
    notes = []
    if firsts and not all(run.values(firsts[0]) for run in done):
        some = sum(bool(run.values(firsts[0])) for run in done)
        notes.append(
            f"{some} of {len(done)} finished runs have {firsts[0]}, measured on held-out prompts. So that none is left "
            f"out all are compared by a metric of training; --metric={firsts[0]} compares those that have it"
        )
    shares = [name for name in (*firsts, "exact_match") if all(run.values(name) for run in done)]
    if moving := [name for name in (*shares, "reward") if any(any(run.values(name)) for run in done)]:
        if skipped := shares[: shares.index(moving[0])] if moving[0] in shares else shares:
            notes.append(f"{' and '.join(skipped)} is 0 in every run: they are compared by {moving[0]}")
        return moving[0], notes
    return next(iter(shares), "reward"), notes


def needed_for(metric: str | None) -> set[str]:
    """The metrics of training that a comparison reads: by this one, or by the one that it chooses."""
    return {metric, "reward", "exact_match", "grad_norm"} - {None, ""}


def parse_metric(text: str) -> tuple[str | None, str]:
    """(what of it is compared, or None, the metric) of --metric=NAME, area:NAME or final:NAME."""
    measure, _, name = text.partition(":")
    return (measure, name) if measure in MEASURES else (None, text)


def parse_reach(text: str) -> tuple[str, float]:
    """(metric, threshold) of --reach=METRIC=VALUE; ConfigError for anything else."""
    metric, _, value = text.rpartition("=")
    try:
        threshold = float(value)
    except ValueError:
        threshold = nan
    if not metric or not isfinite(threshold):
        reason = "It is reached where the metric is at least that high."
        raise ConfigError(f"--reach={text} needs METRIC=NUMBER. {reason} Use --reach=exact_match=0.9.")
    return metric, threshold


def margin_of(text: str, mean: float = 1.0) -> float:
    """The margin of `0.02`, or of `3%`, which is a share of this mean. Raises ConfigError for any other text."""
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = nan
    if not 0 < value < inf:
        reason = "Differences within it are called equal."
        raise ConfigError(refusal(f"--margin={text}", "a number > 0, or one with %", text, reason, "--margin=0.02"))
    return value if number == text else value / 100 * abs(mean)


def goal_of(groups: list[list[Run]], metric: str, threshold: float | None, measure: str | None = None) -> Goal:
    """What the counted runs of these groups are compared by; threshold: the user's, or None for one that fits.

    measure: of MEASURES, compared in its place.
    """
    runs = [run for group in groups for run in group]
    ends = [documents[[0, -1]] for run in runs if (documents := run.points(DOCUMENTS, metric)[0]).size]
    low, high = (max(low for low, _ in ends), min(high for _, high in ends)) if ends else (0.0, 0.0)
    window = 0.0 if metric.startswith(HELD_OUT) else high / _WINDOWS
    why = "as --reach says"
    if not ends:
        threshold, why = None, ""
    elif threshold is None and measure is None:
        threshold, why = _fitting_threshold([group for group in groups if group], metric, window)
    return Goal(metric, threshold, why, window, (low, high), measure or "final", measure is not None)


def _fitting_threshold(groups, metric, window):
    """(threshold or None, how it was found), the same for all runs."""
    if not is_score(metric):
        return None, ""
    share = Goal(metric, _SHARE, "", window, (0.0, 0.0))
    if is_share(metric) and any(all(_place(run, share) is not None for run in group) for group in groups):
        return _SHARE, "the default for a share that a configuration reaches with every seed"
    start = mean([first(run.values(metric)) for group in groups for run in group])
    top = max(min(end_of(run, metric) for run in group) for group in groups)
    if not top > start:
        return None, ""
    found = _rounded(start + _SHARE * (top - start), (top - start) / 100)
    return found, (
        f"nine tenths of the way from {start:.3g}, the mean start, to {top:.3g}, as high as a configuration ends with "
        "every seed"
    )


def _rounded(value: float, most: float) -> float:
    """Return a value in three digits, or in as many as it takes to be at most so far from it."""
    digits = 3
    while digits < 17 and abs(float(f"{value:.{digits}g}") - value) > most:
        digits += 1
    return float(f"{value:.{digits}g}")


def reached(run: Run, goal: Goal) -> Reached:
    """What this run, which has the metric, reached."""

    def exact(axis: str, value: float) -> float:
        return float(value) if axis == "seconds" else int(value)  # documents and tokens are counted

    place, axes = _place(run, goal), [(axis, run.columns[axis]) for axis in AXES if axis in run.columns]
    seen = {axis: exact(axis, np.nanmax(column)) for axis, column in axes}
    to = {axis: exact(axis, column[place]) for axis, column in axes if place is not None and not isnan(column[place])}
    return Reached(to, seen, _mean_over_documents(run, goal), end_of(run, goal.metric))


def _place(run, goal):
    """The row where the mean over the last `goal.window` documents, all of them seen, first is at the threshold."""
    x, y = run.points(DOCUMENTS, goal.metric)
    if goal.threshold is None or not x.size:
        return None
    sums, ends = np.concatenate([[0.0], np.cumsum(y)]), np.arange(1, x.size + 1)
    begins = np.minimum(np.searchsorted(x, x - goal.window, side="right"), ends - 1)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    # A sum of many values may be a last digit below that of one, of equal ones too.
    found = np.flatnonzero((means >= goal.threshold - 1e-12) & (x >= goal.window))
    rows = np.flatnonzero(~np.isnan(run.columns[DOCUMENTS] + run.columns[goal.metric]))
    return int(rows[found[0]]) if found.size else None


def _mean_over_documents(run, goal):
    """The area under the curve from the first to the last document that all have seen, divided by their number."""
    (x, y), (low, high) = run.points(DOCUMENTS, goal.metric), goal.span
    if not x.size or x[0] > low or x[-1] < high:
        return None
    if low >= high:
        return float(np.interp(high, x, y))
    between = (x > low) & (x < high)
    at_low, at_high = np.interp([low, high], x, y)
    places = np.array([low, *x[between], high])
    heights = np.array([at_low, *y[between], at_high])
    return float(np.diff(places) @ (heights[:-1] + heights[1:]) / 2 / (high - low))
