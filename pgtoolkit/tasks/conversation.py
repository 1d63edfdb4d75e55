"""Tasks of several turns: the policy and an environment take turns, and the whole conversation gets
one score."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pgtoolkit.completion import Completion, Message, Prompt
from pgtoolkit.config.schema_tasks import ConversationTaskConfig, GuessTaskConfig
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.environments import Ask, Environments
from pgtoolkit.tasks.failed_scores import FailedScores
from pgtoolkit.tasks.process_pool import NOTHING, Failure, Processes
from pgtoolkit.tasks.reward_functions import as_number, is_nothing
from pgtoolkit.tasks.tasks import Once, PromptRows, Score, Seeds, Task

if TYPE_CHECKING:
    from torch import Tensor

ENDS = ENVIRONMENT, MAX_TURNS, LENGTH = "environment", "max_turns", "length"
"""What may end a conversation, besides TIMEOUT and CRASH of its environment."""


@dataclass(eq=False)
class Conversation:
    """What was said so far, from the start of a prompt on.

    environment: as `Environments` keeps it. tokens, drawn: what follows the prompt, and of each
        token whether the
    policy drew it. log_probs: of the policy's turns. end: what ended it, None while it goes on.
        failure: why the
    environment has no score for it; asked: which of its methods that was.
    """

    prompt: Prompt
    environment: Any
    messages: list[Message]
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    version: int = 0
    end: str | None = None
    failure: Failure | None = None
    asked: str = ""

    @property
    def turns(self) -> int:
        return len(self.log_probs)

    def add_turn(self, written: Completion, text: str) -> None:
        """What the policy drew, and the text that it is to the environment."""
        self.add(written.tokens.tolist(), True, {"role": "assistant", "content": text})
        self.log_probs.append(written.log_probs)
        self.version = written.model_version
        self.end = LENGTH if written.finish_reason == "length" else None

    def add(self, tokens: list[int], drawn: bool, message: Message) -> None:
        self.tokens += tokens
        self.drawn += [drawn] * len(tokens)
        self.messages.append(message)

    def measures(self) -> dict[str, float]:
        counts = {"turns": self.turns, "environment_tokens": len(self.drawn) - sum(self.drawn)}
        return counts | {f"ended_by_{end}_fraction": float(self.end == end) for end in ENDS}

    def __str__(self) -> str:
        return f"{_of(self.prompt)}, whose last message is {self.messages[-1]['content'][:200]!r}"


class ConversationTask(Task):
    """Conversations with an environment, which says what they begin with, what it answers, and what
    they are worth.

    Prompts come from files, as those of `PromptsTask`, or, without one, are a seed each without
    end. Each conversation has an environment of its own. A reward of 1 or more is an exact match.
    """

    def __init__(self, config: ConversationTaskConfig | GuessTaskConfig, seed: int, once: Once):
        self.max_turns, self._seed, self._measures = config.max_turns, seed, None
        self.alphabet = getattr(config, "alphabet", None)
        self._rows = Seeds()
        if isinstance(config, ConversationTaskConfig) and config.path is not None:
            self._rows = PromptRows(config, seed, once)
        self._setting, processes = (
            f"task.environment={config.environment}",
            config.environment_processes,
        )
        self._environments = Processes(
            kind=Environments,
            told=(config.environment, config.options, processes > 0),
            what="environment",
            setting=self._setting,
            processes=processes,
            seconds=config.environment_seconds,
        )
        self._failed_scores = FailedScores(config)
        # A prompt begins the same whenever it comes again; those of files are all looked at as a
        # run starts.
        kept = functools.lru_cache(maxsize=1024 if self.num_prompts is None else None)
        self._prompt = kept(lambda row: self._started([row])[0][1])

    @property
    def num_prompts(self) -> int | None:
        return self._rows.num_prompts

    def row(self, index: int) -> int:
        return self._rows.row(index)

    def rows(self) -> Iterator[Prompt]:
        return (self._prompt(prompt.index) for prompt in self._rows.rows())

    def drop(self, rows: set[int]) -> None:
        self._rows.drop(rows)

    def prompt(self, index: int) -> Prompt:
        return dataclasses.replace(self._prompt(self._rows.row(index)), index=index)

    def begin(self, prompts: Sequence[Prompt]) -> list[Conversation]:
        """A conversation on each of them. Raises DataError where one begins otherwise than its
        prompt did."""
        begun = []
        started = self._started([self._rows.row(prompt.index) for prompt in prompts])
        for prompt, (environment, found) in zip(prompts, started, strict=True):
            if found.messages != prompt.messages:
                needs = (
                    f"{prompt.messages!r:.200} as before, since a group answers one prompt: "
                    "draw by prompt.seed"
                )
                raise self._odd("start", found.messages, needs, _of(prompt))
            begun.append(
                Conversation(
                    prompt, environment, [dict(message) for message in found.messages or ()]
                )
            )
        return begun

    def reply(self, conversations: Sequence[Conversation]) -> list[Message | None]:
        """What the environment of each says; None where the conversation ends with what was said
        before.

        Also where this was the last turn: then nobody would answer.
        """
        messages = []
        for one, message in zip(conversations, self._ask("reply", conversations), strict=True):
            of_another = message is None or (
                _is_message(message) and message["role"] != "assistant"
            )
            if one.end is None and not of_another:
                needs = "{'role': TEXT, 'content': TEXT}, which no assistant says, or None"
                raise self._odd("reply", message, needs, one)
            last = (
                ENVIRONMENT
                if message is None
                else MAX_TURNS
                if one.turns == self.max_turns
                else None
            )
            one.end = one.end or last
            messages.append(message if one.end is None else None)
        return messages

    def judged(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Return the score of each; that of one whose environment gave no answer has failed."""
        ask = [one for one in conversations if one.failure is None]
        values = dict(zip(map(id, ask), self._ask("score", ask), strict=True))
        scores = [self._score(one, values.get(id(one))) for one in conversations]
        failures = []
        for conversation in conversations:
            if (failure := conversation.failure) is not None:
                sentence = (
                    f"{conversation.asked} of {self._setting} {failure.reason} on {conversation}"
                )
                failures.append((sentence, failure))
        self._failed_scores.note(failures, len(conversations))
        return scores

    def close(self) -> None:
        self._environments.close()

    def _ask(self, method: str, conversations: Sequence[Conversation]) -> list[Any]:
        """What each environment returns; None where there is no answer, which ends the
        conversation.

        An environment gets messages of its own, so that it changes none of ours.
        """
        asked = [
            Ask(one.environment, method, copy.deepcopy(one.messages), str(one))
            for one in conversations
        ]
        values = []
        for one, answer in zip(conversations, self._environments.answers(asked), strict=True):
            one.asked = method
            if isinstance(answer, Failure):
                one.end = answer.kind
                one.failure = answer
                answer = (None, None)
            one.environment, value = answer
            values.append(value)
        return values

    def _started(self, rows: Sequence[int]) -> list[tuple[Any, Prompt]]:
        """Of each row a new environment, and the prompt that it begins with."""
        from pgtoolkit.tasks.shuffle import seed_of  # not above: `pgtk check` does without NumPy

        prompts = [
            dataclasses.replace(self._rows.of_row(row), seed=seed_of(self._seed, row))
            for row in rows
        ]
        answers, started = (
            self._environments.answers([Ask(None, "start", one, _of(one)) for one in prompts]),
            [],
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, Failure):
                raise self._odd(
                    "start", answer.kind, "in time: let reply begin what is slow", _of(prompt)
                )
            environment, messages = answer
            is_list = (
                isinstance(messages, list | tuple) and messages and all(map(_is_message, messages))
            )
            if not is_list or messages[-1]["role"] == "assistant":
                needs = (
                    "a list of {'role': TEXT, 'content': TEXT}, of which the policy answers "
                    "the last"
                )
                raise self._odd("start", messages, needs, _of(prompt))
            text = "".join(message["content"] for message in messages)
            started.append(
                (environment, dataclasses.replace(prompt, text=text, messages=tuple(messages)))
            )
        return started

    def _score(self, one: Conversation, value: Any) -> Score:
        is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
        if one.failure is None and (value is None or (is_pair and is_nothing(value[0]))):
            one.failure = Failure(NOTHING, f"returned {value!r:.200}")
        if one.failure is not None:
            measures = one.measures() | self._environments.measures([one.failure])
            return Score(self._failed_scores.score, False, measures, failed=True)
        assert value is not None
        reward, *numbers = map(as_number, (value[0], *value[1].values())) if is_pair else [math.nan]
        if not all(map(math.isfinite, (reward, *numbers))):
            raise self._odd("score", value, "(reward, {NAME: NUMBER}), finite numbers", one)
        names = value[1].keys()
        if odd := [name for name in names if not re.fullmatch(r"[A-Za-z]\w{0,39}", str(name))]:
            raise self._odd(
                "score", odd[0], "names of measures of letters, digits and underscores", one
            )
        self._measures = frozenset(names) if self._measures is None else self._measures
        if names != self._measures:
            needs = f"measures of the same names each time, here {sorted(self._measures)}"
            raise self._odd("score", value, needs, one)
        own = {f"environment/{name}": number for name, number in zip(names, numbers, strict=True)}
        return Score(
            reward, reward >= 1, one.measures() | own | self._environments.measures([None])
        )

    def _odd(self, method: str, value: Any, needs: str, where: Any) -> DataError:
        return DataError(
            f"{method} of {self._setting} must return {needs} (got {value!r:.200}), in {where}."
        )


def _of(prompt: Prompt) -> str:
    return f"the conversation on {prompt.place} (seed {prompt.seed})"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
