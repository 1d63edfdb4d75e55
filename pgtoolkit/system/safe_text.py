"""Makes texts that a model or a stranger wrote safe to show: nothing in them acts on a terminal or
a page."""

from __future__ import annotations

import functools
import unicodedata
from html import escape

_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters without a glyph: controls, marks of direction and format, line
separators."""

_HARMLESS = "\n\t\u200c\u200d"
"""Characters of these categories that stay: line breaks, tabs, and the joiners of Persian, Indic
scripts and emoji."""


@functools.cache
def _shown(character: str) -> str:
    acts = character not in _HARMLESS and unicodedata.category(character) in _ACTING
    return f"<U+{ord(character):04X}>" if acts else character


def legible(text: str) -> str:
    """Return the text with <U+001B> and the like in the place of characters that act on a terminal
    or are hidden."""
    return "".join(map(_shown, text))


def escaped(text: str) -> str:
    """Return the legible text, escaped for HTML."""
    return escape(legible(text))


def shortened(text: str, limit: int) -> str:
    """Shorten a long text to its beginning and end, with the number of characters left out between
    them.

    limit: characters to keep, two thirds of them from the beginning.
    """
    if len(text) <= limit:
        return text
    first = 2 * limit // 3
    last = limit - first
    return f"{text[:first]}\n… {len(text) - limit:,} more characters …\n{text[len(text) - last :]}"


def lines_of(text: str, width: int, limit: int) -> list[str]:
    """Return a legible text as at most `limit` lines of `width` columns; lines are left out before
    the last third."""
    lines = [line for part in legible(text).expandtabs(4).split("\n") for line in _cut(part, width)]
    if len(lines) <= limit:
        return lines
    last = limit // 3
    return [
        *lines[: limit - 1 - last],
        f"… {len(lines) - limit + 1:,} more lines …",
        *lines[len(lines) - last :],
    ]


def _cut(line: str, width: int) -> list[str]:
    """Cut a line into parts of at most `width` columns.

    The cut may be at any character, not only at spaces, so that nothing of a model's text is
    changed. A wide character has two columns.
    """
    parts = []
    start = 0
    columns = 0
    for place, character in enumerate(line):
        character_width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if columns + character_width > width:
            parts.append(line[start:place])
            start = place
            columns = 0
        columns += character_width
    return [*parts, line[start:]]
