"""Verifiers: functions that score how well a completion answers its prompt.

Nothing slow is imported here, since the processes of verifiers import this file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from pgtoolkit.errors import DataError
from pgtoolkit.system.functions import blaming
from pgtoolkit.tasks.process_pool import Failure
from pgtoolkit.tasks.reward_functions import BatchScores, Question, RewardFunction
from pgtoolkit.tasks.signatures import Signature

Verifier = Callable[[str, str], float | Failure]
"""`verifier(completion, answer)` returns the reward, or a Failure that says why there is none. A
reward of 1 or more counts as an exact match."""


class Named(NamedTuple):
    """A verifier as the configuration names it.

    key: the key of the configuration.
    name: the value of that key: one of VERIFIERS, or a dotted path to a function of the user's.
    pattern: the pattern of the verifier regular_expression; None for the others.
    """

    key: str
    name: str
    pattern: str | None = None

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


class BatchQuestion(NamedTuple):
    """A batch of completions for a verifier that scores them in one call.

    number: that of the verifier, among those of the run.
    inputs: the arguments of the call, by name.
    size: the number of completions.
    on: the completions in words, for errors.
    """

    number: int
    inputs: dict[str, object]
    size: int
    on: str


class Verifiers:
    """The functions of a run's verifiers, in the process that calls them.

    Raises ConfigError for one that cannot be imported.
    """

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [
            make_verifier(verifier.name, verifier.pattern, verifier.key) for verifier in named
        ]

    def answer(
        self,
        question: Question | BatchQuestion | None,
    ) -> float | Failure | BatchScores | list[Signature | None]:
        """Return the score that the verifier gives, or the Failure that says why there is none.

        For a BatchQuestion it returns the `BatchScores`. Without a question (None) it returns the
        signature of each verifier, or None for one of pgtoolkit's.
        Raises DataError if a function of the user's fails.
        """
        if question is None:
            return [getattr(function, "signature", None) for function in self._functions]
        function = self._functions[question.number]
        with blaming(str(self._named[question.number]), DataError, question.on):
            if isinstance(question, BatchQuestion):
                assert isinstance(function, RewardFunction)
                return function.scores(question.inputs, question.size)
            if isinstance(function, RewardFunction):
                return function(question.completion, question.answer, question.more)
            return function(question.completion, question.answer)


def make_verifier(name: str, pattern: str | None = None, key: str = "task.verifier") -> Verifier:
    """Return the verifier of this name: one of pgtoolkit's, or the `RewardFunction` at a dotted
    path `package.module.function`.

    Those of pgtoolkit's score 1 if this is true, else 0:
    exact_match: the completion equals the answer, but for white space around either.
    last_number: the last number in the completion equals the last one in the answer; see
        `last_number`.
    regular_expression: the text that the only group of `pattern` captured in its last match in the
        completion equals the answer, but for white space around either.
    math_verify: the completion and the answer are mathematically equal, by the math-verify package;
        `math_golds` says how answers are read.

    key: the key of the configuration that names it, for errors.
    Raises ConfigError for a verifier that cannot be imported.
    """
    if name == "exact_match":
        return lambda completion, answer: float(completion.strip() == answer.strip())
    if name == "last_number":
        return _is_last_number
    if name == "regular_expression":
        assert pattern is not None
        return _regular_expression(pattern)
    if name == "math_verify":
        return _math_verify()
    return RewardFunction(key, name)


_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?")
"""A number with its sign, perhaps with commas at thousands. A minus (- or U+2212) directly after a
letter, a digit or a closing parenthesis is no sign: it is a hyphen, or it subtracts."""


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text; None if there is none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-"))


def _is_last_number(completion: str, answer: str) -> float:
    number = last_number(completion)
    return float(number is not None and number == last_number(answer))


def _regular_expression(pattern: str) -> Verifier:
    expression = re.compile(pattern)

    def verify(completion: str, answer: str) -> float:
        captured = [match.group(1) for match in expression.finditer(completion)]
        # The last match counts, since reasoning may mention other candidates first.
        last = captured[-1] if captured else None
        return float(last is not None and last.strip() == answer.strip())

    return verify


_MATH_SECONDS = 5
"""The longest that math-verify may take to read a text, and to compare."""


def _math_verify() -> Verifier:
    import math_verify

    # Any, since the types of the package do not allow None for a time limit, which means none.
    library: Any = math_verify

    def verify(completion: str, answer: str) -> float:
        # math-verify keeps its time limit by a signal, which only the main thread may ask for.
        is_main = threading.current_thread() is threading.main_thread()
        limit = _MATH_SECONDS if is_main else None
        # math-verify's word for the expressions of which one must be met.
        golds = [
            gold
            for text in math_golds(answer)
            for gold in library.parse(_readable(text), parsing_timeout=limit)
        ]
        parsed = library.parse(_readable(completion), parsing_timeout=limit)
        return float(library.verify(golds, parsed, timeout_seconds=limit))

    return verify


_PERCENT_IN_BOX = re.compile(r"(\\boxed\s*\{\s*)([-+]?[\d.,]*\d)\s*\\?%(?=\s*\})")
"""A number with a percent sign, alone in a box."""


def _readable(text: str) -> str:
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


def math_golds(answer: str) -> list[str]:
    """Return the forms of an answer that math-verify should read; a completion is right if it
    equals one of them.

    math-verify reads LaTeX only where it is marked. In a text without marks it reads the last plain
    number, which is 3 in `3\\sqrt{2}`. So an answer without marks is put into a box, as verl does.
    If the answer is a number with a unit, the number alone is right too. math-verify ignores a unit
    in a box only if it is in its own list, so the number becomes a form of its own.
    """
    if _DELIMITED.search(answer):
        return [answer]
    answer = answer.strip()
    with_escaped_percent = re.sub(r"(?<!\\)%", r"\\%", answer)  # a bare % begins a comment in LaTeX
    forms = [answer, with_escaped_percent]
    with_unit = _WITH_UNIT.fullmatch(answer)
    if with_unit is not None and not _PERCENT_IN_BOX.search(f"\\boxed{{{answer}}}"):
        forms.append(with_unit[1])
    return [f"\\boxed{{{form}}}" for form in dict.fromkeys(forms)]
