"""Tasks of several turns: the policy and an environment take turns, and each conversation gets one
score."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from pgtoolkit.completion import Completion, Message, Prompt
from pgtoolkit.errors import DataError
from pgtoolkit.system.report import plural
from pgtoolkit.tasks.environments import Ask, Environments
from pgtoolkit.tasks.failed_scores import FailedScore, FailedScores
from pgtoolkit.tasks.process_pool import NOTHING, Failure, Processes
from pgtoolkit.tasks.prompt_tasks import PromptRows
from pgtoolkit.tasks.reward_functions import as_number, is_nothing
from pgtoolkit.tasks.settings import ConversationTaskSettings, GuessTaskSettings
from pgtoolkit.tasks.tasks import Once, Score, Seeds, Task, above_one, is_first_above_one

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("pgtoolkit")

ENVIRONMENT = "environment"
MAX_TURNS = "max_turns"
LENGTH = "length"
ENDS = (ENVIRONMENT, MAX_TURNS, LENGTH)
"""The ways in which a conversation ends, besides TIMEOUT and CRASH of its environment."""


@dataclass(eq=False)
class Conversation:
    """Everything that was said so far, from the start of a prompt on.

    environment: as `Environments` keeps it.
    tokens, drawn: the tokens after the prompt, and whether the policy drew each of them.
    log_probs: (N,) of each of the policy's turns. top_ids, top_log_probs: (N, k) of each, as a
        `Completion` has them; empty where they are not asked for.
    version: of the weights of its last turn.
    end: what has ended it; None while it goes on.
    failure: why the environment has no score for it. asked: the method that was called last.
    unanswered: tokens of a message that left no room for an answer; 0 without one.
    """

    prompt: Prompt
    environment: object
    messages: list[Message]
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_log_probs: list[Tensor] = field(default_factory=list)
    version: int = 0
    end: str | None = None
    failure: Failure | None = None
    asked: str = ""
    unanswered: int = 0

    @property
    def turns(self) -> int:
        return len(self.log_probs)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add a turn of the policy. text: the turn as the environment sees it."""
        self.add(completion.tokens.tolist(), True, {"role": "assistant", "content": text})
        self.log_probs.append(completion.log_probs)
        if completion.top_ids is not None and completion.top_log_probs is not None:
            self.top_ids.append(completion.top_ids)
            self.top_log_probs.append(completion.top_log_probs)
        self.version = completion.model_version
        if self.failure is None:
            self.end = LENGTH if completion.finish_reason == "length" else None

    def fail(self, method: str, failure: Failure) -> None:
        """End the conversation, whose environment has no answer to this call."""
        self.asked = method
        self.end = failure.kind
        self.failure = failure
        self.environment = None

    def add(self, tokens: list[int], drawn: bool, message: Message) -> None:
        self.tokens += tokens
        self.drawn += [drawn] * len(tokens)
        self.messages.append(message)

    def measures(self) -> dict[str, float]:
        counts = {"turns": self.turns, "environment_tokens": len(self.drawn) - sum(self.drawn)}
        return counts | {f"ended_by_{end}_fraction": float(self.end == end) for end in ENDS}

    def __str__(self) -> str:
        last = self.messages[-1]["content"]
        return f"{_described(self.prompt)}, whose last message is {last[:200]!r}"


class ConversationTask(Task):
    """Conversations with an environment, which gives their first messages, its replies, and their
    scores.

    Prompts come from files, as those of `PromptsTask`; without a file each prompt is a seed, and
    they never end. Each conversation has an environment of its own. A reward of 1 or more is an
    exact match.

    source_rows: the prompts that environments begin conversations on.
    """

    def __init__(
        self,
        settings: ConversationTaskSettings | GuessTaskSettings,
        seed: int,
        once: Once,
        held_out: bool = False,
    ):
        self.max_turns = settings.max_turns
        self.alphabet = getattr(settings, "alphabet", None)
        self._seed = seed
        # The names of the environment's measures, once there is a score.
        self._measures: frozenset[str] | None = None
        self.source_rows = Seeds()
        if isinstance(settings, ConversationTaskSettings) and settings.path is not None:
            self.source_rows = PromptRows(settings, seed, once)
        self._setting = f"task.environment={settings.environment}"
        processes = settings.environment_processes
        self._environments = Processes(
            kind=Environments,
            arguments=(settings.environment, settings.options, processes > 0),
            noun="environment",
            setting=self._setting,
            processes=processes,
            seconds=settings.environment_seconds,
        )
        self._failed_scores = FailedScores(settings, held_out)
        # A prompt begins the same whenever it comes again; those of files are all looked at as a
        # run starts.
        cached = functools.lru_cache(maxsize=1024 if self.num_prompts is None else None)
        self._prompt = cached(self._started)
        self._noted_share = 0.0

    @property
    def num_prompts(self) -> int | None:
        return self.source_rows.num_prompts

    def row(self, index: int) -> int:
        return self.source_rows.row(index)

    def rows(self) -> Iterator[Prompt]:
        return (self._prompt(prompt.index) for prompt in self.source_rows.rows())

    def drop(self, rows: set[int]) -> None:
        self.source_rows.drop(rows)

    def prompt(self, index: int) -> Prompt:
        return dataclasses.replace(self._prompt(self.source_rows.row(index)), index=index)

    def begin(self, prompts: Sequence[Prompt]) -> list[Conversation]:
        """Begin a conversation on each prompt. Raises DataError if one begins in another way than
        its prompt did. One whose environment gives no answer ends after the first turn."""
        conversations = []
        started = self._start([self.source_rows.row(prompt.index) for prompt in prompts])
        for prompt, (environment, begun) in zip(prompts, started, strict=True):
            if isinstance(environment, Failure):
                conversation = Conversation(prompt, None, [*map(dict, prompt.messages or ())])
                conversation.fail("start", environment)
                conversations.append(conversation)
                continue
            if begun.messages != prompt.messages:
                needs = (
                    f"{prompt.messages!r:.200} as before, since a group answers one prompt: "
                    "draw random numbers by prompt.seed"
                )
                raise self._wrong_value("start", begun.messages, needs, _described(prompt))
            messages = [dict(message) for message in begun.messages or ()]
            conversations.append(Conversation(prompt, environment, messages))
        return conversations

    def reply(self, conversations: Sequence[Conversation]) -> list[Message | None]:
        """Return the reply of each conversation's environment; None if the conversation has ended.

        It has also ended after the last turn that is allowed: nobody would answer a reply.
        """
        messages = []
        replies = self._call("reply", conversations)
        for conversation, reply in zip(conversations, replies, strict=True):
            message = reply if _is_message(reply) and reply["role"] != "assistant" else None
            if conversation.end is None and message is None and reply is not None:
                needs = "{'role': TEXT, 'content': TEXT} of another role than assistant, or None"
                raise self._wrong_value("reply", reply, needs, str(conversation))
            if conversation.end is None and message is None:
                conversation.end = ENVIRONMENT
            elif conversation.end is None and conversation.turns == self.max_turns:
                conversation.end = MAX_TURNS
            messages.append(message if conversation.end is None else None)
        return messages

    def score_conversations(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Return the score of each; where the environment gave no answer, the score has failed."""
        to_score = [conversation for conversation in conversations if conversation.failure is None]
        values = dict(zip(map(id, to_score), self._call("score", to_score), strict=True))
        scores = [
            self._score(conversation, values.get(id(conversation)))
            for conversation in conversations
        ]
        failures = []
        for conversation in conversations:
            failure = conversation.failure
            if failure is not None:
                call = f"{conversation.asked} of {self._setting}"
                failures.append(FailedScore(call, failure, str(conversation)))
        self._failed_scores.note(failures, len(conversations))
        return scores

    def close(self) -> None:
        self._environments.close()

    def _call(self, method: str, conversations: Sequence[Conversation]) -> list[object]:
        """Call a method of each conversation's environment, and return the values.

        Where there is no answer the value is None, and the conversation ends. An environment gets a
        copy of the messages, since it may change them.
        """
        asks = [
            Ask(
                conversation.environment,
                method,
                copy.deepcopy(conversation.messages),
                str(conversation),
            )
            for conversation in conversations
        ]
        values = []
        answers = self._environments.answers(asks)
        for conversation, answer in zip(conversations, answers, strict=True):
            if isinstance(answer, Failure):
                conversation.fail(method, answer)
                values.append(None)
            else:
                conversation.environment, value = answer
                values.append(value)
        return values

    def in_reply(self, conversation: Conversation) -> str:
        """Return the call that an error is about, in words."""
        return f"reply of {self._setting}, in {conversation}"

    def note_unanswered(self, conversations: Sequence[Conversation], longest: int) -> None:
        """Log a note where messages of environments leave no room for an answer, and again when
        the share of these conversations has doubled.

        longest: the most tokens that follow a prompt.
        """
        unanswered = [conversation for conversation in conversations if conversation.unanswered]
        share = len(unanswered) / max(1, len(conversations))
        if not unanswered or share < 2 * self._noted_share:
            return
        self._noted_share = share
        first = unanswered[0]
        log.warning(
            f"note: {self.in_reply(first)}, has returned a message of {first.unanswered} tokens, "
            f"which leaves no room for an answer: rollout.max_completion_length={longest} holds "
            f"all turns and messages of a conversation. So {len(unanswered)} of "
            f"{plural(len(conversations), 'conversation')} "
            f"{'ends' if len(unanswered) == 1 else 'end'} there; the metric "
            "ended_by_length_fraction counts them. This note comes again when the share doubles."
        )

    def _started(self, row: int) -> Prompt:
        """Return the prompt that a row begins with. DataError where its environment gives none."""
        ((environment, prompt),) = self._start([row])
        if isinstance(environment, Failure):
            needs = "in time, and once without a failure: let reply begin what is slow"
            raise self._wrong_value("start", environment.reason, needs, _described(prompt))
        return prompt

    def _start(self, rows: Sequence[int]) -> list[tuple[object, Prompt]]:
        """Return a new environment for each row, and the prompt that it begins with; the Failure in
        its place where there is no answer."""
        from pgtoolkit.tasks.shuffle import seed_of  # not above: `pgtk check` does without NumPy

        prompts = [
            dataclasses.replace(self.source_rows.of_row(row), seed=seed_of(self._seed, row))
            for row in rows
        ]
        asks = [Ask(None, "start", prompt, _described(prompt)) for prompt in prompts]
        answers = self._environments.answers(asks)
        started = []
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, Failure):
                started.append((answer, prompt))
                continue
            environment, messages = answer
            if not _are_messages(messages) or messages[-1]["role"] == "assistant":
                needs = (
                    "a list of {'role': TEXT, 'content': TEXT}, of which the policy answers "
                    "the last"
                )
                raise self._wrong_value("start", messages, needs, _described(prompt))
            text = "".join(message["content"] for message in messages)
            begun = dataclasses.replace(prompt, text=text, messages=tuple(messages))
            started.append((environment, begun))
        return started

    def _score(self, conversation: Conversation, value: object) -> Score:
        """Return the score that a value of the environment's `score` means."""
        pair = _reward_and_measures(value)
        is_missing = value is None or (pair is not None and is_nothing(pair[0]))
        if conversation.failure is None and is_missing:
            conversation.asked = "score"
            conversation.failure = Failure(NOTHING, f"returned {value!r:.200}")
        if conversation.failure is not None:
            failed = self._environments.measures([conversation.failure])
            measures = conversation.measures() | failed
            return Score(self._failed_scores.score, False, measures, failed=True)
        reward = math.nan
        numbers: dict[str, float] = {}
        if pair is not None:
            reward = as_number(pair[0])
            numbers = {name: as_number(item) for name, item in pair[1].items()}
        if not all(map(math.isfinite, (reward, *numbers.values()))):
            needs = "(reward, {NAME: NUMBER}), finite numbers"
            raise self._wrong_value("score", value, needs, str(conversation))
        for name in numbers:
            if not re.fullmatch(r"[A-Za-z]\w{0,39}", str(name)):
                needs = "names of measures of letters, digits and underscores"
                raise self._wrong_value("score", name, needs, str(conversation))
        if self._measures is None:
            self._measures = frozenset(numbers)
        if numbers.keys() != self._measures:
            needs = f"measures of the same names each time, here {sorted(self._measures)}"
            raise self._wrong_value("score", value, needs, str(conversation))
        measures = conversation.measures()
        measures |= {f"environment/{name}": number for name, number in numbers.items()}
        measures |= self._environments.measures([None])
        if reward > 1 and is_first_above_one(self._setting):
            giver = f"score of {self._setting}"
            log.warning(f"note: {above_one(giver, reward, str(conversation))}")
        return Score(reward, reward >= 1, measures)

    def _wrong_value(self, method: str, value: object, needs: str, place: str) -> DataError:
        """Return the error for a value that a method must not return. place: the conversation."""
        return DataError(
            f"{method} of {self._setting} must return {needs} (got {value!r:.200}), in {place}."
        )


def _described(prompt: Prompt) -> str:
    return f"the conversation on {prompt.place} (seed {prompt.seed})"


def _reward_and_measures(value: object) -> tuple[object, dict[str, object]] | None:
    """Return a value of the environment's `score` if it is a pair with a dictionary; else None."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return value
    return None


def _is_message(value: object) -> TypeGuard[Message]:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _are_messages(value: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a value is a list of messages that is not empty."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_message, value))
