"""The curves of one run as a picture: small panels against the documents seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pgtoolkit.runs.series import Columns, smooth, thinned
from pgtoolkit.system.imports import without
from pgtoolkit.system.plain_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    *(("reward", "exact_match"), ("loss",), ("clipped_ratio_fraction",), ("ratio_new_old",)),
    *(("kl_new_old",), ("grad_norm",), ("completion_length",), ("entropy",)),
)
"""The metrics of each panel, in reading order."""
_COLORS = ("#1f77b4", "#d95f02")
_SMOOTH_FROM = 40
"""From this many points on, a line is drawn as its moving mean over the faint points."""


def plot_curves(recorded: Columns, path_png: Path, title: str) -> None:
    """Draw what metrics.jsonl has, by `read_metrics`: a panel for each of its metrics that there is
    a number of."""
    with without():
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    present = [[name for name in names if _has_numbers(recorded, name)] for names in _PANELS]
    present = [names for names in present if names]
    columns = min(4, len(present) or 1)
    rows = max(1, -(-len(present) // columns))
    figure = Figure(figsize=(max(3.5 * columns, 7), 3.2 * rows), dpi=110)
    # Room for labels; a layout engine would draw the picture three times to measure them.
    across = 0.16 / columns
    down = 0.19 / rows
    figure.subplots_adjust(
        left=across, right=0.99, bottom=down, top=1 - down - 0.04 / rows, wspace=0.24, hspace=0.42
    )
    figure.suptitle(title if present else f"{title}: nothing was measured", fontsize=11)
    axis = "step" if np.isnan(recorded.get("documents_seen", np.nan)).any() else "documents_seen"
    for place, names in enumerate(present, start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if place > len(present) - columns:
            axes.set_xlabel(axis.replace("_", " "), fontsize=9)
        _draw(axes, recorded, axis, names)
    with replacing(path_png) as file:
        figure.savefig(file, format="png")


def _has_numbers(recorded: Columns, name: str) -> bool:
    return name in recorded and not np.isnan(recorded[name]).all()


def _draw(axes: Axes, recorded: Columns, axis: str, names: list[str]) -> None:
    titles = []
    for color, name in zip(_COLORS, names, strict=False):
        known = ~np.isnan(recorded[name])
        x, y = recorded[axis][known], recorded[name][known]
        label = name.replace("_", " ")
        low, high = _limits(y)
        _line(axes, x, y.clip(low, high), color, label)
        if low > y.min() or high < y.max():
            # The dots at the edge of the panel are those beyond it.
            label += f"\n(spikes to {y.min() if low > y.min() else y.max():.3g} are cut off)"
            if low > y.min() and high < y.max():
                label = (
                    f"{name.replace('_', ' ')}\n(spikes from {y.min():.3g} to {y.max():.3g} "
                    "are cut off)"
                )
        titles.append(label)
    axes.set_title("; ".join(titles), fontsize=9, y=1.0)  # given a place, it is fixed
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False)


def _line(axes, x, y, color, label):
    if len(y) < _SMOOTH_FROM:
        axes.plot(x, y, color=color, label=label, linewidth=1.4, marker=".", markersize=3)
        return
    # Points alone: lines between the steps of one batch of rollouts, of which the first clips
    #   nothing, would hatch.
    axes.plot(
        x,
        y,
        color=color,
        alpha=0.45,
        linestyle="none",
        marker=".",
        markersize=4.5,
        markeredgewidth=0,
    )
    x, y = thinned(x, y)
    axes.plot(x, smooth(y, max(2, len(y) // 50)), color=color, label=label, linewidth=1.6)


def _limits(values: np.ndarray) -> tuple[float, float]:
    """What the axis shows: all values but spikes, one in a hundred on each side that lie further
    from the others than these are apart."""
    low, high = (
        np.quantile(values, 0.01, method="higher"),
        np.quantile(values, 0.99, method="lower"),
    )
    if (reach := high - low) > 0:
        values = values[(values >= low - reach) & (values <= high + reach)]
    return values.min(), values.max()
