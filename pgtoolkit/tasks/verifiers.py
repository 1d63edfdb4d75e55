"""Verifiers: whether a completion answers its prompt; in this process, or in some of their own with a time limit."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pgtoolkit.errors import DataError
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.tasks.process_pool import NOTHING, Failure, Processes

Verifier = Callable[[str, str], float | Failure]
"""`verifier(completion, answer)` returns the reward; 1 or more counts as an exact match."""


class Named(NamedTuple):
    """A verifier of the configuration: its key there, which names it or has its dotted path, and its pattern."""

    key: str
    name: str
    pattern: str | None = None

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


class Question(NamedTuple):
    """What a verifier is asked. number: of the verifier, among those of the run. on: the rest in words, for errors."""

    number: int
    completion: str
    answer: str
    on: str


class Verifiers:
    """The verifiers of a run. Raises ConfigError for one that cannot be imported."""

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [make_verifier(one.name, one.pattern, one.key) for one in named]

    def answer(self, question: Question) -> float | Failure:
        """The score, or why there is none; raises DataError where a function of the user's fails."""
        with blaming(str(self._named[question.number]), DataError, question.on):
            return self._functions[question.number](question.completion, question.answer)


def verifiers_of(named: Sequence[Named], processes: int = 0, seconds: float | None = None) -> Processes:
    """The verifiers of a run. Raises ConfigError for one that cannot be imported, where this process asks it."""
    verifiers = Processes(Verifiers, ([*named],), "verifier", ", ".join(map(str, named)), processes, seconds)
    verifiers.answers([])  # this process imports them now
    return verifiers


def make_verifier(name: str, pattern: str | None = None, key: str = "task.verifier") -> Verifier:
    """The verifier of that name, or the function at a dotted path `package.module.function`.

    exact_match: the completion is the answer, up to white space around both.
    regular_expression: what the one group of `pattern` captured last in the completion is the answer, likewise.
    math_verify: both are mathematically equal, by the math-verify package; `math_golds` says how answers are read.
    A function of yours takes (completion, answer) and returns a bool or a finite number; None or NaN where it cannot
    tell, which is a Failure.

    Raises ConfigError for a verifier that cannot be imported; the verifier raises DataError for a reward that is no
    finite number, and whatever a function of yours raises.
    """
    if name == "exact_match":
        return lambda completion, answer: float(completion.strip() == answer.strip())
    if name == "regular_expression":
        return _regular_expression(pattern)
    if name == "math_verify":
        return _math_verify()
    return _imported(key, name)


def _regular_expression(pattern: str) -> Verifier:
    expression = re.compile(pattern)

    def verify(completion: str, answer: str) -> float:
        # The last match: a completion that reasons may mention other candidates first.
        captured = [match.group(1) for match in expression.finditer(completion)]
        return float(bool(captured) and captured[-1] is not None and captured[-1].strip() == answer.strip())

    return verify


def _math_verify() -> Verifier:
    from math_verify import parse, verify

    def equal(completion: str, answer: str) -> float:
        # Its time limit is a signal, which only the main thread may set.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        golds = [gold for text in math_golds(answer) for gold in parse(text, parsing_timeout=limit)]
        return float(verify(golds, parse(completion, parsing_timeout=limit), timeout_seconds=limit))

    return equal


_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\[(\[]|\\boxed\b", re.DOTALL)
"""LaTeX that is marked as such: between dollars, \\( and \\), \\[ and \\], or boxed."""

_WITH_UNIT = re.compile(r"(-?\\?\$?[\d., /]*\d)(?:\s*\\?%|\s+[A-Za-z]{4}[A-Za-z. ]*)")
"""A number with a percent sign or words behind it."""


def math_golds(answer: str) -> list[str]:
    """Return the texts that math-verify is to read an answer from; a completion may equal any of them.

    math-verify reads LaTeX only where it is marked, and in other texts the last plain number: of `3\\sqrt{2}` it would
    be 3. So an answer without marks is put into a box, as verl does. Of a number with its unit the number alone is
    right as well, which in a box math-verify knows only of units that it has a list of.
    """
    if _DELIMITED.search(answer):
        return [answer]
    answer = answer.strip()
    readings = [answer, re.sub(r"(?<!\\)%", r"\\%", answer)]
    with_unit = _WITH_UNIT.fullmatch(answer)
    if with_unit is not None:
        readings.append(with_unit[1])
    return [f"\\boxed{{{reading}}}" for reading in dict.fromkeys(readings)]


def as_number(value: object) -> float:
    """What code of the user's gave, such as a bool or a scalar of NumPy; NaN for what is no number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def is_nothing(reward: object) -> bool:
    """Return whether code of the user's gave no score: None, or NaN as a number."""
    return reward is None or (not isinstance(reward, str) and reward != reward)


def _imported(key: str, path: str) -> Verifier:
    function = import_function(key, path, ("completion", "answer"))

    def verify(completion: str, answer: str) -> float | Failure:
        reward = function(completion, answer)
        if is_nothing(reward):
            return Failure(NOTHING, f"returned {reward}")
        number = as_number(reward)
        if not math.isfinite(number):
            raise DataError(f"{key}={path} returned {repr(reward)[:60]}; a verifier returns a bool or a finite number")
        return number

    return verify
