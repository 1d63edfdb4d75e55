"""The value that a user most likely meant by one that its key does not take.

These are numbers with units, decimal commas and powers, words for true, false and nothing, and
names that are written in another way.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator

from pgtoolkit.config.keys import fits
from pgtoolkit.system.declared import Key
from pgtoolkit.system.report import nearest, text

TRUE_WORDS = ("true", "yes", "y", "on", "1", "enabled", "enable")
FALSE_WORDS = ("false", "no", "n", "off", "0", "disabled", "disable")
NOTHING_WORDS = ("none", "null", "nil", "nothing", "off", "no", "false", "disabled", "never", "")

ALSO_CALLED = {
    "gpu": "auto",
    "cuda:0": "auto",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
}
"""Name that the field has for a value -> our name of it."""

_NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]

_TYPOGRAPHIC = {
    **dict.fromkeys("„“”«»‹›‚‘’`\"'", ""),  # noqa: RUF001
    **dict.fromkeys("–—−‐‑", "-"),  # noqa: RUF001
    **dict.fromkeys("\u00a0\u2009\u202f\u3000\t", " "),
    "×": "x",  # noqa: RUF001
    "…": "",
    "\u200b": "",
    "\ufeff": "",
    "＝": "=",  # noqa: RUF001
    "，": ",",  # noqa: RUF001
}
"""Character of a word processor -> what a command line has in its place."""

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"

_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_MEGABYTES = {"mb": 1, "mib": 1, "gb": 1024, "gib": 1024, "g": 1024, "m": 1, "tb": 1024**2}
_SECONDS = {
    "s": 1,
    "sec": 1,
    "seconds": 1,
    "min": 60,
    "m": 60,
    "minutes": 60,
    "h": 3600,
    "d": 86400,
}


def without_typography(word: str) -> str:
    """Return a text with the characters of a command line in place of a word processor's; quotes
    are left out."""
    return "".join(_TYPOGRAPHIC.get(character, character) for character in word)


def typed(name: str, value: object) -> str:
    """Return an override in the spelling of a shell."""
    is_texts = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
    if isinstance(value, list) and is_texts:
        quoted = ",".join('"' + part.replace('"', '\\"') + '"' for part in value)
        return shlex.quote(f"{name}=[{quoted}]")
    if isinstance(value, str) and not re.fullmatch(r"[\w./:$+@%*{}-]+", value, re.ASCII):
        escaped = value.replace("'", "\\'")
        return f"\"{name}='{escaped}'\""
    return f"{name}={text(value)}"


def value_meant(key: Key, value: object, default: object) -> object:
    """Return the value that a key takes and that is most likely meant by another one, else the
    default of the key."""
    for reading in readings(key, value):
        if fits(key, reading):
            return reading
    return default


def values_meant(key: Key, value: object) -> str | None:
    """Return the values of a sweep that are meant by a list or a range in the place of the value of
    a key; None where there are not several."""
    if not key.type.startswith(("int", "float")):
        return None
    word = without_typography(text(value)).strip().strip("()[]{}").lower()
    drawn = re.fullmatch(r"(log|loguniform|uniform|interval)?\(?\s*([^,()]+),([^,()]+)\)?", word)
    word = word if drawn is None or not drawn[1] else f"{drawn[2]},{drawn[3]}"
    count = re.fullmatch(r"(\d+)\s*(?:-|\.\.\.?|:)\s*(\d+)", word)
    if count is not None and int(count[1]) < int(count[2]) and _number_type(key.type) is int:
        return f"range({count[1]},{int(count[2]) + 1})"
    parts = [part for part in re.split(r"[\s,;|:]+|\.\.", word) if part]
    numbers = [
        next((part for part in readings(key, part) if fits(key, part)), None) for part in parts
    ]
    if len(numbers) < 2 or None in numbers:
        return None
    return ",".join(text(number) for number in numbers)


def readings(key: Key, value: object) -> Iterator[object]:
    """Yield what a value may mean as one of a key, the likeliest first; not all are allowed."""
    kind = key.type.partition(" | ")[0]
    if isinstance(value, dict) and kind != "Dictionary":
        return
    if isinstance(value, list):
        if kind.startswith("list"):
            entry = _number_type(kind)
            yield [
                next(_numbers(text(part), entry), part) if entry else text(part)
                for part in _without_lists_inside(value)
            ]
        elif len(value) == 1:
            yield from readings(key, value[0])
        return
    word = without_typography(text(value)).strip().strip("()[]{}").strip()
    if not kind.startswith(("list", "str")):
        word = word.strip("<>;,&|\\").strip()
    if kind.startswith("list"):
        entry = _number_type(kind)
        if "|" in word and re.search(r"[(*+?^$\\]", word):
            return  # a regular expression, whose | separates no entries
        parts = [part.strip() for part in re.split(r"[,;|]", word) if part.strip()]
        if parts:
            yield [next(_numbers(part, entry), part) if entry else part for part in parts]
        return
    lowered = word.lower()
    if key.type.endswith("| None") and word and lowered in NOTHING_WORDS:
        yield None
    if kind in ("bool", "AutoOrBool"):
        yield from [True for word in TRUE_WORDS if lowered == word]
        yield from [False for word in FALSE_WORDS if lowered == word]
        yield lowered
    if key.names:
        spelled = re.sub(r"[-\s.]+", "_", lowered)
        yield from (
            ALSO_CALLED.get(name, name) for name in (lowered, spelled, spelled.partition(":")[0])
        )
        yield nearest(word, key.names)
    number = _number_type(kind)
    if number is not None:
        yield from _with_unit(lowered, key.leaf, number)
        yield from _numbers(lowered, number)
    if kind == "str" and not key.names and word and value is not None:
        yield word


def _without_lists_inside(values: list) -> Iterator[object]:
    """Yield the entries of a list, and those of the lists in it; dictionaries are left out."""
    for value in values:
        if isinstance(value, list):
            yield from _without_lists_inside(value)
        elif not isinstance(value, dict):
            yield value


def _number_type(kind: str) -> type | None:
    """Return int or float where the values of a type are numbers or lists of numbers."""
    return {"int": int, "list[int]": int, "float": float}.get(kind)


def _with_unit(word: str, leaf: str, kind: type) -> Iterator[float]:
    """Yield a number with a unit of memory or of time, for keys that are counted in one."""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]+)", word)
    if match is None:
        return
    for ending, units in (("_mb", _MEGABYTES), ("seconds", _SECONDS)):
        if leaf.endswith(ending) and match[2] in units:
            yield from _whole(float(match[1]) * units[match[2]], kind)


def _numbers(word: str, kind: type) -> Iterator[float]:
    """Yield the numbers of a type that a text without capitals may mean."""
    for number in _floats(word, kind):
        yield from _whole(number, kind)


def _whole(number: float, kind: type) -> Iterator[float]:
    if kind is float:
        yield number
    elif number.is_integer():
        yield int(number)


def _floats(word: str, kind: type) -> Iterator[float]:
    """Yield the numbers that a text may mean."""
    word = re.sub(r"(?<=\d)_(?=\d)", "", word)
    if re.fullmatch(r"\d{1,3}([ ']\d{3})+", word):
        word = re.sub("[ ']", "", word)
    with contextlib.suppress(ValueError, OverflowError, ZeroDivisionError):
        if re.fullmatch(r"\d{1,3}(,\d{3})+", word) and kind is int:
            yield float(word.replace(",", ""))
        if re.fullmatch(_NUMBER, word.replace(",", ".")):
            yield float(word.replace(",", "."))
            return
        if word in _NUMBER_WORDS:
            yield float(_NUMBER_WORDS.index(word))
        power = re.fullmatch(
            rf"(?:({_NUMBER})\s*[*x·]\s*)?({_NUMBER})\s*(?:\^|\*\*)\s*([-+]?\d+)", word
        )
        if power is not None:
            factor, base, exponent = power.groups()
            if float(base) == 10:  # exact, where 10.0 ** -4 is not
                yield float(f"{factor or 1}e{exponent}")
            else:
                yield float(factor or 1) * float(base) ** int(exponent)
        fraction = re.fullmatch(rf"({_NUMBER})\s*/\s*({_NUMBER})", word)
        if fraction is not None:
            yield float(fraction[1]) / float(fraction[2])
        percent = re.fullmatch(rf"({_NUMBER})\s*%", word)
        if percent is not None:
            yield float(percent[1]) / 100
        multiple = re.fullmatch(rf"({_NUMBER})\s*([kmgb]?)", word)
        if multiple is not None:
            yield float(multiple[1]) * _MULTIPLES[multiple[2]]
        counted = re.fullmatch(rf"({_NUMBER})\s*([a-z]+)", word)
        if counted is not None and not counted[2].endswith(("b", "w")):  # bytes are no number
            yield float(counted[1])
