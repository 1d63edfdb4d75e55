"""The comparison as a table of its runs (CSV) and as a picture (PNG)."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from pgtoolkit.comparison import terminal
from pgtoolkit.comparison.groups import Compared, text
from pgtoolkit.comparison.html import lines_of, time_unit
from pgtoolkit.comparison.svg import style
from pgtoolkit.runs.series import best, final


def csv_text(compared: Compared) -> str:
    """A row per run, unfinished ones too: what varies, seed, state, whether it is in the means, what it reached."""
    metric, out = compared.metric, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    reached = [f"final_{metric}", f"{terminal.best_word(metric)}_{metric}", "documents_seen", "seconds"]
    writer.writerow(["run", *compared.keys, "seed", "state", "counted", "step", *reached])
    for group in compared.groups:
        values = [text(value) for value in group.values.values()]
        for run in group.runs:
            found = run.values(metric)
            last = run.rows[-1] if run.rows else {}
            numbers = [final(found), best(found)] if found else ["", ""]
            numbers += [last.get("documents_seen", ""), round(last["seconds"], 3) if "seconds" in last else ""]
            counted = "yes" if run in group.counted else "no"
            writer.writerow([run.path, *values, run.config.get("seed", ""), run.state, counted, run.step, *numbers])
    for run, _ in compared.left_out:
        if not run.config:
            writer.writerow([run.path, *([""] * len(compared.keys)), "", run.state, "no", "", "", "", "", ""])
    return out.getvalue()


def write_png(compared: Compared, path: Path) -> None:
    """The two charts of the report, side by side, with their legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    unit, length = time_unit(compared)
    handles = {}
    for place, (axis, size, label) in enumerate(
        (("documents_seen", 1.0, "documents seen"), ("seconds", length, f"time in {unit}")), start=1
    ):
        axes = figure.add_subplot(1, 2, place)
        axes.set_xlabel(label)
        axes.set_ylabel(compared.metric)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for number, line in enumerate(lines_of(compared, axis, size)):
            _draw(axes, line, *style(number), handles)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(4, len(handles)),
            frameon=False,
            title=", ".join(compared.keys) or None,
        )
    figure.savefig(path, format="png")


def _draw(axes, line, color, dash, handles):
    dashes = (0, tuple(float(length) / 2 for length in dash.split())) if dash else "-"
    for x, y in line.thin:
        handles.setdefault(line.label, axes.plot(x, y, color=color, alpha=0.55, linewidth=0.9)[0])
    if line.points:
        x, mean, low, high = zip(*line.points, strict=True)
        handles[line.label] = axes.plot(x, mean, color=color, linestyle=dashes, linewidth=1.8)[0]
        axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
