"""The figure of a comparison, as it goes onto a page of a paper: columns, panels, legend, words."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from pgtoolkit.comparison.charts import (
    AXES_OF_CURVES,
    draw_curves,
    draw_means,
    draw_tried,
    heights,
    legend_labels,
    unfinished,
)
from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.statistics import LEVEL
from pgtoolkit.comparison.words_in_figures import FONT_SIZE, LINE_HEIGHT, width, wrapped
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.pictures import for_notebook, own_settings
from pgtoolkit.system.report import refusal
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS = (*AXES_OF_CURVES, "means", "tried")
"""Names of panels: curves over an axis, the tested means, the values of the --best-of key."""

COLUMN = 3.3
"""Width of a figure of one panel, in inches: a column of a paper with two of them."""

PAGE = 6.9
"""Width of a figure of several panels, in inches: both columns."""

_PANEL_HEIGHT = 2.2
"""Height of a panel with its axis, in inches."""

_INTERVAL_HEIGHT = 0.07
"""Height in inches of a group in a panel of means: with many groups the panel is higher."""

_LEGEND_LINES = {COLUMN: 20, PAGE: 30}
"""Width of a figure -> the most lines below each other in its legend that fit a page."""

_HANDLE = 0.45
"""Width of a legend's entry without its label, in inches."""

_DOTS_PER_INCH = 300

_SETTINGS = {
    "font.size": FONT_SIZE,
    "figure.titlesize": FONT_SIZE,
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), FONT_SIZE),
    **dict.fromkeys(("legend.fontsize", "legend.title_fontsize"), FONT_SIZE),
    "legend.labelspacing": 0.25,
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
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


def panels_named(text: str | None, best_of: str | None, option: str = "--panels") -> list[str]:
    """Return the panels of a figure by their names with commas between.

    None: curves over documents and time, means and, with --best-of, the values of its key.
    Raises ConfigError for a name of none, and for values of a key without the key.
    """
    if text is None:
        return ["documents", "seconds", "means", *(["tried"] if best_of else [])]
    in_python = option == "panels"
    quote = '"' if in_python else ""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PANELS]
    if unknown:
        known = [name for name in names if name in PANELS]
        raise ConfigError(
            refusal(
                setting=f"{option}={text}",
                needs=f"names of panels: {', '.join(PANELS)}",
                got=", ".join(unknown) or "none",
                reason="The figure has no other.",
                use=f"{option}={quote}{','.join(known) or 'documents,means'}{quote}",
            )
        )
    if "tried" in names and not best_of:
        others = ",".join(name for name in names if name != "tried") or "means"
        raise ConfigError(
            refusal(
                setting=f"{option}={text}",
                needs="best_of" if in_python else "--best-of",
                got="none",
                reason="tried shows the values of its key.",
                use=f"{option}={quote}{others}{quote}, or "
                + ("best_of in compare" if in_python else "--best-of with a key"),
            )
        )
    return [*dict.fromkeys(names)]


def picture(compared: Compared, kind: str, panels: str | None = None) -> bytes:
    """Draw the figure, and return the file.

    kind: png, jpg, pdf, or svg, which is transparent. panels: see `panels_named`.
    In the SVG bands, means and single runs are groups named KIND-GROUP-AXIS, by the group's place,
    and intervals interval-GROUP.
    """
    with own_settings(_SETTINGS):
        metadata = dict.fromkeys(_LEFT_OUT[kind]) if kind in _LEFT_OUT else None
        file = io.BytesIO()
        draw(compared, panels_named(panels, compared.best_of)).savefig(
            file,
            format=kind,
            backend=kind if kind in ("pdf", "svg") else "agg",
            transparent=kind == "svg",
            metadata=metadata,
            dpi=_DOTS_PER_INCH,
        )
    return file.getvalue()


def figure_of(compared: Compared, panels: str | None = None) -> Figure:
    """Return the picture as a figure of matplotlib, which a notebook shows."""
    with own_settings(_SETTINGS):
        figure = draw(compared, panels_named(panels, compared.best_of, "panels"))
        figure.draw_without_rendering()  # or text would be made later, in the user's settings
        return for_notebook(figure)


def draw(compared: Compared, panels: list[str]) -> Figure:
    """Return the figure, which is higher where its legend and labels need it, and no panel smaller.

    One panel is a column wide, several are as wide as the page.
    """
    from matplotlib.figure import Figure

    alone = len(panels) == 1
    full = COLUMN if alone else PAGE
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    size = (full / columns, _PANEL_HEIGHT)
    labels: list[str] = []
    if panels == ["means"]:  # it names the groups at its axis
        labels = [wrapped(label, COLUMN * 0.6) for label in legend_labels(compared)]
        size = (COLUMN * 0.35, max(_PANEL_HEIGHT / 2, LINE_HEIGHT * sum(heights(labels))))
    elif "means" in panels:
        size = (size[0], max(_PANEL_HEIGHT, _INTERVAL_HEIGHT * len(compared.groups)))
    figure = Figure(figsize=(full, size[1]), layout="constrained", dpi=150)
    legend: dict[int, Line2D] = {}
    rows = -(-len(panels) // columns)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.tick_params(labelsize=FONT_SIZE)
        if panel == "means":
            draw_means(axes, compared, labels, size)
        elif panel == "tried":
            legend = draw_tried(axes, compared, size) | legend
        else:
            legend |= draw_curves(axes, compared, panel, size)
    words = wrapped(_said(compared, panels), full - 0.1)
    figure.suptitle(words, x=0.01, ha="left")
    height = rows * size[1] + LINE_HEIGHT * (words.count("\n") + 1)
    if labels:
        height += 0.3 + LINE_HEIGHT * (axes.get_xlabel().count("\n") + 1)
    if legend:
        height += _draw_legend(figure, compared, legend, full)
    figure.set_figheight(height)
    return figure


def _said(compared: Compared, panels: list[str]) -> str:
    """Return what lines, bands and dots of these panels are, for the figure itself."""
    counts = {len(group.counted) for group in compared.groups}
    over = f"{counts.pop()} runs" if len(counts) == 1 else "n runs"
    if over in ("1 runs", "0 runs"):
        over = "one run"
    words = []
    if {*panels} != {"means"}:
        words.append("line: " + ("one run" if over == "one run" else f"mean over {over}"))
        if over != "one run":
            words.append("band: from the lowest to the highest")
    if {*panels} & {*AXES_OF_CURVES}:
        if any(unfinished(group.runs) for group in compared.groups):
            words.append("thin line: a run that did not finish")
        if compared.goal.threshold is not None:
            words.append(f"dotted: the threshold, {compared.goal.threshold:g}")
    if "means" in panels:
        samples = compared.comparisons.samples
        words.append("dot: one run" if over == "one run" else f"dot: mean over {over}")
        if over != "one run":
            words += [f"bar: its {1 - LEVEL:.0%} interval", "stroke: a run"]
        if len({sample.measure for sample in samples if sample.values}) > 1:
            words.append("it does not mean the same in all")
    if compared.is_bounded and {"means", "tried"} & {*panels}:
        words.append(
            f"≥: at least, since a run that never came to the threshold counts as "
            f"{compared.after_limit:,.0f}"
        )
    return "; ".join(words)


def _draw_legend(
    figure: Figure, compared: Compared, lines: dict[int, Line2D], inches: float
) -> float:
    """Draw the legend below the panels, of as many groups as there is room for; return its height
    in inches.

    lines: by the group's place. inches: width of the figure.
    """
    from matplotlib.lines import Line2D

    every = legend_labels(compared)
    labels = [wrapped(every[place], inches - _HANDLE - 0.1) for place in lines]
    widest = max(width(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int((inches - 0.1) / (_HANDLE + widest))))
    lines_each = max(label.count("\n") + 1 for label in labels)
    room = columns * max(1, _LEGEND_LINES[inches] // lines_each)
    handles = [*lines.values()]
    if len(labels) > room:
        handles = [*handles[: room - 1], Line2D([], [], linestyle="none")]
        labels = [*labels[: room - 1], f"and {len(labels) - room + 1} more"]
    title = wrapped(_legend_title(compared), inches - 0.2)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        title=title or None,
        handlelength=2.2,
        handletextpad=0.5,
        columnspacing=1.0,
    )
    rows = -(-len(labels) // columns)
    lines_of_title = title.count("\n") + 1 if title else 0
    return LINE_HEIGHT * (rows * lines_each + lines_of_title) + 0.15


def _legend_title(compared: Compared) -> str:
    """Return the keys whose values the legend shows; "" if the user has named the values."""
    if any(group.labels for group in compared.groups):
        return ""
    return ", ".join(
        legible(key)
        for key in compared.keys
        if any(group.values[key] is not None for group in compared.groups)
    )
