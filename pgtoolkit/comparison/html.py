"""The comparison as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from pgtoolkit.comparison import terminal
from pgtoolkit.comparison.charts import AXES, label_of, line_style, svg
from pgtoolkit.comparison.groups import Compared
from pgtoolkit.comparison.tables import runs_table
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


def html(compared: Compared, command: str) -> str:
    """The page. command: what has made it."""
    title = f"{compared.metric} by {' and '.join(compared.keys) or 'seed'}"
    common = [{"key": key, "value": text(value)} for key, value in compared.common.items()]
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(terminal.heading(compared))}.</p>",
        *(f"<p><strong>Note:</strong> {escape(note)}</p>" for note in compared.notes),
        _charts(compared),
        _groups(compared),
        _differences(compared),
        _left_out(compared),
        _runs(compared),
        f"<details><summary>Configuration shared by all</summary>\n{_table(common)}</details>",
        f'<p class="quiet">Made by <code>{escape(command)}</code></p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def _charts(compared):
    legend = "".join(
        f"<li>{_line(place)}{escape(_settings(group) or group.label)} (n = {len(group.counted)})</li>"
        for place, group in enumerate(compared.groups)
    )
    figures = "".join(
        f"<figure><figcaption>{escape(compared.metric)} against {label_of(compared, axis)[0]}</figcaption>\n"
        f"{svg(compared, axis)}</figure>\n"
        for axis in AXES
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
    color, style = line_style(place)
    return f'<span class="line" style="border-top-color: {color}; border-top-style: {style}"></span>'


def _groups(compared):
    header, *rows = terminal.group_rows(compared)
    numbers = len(header) - len(compared.keys)
    what = (
        f"Until {compared.metric} {compared.goal.threshold:g}, and at the end"
        if compared.by_documents
        else "At the end"
    )
    return (
        f"<h2>{escape(what)}</h2>\n"
        f"{_table([dict(zip(header, row, strict=True)) for row in rows], numbers, range(len(rows)))}\n"
        f"{_quiet(terminal.definitions(compared))}"
    )


def _quiet(sentences):
    return f'<ul class="quiet">{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul>'


def _differences(compared):
    if not compared.comparisons:
        return "<p>Nothing to compare: one configuration has finished runs.</p>"
    write = terminal.tested_format(compared)
    rows = [
        {"first": compared.groups[one.first].label, "second": compared.groups[one.second].label}
        | {"n": " and ".join(map(str, one.counts))}
        | dict(zip(("verdict", "test", *terminal.DIFFERENCES), terminal.difference_row(one, write), strict=True))
        for one in compared.comparisons
    ]
    return (
        f"<h2>Differences, second minus first</h2>\n<p>{escape(terminal.question(compared))}</p>\n"
        f"{_table(rows, 4)}\n{_quiet(terminal.worth(compared.comparisons))}"
    )


def _left_out(compared):
    if not compared.left_out:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in terminal.left_out(compared))
    return f"<h2>Runs in no mean</h2>\n<ul>{items}</ul>"


def _runs(compared):
    from pandas import isna

    write, places = terminal.number_format(compared), [p for p, group in enumerate(compared.groups) for _ in group.runs]
    table = runs_table(compared).iloc[: len(places)].copy()  # without what could not be read
    table["run"] = [run.name for group in compared.groups for run in group.runs]
    for column in table.columns[len(compared.keys) + 5 :]:  # what the run reached: values of the metric, and counts
        table[column] = table[column].map(write if column.endswith(f"_{compared.metric}") else terminal.whole)
    rows = table.map(lambda value: "-" if isna(value) else str(value)).to_dict("records")
    numbers = len(table.columns) - len(compared.keys) - 4
    return f"<details><summary>Every run ({len(rows)})</summary>\n{_table(rows, numbers, places)}</details>"


def _table(rows: list[dict[str, str]], numbers: int = 0, places=()):
    """numbers: how many of the last columns go to the right. places: of each row's group, whose line is shown."""
    from pandas import DataFrame, option_context

    table = DataFrame(rows).map(escape)
    if places:
        table.iloc[:, 0] = [_line(place) + cell for place, cell in zip(places, table.iloc[:, 0], strict=True)]
    with option_context("display.max_colwidth", None):
        body = table.rename(columns=escape).to_html(index=False, border=0, escape=False, justify="unset")
    return f'<div class="wide numbers-{numbers}">{body}</div>'
