"""The comparison as files: a table of its runs (CSV), one page that needs nothing else (HTML), and a picture (PNG)."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path
from string import Template

from pgtoolkit.comparison import text_report
from pgtoolkit.comparison.charts import picture
from pgtoolkit.comparison.compared import Compared, learned
from pgtoolkit.comparison.measures import AXES, reached
from pgtoolkit.runs.series import best
from pgtoolkit.system.legible import escaped
from pgtoolkit.system.report import text

_TABLES = 20
"""Of so many configurations, the best, the page has the differences from all that are behind them."""


def write(compared: Compared, kind: str, path: Path, command: str) -> None:
    """Write one file; kind: csv, html or png. command: what has made the page."""
    if kind == "png":
        path.write_bytes(picture(compared, "png"))
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(run_rows(compared))
    else:
        path.write_text(_render_html(compared, command), encoding="utf-8")


def run_rows(compared: Compared) -> list[list[object]]:
    """The header and a row per run, unfinished ones too: what varies, seed, state, whether it is in the means, what it
    reached.

    `documents_to_METRIC_THRESHOLD` and its like are None where that was not reached in the `documents_seen`.
    """
    goal, rows = compared.goal, []
    to = {axis: f"{AXES[axis]}_to_{goal.metric}_{goal.threshold:g}" for axis in compared.limits}
    values = [f"{name}_{goal.metric}" for name in ("mean", "final", "best")]
    for group in compared.groups:
        for run in group.runs:
            row = {"run": run.path, **{key: text(value) for key, value in group.values.items()}}
            row |= {key: text(learned(run, key)) for key in compared.over}
            counted = "yes" if run in group.counted else "no"
            row |= {"seed": run.config["seed"], "state": run.state, "counted": counted, "step": run.step}
            if measured := run.values(goal.metric):
                at = reached(run, goal)
                row |= {to[axis]: at.to[axis] for axis in to if axis in at.to} | at.seen
                row |= zip(values, (at.mean, at.final, best(measured)), strict=True)
            rows.append(row)
    unread = [run for run, _ in compared.left_out if not run.config]
    rows += [{"run": run.path, "state": run.state, "counted": "no"} for run in unread]
    columns: list[object] = [
        "run",
        *compared.keys,
        *compared.over,
        "seed",
        "state",
        "counted",
        "step",
        *to.values(),
        *values,
        *AXES,
    ]
    return [columns, *([row.get(column) for column in columns] for row in rows)]


def _render_html(compared: Compared, command: str) -> str:
    """Everything that the terminal shows, the differences of all pairs, every run and what they share."""
    title = f"{compared.metric} by {' and '.join(compared.keys) or 'seed'}"
    svg = picture(compared, "svg").decode().replace("#000000", "currentColor")  # legible on light and dark pages
    excluded = text_report.left_out(compared)
    runs = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in run_rows(compared)]
    pairs = [compared.comparisons.against(place) for place in range(min(len(compared.groups), _TABLES))]
    common = [["key", "value"], *([key, text(value)] for key, value in compared.common.items())]
    notes = (f"<p><strong>Note:</strong> {escaped(note)}</p>" for note in compared.notes)
    lead = [f"<p>{escaped(text_report.heading(compared))}.</p>", *notes]
    parts = [
        _table(text_report.group_rows(compared)),
        _sentences(text_report.definitions(compared)),
        f"<h2>{escaped(text_report.question(compared))}</h2>",
        *(
            f"<h3>against {escaped(group.label)} (n = {len(group.counted)})</h3>\n"
            + _table(text_report.difference_rows(compared, of_group))
            for group, of_group in zip(compared.groups, pairs, strict=False)
            if of_group
        ),
        _sentences(text_report.worth(compared, [pair for of_group in pairs for pair in of_group])),
        *(["<h2>Runs excluded from averages</h2>", _sentences(excluded)] if excluded else []),
        f"<details><summary>Every run ({len(runs) - 1})</summary>\n{_table(runs)}</details>",
        f"<details><summary>Configuration shared by all</summary>\n{_table(common)}</details>",
    ]
    page = Template(files("pgtoolkit.comparison").joinpath("report.html").read_text(encoding="utf-8"))
    told = {"title": escaped(title), "lead": "\n".join(lead), "chart": svg[svg.index("<svg ") :]}
    return page.substitute(told, parts="\n".join(parts), command=escaped(command))


def _sentences(sentences):
    return "\n".join(f'<p class="quiet">{escaped(sentence)}</p>' for sentence in sentences)


def _table(rows):
    """The first row is the header."""
    header, *body = [[escaped("-" if cell is None else str(cell)) for cell in row] for row in rows]
    lines = [f"<tr><th>{'</th><th>'.join(header)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"
