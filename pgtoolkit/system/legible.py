"""Texts that a model wrote, so that they can be shown: nothing in them acts on a terminal or a page."""

from __future__ import annotations

import functools
import unicodedata
from html import escape

_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that are no signs: controls, marks of direction and of other formats, line separators."""

_HARMLESS = "\n\t\u200c\u200d"
"""Of those, line breaks and tabs, and the joiners that Persian, Indic scripts and emoji are written with."""


@functools.cache
def _shown(character: str) -> str:
    acts = character not in _HARMLESS and unicodedata.category(character) in _ACTING
    return f"<U+{ord(character):04X}>" if acts else character


def legible(text: str) -> str:
    """The text with <U+001B> and the like in place of characters that would act on what shows it, or hide in it."""
    return "".join(map(_shown, text))


def escaped(text: str) -> str:
    """The legible text as it stands in an HTML page."""
    return escape(legible(text))


def shortened(text: str, most: int) -> str:
    """Of a text of more than `most` characters the first two thirds of so many and the last, around how many lack."""
    if len(text) <= most:
        return text
    first = 2 * most // 3
    last = most - first
    return f"{text[:first]}\n… {len(text) - most:,} more characters …\n{text[len(text) - last :]}"


def lines_of(text: str, width: int, most: int) -> list[str]:
    """A legible text on lines of so many columns; of more than `most` of them the first ones and the last."""
    lines = [line for part in legible(text).expandtabs(4).split("\n") for line in _cut(part, width)]
    if len(lines) <= most:
        return lines
    last = most // 3
    return [*lines[: most - 1 - last], f"… {len(lines) - most + 1:,} more lines …", *lines[len(lines) - last :]]


def _cut(line: str, width: int) -> list[str]:
    """At any character: a text that was written by a model is shown as it is. Of wide ones each takes two columns."""
    parts, start, columns = [], 0, 0
    for place, character in enumerate(line):
        own = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if columns + own > width:
            parts.append(line[start:place])
            start, columns = place, 0
        columns += own
    return [*parts, line[start:]]
