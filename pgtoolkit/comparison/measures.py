"""Measures of a run: how much it took to reach a threshold, its mean over documents, its final
value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan

import numpy as np

from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import HELD_OUT, Run, find_runs
from pgtoolkit.runs.series import final, first, mean, without_rounding
from pgtoolkit.system.report import refusal

AXES = {"documents_seen": "documents", "tokens_seen": "tokens", "seconds": "seconds"}
"""Column -> its name in words, of the columns in which the way to a threshold is counted."""

DOCUMENTS = "documents_seen"

_WINDOWS = 50
"""A metric of training has reached a threshold as soon as its mean over a fiftieth of the documents
reaches it."""

_SHARE = 0.9
"""The default threshold of a share. For other metrics it is this part of the way from the start to
the best end."""

_LAST_EVALUATIONS = 3
"""The final value of an evaluation's metric is a mean over at most this many evaluations."""

MEASURES = {"area": "Area under", "final": "Final"}
"""What --metric=area:NAME and --metric=final:NAME compare, in words."""


@dataclass(frozen=True)
class Goal:
    """The metric by which runs are compared, and how.

    threshold: the value to reach, or None. why: how the threshold was chosen, in words.
    window: documents over which a mean must reach the threshold.
    apart: documents between two measurements of the metric, of the run that is measured least
        often; see `apart_of`.
    span: documents (first, last) that every run has seen.
    measure: of MEASURES, compared where there is no threshold. chosen: whether the user has chosen
        it.
    start: the mean of the first values, None where no run has one.
    """

    metric: str
    threshold: float | None
    why: str
    window: float
    apart: float
    span: tuple[float, float]
    measure: str = "final"
    chosen: bool = False
    start: float | None = None


@dataclass(frozen=True)
class Reached:
    """The measures of one run.

    to: {axis: its value where the run first reached the threshold}, {} if it never did.
    seen: {axis: its value at the end}.
    measured_to: documents at the last measurement of the metric, 0 without one.
    mean: of the curve over documents, None for a run that has not come as far as the others.
    final: see `final_of`.
    """

    to: dict[str, float]
    seen: dict[str, float]
    measured_to: float
    mean: float | None
    final: float


def final_of(values: list[float], metric: str) -> float:
    """Return the mean over the last tenth of a run's steps.

    Of evaluations it is the mean over the last three, or, if there are fewer than nine, over the
    last third.
    """
    if not metric.startswith(HELD_OUT):
        return final(values)
    return mean(values[-num_last_evaluations(len(values)) :])


def num_last_evaluations(count: int) -> int:
    """Return of how many of a run's evaluations the final value is the mean."""
    return min(_LAST_EVALUATIONS, max(1, count // 3))


def end_of(run: Run, metric: str) -> float:
    """Return the final value of a run.

    If the run collapsed, that is the value with which `compare` has extended it.
    """
    values = run.values(metric)
    return values[-1] if run.collapsed else final_of(values, metric)


def is_score(metric: str) -> bool:
    """Return whether a higher value of this metric is better, as far as its name tells."""
    return (
        metric == "reward"
        or is_share(metric)
        or (metric.startswith(HELD_OUT) and metric.endswith("/avg"))
    )


def is_share(metric: str) -> bool:
    """Return whether the metric is a share of right answers, between 0 and 1."""
    return metric == "exact_match" or re.fullmatch(rf"{HELD_OUT}.+/pass@\d+", metric) is not None


def needed_for(metric: str | None) -> set[str]:
    """Return the metrics of training that a comparison reads: those among which it chooses, and
    the named one."""
    names = {"reward", "exact_match", "grad_norm"}
    if metric:
        names.add(metric)
    return names


def runs_with(metric: str | None, reach: str | None, paths: Sequence[str]) -> list[Run]:
    """Return the runs in these folders, read as far as a comparison by a metric needs.

    metric, reach: see `groups.compare`. Raises ConfigError for a folder without runs.
    """
    name = parse_metric(metric)[1] if metric else (reach or "").rpartition("=")[0]
    return find_runs(paths, needed_for(name))


def parse_metric(text: str) -> tuple[str | None, str]:
    """Return (a name in MEASURES or None, metric) of --metric=NAME, area:NAME or final:NAME.

    Raises ConfigError for area or final without a name.
    """
    measure, _, name = text.partition(":")
    if measure in MEASURES and not name:
        needs = "the name of a metric"
        reason = f"{measure} says what of it is compared."
        raise ConfigError(
            refusal(f"--metric={text}", needs, "none", reason, f"--metric={measure}:reward")
        )
    return (measure, name) if measure in MEASURES else (None, text)


def parse_reach(text: str) -> tuple[str, float]:
    """Return (metric, threshold) of --reach=METRIC=VALUE.

    Raises ConfigError for any other text, and for a share that is always or never reached.
    """
    metric, _, value = text.rpartition("=")
    try:
        threshold = float(value)
    except ValueError:
        threshold = nan
    if not metric or not isfinite(threshold):
        reason = "It is reached where the metric is at least that high."
        raise ConfigError(
            f"--reach={text} needs METRIC=NUMBER. {reason} Use --reach=exact_match=0.9."
        )
    if is_share(metric) and not 0 < threshold <= 1:
        meant = threshold / 100 if 1 < threshold <= 100 else 0.9
        raise ConfigError(
            refusal(
                setting=f"--reach={text}",
                needs="a number above 0 and at most 1",
                got=f"{threshold:g}",
                reason=f"{metric} is a share.",
                use=f"--reach={metric}={meant:g}",
            )
        )
    return metric, threshold


def margin_of(text: str, mean: float = 1.0) -> float:
    """Return the margin that a text states, such as `0.02`, or `3%`, which is a share of the mean.

    Raises ConfigError for any other text.
    """
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = nan
    if not 0 < value < inf:
        reason = "Differences within it are called equal."
        raise ConfigError(
            refusal(
                f"--margin={text}", "a number > 0, or one with %", text, reason, "--margin=0.02"
            )
        )
    return value if number == text else value / 100 * abs(mean)


def goal_of(
    groups: list[list[Run]], metric: str, threshold: float | None, measure: str | None = None
) -> Goal:
    """Return the goal by which the counted runs of these groups are compared.

    threshold: the user's; None for one that fits the runs. measure: of MEASURES, compared without a
        threshold.
    """
    curves = [run.points(DOCUMENTS, metric)[0] for group in groups for run in group]
    documents = [x for x in curves if x.size]
    low = max((x[0] for x in documents), default=0.0)
    high = min((x[-1] for x in documents), default=0.0)
    window = 0.0 if metric.startswith(HELD_OUT) else high / _WINDOWS
    starts = [first(run.values(metric)) for group in groups for run in group]
    why = "as --reach says"
    if not documents:
        threshold = None
        why = ""
    elif threshold is None and measure is None:
        threshold, why = _fitting_threshold([group for group in groups if group], metric, window)
    return Goal(
        metric=metric,
        threshold=threshold,
        why=why,
        window=window,
        apart=max((apart_of(run, metric) for group in groups for run in group), default=0.0),
        span=(low, high),
        measure=measure or "final",
        chosen=measure is not None,
        start=mean(starts) if starts else None,
    )


def apart_of(run: Run, metric: str) -> float:
    """Return the median of the documents between two measurements of the run, 0 if nothing was
    measured after the start."""
    gaps = np.diff(run.points(DOCUMENTS, metric)[0], prepend=0)
    gaps = gaps[gaps > 0]
    return float(np.median(gaps)) if gaps.size else 0.0


def measured_after(run: Run, metric: str, documents: float) -> float:
    """Return the documents at the run's first measurement after this number of documents.

    Behind the run's end, the next measurement is taken to be as far away as those before were from
    each other.
    """
    x = run.points(DOCUMENTS, metric)[0]
    behind = x[x > documents]
    return float(behind[0]) if behind.size else float(x[-1]) + apart_of(run, metric)


def _fitting_threshold(
    groups: list[list[Run]], metric: str, window: float
) -> tuple[float | None, str]:
    """Return a threshold for all runs and how it was chosen; (None, "") if no group improves."""
    if not is_score(metric):
        return None, ""
    share = Goal(metric, _SHARE, "", window, 0.0, (0.0, 0.0))
    if is_share(metric) and any(
        all(_reaching_row(run, share) is not None for run in group) for group in groups
    ):
        return _SHARE, "the default for a share that a configuration reaches with every seed"
    start = mean([first(run.values(metric)) for group in groups for run in group])
    top = max(min(end_of(run, metric) for run in group) for group in groups)
    if without_rounding(top - start, max(abs(top), abs(start))) <= 0:
        return None, ""
    threshold = _rounded(start + _SHARE * (top - start), (top - start) / 100)
    return threshold, (
        f"nine tenths of the way from {start:.3g}, the mean start, to {top:.3g}, as high as a "
        "configuration ends with every seed"
    )


def _rounded(value: float, tolerance: float) -> float:
    """Round the value to three digits, or to more if the error would exceed the tolerance."""
    digits = 3
    while digits < 17 and abs(float(f"{value:.{digits}g}") - value) > tolerance:
        digits += 1
    return float(f"{value:.{digits}g}")


def reached(run: Run, goal: Goal) -> Reached:
    """Return the measures of a run, which must have the metric."""

    def exact(axis: str, value: float) -> float:
        return float(value) if axis == "seconds" else int(value)  # documents and tokens are counted

    columns = {axis: run.columns[axis] for axis in AXES if axis in run.columns}
    seen = {axis: exact(axis, np.nanmax(column)) for axis, column in columns.items()}
    to = {}
    row = _reaching_row(run, goal)
    if row is not None:
        to = {
            axis: exact(axis, column[row])
            for axis, column in columns.items()
            if not isnan(column[row])
        }
    x = run.points(DOCUMENTS, goal.metric)[0]
    return Reached(
        to=to,
        seen=seen,
        measured_to=float(x[-1]) if x.size else 0.0,
        mean=_mean_over_documents(run, goal),
        final=end_of(run, goal.metric),
    )


def _reaching_row(run: Run, goal: Goal) -> int | None:
    """Return the first row whose mean over the last `goal.window` documents is at the threshold,
    None without one.

    Rows before `goal.window` documents have been seen do not count.
    """
    x, y = run.points(DOCUMENTS, goal.metric)
    if goal.threshold is None or not x.size:
        return None
    sums = np.concatenate([[0.0], np.cumsum(y)])
    ends = np.arange(1, x.size + 1)
    begins = np.minimum(np.searchsorted(x, x - goal.window, side="right"), ends - 1)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    is_reached = without_rounding(means - goal.threshold, abs(y).max()) >= 0
    places = np.flatnonzero(is_reached & (x >= goal.window))
    if not places.size:
        return None
    rows = np.flatnonzero(~np.isnan(run.columns[DOCUMENTS] + run.columns[goal.metric]))
    if len(rows) == x.size:
        return int(rows[places[0]])
    # Several passes over the same documents are one point, which is complete with the last of them.
    documents = run.columns[DOCUMENTS][rows]
    return int(rows[np.searchsorted(documents, x[places[0]], side="right") - 1])


def _mean_over_documents(run: Run, goal: Goal) -> float | None:
    """Return the area under the curve over `goal.span`, divided by its length; None where the run
    does not cover it."""
    x, y = run.points(DOCUMENTS, goal.metric)
    low, high = goal.span
    if not x.size or x[0] > low or x[-1] < high:
        return None
    if low >= high:
        return float(np.interp(high, x, y))
    between = (x > low) & (x < high)
    at_low, at_high = np.interp([low, high], x, y)
    places = np.array([low, *x[between], high])
    heights = np.array([at_low, *y[between], at_high])
    return float(np.diff(places) @ (heights[:-1] + heights[1:]) / 2 / (high - low))
