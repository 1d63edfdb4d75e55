"""The tables of docs/ that are written from declarations, each at its mark in a page.

A mark is a pair of comments, `<!-- NAME -->` and `<!-- end -->`, with the table between them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from pgtoolkit.config.option_tables import OptionTable, option_tables
from pgtoolkit.config.rules.table import TABLE as RULES
from pgtoolkit.config.trainer_keys import NONE, Theirs, flat
from pgtoolkit.config.trainer_keys import tables as tables_of_trainers
from pgtoolkit.config.word import Word
from pgtoolkit.config.words import HYDRA, OF_CODE, OF_EQUATIONS, TAGS
from pgtoolkit.config.words_of_files import (
    COLUMNS,
    FILES,
    KEYS_OF_SETS,
    OF_CHECKPOINTS,
    OF_COMPLETIONS,
    PARAMETERS,
    PARAMETERS_OF_BATCHES,
    PARAMETERS_OF_LOSSES,
    PARAMETERS_OF_VERL,
)
from pgtoolkit.errors import ExitStatus
from pgtoolkit.runs.declared_metrics import TABLES as METRICS_BY_TABLE
from pgtoolkit.runs.metric import Metric
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import text
from pgtoolkit.tracking.progress import shown_as

Table = list[Sequence[str]]
"""Rows of cells; the first row has the heads of the columns."""


@functools.cache
def tables() -> dict[str, Table]:
    """Return every table by its mark."""
    return {
        "words of the equations": words("word", OF_EQUATIONS),
        "words of the code": words("word", OF_CODE),
        "files of a run": words("`file`", FILES),
        "files of a checkpoint": words("`file`", OF_CHECKPOINTS),
        "columns of completions": words("`column`", OF_COMPLETIONS),
        "tags in MLflow": words("`tag`", TAGS),
        "columns of rollouts": words("`field`", COLUMNS),
        "parameters": words("`parameter`", PARAMETERS),
        "parameters of batches": words("`parameter`", PARAMETERS_OF_BATCHES),
        "parameters of verl": words("`parameter`", PARAMETERS_OF_VERL),
        "parameters of losses": words("`parameter`", PARAMETERS_OF_LOSSES),
        "keys of a set": words("`key of a set`", KEYS_OF_SETS),
        "keys of Hydra": words("`key`", HYDRA),
        **{name: options(table) for name, table in option_tables().items()},
        "exit statuses": exit_statuses(),
        "line of a step": line_of_step(),
        **{name: metrics(group) for name, group in METRICS_BY_TABLE.items()},
        **{trainer: keys_of_trainer(trainer) for trainer in tables_of_trainers()},
        **{f"words of {trainer}": words_of_trainer(trainer) for trainer in tables_of_trainers()},
    }


def filled(page: str) -> str:
    """Return the text of a page of docs/ with its tables."""
    for name, table in tables().items():
        begin = f"<!-- {name} -->\n"
        before, mark, rest = page.partition(begin)
        if mark:
            _, end, after = rest.partition("<!-- end -->")
            page = before + begin + as_text(table) + end + after
    return page


def as_text(table: Table) -> str:
    """Return a table as Markdown, without the columns that are empty in every row."""
    heads, *rows = table
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    lines = [_line(heads[place] for place in kept), f"|{'---|' * len(kept)}"]
    lines += [_line(row[place] for place in kept) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    line = " | ".join(cell.replace("|", "\\|") for cell in cells)
    line = re.sub(r"arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", line)
    return re.sub(r"(?<=\|) +(?=\|)", " ", f"| {line} |")


def _link(see: str) -> str:
    """Return a link to a section of a page; empty without one."""
    return f" ([{see.partition('#')[0]}]({see}))" if see else ""


def words(head: str, declared: Iterable[Word]) -> Table:
    """Return a table of words. head: that of their column, in backticks if the words are code."""
    mark = "`" if head.startswith("`") else ""
    rows = [
        (f"{mark}{word.name}{mark}", word.type, word.help + _link(word.see)) for word in declared
    ]
    return [(head.strip("`"), "type", "is"), *rows]


def options(table: OptionTable) -> Table:
    """Return a table on the options of a group."""
    rows = [
        (", ".join(f"`{setting}`" for setting in settings), *(cell or NONE for cell in cells))
        for settings, cells in table.rows
    ]
    return [(f"`{table.group}=`", *table.heads), *rows]


def rules() -> Table:
    """Return the rules that compare settings; those of one reason share a row where they have the
    same condition, or need the same."""
    needs: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        needs.setdefault((rule.when, rule.because), []).append(f"`{rule.needs}`")
    conditions: dict[tuple[str, str], list[str]] = {}
    for (when, because), needed in needs.items():
        conditions.setdefault((" and ".join(needed), because), []).append(f"`{when}`")
    rows = [
        ("; or ".join(cases), needed, because) for (needed, because), cases in conditions.items()
    ]
    return [("where", "is needed", "since"), *rows]


def exit_statuses() -> Table:
    """Return the exit statuses in the order of their numbers."""
    rows = [(str(status.value), status.meaning, status.in_a_script) for status in ExitStatus]
    return [("exit status", "meaning", "in a script"), *rows]


def metrics(group: Iterable[Metric]) -> Table:
    """Return the metrics of one table of docs/. What all of them need stands above the table."""
    group = list(group)
    of_all = {metric.measured() for metric in group}
    heads = ("name", "what it is", "formula", "over", "measured", "healthy")
    rows = [
        (
            f"`{metric.name}`",
            metric.help + _link(metric.see),
            metric.formula,
            metric.over,
            metric.measured() if len(of_all) > 1 else "",
            metric.healthy_in_words(),
        )
        for metric in group
    ]
    return [heads, *rows]


def line_of_step() -> Table:
    """Return the words on the line that a run prints for each step."""
    rows = [(f"`{word}`", f"`{name}`" if name else meaning) for word, name, meaning in shown_as()]
    return [("on the line", "what it is"), *rows]


def words_of_trainer(trainer: str) -> Table:
    """Return the words that the conditions of a trainer's table use."""
    words = tables_of_trainers()[trainer].content["words"]
    return [("word", "is"), *((f"`{word}`", f"`{formula}`") for word, formula in words.items())]


def keys_of_trainer(trainer: str) -> Table:
    """Return the keys of another trainer: those with an equal here, then those without, by the
    reason. A key that is told with another one stands in its row."""
    table = tables_of_trainers()[trainer]
    told_with: dict[str, list[Theirs]] = {}
    for name in table.content["keys"]:
        row = table.rows[name]
        told_with.setdefault(row.see or name, []).append(row)
    rows = [_row_of_theirs(told_with[name]) for name in told_with]
    for block in table.content["none"]:
        rows.append((_without_equal(block, table.rows), "", NONE, block["reason"]))
    return [(trainer, "default there", "here", "remark"), *rows]


def _row_of_theirs(rows: list[Theirs]) -> Sequence[str]:
    first = next(row for row in rows if not row.see)
    together = [first, *(row for row in rows if row.see)]
    names = ", ".join(_names([_short(row.name) for row in together]))
    defaults = ", ".join(f"`{text(row.default)}`" for row in together)
    return names, defaults, first.here, first.remark


def _names(names: list[str]) -> list[str]:
    """Return keys as code, without their section where it is that of the first."""
    section = names[0].rpartition(".")[0]
    return [f"`{names[0]}`", *(f"`{name.removeprefix(f'{section}.')}`" for name in names[1:])]


def _without_equal(block: JsonObject, of_all: Iterable[str]) -> str:
    """Return the names of keys without an equal, of all of a trainer's keys.

    A section of which all keys are among them stands for these; sections that have the same keys
    stand together.
    """
    names = [_short(name) for name, _ in flat(block.get("keys", {}))]
    others = {_short(name) for name in of_all}.difference(names)
    incomplete = others.union(section for name in others for section in _sections(name))
    parts = [f"`{_short(section)}`" for section in block.get("sections", [])]
    leaves: dict[str, list[str]] = {}
    for name in names:
        complete = [section for section in _sections(name) if section not in incomplete]
        if complete:
            parts.append(f"`{complete[0]}.*`")
        else:
            section, _, leaf = name.rpartition(".")
            leaves.setdefault(section, []).append(leaf)
    together: dict[tuple[str, ...], list[str]] = {}
    for section, of in leaves.items():
        together.setdefault(tuple(of), []).append(section)
    for of, sections in together.items():
        if "" in sections:
            parts += [f"`{name}`" for name in of]
        named = [section for section in sections if section]
        if len(of) == len(named) == 1:
            parts.append(f"`{named[0]}.{of[0]}`")
        elif named:
            listed = ", ".join(f"`{section}`" for section in named)
            parts.append(f"{listed}: {', '.join(of)}")
    return "; ".join(dict.fromkeys(parts))


def _sections(name: str) -> list[str]:
    """Return the sections that a key lies in, the outermost first."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _short(name: str) -> str:
    """Return a key's name as conditions have it, without the section that most of verl's have."""
    return name.removeprefix("actor_rollout_ref.")
