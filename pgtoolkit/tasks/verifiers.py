"""Verifiers: functions that say whether a completion answers its prompt. Imports nothing large."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import blaming, import_function

Verifier = Callable[[str, str], float]
"""`verifier(completion, answer)` returns the reward; 1 or more counts as an exact match."""


@dataclass(frozen=True)
class Named:
    """A verifier of the configuration: its key there, which names it or has its dotted path, and its pattern."""

    key: str
    name: str
    pattern: str | None = None


@dataclass(frozen=True)
class Question:
    """What a verifier is asked. number: of the verifier, among those of the run. on: the rest in words, for errors."""

    number: int
    completion: str
    answer: str
    on: str


class Verifiers:
    """The verifiers of a run in this process. Raises ConfigError for one that cannot be imported."""

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [make_verifier(one.name, one.pattern, one.key) for one in named]

    def score(self, question: Question) -> float:
        """Raises DataError where a function of the user's fails."""
        named = self._named[question.number]
        with blaming(f"{named.key}={named.name}", DataError, question.on):
            return float(self._functions[question.number](question.completion, question.answer))

    def scores(self, questions: Sequence[Question]) -> list[float]:
        """Of each question, in their order. Raises DataError also where a function of the user's would end the run."""
        scores = []
        for question in questions:
            try:
                scores.append(self.score(question))
            except SystemExit as error:
                named = self._named[question.number]
                use = "task.verifier_processes and task.verifier_seconds, and such a completion scores 0"
                raise DataError(
                    f"{named.key}={named.name} raised SystemExit({error.code!r}) on {question.on}. Use {use}."
                ) from error
        return scores

    def close(self) -> None:
        """Nothing was started."""


def make_verifier(name: str, pattern: str | None = None, key: str = "task.verifier") -> Verifier:
    """The verifier of that name, or the function at a dotted path `package.module.function`.

    exact_match: the completion is the answer, up to white space around both.
    regular_expression: what the one group of `pattern` captured last in the completion is the answer, likewise.
    math_verify: both are mathematically equal, by the math-verify package.
    A function of yours takes (completion, answer) and returns a bool or a finite number.

    Raises ConfigError for a verifier that cannot be imported (which names and patterns there are to choose from is a
    rule of config/rules/run.py); the verifier raises DataError for a reward that is no finite number, and whatever a
    function of yours raises.
    """
    if name == "exact_match":
        return _exact_match
    if name == "regular_expression":
        return _regular_expression(pattern)
    if name == "math_verify":
        return _math_verify(key)
    return _imported(key, name)


def _exact_match(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


def _regular_expression(pattern: str) -> Verifier:
    expression = re.compile(pattern)

    def verify(completion: str, answer: str) -> float:
        # The last match: a completion that reasons may mention other candidates first.
        captured = [match.group(1) for match in expression.finditer(completion)]
        return float(bool(captured) and captured[-1] is not None and captured[-1].strip() == answer.strip())

    return verify


def _math_verify(key: str) -> Verifier:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"{key}=math_verify needs the math-verify package (it is not installed). "
            'Use pip install "pgtoolkit[math-verify]".'
        ) from error

    def equal(completion: str, answer: str) -> float:
        # Its time limit is a signal, which only the main thread may set.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        gold = parse(answer, parsing_timeout=limit)
        return float(verify(gold, parse(completion, parsing_timeout=limit), timeout_seconds=limit))

    return equal


def _imported(key: str, path: str) -> Verifier:
    function = import_function(key, path, ("completion", "answer"))

    def verify(completion: str, answer: str) -> float:
        reward = function(completion, answer)
        try:
            number = math.nan if isinstance(reward, str) else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{key}={path} returned {repr(reward)[:60]}; a verifier returns a bool or a finite number")
        return number

    return verify
