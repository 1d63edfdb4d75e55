"""Verifiers, which score whether a completion answers its prompt, here or in processes of their
own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.config.schema_tasks import VERIFIERS
from pgtoolkit.errors import DataError
from pgtoolkit.system.functions import blaming
from pgtoolkit.tasks.process_pool import Failure, Processes
from pgtoolkit.tasks.reward_functions import BatchScores, Question, RewardFunction, TrainerState
from pgtoolkit.tasks.signatures import Signature

Verifier = Callable[[str, str], float | Failure]
"""`verifier(completion, answer)` returns the reward; 1 or more counts as an exact match."""


class Named(NamedTuple):
    """A verifier of the configuration.

    key: of the configuration. name: its value, a name or a dotted path. pattern: of
        regular_expression.
    """

    key: str
    name: str
    pattern: str | None = None

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


_AT_THE_START = TrainerState(global_step=0, max_steps=0)


@dataclass(frozen=True)
class Response:
    """A completion as a text, to be scored.

    finished: whether it ended by itself, with the end of the sequence or a stop string.
    tokens: of the completion, its end included.
    messages: the prompt as the chat template was given it; None where there is no template.
    trainer_state: the progress of training when it was written.
    """

    prompt: Prompt
    text: str
    finished: bool
    tokens: Sequence[int] = ()
    messages: Sequence[Message] | None = None
    trainer_state: TrainerState = _AT_THE_START

    def __str__(self) -> str:
        return (
            f"the completion {self.text[:200]!r} of the prompt at {self.prompt.place}, whose "
            f"answer is {self.prompt.answer[:60]!r}"
        )


class BatchQuestion(NamedTuple):
    """Several completions for a verifier that scores them at once.

    number: of the verifier. inputs: its arguments by name. on: the completions in words, for
        errors.
    """

    number: int
    inputs: dict[str, object]
    size: int
    on: str


class Verifiers:
    """The verifiers of a run. Raises ConfigError for one that cannot be imported."""

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [
            make_verifier(verifier.name, verifier.pattern, verifier.key) for verifier in named
        ]

    def answer(
        self,
        question: Question | BatchQuestion | None,
    ) -> float | Failure | BatchScores | list[Signature | None]:
        """Return the score, or why there is none. Raises DataError where a function of the user's
        fails.

        For the question None, return the signature of each verifier that is the user's, and None
        for each of pgtoolkit's.
        """
        if question is None:
            return [getattr(function, "signature", None) for function in self._functions]
        function = self._functions[question.number]
        with blaming(str(self._named[question.number]), DataError, question.on):
            if not isinstance(function, RewardFunction):
                assert isinstance(question, Question)
                return function(question.completion, question.answer)
            if isinstance(question, BatchQuestion):
                return function.scores(question.inputs, question.size)
            return function(question.completion, question.answer, question.more)


class Scoring:
    """Scores completions by the verifiers of a run: here, in processes, or awaited.

    concurrency: the number of calls of an `async def` that are awaited at a time.
    signatures: of each verifier; None for one of pgtoolkit's.
    Raises ConfigError for a verifier that cannot be imported.
    """

    def __init__(
        self, named: Sequence[Named], processes: int, seconds: float | None, concurrency: int
    ):
        # Not above: asyncio takes a while to import, which processes of verifiers need not do.
        from pgtoolkit.tasks.awaited import Awaited

        self._named = named
        self._pool = verifiers_of(named, processes, seconds)
        self.signatures: list[Signature | None] = [None] * len(named)
        if any(verifier.name not in VERIFIERS for verifier in named):
            (self.signatures,) = self._pool.answers([None])
        self._awaited = Awaited(concurrency, seconds)
        # These wait most of the time, and need no process of their own.
        self._async_functions = {
            number: RewardFunction(verifier.key, verifier.name)
            for number, (verifier, signature) in enumerate(zip(named, self.signatures, strict=True))
            if signature is not None and signature.is_async
        }

    def scores(self, number: int, responses: Sequence[Response]) -> BatchScores:
        """Return the scores by the verifier of this number. DataError where a function of the
        user's fails."""
        signature = self.signatures[number]
        function = self._async_functions.get(number)
        if not responses:
            return BatchScores([])
        if signature is not None and signature.is_batch:
            inputs = _inputs(signature, responses)
            on = f"{len(responses)} completions, first {responses[0]}"
            if function is not None:
                return self._awaited.batch(function, inputs, len(responses), on)
            (outcome,) = self._pool.answers([BatchQuestion(number, inputs, len(responses), on)])
            if isinstance(outcome, Failure):
                outcome = BatchScores([outcome] * len(responses))
            return outcome
        questions = [
            Question(
                number,
                response.text,
                response.prompt.answer,
                str(response),
                _more(signature, response),
            )
            for response in responses
        ]
        if function is not None:
            return BatchScores(self._awaited.each(function, questions))
        return BatchScores(self._pool.answers(questions))

    def measures(self, outcomes: Sequence[object]) -> dict[str, float]:
        """Return whether one of these outcomes of a completion is a failure, by metric; see
        `Processes`."""
        return self._pool.measures(outcomes)

    def close(self) -> None:
        self._awaited.close()
        self._pool.close()


def _more(signature: Signature | None, response: Response) -> dict[str, object] | None:
    """Return the prompt and the row of a completion, where a function asks for them."""
    if signature is None or signature.names is None:
        return None
    prompt = response.prompt
    asked = prompt.text if prompt.messages is None else [*prompt.messages]
    values = {"prompt": asked, "row": prompt.row}
    return {name: value for name, value in values.items() if signature.wants(name)} or None


def _inputs(signature: Signature, responses: Sequence[Response]) -> dict[str, object]:
    """Return the arguments of a function that scores a batch, in the form that TRL's trainers give
    them."""
    inputs: dict[str, object] = {}
    rows = [
        {"answer": response.prompt.answer, **(response.prompt.row or {})} for response in responses
    ]
    for name in dict.fromkeys(name for row in rows for name in row):
        if signature.wants(name) and (name != "prompt" or name in signature.named):
            inputs[name] = [row.get(name) for row in rows]
    prompts: list[str | list[Message]] = []
    completions: list[str | list[Message]] = []
    for response in responses:
        if response.messages is None:
            prompts.append(response.prompt.text)
            completions.append(response.text)
        else:
            prompts.append([*response.messages])
            completions.append([{"role": "assistant", "content": response.text}])
    inputs["prompts"] = prompts
    inputs["completions"] = completions
    inputs["completion_ids"] = [[*response.tokens] for response in responses]
    inputs["trainer_state"] = max(response.trainer_state for response in responses)
    return inputs


def verifiers_of(
    named: Sequence[Named], processes: int = 0, seconds: float | None = None
) -> Processes:
    """Return the verifiers of a run.

    With processes=0, raises ConfigError for one that cannot be imported.
    """
    verifiers = Processes(
        kind=Verifiers,
        arguments=([*named],),
        noun="verifier",
        setting=", ".join(map(str, named)),
        processes=processes,
        seconds=seconds,
    )
    verifiers.answers([])  # Without processes, they are imported here and now.
    return verifiers


def make_verifier(name: str, pattern: str | None = None, key: str = "task.verifier") -> Verifier:
    """Return the verifier of this name, or the function at a dotted path
    `package.module.function`.

    exact_match: the completion is the answer, up to white space around both.
    last_number: the last number of the completion is the answer, as a number; see `last_number`.
    regular_expression: the text that the one group of `pattern` captured last in the completion is
        the answer, up to white space around both.
    math_verify: both are mathematically equal, by the math-verify package; `math_golds` says how
        answers are read.
    A function of the user's is a `RewardFunction`.

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


_A_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?")
"""A number with its sign, perhaps with commas at thousands. A minus after a number or a word is no
sign."""


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None without a number."""
    numbers = _A_NUMBER.findall(text)
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
        # The last match: a completion that reasons may mention other candidates first.
        last = captured[-1] if captured else None
        return float(last is not None and last.strip() == answer.strip())

    return verify


def _math_verify() -> Verifier:
    import math_verify

    library: Any = math_verify  # None means no time limit, which its types lack.

    def equal(completion: str, answer: str) -> float:
        # Its time limit is a signal, which only the main thread may set.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        golds = [
            gold
            for text in math_golds(answer)
            for gold in library.parse(text, parsing_timeout=limit)
        ]
        parsed = library.parse(completion, parsing_timeout=limit)
        return float(library.verify(golds, parsed, timeout_seconds=limit))

    return equal


_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\[(\[]|\\boxed\b", re.DOTALL)
"""LaTeX that is marked as such: between dollars, \\( and \\), \\[ and \\], or boxed."""

_WITH_UNIT = re.compile(r"(-?\\?\$?[\d., /]*\d)(?:\s*\\?%|\s+[A-Za-z]{4}[A-Za-z. ]*)")
"""A number followed by a percent sign or words."""


def math_golds(answer: str) -> list[str]:
    """Return the forms of an answer for math-verify; a completion may equal any of them.

    math-verify reads LaTeX only where it is marked. In other texts it reads the last plain number,
    which of `3\\sqrt{2}` would be 3. So an answer without marks is put into a box, as verl does.
    For a number with its unit the number alone is right as well; in a box math-verify knows that
    only for units that are in its list.
    """
    if _DELIMITED.search(answer):
        return [answer]
    answer = answer.strip()
    readings = [answer, re.sub(r"(?<!\\)%", r"\\%", answer)]
    with_unit = _WITH_UNIT.fullmatch(answer)
    if with_unit is not None:
        readings.append(with_unit[1])
    return [f"\\boxed{{{reading}}}" for reading in dict.fromkeys(readings)]
