"""The comparison as files: a table of its configurations (CSV, LaTeX) or runs (CSV), a page that needs nothing else,
all of it as JSON, and a picture (PNG, SVG, PDF)."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from pgtoolkit.comparison import text_report
from pgtoolkit.comparison.charts import picture
from pgtoolkit.comparison.compared import Compared, Group, learned
from pgtoolkit.comparison.measures import AXES, reached
from pgtoolkit.comparison.statistics import Comparison, mean_and_std, mean_interval
from pgtoolkit.runs.series import best
from pgtoolkit.system.legible import escaped, legible
from pgtoolkit.system.report import text

_TABLES = 20
"""Of so many configurations, the best, the page has the differences from all that are behind them."""


def write(compared: Compared, kind: str, path: Path, command: str) -> None:
    """Write one file; kind: html, csv, runs_csv, latex, png, svg or pdf. command: what has made the page."""
    if kind in ("png", "svg", "pdf"):
        path.write_bytes(picture(compared, kind))
    elif kind in ("csv", "runs_csv"):
        rows = configuration_rows(compared) if kind == "csv" else run_rows(compared)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    elif kind == "latex":
        path.write_text(_latex(compared, command), encoding="utf-8")
    else:
        path.write_text(_render_html(compared, command), encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A configuration with what it reached and how it differs from its base.

    mean, interval: of what is tested, None where no run counts, or a single one. pair: the planned comparison with its
    base, None of a base itself.
    """

    group: Group
    mean: float | None
    interval: tuple[float, float] | None
    std: float | None
    pair: Comparison | None
    verdict: str


def configurations(compared: Compared) -> list[Row]:
    """Return a row for each configuration, in their order."""
    pairs = {pair.second: pair for of_base in text_report.planned(compared) for pair in of_base}
    rows = []
    for place, group in enumerate(compared.groups):
        mean, std = mean_and_std(compared.tested(group))
        pair = pairs.get(place)
        margin = compared.comparisons.margin
        verdict = text_report.verdict(pair, compared.sign, margin) if pair else "base" if pairs else "not compared"
        rows.append(Row(group, mean, mean_interval(compared.comparisons.samples[place]), std, pair, verdict))
    return rows


def configuration_rows(compared: Compared) -> list[list[object]]:
    """Return the header and a row for each configuration, numbers in full."""
    columns: list[object] = [
        "label",
        *compared.keys,
        "n",
        "measured",
        "mean",
        "mean_low",
        "mean_high",
        "std",
        "against",
    ]
    columns += ["difference", "difference_low", "difference_high", "p", "p_adjusted", "p_equal", "verdict"]
    rows: list[list[object]] = [columns]
    for row in configurations(compared):
        pair = row.pair
        of_pair: list[object] = [None] * 7
        if pair is not None:
            between = pair.interval or (None, None)
            against = compared.groups[pair.first].label
            of_pair = [against, pair.difference, *between, pair.p, pair.adjusted_p, pair.equal_p]
        values = [text(value) for value in row.group.values.values()]
        reached = [compared.measured, row.mean, *(row.interval or (None, None)), row.std]
        rows.append([row.group.label, *values, len(row.group.counted), *reached, *of_pair, row.verdict])
    return rows


def _latex(compared: Compared, command: str) -> str:
    """The same as a table: means with their intervals, differences with theirs, adjusted p, verdicts."""
    write = text_report.whole if compared.by_documents else text_report.number_format(compared)
    keys = [key for key in compared.keys if len({repr(group.values[key]) for group in compared.groups}) > 1]
    every_word_tells = all(group.telling_words == group.words for group in compared.groups)
    names = keys if len(keys) > 1 and every_word_tells else ["configuration"]

    def signed(value: float) -> str:
        return f"+{write(value)}" if value > 0 else write(value)

    lines = []
    for row in configurations(compared):
        words = dict(zip(row.group.values, row.group.words, strict=True))
        cells = [words[key] for key in keys] if names == keys else [row.group.label]
        cells += [str(len(row.group.counted)), write(row.mean) + _between(row.interval, write)]
        if row.pair is None:
            cells += ["--", "--", row.verdict]
        else:
            p = row.pair.adjusted_p
            shown = "--" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
            cells += [signed(row.pair.difference) + _between(row.pair.interval, signed), shown, row.verdict]
        lines.append(cells)
    heads = [*names, "n", compared.measured, "difference", "p", "verdict"]
    body = [" & ".join(_tex(cell) for cell in cells) + r" \\" for cells in lines]
    what = [*text_report.definitions(compared), text_report.question(compared)]
    comments = [f"% {legible(line)}" for sentence in [f"Made by {command}", *what] for line in sentence.splitlines()]
    table = [
        r"\begin{tabular}{" + "l" * len(names) + "rrrrl}",
        r"\toprule",
        " & ".join(_tex(head) for head in heads) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join([*comments, "% \\usepackage{booktabs}", *table]) + "\n"


def _between(interval: tuple[float, float] | None, write: Callable[[float], str]) -> str:
    return "" if interval is None else f" [{write(interval[0])}, {write(interval[1])}]"


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
_TEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {"≥": r"$\geq$", "±": r"$\pm$", "-": "-"}


def _tex(cell: str) -> str:
    """Return a text with what LaTeX would take for its own as characters, a number's minus sign as one."""
    shown = "".join(_TEX.get(character, character) for character in legible(cell))
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", shown)


def as_json(compared: Compared) -> str:
    """Return all that a report shows as one JSON object, numbers in full."""
    groups = []
    for row in configurations(compared):
        group = row.group
        groups.append(
            {
                "label": group.label,
                "values": {key: text(value) for key, value in group.values.items()},
                "n": len(group.counted),
                "mean": row.mean,
                "interval": row.interval,
                "std": row.std,
                "verdict": row.verdict,
                "runs": [str(run.path) for run in group.counted],
                "of_runs": compared.tested(group),
            }
        )
    pairs = [
        {
            "first": compared.groups[pair.first].label,
            "second": compared.groups[pair.second].label,
            **{name: value for name, value in vars(pair).items() if name not in ("first", "second")},
            "verdict": text_report.verdict(pair, compared.sign, compared.comparisons.margin),
        }
        for pair in compared.comparisons
    ]
    found = {
        "metric": compared.metric,
        "measured": compared.measured,
        "threshold": compared.goal.threshold,
        "keys": compared.keys,
        "following": compared.following,
        "configurations": groups,
        "pairs": pairs,
        "excluded": [{"run": str(run.path), "why": why} for run, why in compared.left_out],
        "notes": compared.notes,
        "common": {key: text(value) for key, value in compared.common.items()},
    }
    return json.dumps(_finite(found), indent=1, ensure_ascii=False)


def _finite(value: object) -> object:
    """Return the value with null in the place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
