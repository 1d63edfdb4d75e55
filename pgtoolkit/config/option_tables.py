"""The tables of docs/losses.md on options: their formulas, their sources, and what other trainers
call them; option_tables.yaml has them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class OptionTable:
    """A table on the options of a group.

    heads: of its columns after the first.
    rows: the option, and keys of it that the row holds for, such as ("constant", "divisor=1"), with
        a cell for each head; empty where there is nothing to say.
    """

    group: str
    heads: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@functools.cache
def option_tables() -> dict[str, OptionTable]:
    """Return the tables by their marks in docs/losses.md."""
    file = Path(__file__).with_suffix(".yaml")
    declared = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        name: OptionTable(
            table["group"],
            tuple(table["heads"]),
            tuple((tuple(row.split()), tuple(cells)) for row, cells in table["rows"].items()),
        )
        for name, table in declared.items()
    }


def rows_on(group: str, option: str) -> Iterator[tuple[str, str]]:
    """Yield (head, cell) of each row on an option; the head names the keys that it holds for."""
    for table in option_tables().values():
        for settings, cells in table.rows:
            if (table.group, settings[0]) != (group, option):
                continue
            condition = "".join(f", with {setting}" for setting in settings[1:])
            for head, cell in zip(table.heads, cells, strict=True):
                if cell:
                    yield head + condition, cell
