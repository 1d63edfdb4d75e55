"""Curves of a metric over seeds, and the panels of a comparison's figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.statistics import mean_interval
from pgtoolkit.comparison.words_in_figures import FONT_SIZE, wrapped
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.series import smooth, thinned
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

COLORS = ("#000000", "#b8322a", "#b58ad6", "#24429c", "#0f8f78", "#ecb32c")
"""Their lightness L* differs by 10 or more, so they stay apart in grey, and for colour-blind eyes.
A page turns black into the colour of its text."""

_LINE_STYLES = ("solid", "dashed", "dotted", "dashdot")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d")
"""Their number and that of the colours have no common factor, so that a colour gets each shape."""

AXES_OF_CURVES = {"documents": "documents_seen", "steps": "step", "seconds": "seconds"}
"""Name of a panel of curves -> the column of its axis."""

_POINTS = 120
"""The highest number of places at which the curves of several runs are averaged."""

_WIDTH_OF_TEXT = 0.8
_HEIGHT_OF_TEXT = 0.65
"""The shares of a panel's width and height that the text at its axis may have."""


def curve(run: Run, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of a run, y smoothed over about a twentieth of its points.

    axis: documents_seen, step or seconds.
    """
    x, y = thinned(*run.points(axis, metric))
    return x, smooth(y, len(y) // 80) if x.size else y


def mean_curve(runs: list[Run], metric: str, axis: str) -> np.ndarray:
    """Return (4, points): x, and the mean, the lowest and the highest of the runs there.

    x spans what all the runs have seen. At each x one of the runs was measured, or where it begins
    or ends; the others are interpolated there.
    """
    curves = [(x, y) for x, y in (curve(run, metric, axis) for run in runs) if x.size]
    if not curves:
        return np.empty((4, 0))
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    measured = np.unique(np.clip(np.concatenate([x for x, _ in curves]), low, max(low, high)))
    places = measured
    if measured.size > _POINTS:
        evenly = np.linspace(measured[0], measured[-1], _POINTS)
        places = np.unique(measured[np.searchsorted(measured, evenly)])
    values = np.array([np.interp(places, x, y) for x, y in curves])
    return np.array([places, values.mean(0), values.min(0), values.max(0)])


def style(place: int) -> dict[str, Any]:
    """Return the colour, line style and marker of the group at a place.

    The markers of the first 78 groups are filled, those of the next 78 hollow.
    """
    pairs = len(COLORS) * len(_MARKERS)
    color = COLORS[place % len(COLORS)]
    return {
        "color": color,
        "linestyle": _LINE_STYLES[place // len(COLORS) % len(_LINE_STYLES)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markerfacecolor": "none" if place // pairs % 2 else color,
    }


def draw_curves(
    axes: Axes, compared: Compared, panel: str, size: tuple[float, float]
) -> dict[int, Line2D]:
    """Draw the mean curve of each group, and a thin one for each run that did not finish.

    panel: of AXES_OF_CURVES. size: width and height that the panel has, in inches.
    Returns a line for each group that has one, by the group's place.
    """
    from matplotlib.ticker import EngFormatter

    axis = AXES_OF_CURVES[panel]
    name, unit = _time_unit(compared) if panel == "seconds" else ("", 1)
    words = {"documents": "documents seen", "steps": "steps", "seconds": f"time in {name}"}
    axes.set_xlabel(words[panel])
    # As sweeps name it: the whole name would be broken over lines.
    name_of_axis = compared.metric.removeprefix(HELD_OUT).replace("/", " ")
    axes.set_ylabel(wrapped(name_of_axis, size[1] * _HEIGHT_OF_TEXT))
    # As 10k; but half a minute would become 500m.
    axes.xaxis.set_major_formatter("{x:g}" if panel == "seconds" else EngFormatter(sep=""))
    axes.locator_params("x", nbins=4)
    lines = {}
    for place in range(len(compared.groups)):
        line = _draw_group(axes, compared, place, axis, unit)
        if line is not None:
            lines[place] = line
    if compared.goal.threshold is not None and lines:
        axes.axhline(
            compared.goal.threshold,
            color="gray",
            linestyle=":",
            linewidth=0.9,
            gid=f"threshold-{axis}",
        )
    if not lines:
        axes.text(0.5, 0.5, "no run has recorded this", transform=axes.transAxes, ha="center")
    return lines


def _time_unit(compared: Compared) -> tuple[str, int]:
    """Return the unit of time that suits the longest run, and how many seconds it has."""
    longest = max(
        (run.last("seconds") for group in compared.groups for run in group.runs), default=0
    )
    if longest > 7200:
        return "hours", 3600
    if longest > 300:
        return "minutes", 60
    return "seconds", 1


def _draw_group(axes: Axes, compared: Compared, place: int, axis: str, unit: int) -> Line2D | None:
    """Draw the curves of the group at a place, and return one of its lines for the legend.

    unit: the values of the axis are divided by it.
    """
    group = compared.groups[place]
    looks = {**style(place), "markersize": 3.5}
    line = None
    for number, run in enumerate(unfinished(group.runs)):
        x, y = curve(run, compared.metric, axis)
        if x.size:
            line = axes.plot(
                np.divide(x, unit),
                y,
                **{**looks, "linestyle": "solid"},
                markevery=_markers_at(place, len(x)),
                alpha=0.55,
                linewidth=0.6,
                gid=f"run-{place}-{axis}-{number}",
            )[0]
    x, mean, low, high = mean_curve(group.counted, compared.metric, axis)
    if x.size:
        x = x / unit
        line = axes.plot(
            x,
            mean,
            **looks,
            markevery=_markers_at(place, len(x)),
            linewidth=1.3,
            gid=f"mean-{place}-{axis}",
        )[0]
    if (low < high).any():
        gid = f"band-{place}-{axis}"
        axes.fill_between(x, low, high, color=looks["color"], alpha=0.16, linewidth=0, gid=gid)
    return line


def unfinished(runs: list[Run]) -> list[Run]:
    """Return the runs that get a thin line.

    Runs that are done but not counted are older ones of a seed, whose newer run is in the mean.
    """
    return [run for run in runs if run.state != "done"]


def _markers_at(place: int, num_points: int) -> tuple[int, int]:
    """Return (first, distance) of the points of a curve that get a marker: about four.

    They are other points for the next groups, whose curves may be the same.
    """
    distance = max(1, num_points // 4)
    return place * distance // len(COLORS) % distance, distance


def draw_means(
    axes: Axes, compared: Compared, labels: list[str], size: tuple[float, float]
) -> None:
    """Draw each group's runs, their mean and its interval over seeds; the first group is on top.

    labels: of the groups, which stand at the axis; [] where a legend names them.
    size: width and height that the panel has, in inches.
    """
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(wrapped(compared.measured, size[0] * _WIDTH_OF_TEXT))
    if compared.by_documents:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    rows = np.array(heights(labels or [""] * len(compared.groups)))
    positions = rows / 2 - np.cumsum(rows)
    axes.set_ylim(-rows.sum(), 0)
    axes.set_yticks(positions if labels else [], labels)
    axes.tick_params("y", length=0)
    axes.grid(False, axis="y")
    room = 72 * size[1] / len(compared.groups)
    samples = compared.comparisons.samples
    for place, (group, sample) in enumerate(zip(compared.groups, samples, strict=False)):
        values = compared.tested_values(group)
        if not values:
            continue
        looks = {**style(place), "linestyle": "none"}
        mean = float(np.mean(values))
        strokes = {**looks, "marker": "|", "markersize": min(7, room), "alpha": 0.5}
        axes.plot(values, [positions[place]] * len(values), **strokes)
        interval = mean_interval(sample)
        lengths = None
        if interval is not None:
            low, high = interval
            lengths = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        bars = axes.errorbar(
            mean,
            positions[place],
            xerr=lengths,
            **looks,
            markersize=min(4.5, room),
            capsize=min(2.5, room / 2),
            elinewidth=min(1.3, room / 3),
        )
        bars[0].set_gid(f"interval-{place}")
        if sample.is_bound:
            end = max(mean, *values, interval[1] if interval else mean)
            _mark_bound(axes, end, positions[place], min(FONT_SIZE - 2, 0.8 * room))
    if not any(compared.tested_values(group) for group in compared.groups):
        axes.text(0.5, 0.5, "no run has finished", transform=axes.transAxes, ha="center")


def _mark_bound(axes: Axes, x: float, y: float, size: float) -> None:
    """Write to the right of a place that it is a lower bound. size: of the mark, in points."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import ScaledTranslation

    sign = TextPath((0, 0), "≥", size=100)
    middle = sign.get_extents().get_points().mean(0)
    inches = axes.get_figure(root=True)
    assert inches is not None
    aside = ScaledTranslation((4 + size / 2) / 72, 0, inches.dpi_scale_trans)
    axes.plot(
        x,
        y,
        marker=Path(sign.vertices - middle, sign.codes),
        color="black",
        markersize=size,
        markeredgewidth=0,
        clip_on=False,
        transform=axes.transData + aside,
        gid="bound",
    )


def heights(labels: list[str]) -> list[float]:
    """Return the height of each label's row, where a line with its distance to others has 1."""
    return [1 + 1.1 * label.count("\n") for label in labels]


def draw_tried(axes: Axes, compared: Compared, size: tuple[float, float]) -> dict[int, Line2D]:
    """Draw the mean, the lowest and the highest tested value at each value of the --best-of key.

    size: width and height that the panel has, in inches. Returns a line for each group, by its
    place.
    """
    values = compared.tried
    axes.set_xlabel(wrapped(compared.best_of or "", size[0] * _WIDTH_OF_TEXT))
    axes.set_ylabel(wrapped(compared.measured, size[1] * _HEIGHT_OF_TEXT))
    # A label upright needs the height of its letters, so some are left out where many are tried.
    shown = range(0, len(values), 1 + int(len(values) * 1.7 * FONT_SIZE / (72 * size[0])))
    axes.set_xticks(
        shown,
        [wrapped(values[place], size[1] * _HEIGHT_OF_TEXT) for place in shown],
        rotation=90 if sum(map(len, values)) * 0.09 > size[0] else 0,
    )
    lines = {}
    for place, group in enumerate(compared.groups):
        x = sorted(map(values.index, group.tried))
        tested = [compared.tested_values(group.tried[values[position]]) for position in x]
        means = [float(np.mean(numbers)) for numbers in tested]
        looks = {**style(place), "markersize": 3.5, "linewidth": 1.3}
        lines[place] = axes.plot(x, means, **looks, gid=f"tried-{place}")[0]
        for position, mean in zip(x, means, strict=True):
            tried = group.tried[values[position]]
            if compared.by_documents and compared.arrived(tried) < len(tried.counted):
                _mark_bound(axes, position, mean, FONT_SIZE - 2)
        low = [*map(min, tested)]
        high = [*map(max, tested)]
        axes.fill_between(x, low, high, color=looks["color"], alpha=0.16, linewidth=0)
    return lines


def legend_labels(compared: Compared) -> list[str]:
    """Return the label of each group, with its number of runs where the groups differ in it."""
    differ = len({len(group.counted) for group in compared.groups}) > 1
    return [
        legible(f"{group.label} (n = {len(group.counted)})" if differ else group.label)
        for group in compared.groups
    ]
