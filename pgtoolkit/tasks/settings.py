"""The settings of tasks: which prompts are asked, and how completions are scored."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pgtoolkit.system.declared import (
    REQUIRED,
    Alters,
    Dictionary,
    Needs,
    Option,
    Refusal,
    Settings,
    chosen,
    key,
)

_FAILURES_SCORE = "task.verifier_failure=score"
VERIFIERS = ("exact_match", "last_number", "regular_expression", "math_verify")
"""The verifiers that come with pgtoolkit; others are functions of the user's."""

_NEEDS_ROWS: Needs = {"only_if": "task.path!=null", "use": "task.path=prompts.jsonl"}
_NEEDS_VERIFIER_TIMEOUT: Refusal = {
    "only_if": "task.verifier_seconds!=null",
    "use": "task.verifier_seconds=10",
    "why": "A process of its own has a time limit.",
}
_NEEDS_VERIFIER_PROCESSES: Refusal = {
    "only_if": "task.verifier_processes>0",
    "use": "task.verifier_processes=4",
    "why": "Only a process of its own can be ended.",
}
_NEEDS_ENVIRONMENT_TIMEOUT: Refusal = {
    "only_if": "task.environment_seconds!=null",
    "use": "task.environment_seconds=10",
    "why": "A process of its own has a time limit.",
}
_NEEDS_ENVIRONMENT_PROCESSES: Refusal = {
    "only_if": "task.environment_processes>0",
    "use": "task.environment_processes=4",
    "why": "Only a process of its own can be ended.",
}


class Chat(StrEnum):
    auto = "auto"
    never = "never"


class TooLong(StrEnum):
    refuse = "refuse"
    skip = "skip"


class VerifierFailure(StrEnum):
    exclude = "exclude"
    score = "score"


_FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt")


def is_data_set_name(path: str) -> bool:
    """Return whether task.path names a data set on the Hugging Face hub, OWNER/NAME, and no file of
    this machine."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    return is_name and not path.endswith(_FILE_ENDINGS) and not os.path.exists(path)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    name: str = key(option=True)


@dataclass(frozen=True, kw_only=True)
class GeneratedTaskSettings(TaskSettings):
    """Problems that a generator makes, without end.

    alphabet: their characters, each a token of the tiny model. size: the key for the largest size
    of a problem. longest: the characters of the longest prompt, and of the longest reference
    answer with its end.
    """

    alphabet = ""
    size = ""
    longest = (0, 0)


@dataclass(frozen=True, kw_only=True)
class ReverseTaskSettings(GeneratedTaskSettings):
    name: Literal["reverse"] = chosen("reverse", alters=Alters.prompts)
    num_digits: int = key(
        default=6,
        help="Digits of the number (>= 1). The answer takes one token more: the end of the "
        "sequence.",
        least=1,
        most=1000,
        alters=Alters.prompts,
    )
    alphabet = "0123456789="
    size = "num_digits"
    longest = property(lambda self: (self.num_digits + 1, self.num_digits + 1))


@dataclass(frozen=True, kw_only=True)
class GuessTaskSettings(GeneratedTaskSettings):
    name: Literal["guess"] = chosen("guess", alters=Alters.prompts)
    numbers: int = key(
        default=10,
        help="The number to be found is one of this many, from 0 on (>= 2).",
        least=2,
        most=10**6,
        alters=Alters.prompts,
    )
    max_turns: int = key(
        default=4,
        help="Most guesses in a conversation (>= 1).",
        least=1,
        most=1000,
        alters=Alters.prompts,
    )
    alphabet = "0123456789-?eghilorw"
    size = "numbers"
    # Keys of other conversations, which are fixed here.
    environment = "pgtoolkit.tasks.environments.Guess"
    path = None
    environment_processes = 0
    environment_seconds = None
    verifier_failure = VerifierFailure.exclude
    failure_score = 0.0
    options = property(lambda self: {"numbers": self.numbers})

    @property
    def longest(self) -> tuple[int, int]:
        guess = len(str(self.numbers - 1)) + 1
        return 2 + guess, self.max_turns * guess + (self.max_turns - 1) * len("higher")


@dataclass(frozen=True, kw_only=True)
class ChatTaskSettings(TaskSettings):
    """Prompts in words, which a tokenizer splits, perhaps after a chat template."""

    chat: Chat = key(
        default=Chat.auto,
        help="Whether prompts go through the chat template of the model's tokenizer: auto (where "
        "it has one) or never.",
        alters=Alters.prompts,
    )
    system_prompt: str | None = key(
        default=None,
        help="The system message of every prompt, which needs a chat template; null: none but the "
        "template's own.",
        alters=Alters.prompts,
    )
    chat_arguments: Dictionary = key(
        default={},
        help="Arguments of the chat template by their names, such as {enable_thinking: false}.",
        free=True,
        learns="task.chat_arguments!={}",
        added=True,
        alters=Alters.prompts,
    )


@dataclass(frozen=True, kw_only=True)
class WrittenTaskSettings(ChatTaskSettings):
    """Prompts that pgtoolkit did not write: they may be too long, and their scoring may fail."""

    max_prompt_length: int | None = key(
        default=None,
        help="Most tokens of a prompt (>= 1), chat template included; null: those that a "
        "completion of full length leaves room for.",
        least=1,
        most=10**7,
        alters=Alters.prompts,
    )
    too_long: TooLong = key(
        default=TooLong.refuse,
        help="What happens to prompts that are longer, or empty: refuse (the run) or skip (these "
        "prompts, which a note counts).",
        alters=Alters.prompts,
    )
    verifier_failure: VerifierFailure = key(
        default=VerifierFailure.exclude,
        help="What happens to a completion whose scoring crashed, took too long or returned no "
        "number (None or NaN): exclude (it gets weight 0 and is left out of its group's baseline) "
        "or score (it gets task.failure_score). The metric failed_score_fraction counts them.",
        learns=_FAILURES_SCORE,
        fixed="",
        added=True,
        alters=Alters.scores,
    )
    failure_score: float = key(
        default=0.0,
        help="The score in place of one that failed, with task.verifier_failure=score; of several "
        "verifiers, before it is multiplied by the verifier's weight.",
        least=-1e6,
        most=1e6,
        learns=_FAILURES_SCORE,
        fixed="",
        added=True,
        only_if=_FAILURES_SCORE,
        alters=Alters.scores,
    )


@dataclass(frozen=True, kw_only=True)
class SumsTaskSettings(ChatTaskSettings):
    name: Literal["sums"] = chosen("sums", alters=Alters.prompts)
    num_terms: int = key(
        default=2,
        help="Numbers of a sum (>= 2).",
        least=2,
        most=100,
        alters=Alters.prompts,
    )
    num_digits: int = key(
        default=2,
        help="Digits of each number (>= 1): the more, the harder.",
        least=1,
        most=100,
        alters=Alters.prompts,
    )

    def asked(self, terms: list[int]) -> str:
        """Return the prompt of a sum."""
        return f"What is {' + '.join(map(str, terms))}? Answer with the number only."

    @property
    def longest_prompt(self) -> str:
        """A longest prompt; all have the same number of characters."""
        return self.asked([10**self.num_digits - 1] * self.num_terms)


@dataclass(frozen=True, kw_only=True)
class ScoredTaskSettings(WrittenTaskSettings):
    """Prompts whose completions verifiers score, perhaps in processes of their own."""

    verifier_processes: int = key(
        default=0,
        help="Processes on every rank that score completions (>= 1); 0: the process that trains "
        "scores them.",
        least=0,
        most=1024,
        learns=False,
        fixed="",
        added=True,
        alters=Alters.nothing,
        **_NEEDS_VERIFIER_TIMEOUT,
    )
    verifier_seconds: float | None = key(
        default=None,
        help="Most seconds that a verifier may take for a completion, or for a batch if it scores "
        "whole batches; after that the score has failed (task.verifier_failure). null without "
        "verifier_processes. What is imported meanwhile does not count, and the first completion "
        "has 120 seconds, for which a verifier may load more.",
        least=0.01,
        most=86400,
        # null has always been part of the digests of task=prompts.
        learns="task.verifier_seconds>0 or task.name=prompts",
        fixed="",
        added=True,
        alters=Alters.scores,
        **_NEEDS_VERIFIER_PROCESSES,
    )


QUESTIONS = 10_000
"""Questions of a data set of reasoning-gym whose options do not say how many it has."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTaskSettings(ScoredTaskSettings):
    name: Literal["reasoning_gym"] = chosen("reasoning_gym", alters=Alters.prompts)
    dataset: str = key(
        default=REQUIRED,
        help="Name of the data set in reasoning-gym, such as chain_sum.",
        example="chain_sum",
        alters=Alters.prompts,
    )
    options: Dictionary = key(
        default={},
        help="Options of that data set, such as {min_terms: 2, max_terms: 3}.",
        free=True,
        alters=Alters.prompts,
    )


@dataclass(frozen=True, kw_only=True)
class PromptsTaskSettings(ScoredTaskSettings):
    name: Literal["prompts"] = chosen("prompts", alters=Alters.prompts)
    path: str = key(
        default=REQUIRED,
        help="A JSONL or Parquet file with a prompt in each row, a folder of them, a glob, "
        "the folder of a Hugging Face data set, or the name of one on the hub, such as "
        "openai/gsm8k, which the package datasets loads.",
        reads="data",
        example="prompts.jsonl",
        alters=Alters.prompts,
    )
    config: str | None = key(
        default=None,
        help="The configuration of a data set on the hub, such as main; null: its only one.",
        learns="task.config!=null",
        added=True,
        alters=Alters.prompts,
    )
    split: str | None = key(
        default=None,
        help="The split of that data set, such as train; null: its only one, or a folder without "
        "splits.",
        alters=Alters.prompts,
    )
    prompt_field: str = key(
        default="prompt",
        help="Column with the prompt: a text, or a list of chat messages {role, content}.",
        alters=Alters.prompts,
    )
    answer_field: str = key(
        default="answer",
        help="Column with the reference answer. In a file without a column answer, such as verl's, "
        "it is reward_model.ground_truth.",
        alters=Alters.scores,
    )
    answer_pattern: str | None = key(
        default=None,
        help="Regular expression with one group: the answer is what the group matches last in that "
        "column, such as '#### (.*)' in GSM8K's worked solutions. null: the whole column is the "
        "answer.",
        learns="task.answer_pattern!=null",
        added=True,
        alters=Alters.scores,
    )
    verifier: str | None = key(
        default="exact_match",
        help="How a completion is scored: exact_match, last_number, regular_expression, "
        "math_verify, or by a function of your own or for TRL (docs/data.md), given by its dotted "
        "path `package.module.function`, in the current directory or installed. A score of 1 or "
        "more counts as right, in exact_match and pass@k: a function that scores up to 10 returns "
        "score / 10.",
        code="function",
        only_if="task.verifiers={}",
        alters=Alters.scores,
    )
    pattern: str | None = key(
        default=None,
        help="The expression whose group is compared with the answer, only for "
        "verifier=regular_expression; else null.",
        only_if="task.verifiers={}",
        alters=Alters.scores,
    )
    verifiers: Dictionary = key(
        default={},
        help="Several verifiers in place of task.verifier, by names of your choice, such as "
        "{answer: {verifier: math_verify}, boxed: {verifier: my_module.boxed, weight: 0.1}}. The "
        "reward is the sum of weight x score. The first of them decides whether a completion "
        "counts as right: by a score of 1 or more, before its weight.",
        free=True,
        example="{answer: {verifier: exact_match}}",
        code="function",
        alters=Alters.scores,
    )
    verifier_concurrency: int = key(
        default=16,
        help="Calls of an async def verifier, such as requests to a judge, that every rank awaits "
        "at the same time (>= 1).",
        least=1,
        most=10_000,
        learns=False,
        fixed="",
        added=True,
        alters=Alters.nothing,
    )
    verifier_retries: int = key(
        default=3,
        help="Further calls of a verifier that does not reach its server, or that is awaited and "
        "too late (>= 0). A verifier that then answers no call any more ends the run, which can "
        "be resumed.",
        least=0,
        most=10_000,
        learns=False,
        fixed="",
        added=True,
        alters=Alters.nothing,
    )
    verifier_retry_seconds: float = key(
        default=0.5,
        help="Seconds before the first of these calls (>= 0). Each further wait is four times as "
        "long, up to 60 seconds, or up to the first wait if that is longer.",
        least=0,
        most=86400,
        learns=False,
        fixed="",
        added=True,
        only_if="task.verifier_retries>0",
        use="task.verifier_retries=3",
        alters=Alters.nothing,
    )


@dataclass(frozen=True, kw_only=True)
class ConversationTaskSettings(WrittenTaskSettings):
    name: Literal["conversation"] = chosen("conversation", alters=Alters.prompts)
    environment: str = key(
        default=REQUIRED,
        help="Dotted path of a class with the methods start(prompt), reply(messages) and "
        "score(messages), in the current directory or installed.",
        code="function",
        example="my_module.Environment",
        alters=Alters.prompts,
    )
    options: Dictionary = key(
        default={},
        help="Keyword arguments of the class, such as {rounds: 3}.",
        free=True,
        alters=Alters.prompts,
    )
    max_turns: int = key(
        default=8,
        help="Most turns of the policy in a conversation (>= 1).",
        least=1,
        most=10**6,
        alters=Alters.prompts,
    )
    path: str | None = key(
        default=None,
        help="The prompts that conversations begin with, in files as for task=prompts; null: each "
        "conversation begins with a seed, without end.",
        reads="data",
        example="prompts.jsonl",
        alters=Alters.prompts,
    )
    split: str | None = key(
        default=None,
        help="The split of a data set at task.path, such as train; null: it has no splits.",
        alters=Alters.prompts,
        **_NEEDS_ROWS,
    )
    prompt_field: str = key(
        default="prompt",
        help="Column of task.path with the prompt: a text, or a list of chat messages {role, "
        "content}.",
        alters=Alters.prompts,
        **_NEEDS_ROWS,
    )
    answer_field: str = key(
        default="answer",
        help="Column of task.path with the reference answer.",
        alters=Alters.scores,
        **_NEEDS_ROWS,
    )
    environment_processes: int = key(
        default=0,
        help="Processes on every rank in which environments run (>= 1); 0: they run in the process "
        "that trains.",
        least=0,
        most=1024,
        learns=False,
        fixed="",
        alters=Alters.nothing,
        **_NEEDS_ENVIRONMENT_TIMEOUT,
    )
    environment_seconds: float | None = key(
        default=None,
        help="Most seconds that a call of an environment may take; after that its conversation "
        "ends, and the score has failed (task.verifier_failure). null without "
        "environment_processes. What is imported meanwhile does not count, and the first call has "
        "120 seconds.",
        least=0.01,
        most=86400,
        fixed="",
        alters=Alters.scores,
        **_NEEDS_ENVIRONMENT_PROCESSES,
    )


OPTIONS = {
    "task": {
        "reverse": Option(
            ReverseTaskSettings,
            help="Write a number backwards; the reward is the fraction of positions that are "
            "right. Learnt from random weights.",
        ),
        "sums": Option(
            SumsTaskSettings,
            help="Sums in words, for a model that follows instructions: `What is 23 + 45? Answer "
            "with the number only.` The reward is 1 if the last number of a completion is the sum, "
            "else 0. One problem of eight is held out and never trained on.",
        ),
        "reasoning_gym": Option(
            ReasoningGymTaskSettings,
            help="Any data set of the reasoning-gym package: `pgtk task=reasoning_gym "
            "task.dataset=chain_sum`.",
        ),
        "prompts": Option(
            PromptsTaskSettings,
            help="Your own prompts with reference answers: `pgtk task=prompts "
            "task.path=prompts.jsonl`.",
        ),
        "conversation": Option(
            ConversationTaskSettings,
            help="Several turns with an environment of yours: `pgtk task=conversation "
            "task.environment=my_module.Environment`.",
        ),
        "guess": Option(
            GuessTaskSettings,
            help='Find a number with the help of "higher" and "lower", in a conversation of '
            "several turns. Learnt from random weights.",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
