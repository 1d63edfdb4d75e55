"""What other trainers call our keys, and the other tables of docs/ that pgtoolkit reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pgtoolkit.config.files import docs_page

_CODE = "`([^`]+)`"


def table_rows(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (heads, cells) for every row of the tables in a page of docs/."""
    heads = None
    before = ""
    for line in docs_page(page).splitlines():
        if re.fullmatch(r"\|[-|]+\|", line):
            heads = _cells(before)
        elif line.startswith("|") and heads is not None:
            yield heads, _cells(line)
        elif not line.startswith("|"):
            heads = None
        before = line


def keys_called(name: str) -> list[str]:
    """Return our keys for another trainer's key, if its value may be typed there as it is.

    name: with or without the groups of that trainer: `beta`, `actor_rollout_ref.rollout.n`.
    """
    leaf = name.rpartition(".")[2]
    for heads, row in table_rows("losses.md"):
        if heads[0] == "here" and heads[1].startswith("TRL"):
            keys = [code for code in re.findall(_CODE, row[0]) if "." in code]
            theirs = {code.rpartition(".")[2] for cell in row[1:] for code in _names_alone(cell)}
            if leaf in theirs:
                ending = leaf.rpartition("_")[2]  # clip_ratio_low is one of two, epsilon both
                return [key for key in keys if key.endswith(f"_{ending}")] or keys
    return []


def is_known_elsewhere(name: str) -> bool:
    """Return whether the tables of other trainers' keys have this one, such as `num_generations`."""
    leaf = name.rpartition(".")[2]
    rows = [row for heads, row in table_rows("losses.md") if heads[0] == "here"]
    codes = [code for row in rows for cell in row[1:] for code in re.findall(_CODE, cell)]
    return leaf in {code.rpartition(".")[2] for code in codes}


def _names_alone(cell: str) -> list[str]:
    """Return the names in a cell such as "`a`, `b` with `c`" that mean the same as our key: a and b."""
    parts = cell.partition(" with ")[0].split(", ")
    names = [re.fullmatch(_CODE, part) for part in parts]
    return [name[1] for name in names if name] if all(names) else []


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).strip() for cell in cells]
