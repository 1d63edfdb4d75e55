"""Verifiers: functions that score how well a completion answers its prompt.

Nothing slow is imported here, since the processes of verifiers import this file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from pgtoolkit.errors import DataError
from pgtoolkit.system.functions import blaming
from pgtoolkit.tasks.async_rewards import Awaited
from pgtoolkit.tasks.math_answers import (
    final_part,
    last_box,
    math_golds,
    readable,
    same_quantity,
)
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


class AwaitedQuestions(NamedTuple):
    """Completions for one `async def` verifier, which are scored at the same time.

    number: that of the verifier, among those of the run.
    """

    number: int
    questions: list[Question]


class Verifiers:
    """The functions of a run's verifiers, in the process that calls them.

    seconds, concurrency: of those that are awaited; see `Awaited`.
    Raises ConfigError for one that cannot be imported.
    """

    def __init__(self, named: Sequence[Named], seconds: float | None, concurrency: int):
        self._named = named
        self._awaited = Awaited(concurrency, seconds)
        self._functions = [
            make_verifier(verifier.name, verifier.pattern, verifier.key) for verifier in named
        ]

    def answer(
        self,
        question: Question | BatchQuestion | AwaitedQuestions | None,
    ) -> (
        float
        | Failure
        | BatchScores
        | Iterator[tuple[int, float | Failure]]
        | list[Signature | None]
    ):
        """Return the score that the verifier gives, or the Failure that says why there is none.

        For a BatchQuestion it returns the `BatchScores`, and for AwaitedQuestions what
        `Awaited.each` yields. Without a question (None) it returns the signature of each verifier,
        or None for one of pgtoolkit's.
        Raises DataError if a function of the user's fails.
        """
        if question is None:
            return [getattr(function, "signature", None) for function in self._functions]
        function = self._functions[question.number]
        if isinstance(function, RewardFunction) and function.signature.is_async:
            return self._awaited_answer(function, question)
        assert not isinstance(question, AwaitedQuestions)
        with blaming(str(self._named[question.number]), DataError, question.on):
            if isinstance(question, BatchQuestion):
                assert isinstance(function, RewardFunction)
                return function.scores(question.inputs, question.size)
            if isinstance(function, RewardFunction):
                return function(question.completion, question.answer, question.more)
            return function(question.completion, question.answer)

    def _awaited_answer(
        self, function: RewardFunction, question: Question | BatchQuestion | AwaitedQuestions
    ) -> float | Failure | BatchScores | Iterator[tuple[int, float | Failure]]:
        if isinstance(question, AwaitedQuestions):
            return self._awaited.each(function, question.questions)
        if isinstance(question, BatchQuestion):
            return self._awaited.batch(function, question.inputs, question.size, question.on)
        ((_, score),) = self._awaited.each(function, [question])
        return score


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
        `math_golds` and `same_quantity` say how answers are read.

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
        final = final_part(completion)
        verdict = same_quantity(answer, last_box(final))
        if verdict is not None:
            return float(verdict)
        # math-verify keeps its time limit by a signal, which only the main thread may ask for.
        is_main = threading.current_thread() is threading.main_thread()
        limit = _MATH_SECONDS if is_main else None
        # math-verify's word for the expressions of which one must be met.
        golds = [
            gold
            for text in math_golds(answer)
            for gold in library.parse(readable(text), parsing_timeout=limit)
        ]
        parsed = library.parse(readable(final), parsing_timeout=limit)
        return float(
            any(
                library.verify(gold, expression, timeout_seconds=limit)
                and not _are_small_and_differ(gold, expression)
                for gold in golds
                for expression in parsed
            )
        )

    return verify


_SMALL = 1e-3
_SMALL_TOLERANCE = 2e-3
"""The largest difference of equal small numbers, relative to the larger one: 0.000333 is 1/3000."""


def _are_small_and_differ(gold: Any, expression: Any) -> bool:
    """Return whether two expressions of sympy are small numbers that differ.

    math-verify rounds numbers at six decimals, and takes a difference below 1e-15 for none.
    """
    numbers = []
    for side in (gold, expression):
        side = getattr(side, "rhs", side)  # of an equation, such as x = 2e-7
        try:
            numbers.append(float(side))
        except (TypeError, ValueError, OverflowError, AttributeError):
            return False
    largest = max(map(abs, numbers))
    difference = abs(numbers[0] - numbers[1])
    return 0 < largest < _SMALL and difference > _SMALL_TOLERANCE * largest
