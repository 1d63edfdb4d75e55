"""The comparison as files: a table of its runs (CSV), one page that needs nothing else (HTML), and a picture (PNG)."""

from __future__ import annotations

import csv
from pathlib import Path

from pgtoolkit.comparison import charts, terminal
from pgtoolkit.comparison.groups import Compared
from pgtoolkit.comparison.measures import AXES, reached
from pgtoolkit.runs.series import best
from pgtoolkit.system.legible import escaped
from pgtoolkit.system.report import text

_CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, li { max-width: 60rem; } .quiet { opacity: .75; font-size: .9em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid rgb(128 128 128 / .3); }
th { font-weight: 600; } th, td { white-space: nowrap; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
.line { display: inline-block; width: 30px; margin-right: .5rem; vertical-align: middle; border-top: 3px solid; }
summary { cursor: pointer; font-weight: 600; margin: 1.4rem 0 .5rem; } code { font-size: .92em; }
"""
_RIGHT = ", ".join(f".numbers-{count} :is(th, td):nth-last-child(-n+{count})" for count in range(1, 10))
_CSS += f"{_RIGHT} {{ text-align: right; }}\n"

_CAPTION = (
    "Lines: mean over seeds, smoothed over a twentieth of the run, as far as all seeds have been; bands: from the "
    "lowest to the highest seed. Time begins with the first step and leaves out evaluations and pauses before a resume"
)


def write(compared: Compared, kind: str, path: Path, command: str) -> None:
    """Write one file; kind: csv, html or png. command: what has made the page."""
    if kind == "png":
        charts.write_png(compared, path)
    elif kind == "csv":
        rows = runs_table(compared)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(_render_html(compared, command), encoding="utf-8")


def runs_table(compared: Compared) -> list[dict[str, object]]:
    """A row per run, unfinished ones too: what varies, seed, state, whether it is in the means, what it reached.

    `documents_to_METRIC_THRESHOLD` and its like are None where that was not reached in the `documents_seen`.
    """
    goal, rows = compared.goal, []
    to = {axis: f"{AXES[axis]}_to_{goal.metric}_{goal.threshold:g}" for axis in compared.limits}
    values = {name: f"{name}_{goal.metric}" for name in ("mean", "final", "best")}
    for group in compared.groups:
        for run in group.runs:
            row = {"run": run.path, **{key: text(value) for key, value in group.values.items()}}
            counted = "yes" if run in group.counted else "no"
            row |= {"seed": run.config["seed"], "state": run.state, "counted": counted, "step": run.step}
            if found := run.values(goal.metric):
                one = reached(run, goal)
                row |= {to[axis]: one.to[axis] for axis in to if axis in one.to} | one.seen
                row |= zip(values.values(), (one.mean, one.final, best(found)), strict=True)
            rows.append(row)
    unread = [run for run, _ in compared.left_out if not run.config]
    rows += [{"run": run.path, "state": run.state, "counted": "no"} for run in unread]
    fixed = ["run", *compared.keys, "seed", "state", "counted", "step"]
    columns = [*fixed, *to.values(), *values.values(), *AXES]
    return [dict.fromkeys(columns) | row for row in rows]


def _render_html(compared: Compared, command: str) -> str:
    title = f"{compared.metric} by {' and '.join(compared.keys) or 'seed'}"
    common = [["key", "value"], *([key, text(value)] for key, value in compared.common.items())]
    sections = [
        f"<h1>{escaped(title)}</h1>",
        f"<p>{escaped(terminal.heading(compared))}.</p>",
        *(f"<p><strong>Note:</strong> {escaped(note)}</p>" for note in compared.notes),
        _charts(compared),
        _groups(compared),
        _differences(compared),
        _left_out(compared),
        _runs(compared),
        f"<details><summary>Configuration shared by all</summary>\n{_table(common)}</details>",
        f'<p class="quiet">Made by <code>{escaped(command)}</code></p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escaped(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def _charts(compared):
    legend = "".join(
        f"<li>{_line(place)}{escaped(_settings(group) or group.label)} (n = {len(group.counted)})</li>"
        for place, group in enumerate(compared.groups)
    )
    figures = "".join(
        f"<figure><figcaption>{escaped(compared.metric)} against {charts.label_of(compared, axis)[0]}</figcaption>\n"
        f"{charts.svg(compared, axis)}</figure>\n"
        for axis in charts.AXES
    )
    unfinished = any(run.state != "done" for group in compared.groups for run in group.runs)
    thin = "; thin lines: unfinished runs" if unfinished else ""
    dotted = "" if compared.goal.threshold is None else f"; dotted: {compared.goal.threshold:g}, to be reached"
    return (
        f'<ul class="legend">{legend}</ul>\n<div class="charts">\n{figures}</div>\n'
        f'<p class="quiet">{_CAPTION}{dotted}{thin}.</p>'
    )


def _settings(group):
    return " ".join(f"{key}={text(value)}" for key, value in group.values.items())


def _line(place):
    color, style = charts.line_style(place)
    return f'<span class="line" style="border-top-color: {color}; border-top-style: {style}"></span>'


def _groups(compared):
    rows = terminal.group_rows(compared)
    what = (
        f"Until {compared.metric} {compared.goal.threshold:g}, and at the end"
        if compared.by_documents
        else "At the end"
    )
    return (
        f"<h2>{escaped(what)}</h2>\n"
        f"{_table(rows, len(rows[0]) - len(compared.keys), range(len(rows)))}\n"
        f"{_quiet(terminal.definitions(compared))}"
    )


def _quiet(sentences):
    return f'<ul class="quiet">{"".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)}</ul>'


def _differences(compared):
    if not compared.comparisons:
        return "<p>Nothing to compare: one configuration has finished runs.</p>"
    write = terminal.tested_format(compared)
    rows = [["first", "second", "n", "verdict", "test", *terminal.DIFFERENCES]]
    for one in compared.comparisons:
        labels = [compared.groups[place].label for place in (one.first, one.second)]
        rows.append([*labels, " and ".join(map(str, one.counts)), *terminal.difference_row(one, write)])
    return (
        f"<h2>Differences, second minus first</h2>\n<p>{escaped(terminal.question(compared))}</p>\n"
        f"{_table(rows, 4)}\n{_quiet(terminal.worth(compared.comparisons))}"
    )


def _left_out(compared):
    if not compared.left_out:
        return ""
    items = "".join(f"<li>{escaped(line)}</li>" for line in terminal.left_out(compared))
    return f"<h2>Runs excluded from averages</h2>\n<ul>{items}</ul>"


def _runs(compared):
    write, rows, places = terminal.number_format(compared), runs_table(compared), []
    cells = [[*rows[0]]]
    runs = [(place, run) for place, group in enumerate(compared.groups) for run in group.runs]
    for (place, run), row in zip(runs, rows, strict=False):  # which has those that could not be read at its end
        places.append(place)
        row["run"] = run.name
        for column in cells[0][len(compared.keys) + 5 :]:  # what the run reached: values of the metric, and counts
            row[column] = (write if column.endswith(f"_{compared.metric}") else terminal.whole)(row[column])
        cells.append(["-" if value is None else str(value) for value in row.values()])
    numbers = len(cells[0]) - len(compared.keys) - 4
    return f"<details><summary>Every run ({len(runs)})</summary>\n{_table(cells, numbers, places)}</details>"


def _table(rows: list[list[str]], numbers: int = 0, places=()):
    """rows: the first is the header. numbers: how many of the last columns go to the right. places: of each row's
    group, whose line is shown."""
    header, *rows = [[escaped(cell) for cell in row] for row in rows]
    for place, row in zip(places, rows, strict=False):
        row[0] = _line(place) + row[0]
    lines = [f"<tr><th>{'</th><th>'.join(header)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    body = "\n".join(lines)
    return f'<div class="wide numbers-{numbers}"><table>\n{body}\n</table></div>'
