"""Curves of a metric over seeds, and their picture: against the documents seen and against time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from pgtoolkit.comparison.compared import Compared
from pgtoolkit.comparison.statistics import mean_interval
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.series import smooth, thinned
from pgtoolkit.system.legible import legible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#2a78c2", "#d9731a", "#2e9e5b", "#c2417c", "#8a63c9", "#a8862a", "#2aa5a5", "#8c8c8c")
_LOOKS = [{"color": color, "linestyle": style} for style in ("solid", "dashed", "dotted") for color in _COLORS]
_PLAIN = {"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False}
_POINTS = 120
_WITHOUT = {"svg": ("Date", "Creator", "Format", "Type"), "pdf": ("CreationDate", "Creator", "Producer")}
"""What a file would say of when and by what it was drawn: equal pictures are equal files."""


def curve(run: Run, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a run, y smoothed over about a twentieth of its points; axis: documents_seen or seconds."""
    x, y = thinned(*run.points(axis, metric))
    return x, smooth(y, len(y) // 80) if x.size else y


def mean_curve(runs: list[Run], metric: str, axis: str) -> np.ndarray:
    """(4, points): x, the mean of the runs, the lowest and the highest of them, as far as all the runs have been."""
    curves = [(x, y) for x, y in (curve(run, metric, axis) for run in runs) if x.size]
    if not curves:
        return np.empty((4, 0))
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.linspace(low, high, _POINTS if high > low else 1)
    values = np.array([np.interp(places, x, y) for x, y in curves])
    return np.array([places, values.mean(0), values.min(0), values.max(0)])


def picture(compared: Compared, kind: str) -> bytes:
    """The charts, and their legend; kind: png, pdf, or svg, in black and colours on no ground.

    Two of curves, one of what is tested with intervals, and with --best-of a fourth. Bands, means and single runs are
    groups of the SVG named KIND-GROUP-AXIS, by the group's place, and intervals interval-GROUP.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Without formulas: a path may hold two dollar signs. The salt makes equal curves equal files.
    settings: dict[str, object] = {"svg.fonttype": "none", "svg.hashsalt": "pgtk", "text.parse_math": False}
    settings["pdf.fonttype"] = 42  # letters as letters, which journals ask for
    with rc_context(settings | _PLAIN):  # pyright: ignore[reportArgumentType]  (keys are a Literal of all settings)
        panels = 4 if compared.best_of else 3
        file = io.BytesIO()
        figure = Figure(figsize=(4.6 * panels, 4.6), layout="constrained", dpi=100)
        longest = max((run.last("seconds") for group in compared.groups for run in group.runs), default=0)
        unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 300 else ("seconds", 1)
        _draw(figure.add_subplot(1, panels, 1), compared, "documents_seen", "documents seen", 1)
        handles = _draw(figure.add_subplot(1, panels, 2), compared, "seconds", f"time in {unit}", seconds)
        _draw_intervals(figure.add_subplot(1, panels, 3), compared)
        if compared.best_of:
            _draw_tried(figure.add_subplot(1, panels, 4), compared)
        if handles:
            groups = [compared.groups[place] for place in handles]
            labels = [legible(f"{group.label} (n = {len(group.counted)})") for group in groups]
            fits = int(4.6 * panels / (0.6 + 0.08 * max(map(len, labels))))  # in inches: a line, and its letters
            figure.legend(
                handles.values(),
                labels,
                loc="outside lower center",
                ncols=max(1, min(4, fits, len(handles))),
                frameon=False,
                title=legible(_varying(compared)) or None,
            )
        metadata = dict.fromkeys(_WITHOUT[kind]) if kind in _WITHOUT else None
        figure.savefig(file, format=kind, transparent=kind == "svg", metadata=metadata)
    return file.getvalue()


def _varying(compared: Compared) -> str:
    """Return the keys that legends' names are of; none where the user has named the values."""
    if any(group.labels for group in compared.groups):
        return ""
    return ", ".join(key for key in compared.keys if any(group.values[key] is not None for group in compared.groups))


def _draw_intervals(axes: Axes, compared: Compared) -> None:
    """Draw the mean of what is tested of each group with its interval over seeds, the first group at the top."""
    axes.set(xlabel=legible(f"{compared.measured}\n(a line for each run, the mean, its 95 % interval)"), yticks=[])
    axes.set_ylim(-len(compared.groups) + 0.4, 0.6)
    for place, (group, sample) in enumerate(zip(compared.groups, compared.comparisons.samples, strict=False)):
        values = compared.tested(group)
        if not values:
            continue
        color = _LOOKS[place % len(_LOOKS)]["color"]
        mean = float(np.mean(values))
        axes.plot(values, [-place] * len(values), color=color, linestyle="none", marker="|", markersize=9, alpha=0.5)
        interval = mean_interval(sample)
        reach = None if interval is None else [[max(0.0, mean - interval[0])], [max(0.0, interval[1] - mean)]]
        bars = axes.errorbar(mean, -place, xerr=reach, color=color, fmt="o", capsize=4, linewidth=1.8)
        bars[0].set_gid(f"interval-{place}")
    if not any(compared.tested(group) for group in compared.groups):
        axes.text(0.5, 0.5, "no run has finished", transform=axes.transAxes, ha="center")


def _draw(axes, compared, axis, label, unit):
    """Draw a line per group, and runs that did not finish for themselves; returns {group's place: its line}."""
    from matplotlib.ticker import EngFormatter

    handles = {}
    axes.set(xlabel=label, ylabel=legible(compared.metric))
    if axis == "documents_seen":  # 10k; half a minute is no 500m
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for place, group in enumerate(compared.groups):
        look = _LOOKS[place % len(_LOOKS)]
        color = look["color"]
        # An older run of the same seed is in the picture already, as its newer self.
        for number, run in enumerate(run for run in group.runs if run.state != "done"):
            x, y = curve(run, compared.metric, axis)
            if x.size:
                gid = f"run-{place}-{axis}-{number}"
                handles[place] = axes.plot(np.divide(x, unit), y, color=color, alpha=0.55, linewidth=0.9, gid=gid)[0]
        x, mean, low, high = mean_curve(group.counted, compared.metric, axis)
        if x.size:
            x = x / unit
            gid = f"mean-{place}-{axis}"
            handles[place] = axes.plot(x, mean, **look, linewidth=1.8, gid=gid)[0]
        if (low < high).any():
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0, gid=f"band-{place}-{axis}")
    if compared.goal.threshold is not None and handles:
        axes.axhline(compared.goal.threshold, color="gray", linestyle=":", linewidth=1.1, gid=f"threshold-{axis}")
    if not handles:
        axes.text(0.5, 0.5, "no run has recorded this", transform=axes.transAxes, ha="center")
    return handles


def _draw_tried(axes, compared):
    """Draw what is tested over every value of the key of which each group has its best: mean, lowest and highest."""
    values = compared.tried
    axes.set(xlabel=legible(compared.best_of), ylabel=legible(compared.measured))
    axes.set_xticks(range(len(values)), [*map(legible, values)], rotation=30 if sum(map(len, values)) > 40 else 0)
    for place, group in enumerate(compared.groups):
        x, look = sorted(map(values.index, group.tried)), _LOOKS[place % len(_LOOKS)]
        found = [compared.tested(group.tried[values[one]]) for one in x]
        axes.plot(x, [*map(np.mean, found)], **look, marker="o", gid=f"tried-{place}")
        axes.fill_between(x, [*map(min, found)], [*map(max, found)], color=look["color"], alpha=0.16, linewidth=0)
