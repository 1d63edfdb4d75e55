"""Scores completions by the verifiers of a run.

Verifiers are called in this process or in processes of their own; an `async def` is awaited in this
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.config.schema_tasks import VERIFIERS
from pgtoolkit.tasks.awaited import Awaited
from pgtoolkit.tasks.process_pool import Failure, Processes
from pgtoolkit.tasks.reward_functions import BatchScores, Question, RewardFunction, TrainerState
from pgtoolkit.tasks.signatures import Signature
from pgtoolkit.tasks.verifiers import BatchQuestion, Named, Verifiers

if TYPE_CHECKING:
    from torch import Tensor

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
    tokens: list[int] | Tensor = field(default_factory=list)
    messages: Sequence[Message] | None = None
    trainer_state: TrainerState = _AT_THE_START

    def __str__(self) -> str:
        return (
            f"the completion {self.text[:200]!r} of the prompt at {self.prompt.place}, whose "
            f"answer is {self.prompt.answer[:60]!r}"
        )


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
        self._named = named
        self._pool = verifier_pool(named, processes, seconds)
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

    Some may be among them that the function does not ask for; `RewardFunction` leaves them out.
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
    if signature.wants("completion_ids"):
        arguments["completion_ids"] = [_as_list(response.tokens) for response in responses]
    # The latest of all: a tuple is compared by its first field, which is global_step.
    arguments["trainer_state"] = max(response.trainer_state for response in responses)
    return arguments


def _as_list(tokens: list[int] | Tensor) -> list[int]:
    return tokens if isinstance(tokens, list) else tokens.tolist()


def verifier_pool(
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
