"""Scores completions by the verifiers of a run.

Verifiers are called in this process or in processes of their own. A call that does not reach its
server is made again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.errors import VerifierLost
from pgtoolkit.system.report import plural
from pgtoolkit.tasks.process_pool import NOTHING, TIMEOUT, Answer, Failure, Processes
from pgtoolkit.tasks.retries import Retries, stop_asked
from pgtoolkit.tasks.reward_functions import UNREACHABLE, BatchScores, Question, TrainerState
from pgtoolkit.tasks.settings import VERIFIERS
from pgtoolkit.tasks.signatures import OF_A_BATCH_OF_VERL, OF_VERL, Signature
from pgtoolkit.tasks.verifiers import AwaitedQuestions, BatchQuestion, Named, Verifiers

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("pgtoolkit")

_TOLD_FROM = 5.0
"""Seconds of a wait from which on a line says what is waited for."""

_PROBES = 8
"""Questions that are asked again before a server that had answered them counts as lost."""

_AT_THE_START = TrainerState(global_step=0, max_steps=0)


@dataclass(frozen=True)
class Response:
    """A completion to be scored, with its prompt.

    text: the completion as a text.
    finished: whether it ended by itself, with the end of the sequence or a stop string.
    tokens: the tokens of the completion, with the one that ends it.
    messages: the messages of the prompt that the chat template got; None without a template.
    trainer_state: the progress of training when the completion was written.
    plain: the text without special tokens, which functions in TRL's form and verl's get, as there;
        None: it is not known, and they get the text.
    """

    prompt: Prompt
    text: str
    finished: bool
    tokens: list[int] | Tensor = field(default_factory=list)
    messages: Sequence[Message] | None = None
    trainer_state: TrainerState = _AT_THE_START
    plain: str | None = None

    @property
    def text_elsewhere(self) -> str:
        """The text that functions of other trainers get."""
        return self.text if self.plain is None else self.plain

    def __str__(self) -> str:
        return (
            f"the completion {self.text[:200]!r} of the prompt at {self.prompt.place}, whose "
            f"answer is {self.prompt.answer[:60]!r}"
        )


class Scoring:
    """Scores completions by the verifiers of a run.

    processes: the number of processes that call the verifiers; with 0 this process does.
    seconds: the longest that a call in another process may take.
    concurrency: the number of calls of `async def` verifiers that are awaited at a time.
    retries: of calls that do not reach their server.
    signatures: the signature of each verifier; None for one of pgtoolkit's.
    Raises ConfigError for a verifier that cannot be imported.
    """

    def __init__(
        self,
        named: Sequence[Named],
        processes: int,
        seconds: float | None,
        concurrency: int,
        retries: Retries,
    ):
        self._named = named
        self._retries = retries
        # The latest questions that each verifier has answered.
        self._answered = [deque[Question | BatchQuestion](maxlen=_PROBES) for _ in named]
        self._pool = verifier_pool(named, processes, seconds, concurrency)
        self.signatures: list[Signature | None] = [None] * len(named)
        if any(verifier.name not in VERIFIERS for verifier in named):
            (self.signatures,) = self._pool.answers([None])

    def scores(self, number: int, responses: Sequence[Response]) -> BatchScores:
        """Return the scores of the responses by verifier `number`.

        Raises DataError if a function of the user's fails, and VerifierLost where its server stays
        away.
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
        return BatchScores(self._outcomes(number, questions))

    def _scores_of_batch(
        self, number: int, signature: Signature, responses: Sequence[Response]
    ) -> BatchScores:
        """Return the scores by a verifier that scores all responses in one call."""
        inputs = _batch_arguments(signature, responses)
        size = len(responses)
        on = f"{size} completions, first {responses[0]}"
        (outcome,) = self._outcomes(number, [BatchQuestion(number, inputs, size, on)])
        if isinstance(outcome, Failure):
            return BatchScores([outcome] * size)
        return outcome

    def _outcomes(self, number: int, questions: Sequence[Question | BatchQuestion]) -> list[Answer]:
        """Return the outcome of each question. Raises VerifierLost where no call reaches the
        server."""
        outcomes = self._asked_with_retries(number, questions)
        self._refuse_lost(number, questions, outcomes)
        return outcomes

    def _asked_with_retries(
        self, number: int, questions: Sequence[Question | BatchQuestion]
    ) -> list[Answer]:
        """Return the outcome of each question. Calls that did not reach their server are made
        again."""
        outcomes = self._asked(number, questions)
        for wait in self._retries.waits():
            places = [
                place for place, outcome in enumerate(outcomes) if self._lost(number, outcome)
            ]
            if not places:
                break
            if wait >= _TOLD_FROM:
                reason = outcomes[places[0]].reason
                log.warning(
                    f"note: {self._named[number]} {reason}. {len(places)} of "
                    f"{plural(len(questions), 'call')} are made again in {wait:g} seconds "
                    "(task.verifier_retries)."
                )
            if stop_asked.wait(wait):
                break
            again = self._asked(number, [questions[place] for place in places])
            for place, outcome in zip(places, again, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _asked(self, number: int, questions: Sequence[Question | BatchQuestion]) -> list[Answer]:
        signature = self.signatures[number]
        if signature is None or not signature.is_async:
            return self._pool.answers(questions)
        # What is awaited keeps to its time from the first call on: it may hang in each process.
        if signature.is_batch:
            return self._pool.answers(questions, is_first_longer=False)
        return self._pool.answers_together(questions, lambda some: AwaitedQuestions(number, some))

    def _lost(self, number: int, outcome: object) -> bool:
        """Return whether a call failed since its server did.

        A function that is awaited is taken to ask one, so it is too late for the same reason.
        """
        signature = self.signatures[number]
        is_async = signature is not None and signature.is_async
        kinds = (UNREACHABLE, TIMEOUT) if is_async else (UNREACHABLE,)
        return isinstance(outcome, Failure) and outcome.kind in kinds

    def _refuse_lost(
        self,
        number: int,
        questions: Sequence[Question | BatchQuestion],
        outcomes: Sequence[object],
    ) -> None:
        """Raise VerifierLost where a verifier answers no question any more.

        A server that fails on one completion alone is still there, and so is one that refuses some
        calls at random: a question that it has answered is asked once more, and if that fails,
        several are, each as often as any other. Where few are asked at a time, as a judge of whole
        batches is, those of earlier calls count.
        """
        answered = [
            question
            for question, outcome in zip(questions, outcomes, strict=True)
            if not isinstance(outcome, Failure) or outcome.kind == NOTHING
        ]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        lost = [failure for failure in failures if self._lost(number, failure)]
        late = [failure for failure in failures if failure.kind == TIMEOUT]
        if late and not lost and not answered and len(questions) > 1:
            raise VerifierLost(
                f"{self._named[number]} {late[0].reason}, and scored none of "
                f"{plural(len(questions), 'completion')}. Use a larger task.verifier_seconds if it "
                "needs more time."
            )
        self._answered[number].extend(answered[-_PROBES:])
        if not lost:
            return
        if len(questions) < _PROBES:
            answered = answered or [*self._answered[number]]
        again = f"was made again {plural(self._retries.count, 'time')}"
        reason = f"{self._named[number]} {lost[0].reason}."
        longer = self._retries.longer()
        ways_out = (
            f"Start the server, or use task.verifier_retries={longer.count} and "
            f"task.verifier_retry_seconds={longer.seconds:g} to wait for it up to "
            f"{sum(longer.waits()):.0f} seconds."
        )
        if stop_asked.is_set():
            raise VerifierLost(f"{reason} The run was asked to stop, so no call is made again.")
        if not answered:
            raise VerifierLost(f"{reason} Each call {again}, and none was answered. {ways_out}")
        (outcome,) = self._asked(number, answered[:1])
        if not self._lost(number, outcome):
            return
        probes = answered[:_PROBES]
        if all(self._lost(number, outcome) for outcome in self._asked_with_retries(number, probes)):
            raise VerifierLost(
                f"{reason} Each call {again}: {len(lost)} of {plural(len(questions), 'call')} "
                f"failed, and then so did {plural(len(probes), 'call')} that it had answered "
                f"before. {ways_out}"
            )

    def measures(self, outcomes: Sequence[object]) -> dict[str, float]:
        """Return the metrics of failures for one completion; see `Processes.measures`.

        outcomes: the scores or Failures that the verifiers gave it.
        """
        return self._pool.measures(outcomes)

    def close(self) -> None:
        self._pool.close()


def _prompt_and_row(signature: Signature | None, response: Response) -> dict[str, object] | None:
    """Return the arguments that a function asks for besides completion and answer; None if it asks
    for no others."""
    if signature is None or signature.names is None:
        return None
    prompt = response.prompt
    if signature.is_verl:
        of_verl = _arguments_of_verl(response)
        return {name: value for name, value in of_verl.items() if signature.wants(name)}
    values = {
        "prompt": prompt.text if prompt.messages is None else [*prompt.messages],
        "row": prompt.row,
    }
    return {name: value for name, value in values.items() if signature.wants(name)} or None


def _arguments_of_verl(response: Response) -> dict[str, object]:
    """Return the arguments of verl's compute_score, as its reward managers give them.

    ground_truth is the answer: where that comes from reward_model.ground_truth, the value there,
    which may be no text.
    """
    row = response.prompt.row or {}
    ground_truth: object = response.prompt.answer
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict):
        value = reward_model.get("ground_truth")
        if value is not None and value == row.get("answer"):
            ground_truth = value
    return {
        "data_source": row.get("data_source"),
        "solution_str": response.text_elsewhere,
        "ground_truth": ground_truth,
        "extra_info": dict(row.get("extra_info") or {}),
    }


def _batch_arguments(signature: Signature, responses: Sequence[Response]) -> dict[str, object]:
    """Return the arguments of a function that scores a batch, by name, in the form that TRL's
    trainers give them.

    Some may be among them that the function does not ask for; `RewardFunction` leaves them out.
    """
    if signature.is_verl:
        of_verl = [_arguments_of_verl(response) for response in responses]
        return {
            plural_name: [arguments[name] for arguments in of_verl]
            for name, plural_name in zip(OF_VERL, OF_A_BATCH_OF_VERL, strict=True)
        }
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
            completions.append(response.text_elsewhere)
        else:
            prompts.append([*response.messages])
            completions.append([{"role": "assistant", "content": response.text_elsewhere}])
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
    named: Sequence[Named],
    processes: int = 0,
    seconds: float | None = None,
    concurrency: int = 1,
) -> Processes:
    """Return the pool that asks a run's `Verifiers` questions, in this process or in others.

    With processes=0, raises ConfigError for a verifier that cannot be imported. Other processes
    import them when they get their first question.
    """
    pool = Processes(
        kind=Verifiers,
        arguments=([*named], seconds, math.ceil(concurrency / max(1, processes))),
        noun="verifier",
        setting=", ".join(map(str, named)),
        processes=processes,
        seconds=seconds,
    )
    pool.answers([])  # No question, but without processes this imports the verifiers.
    return pool
