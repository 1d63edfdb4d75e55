"""Curves of a metric over seeds, and their charts: in the HTML page and as a picture."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np

from pgtoolkit.comparison.groups import Compared
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.series import smooth
from pgtoolkit.system.legible import escaped, legible

AXES = ("documents_seen", "seconds")
"""What the two charts have on their x axis."""

_COLORS = ("#2a78c2", "#d9731a", "#2e9e5b", "#c2417c", "#8a63c9", "#a8862a", "#2aa5a5", "#8c8c8c")
_STYLES = ("solid", "dashed", "dotted")  # as matplotlib and CSS both call them
_POINTS = 120
_NO_FORMULAS = {"text.parse_math": False}  # of a path with two dollar signs in it


def line_style(place: int) -> tuple[str, str]:
    """(colour, solid, dashed or dotted) of the group at this place; from the ninth on the colours repeat, dashed."""
    return _COLORS[place % len(_COLORS)], _STYLES[place // len(_COLORS) % len(_STYLES)]


def curve(run: Run, metric: str, axis: str) -> tuple[list[float], list[float]]:
    """(x, y) of a run, y smoothed over about a twentieth of its points; axis: one of AXES."""
    points = [(row[axis], row[metric]) for row in run.rows if axis in row and metric in row]
    return [x for x, _ in points], smooth([y for _, y in points], len(points) // 80) if points else []


def mean_curve(runs: list[Run], metric: str, axis: str) -> np.ndarray:
    """(4, points): x, the mean of the runs, the lowest and the highest of them, as far as all the runs have been."""
    curves = [(x, y) for x, y in (curve(run, metric, axis) for run in runs) if x]
    if not curves:
        return np.empty((4, 0))
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.linspace(low, high, _POINTS if high > low else 1)
    values = np.array([np.interp(places, x, y) for x, y in curves])
    return np.array([places, values.mean(0), values.min(0), values.max(0)])


def label_of(compared: Compared, axis: str) -> tuple[str, float]:
    """(label of the axis, what its numbers are divided by): time is shown in a unit in which it is readable."""
    if axis == "documents_seen":
        return "documents seen", 1.0
    longest = max((run.rows[-1].get(axis, 0) for g in compared.groups for run in g.runs if run.rows), default=0)
    unit, seconds = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)
    return f"time in {unit}", seconds


def svg(compared: Compared, axis: str) -> str:
    """The chart as an SVG element with `axis` in the ids of its parts; black is the text colour of the page around it.

    Each path of data has the class mean, band or run, and the group's label as its title.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    title = escaped(f"{compared.metric} against {label_of(compared, axis)[0]}")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": axis, "font.size": 12, **_NO_FORMULAS}):
        figure = Figure(figsize=(620 / 72, 330 / 72), layout="constrained")  # in points, of which there are 72 an inch
        _draw(figure.add_subplot(), compared, axis)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue().replace("#000000", "currentColor")
    head = f'<svg role="img" aria-label="{title}" '
    text = text[text.index("<svg ") :].replace("<svg ", head, 1).replace(">", f">\n<title>{title}</title>", 1)
    labels = [escaped(group.label) for group in compared.groups]
    return re.sub(
        r'(<g id="(mean|band|run)-(\d+)-[\w-]+">)\s*<path ',
        lambda found: f'{found[1]}<title>{labels[int(found[3])]}</title><path class="{found[2]}" ',
        text,
    )


def write_png(compared: Compared, path: Path) -> None:
    """The charts side by side, with their legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_NO_FORMULAS):
        figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=100)
        for place, axis in enumerate(AXES, start=1):
            handles = _draw(figure.add_subplot(1, 2, place), compared, axis)
        if handles:
            title, columns = legible(", ".join(compared.keys)) or None, min(4, len(handles))
            groups = [compared.groups[place] for place in handles]
            labels = [legible(f"{group.label} (n = {len(group.counted)})") for group in groups]
            figure.legend(
                handles.values(), labels, loc="outside lower center", ncols=columns, frameon=False, title=title
            )
        figure.savefig(path, format="png")


def _draw(axes, compared, axis):
    """Draw a line per group, and runs that did not finish for themselves; returns {group's place: its line}."""
    from matplotlib.ticker import EngFormatter

    (label, unit), handles = label_of(compared, axis), {}
    axes.set_xlabel(label)
    axes.set_ylabel(legible(compared.metric))
    if axis == "documents_seen":  # 10k; half a minute is no 500m
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for place, group in enumerate(compared.groups):
        color, style = line_style(place)
        # An older run of the same seed is in the picture already, as its newer self.
        for number, run in enumerate(run for run in group.runs if run.state != "done"):
            x, y = curve(run, compared.metric, axis)
            if x:
                gid = f"run-{place}-{axis}-{number}"
                handles[place] = axes.plot(np.divide(x, unit), y, color=color, alpha=0.55, linewidth=0.9, gid=gid)[0]
        x, mean, low, high = mean_curve(group.counted, compared.metric, axis)
        if x.size:
            x = x / unit
            gid = f"mean-{place}-{axis}"
            handles[place] = axes.plot(x, mean, color=color, linestyle=style, linewidth=1.8, gid=gid)[0]
        if (low < high).any():
            around = [*x, *x[::-1]], [*high, *low[::-1]]
            axes.fill(*around, color=color, alpha=0.16, linewidth=0, gid=f"band-{place}-{axis}")
    if compared.goal.threshold is not None and handles:
        axes.axhline(compared.goal.threshold, color="gray", linestyle=":", linewidth=1.1, gid=f"threshold-{axis}")
    if not handles:
        axes.text(0.5, 0.5, "no run has recorded this", transform=axes.transAxes, ha="center")
    return handles
