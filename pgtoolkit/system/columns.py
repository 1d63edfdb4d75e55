"""Rows of texts as lines whose columns stand below each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def aligned(rows: Sequence[Sequence[str]], room: float = inf, shrinking: int = 1) -> list[str]:
    """Return each row as a line; where they take more than `room`, the longest of the first `shrinking` are cut.

    They are cut in their middle: paths, and lists of values, often differ at their end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > room and max(widths[:shrinking], default=0) > 4:
        widths[widths.index(max(widths[:shrinking]))] -= 1
    return ["  ".join(map(_cut, row, widths)).rstrip() for row in rows]


def _cut(field: str, width: int) -> str:
    end = (width - 1) // 2
    shown = field if len(field) <= width else f"{field[: width - 1 - end]}…{field[len(field) - end :]}"
    return shown.ljust(width)
