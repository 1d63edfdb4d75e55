"""Verifiers: functions that say whether a completion answers its prompt."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import import_function

Verifier = Callable[[str, str], float]
"""`verifier(completion, answer)` returns the reward; 1 or more counts as an exact match."""


def make_verifier(name: str, pattern: str | None = None) -> Verifier:
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
        return _math_verify()
    return _imported(name)


def _exact_match(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


def _regular_expression(pattern: str) -> Verifier:
    expression = re.compile(pattern)

    def verify(completion: str, answer: str) -> float:
        # The last match: a completion that reasons may mention other candidates first.
        captured = [match.group(1) for match in expression.finditer(completion)]
        return float(bool(captured) and captured[-1] is not None and captured[-1].strip() == answer.strip())

    return verify


def _math_verify() -> Verifier:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            "task.verifier=math_verify needs the math-verify package (it is not installed). "
            'Use pip install "pgtoolkit[math-verify]".'
        ) from error

    def equal(completion: str, answer: str) -> float:
        # Its time limit is a signal, which only the main thread may set.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        gold = parse(answer, parsing_timeout=limit)
        return float(verify(gold, parse(completion, parsing_timeout=limit), timeout_seconds=limit))

    return equal


def _imported(path: str) -> Verifier:
    function = import_function("task.verifier", path, "completion", "answer")

    def verify(completion: str, answer: str) -> float:
        reward = function(completion, answer)
        try:
            number = math.nan if isinstance(reward, str) else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"task.verifier={path} returned {repr(reward)[:60]}; a verifier returns a bool or a finite number"
            )
        return number

    return verify
