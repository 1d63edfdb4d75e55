"""Verifiers: functions that score how well a completion answers its prompt.

They are called in this process or in processes of their own; an `async def` is awaited in this one.
"""

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


_AT_THE_START = TrainerState(global_step=0, max_steps=0)


@dataclass(frozen=True)
class Response:
    """A completion to be scored, with its prompt.

    text: the completion as a text.
    finished: whether it ended by itself, with the end of the sequence or a stop string.
    tokens: the tokens of the completion, with the one that ends it.
    messages: the messages of the prompt that the chat template got; None without a template.
    trainer_state: the progress of training when the completion was written.
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
        signature of each verifier, which is None for one of pgtoolkit's.
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


class Scoring:
    """Scores completions by the verifiers of a run.

    processes: the number of processes that call the verifiers; with 0 this process does.
    seconds: the longest that a call in another process, or one that is awaited, may take.
    concurrency: the number of calls of `async def` verifiers that are awaited at a time.
    signatures: the signature of each verifier; None for one of pgtoolkit's.
    Raises ConfigError for a verifier that cannot be imported.
    """

    def __init__(
        self, named: Sequence[Named], processes: int, seconds: float | None, concurrency: int
    ):
        # Imported only here, since it imports asyncio. That takes a while, and the processes of
        # verifiers, which import this file too, do not need it.
        from pgtoolkit.tasks.awaited import Awaited

        self._named = named
        self._pool = verifiers_of(named, processes, seconds)
        self.signatures: list[Signature | None] = [None] * len(named)
        if any(verifier.name not in VERIFIERS for verifier in named):
            (self.signatures,) = self._pool.answers([None])
        self._awaited = Awaited(concurrency, seconds)
        # An `async def` is awaited in this process: it waits most of the time.
        self._async_functions = {
            number: RewardFunction(verifier.key, verifier.name)
            for number, (verifier, signature) in enumerate(zip(named, self.signatures, strict=True))
            if signature is not None and signature.is_async
        }

    def scores(self, number: int, responses: Sequence[Response]) -> BatchScores:
        """Return the scores of the responses by verifier `number`.

        Raises DataError if a function of the user's fails.
        """
        if not responses:
            return BatchScores([])
        signature = self.signatures[number]
        if signature is not None and signature.is_batch:
            return self._scores_of_batch(number, signature, responses)
        questions = [
            Question(
                number=number,
                completion=response.text,
                answer=response.prompt.answer,
                on=str(response),
                more=_prompt_and_row(signature, response),
            )
            for response in responses
        ]
        async_function = self._async_functions.get(number)
        if async_function is not None:
            return BatchScores(self._awaited.each(async_function, questions))
        return BatchScores(self._pool.answers(questions))

    def _scores_of_batch(
        self, number: int, signature: Signature, responses: Sequence[Response]
    ) -> BatchScores:
        """Return the scores by a verifier that scores all responses in one call."""
        inputs = _batch_arguments(signature, responses)
        size = len(responses)
        on = f"{size} completions, first {responses[0]}"
        async_function = self._async_functions.get(number)
        if async_function is not None:
            return self._awaited.batch(async_function, inputs, size, on)
        (outcome,) = self._pool.answers([BatchQuestion(number, inputs, size, on)])
        if isinstance(outcome, Failure):
            return BatchScores([outcome] * size)
        return outcome

    def measures(self, outcomes: Sequence[object]) -> dict[str, float]:
        """Return the metrics of failures for one completion; see `Processes.measures`.

        outcomes: the scores or Failures that the verifiers gave it.
        """
        return self._pool.measures(outcomes)

    def close(self) -> None:
        self._awaited.close()
        self._pool.close()


def _prompt_and_row(signature: Signature | None, response: Response) -> dict[str, object] | None:
    """Return those of the arguments `prompt` and `row` that a function asks for; None if it asks
    for neither."""
    if signature is None or signature.names is None:
        return None
    prompt = response.prompt
    values = {
        "prompt": prompt.text if prompt.messages is None else [*prompt.messages],
        "row": prompt.row,
    }
    return {name: value for name, value in values.items() if signature.wants(name)} or None


def _batch_arguments(signature: Signature, responses: Sequence[Response]) -> dict[str, object]:
    """Return the arguments of a function that scores a batch, by name, in the form that TRL's
    trainers give them.

    Those of each batch are always there; `RewardFunction` leaves out what the function does not ask
    for.
    """
    arguments: dict[str, object] = {}
    rows = [
        {"answer": response.prompt.answer, **(response.prompt.row or {})} for response in responses
    ]
    for column in dict.fromkeys(column for row in rows for column in row):
        # As in TRL, **kwargs gets no column "prompt", since `prompts` has the same. A function that
        # names a parameter `prompt` gets the column.
        if signature.wants(column) and (column != "prompt" or column in signature.named):
            arguments[column] = [row.get(column) for row in rows]
    prompts: list[str | list[Message]] = []
    completions: list[str | list[Message]] = []
    for response in responses:
        if response.messages is None:
            prompts.append(response.prompt.text)
            completions.append(response.text)
        else:
            prompts.append([*response.messages])
            completions.append([{"role": "assistant", "content": response.text}])
    arguments["prompts"] = prompts
    arguments["completions"] = completions
    arguments["completion_ids"] = [[*response.tokens] for response in responses]
    # The latest of all: a tuple is compared by its first field, which is global_step.
    arguments["trainer_state"] = max(response.trainer_state for response in responses)
    return arguments


def verifiers_of(
    named: Sequence[Named], processes: int = 0, seconds: float | None = None
) -> Processes:
    """Return the pool that asks a run's `Verifiers` questions, in this process or in others.

    With processes=0, raises ConfigError for a verifier that cannot be imported. Other processes
    import them when they get their first question.
    """
    pool = Processes(
        kind=Verifiers,
        arguments=([*named],),
        noun="verifier",
        setting=", ".join(map(str, named)),
        processes=processes,
        seconds=seconds,
    )
    pool.answers([])  # No question, but without processes this imports the verifiers.
    return pool


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
            for gold in library.parse(text, parsing_timeout=limit)
        ]
        parsed = library.parse(completion, parsing_timeout=limit)
        return float(library.verify(golds, parsed, timeout_seconds=limit))

    return verify


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
    if with_unit is not None:
        forms.append(with_unit[1])
    return [f"\\boxed{{{form}}}" for form in dict.fromkeys(forms)]
