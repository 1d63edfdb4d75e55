"""The curves of one run as a picture: six small panels against the documents seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pgtoolkit.runs.series import Columns, smooth, thinned
from pgtoolkit.system.imports import without
from pgtoolkit.system.plain_files import replacing

# Title and lines of each panel, in reading order; (metric, label, on the right axis).
_PANELS = (
    ("reward", (("reward", "reward", False), ("exact_match", "exact match", False))),
    ("loss", (("loss", "loss", False),)),
    ("ratio and clipping", (("clipped_ratio_fraction", "clipped fraction", False), ("ratio_new_old", "ratio", True))),
    ("KL, new against old policy", (("kl_new_old", "kl", False),)),
    ("gradient norm", (("grad_norm", "before clipping", False),)),
    ("completions", (("completion_length", "tokens", False), ("entropy", "entropy", True))),
)
_COLORS = ("#1f77b4", "#d95f02")
_SMOOTH_FROM = 40
"""From this many points on, a line is drawn as its moving mean over the faint points."""
_NEVER_CUT = 8
"""Up to this many points the axis shows them all."""


def plot_curves(recorded: Columns, path_png: Path, title: str) -> None:
    """Draw what metrics.jsonl has, by `read_metrics`; a panel without data says so."""
    with without():
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(12, 6.2), dpi=110)
    # Room for labels on both sides of a panel; a layout engine would draw the picture three times to measure them.
    figure.subplots_adjust(left=0.055, right=0.93, bottom=0.075, top=0.9, wspace=0.34, hspace=0.3)
    figure.suptitle(title, fontsize=11)
    axis = "step" if np.isnan(recorded.get("documents_seen", np.nan)).any() else "documents_seen"
    for place, (panel_title, lines) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(2, 3, place)
        axes.set_title(panel_title, fontsize=10, y=1.0)  # given a place, it is not searched for one
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if place > 3:
            axes.set_xlabel(axis.replace("_", " "), fontsize=9)
        _draw(axes, recorded, axis, lines)
    with replacing(path_png) as file:
        figure.savefig(file, format="png")


def _draw(axes, recorded, axis, lines):
    handles, sides = [], [axes]
    for color, (name, label, right) in zip(_COLORS, lines, strict=False):
        values = recorded.get(name, np.empty(0))
        y = values[~np.isnan(values)]
        if not y.size:
            continue
        side = axes
        if right and handles:
            side = axes.twinx()
            sides.append(side)
        x = recorded[axis][~np.isnan(values)]
        low, high = _limits(y)
        handles.append(_line(side, x, y.clip(low, high), color, label))
        _mark_cut(side, x, y, low, high, color)
        if any(on_right for *_, on_right in lines):
            side.set_ylabel(label, color=color, fontsize=9)
    if not handles:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="gray")
        axes.set(xticks=[], yticks=[])
    elif len(sides) == 1 and len(handles) > 1:
        axes.legend(handles=handles, fontsize=8, frameon=False)
    for side in sides:
        side.tick_params(labelsize=8)
        side.spines[["top"] if len(sides) > 1 else ["top", "right"]].set_visible(False)


def _line(axes, x, y, color, label):
    if len(y) < _SMOOTH_FROM:
        return axes.plot(x, y, color=color, label=label, linewidth=1.4, marker=".", markersize=3)[0]
    # Points alone: lines between the steps of one batch of rollouts, of which the first clips nothing, would hatch.
    axes.plot(x, y, color=color, alpha=0.25, linestyle="none", marker=".", markersize=2.5, markeredgewidth=0)
    x, y = thinned(x, y)
    return axes.plot(x, smooth(y, max(2, len(y) // 50)), color=color, label=label, linewidth=1.6)[0]


def _limits(values: np.ndarray) -> tuple[float, float]:
    """What the axis shows: all values but spikes, of at most one in fifty and at least one, far from all others.

    Far is further than the others' whole range from it.
    """
    ordered = np.sort(values)
    few = max(1, len(ordered) // 50)
    if len(ordered) > _NEVER_CUT and (reach := ordered[-1 - few] - ordered[few]) > 0:
        ordered = ordered[(ordered >= ordered[few] - reach) & (ordered <= ordered[-1 - few] + reach)]
    return ordered[0], ordered[-1]


def _mark_cut(axes, x, y, low, high, color):
    """Arrows at the edge where values lie beyond the limits, with the most extreme one as a number."""
    for beyond, edge, marker, up in ((y - high, high, "^", -9), (low - y, low, "v", 9)):
        if (cut := beyond > 0).any():
            edges = np.full(cut.sum(), edge)
            axes.plot(x[cut], edges, color=color, linestyle="none", marker=marker, markersize=6, clip_on=False)
            furthest = beyond.argmax()
            style = {"textcoords": "offset points", "va": "center", "fontsize": 7, "color": color}
            on_left = x[furthest] < (x[0] + x[-1]) / 2  # and below or above the arrow: beside it another may lie
            style |= {"xytext": (0, up), "ha": "left" if on_left else "right"}
            axes.annotate(f"{y[furthest]:.3g}", (x[furthest], edge), **style)
