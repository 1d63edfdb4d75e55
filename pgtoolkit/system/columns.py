"""Rows of texts as lines with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def aligned(
    rows: Sequence[Sequence[str]], room: float = inf, fewest: Sequence[int] = ()
) -> list[str]:
    """Return each row as a line. Where lines are longer than `room`, cells of the first columns are
    shortened; no other cell ever is, since half a number is another number.

    fewest: of each of these first columns, the width that it keeps.
    Cells are cut in their middle, since paths and lists of values often differ at their end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > room:
        wider = [place for place, least in enumerate(fewest) if widths[place] > least]
        if not wider:
            break
        widths[max(wider, key=widths.__getitem__)] -= 1
    return ["  ".join(map(_cut, row, widths)).rstrip() for row in rows]


def _cut(field: str, width: int) -> str:
    """Return the cell in exactly this width, with an ellipsis in its middle if it is longer."""
    if len(field) > width:
        end = (width - 1) // 2
        field = f"{field[: width - 1 - end]}…{field[len(field) - end :]}"
    return field.ljust(width)
