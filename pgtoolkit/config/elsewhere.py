"""The names of our keys in other trainers, and other tables of docs/, as they are read."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pgtoolkit.config.files import docs_page

_CODE = "`([^`]+)`"

NONE = "–"  # noqa: RUF001
"""An empty cell of a table."""


@dataclass(frozen=True)
class Theirs:
    """A row of docs/trl_and_verl.md: keys of another trainer with the same meaning here.

    names: theirs, with sections if these are needed to tell them apart. defaults: theirs, as YAML:
    one for all names, one for each, or none. here: our keys with words between them, or NONE.
    remark: what differs, or why there is none.
    """

    trainer: str
    names: tuple[str, ...]
    defaults: tuple[str, ...]
    here: str
    remark: str

    @property
    def keys(self) -> list[str]:
        """Our keys if they take the same value, which is so if there are no words between them;
        else empty."""
        parts = [re.fullmatch(_CODE, part) for part in self.here.split(", ")]
        return [part[1] for part in parts if part and "=" not in part[1]] if all(parts) else []

    def sentence(self, name: str) -> str:
        """Return a sentence on what a key of theirs is here."""
        if self.here == NONE:
            return f"{self.trainer}'s {name} has no equal here: {self.remark}."
        remark = "" if not self.remark else f" ({self.remark})"
        return f"{self.trainer}'s {name} is here {self.here}{remark}."


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


@functools.cache
def rows_of_trainers() -> tuple[Theirs, ...]:
    """Return every row of docs/trl_and_verl.md."""
    return tuple(
        Theirs(
            trainer=heads[0],
            names=tuple(re.findall(_CODE, row[0])),
            defaults=tuple(re.findall(_CODE, row[1])),
            here=row[2],
            remark=row[3],
        )
        for heads, row in table_rows("trl_and_verl.md")
    )


def known_as(name: str, trainer: str | None = None) -> list[tuple[str, Theirs]]:
    """Return (their name, row) for another trainer's key, with or without its sections; a section
    stands for its keys.

    Of several rows, those that share the most sections with the name are returned:
    `val_kwargs.top_k` is not `rollout.top_k`.
    """
    while name:
        matching = [
            (theirs, row)
            for row in rows_of_trainers()
            if trainer in (None, row.trainer)
            for theirs in row.names
            if name == theirs or name.endswith(f".{theirs}") or theirs.endswith(f".{name}")
        ]
        if matching:
            shared = [min(len(theirs), len(name)) for theirs, _ in matching]
            return [
                pair for pair, length in zip(matching, shared, strict=True) if length == max(shared)
            ]
        name = name.rpartition(".")[0]
    return []


def keys_called(name: str) -> list[str]:
    """Return our keys for another trainer's key, if they take the same value.

    name: with or without the sections of that trainer: `beta`, `actor_rollout_ref.rollout.n`.
    """
    keys = list(dict.fromkeys(key for _, row in known_as(name) for key in row.keys))
    if "." not in name:  # `lr` alone is the policy's, not the critic's
        keys = [key for key in keys if not key.startswith("critic.")] or keys
    # clip_ratio_low is one of two keys, and epsilon is both.
    ending = name.rpartition(".")[2].rpartition("_")[2]
    return [key for key in keys if key.endswith(f"_{ending}")] or keys


def keys_mentioned(name: str, group: str) -> list[str]:
    """Return our keys of a group that the rows on another trainer's key mention."""
    mentioned = [key for _, row in known_as(name) for key in re.findall(_CODE, row.here)]
    return [
        key for key in dict.fromkeys(mentioned) if key.startswith(f"{group}.") and "=" not in key
    ]


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).strip() for cell in cells]
