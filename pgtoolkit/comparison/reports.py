"""The comparison as files: tables (CSV, LaTeX), one self-contained HTML page, JSON, and its
figure."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from pgtoolkit.comparison import text_report
from pgtoolkit.comparison.beside import beside, more_than_the_axis
from pgtoolkit.comparison.compared_runs import Compared, RunGroup, learned
from pgtoolkit.comparison.figure import picture
from pgtoolkit.comparison.measures import AXES, reached
from pgtoolkit.comparison.no_verdict import without_verdict
from pgtoolkit.comparison.pairs import of_blocks
from pgtoolkit.comparison.seed_noise import as_numbers, noise_of, noise_sentences
from pgtoolkit.comparison.statistics import (
    Comparison,
    mean_and_std,
    mean_interval,
    paired_blocks,
)
from pgtoolkit.runs.series import best
from pgtoolkit.system.pictures import format_of, saying_why_not_drawn
from pgtoolkit.system.report import plural, text
from pgtoolkit.system.safe_text import escaped, legible

_TABLES = 20
"""The number of configurations, the best ones, for which the page has a table of differences."""


def write(
    compared: Compared, kind: str, path: Path, command: str, panels: str | None = None
) -> str:
    """Write the comparison into a file.

    kind: html, csv, runs_csv, latex, or figure, whose format the name of its file says.
    command: shown as the one that made the file. panels: of the figure, see `panels_named`.
    Returns why a picture could not be drawn; "" for all else.
    """
    problems = []
    if kind == "figure":
        with saying_why_not_drawn(path, problems.append):
            path.write_bytes(picture(compared, format_of(path), panels))
    elif kind in ("csv", "runs_csv"):
        rows = configuration_rows(compared) if kind == "csv" else run_rows(compared)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    elif kind == "latex":
        path.write_text(_latex(compared, command), encoding="utf-8")
    else:
        svg = ""
        with saying_why_not_drawn(path, problems.append):
            svg = picture(compared, "svg", panels).decode()
        path.write_text(_render_html(compared, command, svg, problems), encoding="utf-8")
    return "".join(problems)


@dataclass(frozen=True)
class ReportRow:
    """A configuration with its tested values and how they differ from those of its base.

    group: with the runs that are paired with those of the base alone, where they are. The numbers
        of the row are of these.
    mean: None without a counted run. interval, std: None with fewer than two.
    num_reached: the runs that reached the threshold, None without one.
    pair: the planned comparison with its base, None for a base itself.
    """

    group: RunGroup
    mean: float | None
    interval: tuple[float, float] | None
    std: float | None
    pair: Comparison | None
    verdict: str
    num_reached: int | None

    @property
    def bound(self) -> str:
        """Return "≥" if a run never reached the threshold, so that the mean would be higher."""
        is_bound = self.num_reached is not None and self.num_reached < len(self.group.counted)
        return "≥" if is_bound else ""


def configurations(compared: Compared) -> list[ReportRow]:
    """Return a row for each configuration, in their order."""
    pairs = {pair.second: pair for pairs in text_report.planned(compared) for pair in pairs}
    bases = {pair.first for pair in pairs.values()}
    rows = []
    samples = compared.comparisons.samples
    for place, group in enumerate(compared.groups):
        sample = samples[place]
        pair = pairs.get(place)
        if pair is not None and pair.paired:
            blocks = paired_blocks(samples[pair.first], sample)
            group = of_blocks(compared, group, blocks)
            sample = sample.only(blocks)
        mean, std = mean_and_std(compared.tested_values(group))
        interval = mean_interval(sample)
        if pair is not None:
            verdict = text_report.verdict(pair, compared.sign, compared.margin)
        else:
            verdict = "base" if place in bases else "not compared"
        num_reached = compared.arrived(group) if compared.by_documents else None
        rows.append(ReportRow(group, mean, interval, std, pair, verdict, num_reached))
    return rows


def configuration_rows(compared: Compared) -> list[list[object]]:
    """Return the header and a row for each configuration, numbers in full."""
    keys: list[object] = [*compared.keys]
    tested = ["n", "reached", "measured", "mean", "mean_bound", "mean_low", "mean_high", "std"]
    difference = [
        "against",
        "against_mean",
        "difference",
        "difference_bound",
        "difference_low",
        "difference_high",
        "p",
        "p_adjusted",
        "p_equal",
    ]
    rows: list[list[object]] = [["label", *keys, *tested, *difference, "verdict"]]
    for row in configurations(compared):
        pair = row.pair
        values = [text(value) for value in row.group.values.values()]
        cells: list[object] = [row.group.label, *values, len(row.group.counted), row.num_reached]
        cells += [compared.measured, row.mean, row.bound or None]
        cells += [*(row.interval or (None, None)), row.std]
        if pair is None:
            cells += [None] * len(difference)
        elif not pair.is_common:
            cells += [compared.groups[pair.first].label, *[None] * (len(difference) - 1)]
        else:
            cells += [
                compared.groups[pair.first].label,
                pair.means[0],
                pair.difference,
                text_report.bound_of(compared, pair) or None,
                *(pair.interval or (None, None)),
            ]
            cells += [pair.p, pair.adjusted_p, pair.equal_p]
        rows.append([*cells, row.verdict])
    return rows


def _latex(compared: Compared, command: str) -> str:
    """Return the configurations as a table in LaTeX: the columns of the text that fit a page.

    Comments above the table define its numbers, and say where the others are.
    """
    write = (
        text_report.short_count if compared.by_documents else text_report.number_format(compared)
    )
    keys = text_report.differing_keys(compared)
    every_word_tells = all(group.telling_words == group.words for group in compared.groups)
    column_per_key = len(keys) > 1 and every_word_tells

    names = keys if column_per_key else ["configuration"]
    counted = "reached" if compared.by_documents else "n"
    equal = [] if compared.margin is None else ["equal"]
    configured = configurations(compared)
    bases = {row.pair.first for row in configured if row.pair is not None}
    against = ["against"] if len(bases) > 1 else []
    difference_columns = [*against, "difference", "interval", "p", *equal]
    rows = [[*names, counted, "mean", *difference_columns, "verdict"]]
    for row in configured:
        words = dict(zip(row.group.values, row.group.words, strict=True))
        cells = [words[key] for key in keys] if column_per_key else [row.group.label]
        count = str(len(row.group.counted))
        if row.num_reached is not None:
            count = f"{row.num_reached} of {count}"
        cells += [count, row.bound + write(row.mean)]
        pair = row.pair
        if pair is None or not pair.is_common:
            cells += ["--"] * len(difference_columns)
        else:
            cells += [compared.groups[pair.first].label for _ in against]
            bound = text_report.bound_of(compared, pair)
            difference, interval = text_report.difference_and_interval(pair, write, bound)
            cells += [difference, interval if pair.interval else "--"]
            cells.append(text_report.p_value(pair.adjusted_p) or "--")
            cells += [text_report.p_value(pair.equal_p) or "--" for _ in equal]
        rows.append([*cells, row.verdict])
    pairs = [pair for of_base in text_report.planned(compared) for pair in of_base]
    excluded = text_report.left_out(compared)
    if excluded:
        excluded = [f"{plural(len(excluded), 'run')} excluded from averages:", *excluded]
    sentences = [
        f"Made by {command}",
        *text_report.definition_of_tested_mean(compared),
        text_report.question(compared, pairs),
        *more_than_the_axis(compared, pairs),
        *without_verdict(compared, pairs),
        *text_report.of_shared_runs(compared, pairs),
        *text_report.worth_of_intervals(pairs),
        *([text_report.UNKNOWN] if any(row[-1] == "unknown" for row in rows) else []),
        *text_report.without_noise(compared, pairs),
        *excluded,
        "seeds, better and test of each difference: pgtk compare without --latex prints them.",
    ]
    comments = [f"% {legible(line)}" for sentence in sentences for line in sentence.splitlines()]
    aligned = ["rr", "l" * len(against), "r" * (3 + len(equal)), "l"]
    table = _tex_table(rows, "l" * len(names) + "".join(aligned))
    return "\n".join([*comments, "% \\usepackage{booktabs}", *table]) + "\n"


def _tex_table(rows: list[list[str]], columns: str) -> list[str]:
    """Return the lines of a table in LaTeX; its first row is the header. columns: how each column
    is aligned, such as `lr`."""
    header, *body = [_tex_row(cells) for cells in rows]
    return [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        header,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"$\sim$",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
}
_TEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "±": r"$\pm$",
    "-": "-",
}
"""What LaTeX needs in the place of a character."""


def _tex_row(cells: list[str]) -> str:
    return " & ".join(_tex(cell) for cell in cells) + r" \\"


def _tex(cell: str) -> str:
    """Return the text for LaTeX: its special characters escaped, and the minus of a number as a
    minus sign."""
    escaped_text = "".join(_TEX.get(character, character) for character in legible(cell))
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped_text)


def as_json(compared: Compared) -> str:
    """Return all that a report shows as one JSON object, numbers in full."""
    pairs = [*compared.comparisons]
    report = {
        "metric": compared.metric,
        "measured": compared.measured,
        "threshold": compared.goal.threshold,
        "keys": compared.keys,
        "following": compared.following,
        "configurations": [_json_row(compared, row) for row in configurations(compared)],
        "pairs": [_json_pair(compared, pair) for pair in pairs],
        "without_verdict": without_verdict(compared, pairs),
        "seed_noise": as_numbers(noise_of(compared)),
        "excluded": [{"run": str(run.path), "why": why} for run, why in compared.left_out],
        "notes": compared.notes,
        "common": {key: text(value) for key, value in compared.common.items()},
    }
    return json.dumps(_finite(report), indent=1, ensure_ascii=False)


def _json_row(compared: Compared, row: ReportRow) -> dict[str, object]:
    group = row.group
    return {
        "label": group.label,
        "values": {key: text(value) for key, value in group.values.items()},
        "n": len(group.counted),
        "reached": row.num_reached,
        "mean": row.mean,
        "mean_bound": row.bound or None,
        "interval": row.interval,
        "std": row.std,
        "verdict": row.verdict,
        "runs": [str(run.path) for run in group.counted],
        "of_runs": compared.tested_values(group),
    }


def _json_pair(compared: Compared, pair: Comparison) -> dict[str, object]:
    labels = {
        "first": compared.groups[pair.first].label,
        "second": compared.groups[pair.second].label,
    }
    verdict = text_report.verdict(pair, compared.sign, compared.margin)
    difference = pair.difference if pair.is_common else None
    columns = {**vars(pair), **labels, "difference": difference, "verdict": verdict}
    del columns["improvement"]  # of values, whichever is better
    better = text_report.probability_of_better(pair, compared.sign)
    beside_axis = {
        name: [text(value) for value in values] for name, values in beside(compared, pair).items()
    }
    bound = text_report.bound_of(compared, pair) or None
    return {**columns, "difference_bound": bound, "better": better, "beside": beside_axis}


def _finite(value: object) -> object:
    """Return the value with None in the place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_rows(compared: Compared) -> list[list[object]]:
    """Return the header and a row per run, unfinished ones too.

    A row has the values that vary, the seed, the state, whether the run is in the means, and its
    measures. The columns `documents_to_METRIC_THRESHOLD`, `tokens_to_...` and `seconds_to_...` are
    None where the run has not reached the threshold.
    """
    goal = compared.goal
    to = {axis: f"{AXES[axis]}_to_{goal.metric}_{goal.threshold:g}" for axis in compared.axes}
    mean = f"mean_{goal.metric}"
    final = f"final_{goal.metric}"
    highest = f"best_{goal.metric}"
    rows = []
    for group in compared.groups:
        for run in group.runs:
            row: dict[str, object] = {"run": run.path}
            row |= {key: text(value) for key, value in group.values.items()}
            row |= {key: text(learned(run, key)) for key in compared.over}
            row["seed"] = run.config["seed"]
            row["state"] = run.state
            row["counted"] = "yes" if run in group.counted else "no"
            row["step"] = run.step
            values = run.values(goal.metric)
            if values:
                measures = reached(run, goal)
                row |= {to[axis]: measures.to[axis] for axis in to if axis in measures.to}
                row |= measures.seen
                row |= {mean: measures.mean, final: measures.final, highest: best(values)}
            rows.append(row)
    unreadable = [run for run, _ in compared.left_out if not run.config]
    rows += [{"run": run.path, "state": run.state, "counted": "no"} for run in unreadable]
    columns: list[object] = [
        "run",
        *compared.keys,
        *compared.over,
        "seed",
        "state",
        "counted",
        "step",
    ]
    columns += [*to.values(), mean, final, highest, *AXES]
    return [columns, *([row.get(column) for column in columns] for row in rows)]


def _render_html(compared: Compared, command: str, svg: str, problems: list[str]) -> str:
    """Return the page: all that the terminal shows, the differences of all pairs, every run, and
    the configuration that they share.

    svg: the picture; "" where it could not be drawn. problems: why.
    """
    title = f"{compared.metric} by {' and '.join(compared.keys) or 'seed'}"
    # The text's own colour can be read on light and dark pages.
    svg = svg.replace("#000000", "currentColor")
    lead, parts = html_parts(compared, problems)
    page = Template(
        files("pgtoolkit.comparison").joinpath("report.html").read_text(encoding="utf-8")
    )
    return page.substitute(
        title=escaped(title),
        lead="\n".join(lead),
        chart=svg[svg.find("<svg ") :],
        parts="\n".join(parts),
        command=escaped(command),
    )


def html_parts(compared: Compared, problems: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return what stands on the page before its picture, and after it. problems: as notes."""
    excluded = text_report.left_out(compared)
    runs = [
        [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]
        for row in run_rows(compared)
    ]
    common = [["key", "value"], *([key, text(value)] for key, value in compared.common.items())]
    notes = (
        f"<p><strong>Note:</strong> {escaped(note)}</p>" for note in [*compared.notes, *problems]
    )
    lead = [f"<p>{escaped(text_report.heading(compared))}.</p>", *notes]
    parts = [
        table_as_html(text_report.group_rows(compared)),
        _sentences(text_report.definitions(compared)),
        *_tables_of_differences(compared),
    ]
    if excluded:
        parts += ["<h2>Runs excluded from averages</h2>", _sentences(excluded)]
    parts += [
        f"<details><summary>Every run ({len(runs) - 1})</summary>\n{table_as_html(runs)}</details>",
        "<details><summary>Configuration shared by all</summary>\n"
        f"{table_as_html(common)}</details>",
    ]
    return lead, parts


def _tables_of_differences(compared: Compared) -> list[str]:
    """Return the question, a table for each of the best configurations, and sentences on how to
    read them."""
    parts = []
    shown = []
    for place, group in enumerate(compared.groups[:_TABLES]):
        pairs = compared.comparisons.against(place)
        if pairs:
            table = table_as_html(text_report.difference_rows(compared, pairs))
            title = f"<h3>against {escaped(group.label)} (n = {len(group.counted)})</h3>"
            parts.append(f"{title}\n{table}")
            shown += pairs
    sentences = more_than_the_axis(compared, shown)
    sentences += without_verdict(compared, shown) + text_report.worth(compared, shown)
    sentences += noise_sentences(compared, noise_of(compared))
    question = f"<h2>{escaped(text_report.question(compared, shown))}</h2>"
    return [question, *parts, _sentences(sentences)]


def _sentences(sentences: Sequence[str]) -> str:
    return "\n".join(f'<p class="quiet">{escaped(sentence)}</p>' for sentence in sentences)


def table_as_html(rows: Sequence[Sequence[object]]) -> str:
    """Return a table in HTML; the first row is its header."""
    header, *body = [[escaped("-" if cell is None else str(cell)) for cell in row] for row in rows]
    lines = [f"<tr><th>{'</th><th>'.join(header)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"
