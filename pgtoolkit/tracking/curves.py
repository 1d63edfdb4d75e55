"""The curves of one run as a picture: small panels against the documents seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pgtoolkit.runs.series import Columns, smooth, thinned
from pgtoolkit.system.pictures import for_notebook, own_settings
from pgtoolkit.system.plain_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (
    *(("reward", "exact_match"), ("loss",), ("clipped_ratio_fraction",), ("ratio_new_old",)),
    *(("kl_new_old",), ("grad_norm",), ("completion_length",), ("entropy",)),
)
"""The metrics of each panel, in reading order."""
_COLORS = ("#1f77b4", "#d95f02")
_SMOOTH_FROM = 40
"""From this many points on, a line is drawn as its moving mean over the faint points."""


def plot_curves(recorded: Columns, path_png: Path, title: str) -> None:
    """Draw the columns of metrics.jsonl: a panel for each of the metrics that have values.

    recorded: by `read_metrics`. Raises OSError if the picture cannot be written.
    """
    with own_settings():
        figure = _figure(recorded, title)
        with replacing(path_png) as file:
            figure.savefig(file, format="png", backend="agg")


def figure_of(recorded: Columns, title: str) -> Figure:
    """Return the same picture as a figure of matplotlib, which a notebook shows."""
    with own_settings():
        return for_notebook(_figure(recorded, title))


def _figure(recorded: Columns, title: str) -> Figure:
    from matplotlib.figure import Figure

    present = [[name for name in names if _has_numbers(recorded, name)] for names in _PANELS]
    present = [names for names in present if names]
    columns = min(4, len(present) or 1)
    rows = max(1, -(-len(present) // columns))
    figure = Figure(figsize=(max(3.5 * columns, 7), 3.2 * rows), dpi=110)
    # Fixed room for labels: a layout engine would draw the picture three times to measure them.
    bottom = 0.19 / rows
    figure.subplots_adjust(
        left=0.16 / columns,
        right=0.99,
        bottom=bottom,
        top=1 - bottom - 0.04 / rows,
        wspace=0.24,
        hspace=0.42,
    )
    title = " ".join(title.split())
    figure.suptitle(title if present else f"{title}: nothing was measured", fontsize=11)
    # Several passes over the same documents would be one place on that axis.
    seen = recorded.get("documents_seen", np.array([np.nan]))
    rises = not np.isnan(seen).any() and bool((np.diff(seen) > 0).all())
    axis = "documents_seen" if rises else "step"
    for number, names in enumerate(present, start=1):
        axes = figure.add_subplot(rows, columns, number)
        if number > len(present) - columns:  # in the lowest row
            axes.set_xlabel(axis.replace("_", " "), fontsize=9)
        _draw(axes, recorded, axis, names)
    return figure


def _has_numbers(recorded: Columns, name: str) -> bool:
    return name in recorded and not np.isnan(recorded[name]).all()


def _draw(axes: Axes, recorded: Columns, axis: str, names: list[str]) -> None:
    """Draw metrics into one panel, and title it with their names."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    titles = []
    for color, name in zip(_COLORS, names, strict=False):
        has_value = ~np.isnan(recorded[name])
        x = recorded[axis][has_value]
        y = recorded[name][has_value]
        label = name.replace("_", " ")
        low, high = _limits(y)
        # Spikes become dots at the edge of the panel.
        _draw_line(axes, x, y.clip(low, high), color, label)
        titles.append(label + _note_on_spikes(y, low, high))
    axes.set_title("; ".join(titles), fontsize=9, y=1.0)  # without y it would be moved
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False)


def _note_on_spikes(values: np.ndarray, low: float, high: float) -> str:
    """Return a line for a panel's title on values beyond its limits; "" for none."""
    lowest = values.min()
    highest = values.max()
    if low > lowest and high < highest:
        return f"\n(spikes from {lowest:.3g} to {highest:.3g} are cut off)"
    if low > lowest:
        return f"\n(spikes to {lowest:.3g} are cut off)"
    if high < highest:
        return f"\n(spikes to {highest:.3g} are cut off)"
    return ""


def _draw_line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    if len(y) < _SMOOTH_FROM:
        axes.plot(x, y, color=color, label=label, linewidth=1.4, marker=".", markersize=3)
        return
    # Points without a line: the first step of each batch of rollouts clips nothing, so a line would
    # go up and down between the steps of a batch.
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
    """Return the lowest and the highest value that an axis shows: all but spikes.

    Spikes are up to one in a hundred values on each side, if they are further from the other values
    than these are from each other.
    """
    low = np.quantile(values, 0.01, method="higher")
    high = np.quantile(values, 0.99, method="lower")
    spread = high - low
    if spread > 0:
        values = values[(values >= low - spread) & (values <= high + spread)]
    return values.min(), values.max()
