"""The comparison as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from pgtoolkit.comparison import terminal
from pgtoolkit.comparison.groups import Compared, text
from pgtoolkit.comparison.mean_curves import curve, mean_curve
from pgtoolkit.comparison.runs import Run
from pgtoolkit.comparison.svg import Line, chart, style
from pgtoolkit.runs.series import best, final

_CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, li { max-width: 60rem; } .quiet { opacity: .75; font-size: .9em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid rgb(128 128 128 / .3); }
th { font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right; } td { white-space: nowrap; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
.legend svg, td svg { width: 30px; height: 10px; margin-right: .5rem; vertical-align: middle; }
summary { cursor: pointer; font-weight: 600; margin: 1.4rem 0 .5rem; } code { font-size: .92em; }
"""


_CAPTION = (
    "Lines: mean over seeds, smoothed over a twentieth of the run, as far as all seeds have been; bands: from the "
    "lowest to the highest seed. Time begins with the first step and leaves out pauses before a resume"
)


def html(compared: Compared, command: str) -> str:
    """The page. command: what has made it."""
    by = " and ".join(compared.keys) or "seed"
    title = f"{compared.metric} by {by}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(terminal.heading(compared))}.</p>",
        *(f"<p><strong>Note:</strong> {escape(note)}</p>" for note in compared.notes),
        _charts(compared),
        _groups(compared),
        _verdicts(compared),
        _left_out(compared),
        _runs(compared),
        _common(compared),
        f'<p class="quiet">Made by <code>{escape(command)}</code></p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def lines_of(compared: Compared, axis: str, unit: float = 1.0) -> list[Line]:
    """A line per group; runs that did not finish are drawn for themselves. unit: what x is divided by."""
    lines = []
    for group in compared.groups:
        mean = [(x / unit, *rest) for x, *rest in mean_curve(group.counted, compared.metric, axis)]
        # An older run of the same seed is in the picture already, as its newer self.
        unfinished = [curve(run, compared.metric, axis) for run in group.runs if run.state != "done"]
        label = f"{group.label} (n = {len(group.counted)})"
        lines.append(Line(label, mean, [([at / unit for at in x], y) for x, y in unfinished if x]))
    return lines


def time_unit(compared: Compared) -> tuple[str, float]:
    """(name, seconds) of the unit in which the longest run is a readable number."""
    longest = max((run.rows[-1].get("seconds", 0) for g in compared.groups for run in g.runs if run.rows), default=0)
    return ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)


def _charts(compared):
    metric = compared.metric
    unit, length = time_unit(compared)
    documents = chart(
        lines_of(compared, "documents_seen"), f"{metric} against documents seen", "documents seen", metric
    )
    time = chart(lines_of(compared, "seconds", length), f"{metric} against time", f"time in {unit}", metric)
    legend = "".join(
        f"<li>{_swatch(place)}{escape(_legend(compared, group))}</li>" for place, group in enumerate(compared.groups)
    )
    unfinished = any(run.state != "done" for group in compared.groups for run in group.runs)
    thin = "; thin lines: unfinished runs" if unfinished else ""
    return (
        f'<ul class="legend">{legend}</ul>\n<div class="charts">\n'
        f"<figure><figcaption>{escape(metric)} against documents seen</figcaption>\n{documents}</figure>\n"
        f"<figure><figcaption>{escape(metric)} against time</figcaption>\n{time}</figure>\n</div>\n"
        f'<p class="quiet">{_CAPTION}{thin}.</p>'
    )


def _legend(compared, group):
    pairs = [f"{key}={text(value)}" for key, value in group.values.items()]
    return f"{' '.join(pairs) or group.label} (n = {len(group.counted)})"


def _swatch(place):
    color, dash = style(place)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<svg viewBox="0 0 30 10" aria-hidden="true"><path d="M0 5H30" stroke="{color}" stroke-width="3"{dashed}/>'
        "</svg>"
    )


def _groups(compared):
    write = terminal.writer(compared)
    word = terminal.best_word(compared.metric)
    header = [*compared.keys, "n seeds", "n final mean", "n ± std", f"n {word} mean", "n ± std"]
    rows = []
    for place, group in enumerate(compared.groups):
        numbers = [str(len(group.counted)), *map(write, (*group.final, *group.best))]
        cells = [*(f" {text(value)}" for value in group.values.values()), *(f"n {number}" for number in numbers)]
        rows.append((_swatch(place), cells))
    return (
        f"<h2>Final and {word} {escape(compared.metric)}</h2>\n{_table(header, rows)}\n"
        f'<p class="quiet">{escape(terminal.definitions(compared))}</p>'
    )


def _verdicts(compared):
    if not compared.comparisons:
        return "<p>Nothing to compare: one configuration has finished runs.</p>"
    write = terminal.writer(compared)
    header = ["higher", "lower", "n seeds", "n difference", "n t", "n p", "n p adjusted", "verdict"]
    rows = []
    for c in compared.comparisons:
        p = "-" if c.p is None else f"{c.p:.3g}"
        t = "-" if c.t is None else f"{c.t:.2f}"
        counts = f"{c.counts[0]} and {c.counts[1]}"
        numbers = [counts, f"+{write(c.difference)}", t, p, terminal.p_value(c)]
        labels = [f" {compared.groups[place].label}" for place in (c.first, c.second)]
        rows.append(("", [*labels, *(f"n {number}" for number in numbers), f" {terminal.verdict(c)}"]))
    return f"<h2>Differences</h2>\n<p>{escape(terminal.question(compared))}</p>\n{_table(header, rows)}"


def _left_out(compared):
    if not compared.left_out:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in terminal.left_out(compared))
    return f"<h2>Runs in no mean</h2>\n<ul>{items}</ul>"


def _runs(compared):
    rows = []
    for place, group in enumerate(compared.groups):
        values = [f" {text(value)}" for value in group.values.values()]
        for run in group.runs:
            rows.append((_swatch(place), [f" {run.name}", *values, *_numbers(run, compared)]))
    header = ["run", *compared.keys, "n seed", "state", "n step", "n final", f"n {terminal.best_word(compared.metric)}"]
    return f"<details><summary>Every run ({len(rows)})</summary>\n{_table(header, rows)}</details>"


def _numbers(run: Run, compared):
    found = run.values(compared.metric)
    write = terminal.writer(compared)
    reached = (write(final(found)), write(best(found))) if found else ("-", "-")
    seed = run.config.get("seed", "-")
    return [f"n {seed}", f" {run.state}", f"n {run.step}", *(f"n {number}" for number in reached)]


def _common(compared):
    rows = [("", [f" {key}", f" {text(value)}"]) for key, value in compared.common.items()]
    return f"<details><summary>Configuration shared by all</summary>\n{_table(['key', 'value'], rows)}</details>"


def _table(header, rows):
    """header and cells that begin with `n ` are numbers, to the right; others of rows begin with a space."""
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, mark if i == 0 else "") for i, cell in enumerate(cells)) + "</tr>\n"
        for mark, cells in rows
    )
    head = "".join(_cell("th", name if name.startswith("n ") else f" {name}", "") for name in header)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(tag, field, mark):
    kind, _, shown = field.partition(" ")
    side = ' class="n"' if kind == "n" else ""
    scope = ' scope="col"' if tag == "th" else ""
    return f"<{tag}{side}{scope}>{mark}{escape(shown)}</{tag}>"
