"""Curves of a metric over seeds, and their picture: against the documents seen and against time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.statistics import mean_interval
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.series import smooth, thinned
from pgtoolkit.system.pictures import for_notebook, own_settings
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_COLORS = ("#2a78c2", "#d9731a", "#2e9e5b", "#c2417c", "#8a63c9", "#a8862a", "#2aa5a5", "#8c8c8c")
_LINE_STYLES = ("solid", "dashed", "dotted")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", (4, 1, 0), (8, 1, 0))
"""Shapes of a group's dots: all groups of one shape differ in their colour."""

_PANEL_SIZE = 4.6
"""Width and height of a panel, in inches, without the legend."""

_INTERVAL_HEIGHT = 0.07
"""Height in inches that a group has in the panel of intervals, which so grows with many groups."""

_LEGEND_LINE = 0.21
"""Height of a line of the legend, in inches."""

_POINTS = 120
"""Places at which the curves of several runs are averaged."""

_SETTINGS = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pgtk",  # so that equal pictures are equal files
    "pdf.fonttype": 42,  # letters stay letters, which journals ask for
}

_LEFT_OUT = {
    "svg": ("Date", "Creator", "Format", "Type"),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
"""Metadata about when and by which program a file was drawn. Without it equal pictures are equal
files."""


def curve(run: Run, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of a run, y smoothed over about a twentieth of its points.

    axis: documents_seen or seconds.
    """
    x, y = thinned(*run.points(axis, metric))
    return x, smooth(y, len(y) // 80) if x.size else y


def mean_curve(runs: list[Run], metric: str, axis: str) -> np.ndarray:
    """Return (4, points): x, and the mean, the lowest and the highest of the runs there.

    x spans what all the runs have seen.
    """
    curves = [(x, y) for x, y in (curve(run, metric, axis) for run in runs) if x.size]
    if not curves:
        return np.empty((4, 0))
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    places = np.linspace(low, high, _POINTS if high > low else 1)
    values = np.array([np.interp(places, x, y) for x, y in curves])
    return np.array([places, values.mean(0), values.min(0), values.max(0)])


def picture(compared: Compared, kind: str) -> bytes:
    """Draw the charts with their legend, and return the file.

    The panels are curves over documents, curves over time, the tested means with their intervals,
    and with --best-of the values that were tried. kind: png, jpg, pdf, or svg, which is
    transparent. In the SVG bands, means and single runs are groups named KIND-GROUP-AXIS, by the
    group's place, and intervals interval-GROUP.
    """
    with own_settings(_SETTINGS):
        metadata = dict.fromkeys(_LEFT_OUT[kind]) if kind in _LEFT_OUT else None
        file = io.BytesIO()
        draw(compared).savefig(
            file,
            format=kind,
            backend=kind if kind in ("pdf", "svg") else "agg",
            transparent=kind == "svg",
            metadata=metadata,
        )
    return file.getvalue()


def figure_of(compared: Compared) -> Figure:
    """Return the picture as a figure of matplotlib, which a notebook shows."""
    with own_settings(_SETTINGS):
        return for_notebook(draw(compared))


def draw(compared: Compared) -> Figure:
    """Return the charts with their legend, which makes the figure higher and no panel smaller."""
    from matplotlib.figure import Figure

    panels = 4 if compared.best_of else 3
    height = max(_PANEL_SIZE, _INTERVAL_HEIGHT * len(compared.groups))
    figure = Figure(figsize=(_PANEL_SIZE * panels, height), layout="constrained", dpi=100)
    unit, seconds = _time_unit(compared)
    over_documents, over_time, intervals, *tried = [
        figure.add_subplot(1, panels, place + 1) for place in range(panels)
    ]
    _draw_curves(over_documents, compared, "documents_seen", "documents seen", 1)
    lines = _draw_curves(over_time, compared, "seconds", f"time in {unit}", seconds)
    _draw_intervals(intervals, compared, 72 * height / len(compared.groups))
    for axes in tried:
        _draw_tried(axes, compared)
    if lines:
        legend_lines = _draw_legend(figure, compared, lines)
        figure.set_figheight(height + _LEGEND_LINE * legend_lines)
    return figure


def _style(place: int) -> dict[str, Any]:
    """Return the color, linestyle and marker of the group at a place."""
    number = place // len(_COLORS)
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": _LINE_STYLES[number % len(_LINE_STYLES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


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


def _draw_legend(figure: Figure, compared: Compared, lines: dict[int, Line2D]) -> int:
    """Draw the legend below the panels; return the number of its lines of text.

    lines: by the group's place.
    """
    groups = [compared.groups[place] for place in lines]
    labels = [legible(f"{group.label} (n = {len(group.counted)})") for group in groups]
    entry_width = 0.6 + 0.08 * max(map(len, labels))  # inches: the line, and its letters
    columns = max(1, min(4, int(figure.get_figwidth() / entry_width), len(lines)))
    title = legible(_legend_title(compared))
    figure.legend(
        lines.values(),
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        title=title or None,
    )
    return -(-len(lines) // columns) + bool(title)


def _legend_title(compared: Compared) -> str:
    """Return the keys whose values the legend shows; "" if the user has named the values."""
    if any(group.labels for group in compared.groups):
        return ""
    return ", ".join(
        key
        for key in compared.keys
        if any(group.values[key] is not None for group in compared.groups)
    )


def _draw_intervals(axes: Axes, compared: Compared, room: float) -> None:
    """Draw each group's runs, their mean and its interval over seeds; the first group is on top.

    room: height of a group, in points.
    """
    measures = {sample.measure for sample in compared.comparisons.samples if sample.values}
    what = "a line for each run, the mean, its 95 % interval"
    if len(measures) > 1:
        what += ";\nit does not mean the same in all"
    axes.set(xlabel=legible(f"{compared.measured}\n({what})"), yticks=[])
    axes.set_ylim(-len(compared.groups) + 0.4, 0.6)
    for place, (group, sample) in enumerate(
        zip(compared.groups, compared.comparisons.samples, strict=False)
    ):
        values = compared.tested_values(group)
        if not values:
            continue
        style = _style(place)
        color = style["color"]
        mean = float(np.mean(values))
        axes.plot(
            values,
            [-place] * len(values),
            color=color,
            linestyle="none",
            marker="|",
            markersize=min(9, room),
            alpha=0.5,
        )
        interval = mean_interval(sample)
        lengths = None
        if interval is not None:
            low, high = interval
            lengths = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        bars = axes.errorbar(
            mean,
            -place,
            xerr=lengths,
            color=color,
            linestyle="none",
            marker=style["marker"],
            markersize=min(6, room),
            capsize=min(4, room / 2),
            elinewidth=min(1.8, room / 3),
        )
        bars[0].set_gid(f"interval-{place}")
    if not any(compared.tested_values(group) for group in compared.groups):
        axes.text(0.5, 0.5, "no run has finished", transform=axes.transAxes, ha="center")


def _draw_curves(
    axes: Axes, compared: Compared, axis: str, label: str, unit: int
) -> dict[int, Line2D]:
    """Draw the mean curve of each group, and a thin one for each run that did not finish.

    unit: the values of the axis are divided by it. Returns a line for each group that has one, by
        the group's place.
    """
    from matplotlib.ticker import EngFormatter

    lines = {}
    axes.set(xlabel=label, ylabel=legible(compared.metric))
    if axis == "documents_seen":  # as 10k; half a minute would become 500m
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for place in range(len(compared.groups)):
        line = _draw_group(axes, compared, place, axis, unit)
        if line is not None:
            lines[place] = line
    if compared.goal.threshold is not None and lines:
        axes.axhline(
            compared.goal.threshold,
            color="gray",
            linestyle=":",
            linewidth=1.1,
            gid=f"threshold-{axis}",
        )
    if not lines:
        axes.text(0.5, 0.5, "no run has recorded this", transform=axes.transAxes, ha="center")
    return lines


def _draw_group(axes: Axes, compared: Compared, place: int, axis: str, unit: int) -> Line2D | None:
    """Draw the curves of the group at a place, and return one of its lines for the legend."""
    group = compared.groups[place]
    style = _style(place)
    color = style["color"]
    if len(compared.groups) <= len(_COLORS):
        style["marker"] = ""  # the colour tells them apart
    line = None
    # Runs that are done but not counted are older ones of a seed, whose newer run is in the mean.
    unfinished = [run for run in group.runs if run.state != "done"]
    for number, run in enumerate(unfinished):
        x, y = curve(run, compared.metric, axis)
        if x.size:
            gid = f"run-{place}-{axis}-{number}"
            x = np.divide(x, unit)
            line = axes.plot(
                x,
                y,
                color=color,
                marker=style["marker"],
                markevery=_markers_at(place, len(x)),
                alpha=0.55,
                linewidth=0.9,
                gid=gid,
            )[0]
    x, mean, low, high = mean_curve(group.counted, compared.metric, axis)
    if x.size:
        x = x / unit
        gid = f"mean-{place}-{axis}"
        line = axes.plot(
            x, mean, **style, markevery=_markers_at(place, len(x)), linewidth=1.8, gid=gid
        )[0]
    if (low < high).any():
        gid = f"band-{place}-{axis}"
        axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0, gid=gid)
    return line


def _markers_at(place: int, num_points: int) -> tuple[int, int]:
    """Return (first, distance) of the points of a curve that get a marker: about four.

    They are other points for the next groups, whose curves may be the same.
    """
    distance = max(1, num_points // 4)
    return place * distance // 8 % distance, distance


def _draw_tried(axes: Axes, compared: Compared) -> None:
    """Draw the mean, the lowest and the highest tested value at each value of the --best-of key."""
    values = compared.tried
    axes.set(xlabel=legible(compared.best_of or ""), ylabel=legible(compared.measured))
    axes.set_xticks(
        range(len(values)),
        [*map(legible, values)],
        rotation=30 if sum(map(len, values)) > 40 else 0,
    )
    for place, group in enumerate(compared.groups):
        style = _style(place)
        x = sorted(map(values.index, group.tried))
        tested = [compared.tested_values(group.tried[values[position]]) for position in x]
        means = [float(np.mean(numbers)) for numbers in tested]
        axes.plot(x, means, **style, gid=f"tried-{place}")
        axes.fill_between(
            x,
            [*map(min, tested)],
            [*map(max, tested)],
            color=style["color"],
            alpha=0.16,
            linewidth=0,
        )
