"""The curves of one run as a picture: small panels against the documents seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pgtoolkit.runs.series import Columns, smooth, thinned
from pgtoolkit.system.imports import without
from pgtoolkit.system.plain_files import replacing

_PANELS = (
    *(("reward", "exact_match"), ("loss",), ("clipped_ratio_fraction",), ("ratio_new_old",)),
    *(("kl_new_old",), ("grad_norm",), ("completion_length",), ("entropy",)),
)
"""The metrics of each panel, in reading order."""
_COLORS = ("#1f77b4", "#d95f02")
_SMOOTH_FROM = 40
"""From this many points on, a line is drawn as its moving mean over the faint points."""


def plot_curves(recorded: Columns, path_png: Path, title: str) -> None:
    """Draw what metrics.jsonl has, by `read_metrics`; a panel without data says so."""
    with without():
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(14, 6), dpi=110)
    # Room for labels; a layout engine would draw the picture three times to measure them.
    figure.subplots_adjust(left=0.045, right=0.99, bottom=0.075, top=0.9, wspace=0.24, hspace=0.3)
    figure.suptitle(title, fontsize=11)
    axis = "step" if np.isnan(recorded.get("documents_seen", np.nan)).any() else "documents_seen"
    for place, names in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(2, 4, place)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if place > 4:
            axes.set_xlabel(axis.replace("_", " "), fontsize=9)
        _draw(axes, recorded, axis, names)
    with replacing(path_png) as file:
        figure.savefig(file, format="png")


def _draw(axes, recorded, axis, names):
    titles = []
    for color, name in zip(_COLORS, names, strict=False):
        values = recorded.get(name, np.empty(0))
        x, y = recorded[axis][~np.isnan(values)], values[~np.isnan(values)]
        titles.append(name.replace("_", " "))
        if y.size:
            low, high = _limits(y)
            _line(axes, x, y.clip(low, high), color, titles[-1])
            if low > y.min() or high < y.max():
                titles[-1] += f", cut: {y.min():.3g} to {y.max():.3g}"
    axes.set_title("; ".join(titles), fontsize=10, y=1.0)  # given a place, it is not searched for one
    if not axes.lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="gray")
        axes.set(xticks=[], yticks=[])
    elif len(names) > 1:
        axes.legend(fontsize=8, frameon=False)


def _line(axes, x, y, color, label):
    if len(y) < _SMOOTH_FROM:
        axes.plot(x, y, color=color, label=label, linewidth=1.4, marker=".", markersize=3)
        return
    # Points alone: lines between the steps of one batch of rollouts, of which the first clips nothing, would hatch.
    axes.plot(x, y, color=color, alpha=0.25, linestyle="none", marker=".", markersize=2.5, markeredgewidth=0)
    x, y = thinned(x, y)
    axes.plot(x, smooth(y, max(2, len(y) // 50)), color=color, label=label, linewidth=1.6)


def _limits(values: np.ndarray) -> tuple[float, float]:
    """What the axis shows: all values but spikes, one in a hundred on each side that lie further from the others than
    these are apart."""
    low, high = np.quantile(values, 0.01, method="higher"), np.quantile(values, 0.99, method="lower")
    if (reach := high - low) > 0:
        values = values[(values >= low - reach) & (values <= high + reach)]
    return values.min(), values.max()
