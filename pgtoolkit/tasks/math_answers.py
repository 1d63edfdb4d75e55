"""Answers of mathematics as texts: the part of a completion that answers, the forms that
math-verify reads, and what it does not compare: units, and numbers of another base."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_THOUGHT_END = "</think>"

_BOX = "\\boxed{"


def final_part(completion: str) -> str:
    """Return the part of a completion that answers: what follows its thoughts, and of several lines
    with boxes the last.

    math-verify joins boxes into a set, wherever they stand.
    """
    text = completion.rpartition(_THOUGHT_END)[2]
    boxes = _boxes(text)
    first = len(boxes) - 1
    while first > 0 and "\n" not in text[boxes[first - 1][1] : boxes[first][0]]:
        first -= 1
    if first <= 0:
        return text
    return text[text.rfind("\n", 0, boxes[first][0]) + 1 :]


def last_box(text: str) -> str | None:
    """Return what the last box of a text holds; None without a box."""
    boxes = _boxes(text)
    if not boxes:
        return None
    start, end = boxes[-1]
    return text[start + len(_BOX) : end - 1]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return the place of each box that is closed, from its \\ to behind its last brace."""
    boxes = []
    start = text.find(_BOX)
    while start >= 0:
        depth = 0
        end = start
        for end in range(start + len(_BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                boxes.append((start, end + 1))
                break
        start = text.find(_BOX, end)
    return boxes


_UNITS = {
    "length": {"mm": "0.001", "cm": "0.01", "dm": "0.1", "m": "1", "km": "1000"},
    "mass": {"mg": "0.001", "g": "1", "kg": "1000"},
    "time": {"second": "1", "minute": "60", "hour": "3600", "day": "86400", "week": "604800"},
    "money": {"cent": "0.01", "dollar": "1"},
}
"""Kind of quantity -> its units, each with its size."""

_NAMES = {
    "millimeter": "mm",
    "centimeter": "cm",
    "decimeter": "dm",
    "meter": "m",
    "kilometer": "km",
    "milligram": "mg",
    "gram": "g",
    "kilogram": "kg",
    "sec": "second",
    "min": "minute",
    "hr": "hour",
    "¢": "cent",
}
"""Other names of units."""

_SIZES = {
    name: (dimension, Fraction(size))
    for dimension, units in _UNITS.items()
    for name, size in units.items()
}

_QUANTITY = re.compile(r"(-?)\\?\$?(\d[\d,]*(?:\.\d+)?)\s*([A-Za-z¢]+)\.?")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{([^{}]*)\}|\\[ ,;!]|~")
_BASED = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")


def same_quantity(answer: str, boxed: str | None) -> bool | None:
    """Return whether two texts mean the same number, if each has a unit that is known or a base.

    None where one of them has neither: then only math-verify can tell. It takes no notice of units
    and bases. boxed: what is in the box of a completion.
    """
    if boxed is None:
        return None
    texts = [_plain(last_box(answer) or answer), _plain(boxed)]
    first, second = map(_quantity, texts)
    if first is not None and second is not None:
        return first == second
    numbers = [_number_of_base(text) for text in texts]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return None


def _plain(text: str) -> str:
    """Return a text without dollars around it and without LaTeX around words."""
    text = _TEXT.sub(lambda match: match[1] or " ", text).strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text


def _quantity(text: str) -> tuple[str, Fraction] | None:
    """Return what a number with a unit measures, and how much; None for another text."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    name = match[3].lower() if len(match[3]) > 2 else match[3]
    singular = name.removesuffix("s") if len(name) > 2 else name
    size = _SIZES.get(_NAMES.get(singular, singular))
    if size is None:
        return None
    number = Fraction(Decimal(match[2].replace(",", "")))
    return size[0], (-number if match[1] else number) * size[1]


def _number_of_base(text: str) -> int | None:
    """Return the value of digits with their base as an index, such as 101_2; None for others."""
    match = _BASED.fullmatch(text)
    if match is None or not 2 <= int(match[2]) <= 36:
        return None
    try:
        return int(match[1], int(match[2]))
    except ValueError:
        return None


_PERCENT_IN_BOX = re.compile(r"(\\boxed\s*\{\s*)([-+]?[\d.,]*\d)\s*\\?%(?=\s*\})")
"""A number with a percent sign, alone in a box."""


def readable(text: str) -> str:
    """Return a text in forms that math-verify reads, where it reads nothing in others that are as
    common: a number with a percent sign alone in a box, and the other sign of the empty set.

    It reads `\\boxed{\\frac{50}{1}\\%}`, which equals 50 and 1/2, and nothing in `\\boxed{50\\%}`.
    Between dollars it reads neither, so the only box of a text takes the place of the text.
    """
    text = text.replace("\\varnothing", "\\emptyset")
    box = _PERCENT_IN_BOX.search(text)
    if box is not None and text.count("\\boxed") == 1:
        text = f"{box[0]}}}"
    return _PERCENT_IN_BOX.sub(
        lambda match: rf"{match[1]}\frac{{{match[2].replace(',', '')}}}{{1}}\%", text
    )


_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\[(\[]|\\boxed\b", re.DOTALL)
"""LaTeX that is marked as such: between dollars, \\( and \\), \\[ and \\], or boxed."""

_WITH_UNIT = re.compile(r"(-?\\?\$?[\d., /]*\d)(?:\s*\\?%|\s+[A-Za-z]{4}[A-Za-z. ]*)")
"""A number followed by a percent sign, or by words of which the first has at least four letters."""


_DEGREES = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|degrees?)")
"""An angle in degrees."""


def math_golds(answer: str) -> list[str]:
    """Return the forms of an answer that math-verify should read; a completion is right if it
    equals one of them.

    math-verify reads LaTeX only where it is marked. In a text without marks it reads the last plain
    number, which is 3 in `3\\sqrt{2}`. So an answer without marks is put into a box, as verl does.
    An angle in degrees may be given in radians.
    If the answer is a number with a unit, the number alone is right too. math-verify ignores a unit
    in a box only if it is in its own list, so the number becomes a form of its own.
    """
    if _DELIMITED.search(answer):
        return [answer]
    answer = answer.strip()
    with_escaped_percent = re.sub(r"(?<!\\)%", r"\\%", answer)  # a bare % begins a comment in LaTeX
    forms = [answer, with_escaped_percent]
    with_unit = _WITH_UNIT.fullmatch(answer)
    degrees = _DEGREES.fullmatch(answer)
    if degrees is not None:
        forms.append(rf"\frac{{{degrees[1]}\pi}}{{180}}")
    if with_unit is not None and not _PERCENT_IN_BOX.search(f"\\boxed{{{answer}}}"):
        forms.append(with_unit[1])
    return [f"\\boxed{{{form}}}" for form in dict.fromkeys(forms)]
