"""Text of figures, broken into lines by the width of its letters."""

from __future__ import annotations

import functools
import re

from pgtoolkit.system.safe_text import legible

FONT_SIZE = 8
"""Of all text of a figure, in points."""

LINE_HEIGHT = 0.14
"""Of a line of text with its distance to the next, in inches."""


def wrapped(text: str, inches: float) -> str:
    """Return the text in lines that are not wider, broken at spaces, and long words behind marks
    such as /."""
    lines: list[str] = []
    for word in legible(text).split():
        if lines and width(f"{lines[-1]} {word}") <= inches:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        pieces = [word] if width(word) <= inches else re.findall(r"[^/._-]{1,16}[/._-]*|.", word)
        for piece in pieces:
            if lines[-1] and width(lines[-1] + piece) > inches:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


@functools.lru_cache(maxsize=4096)
def width(text: str) -> float:
    """Return the width of a line of text in a figure, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    points, _, _ = text_to_path.get_text_width_height_descent(
        text, FontProperties(size=FONT_SIZE), False
    )
    return points / 72
