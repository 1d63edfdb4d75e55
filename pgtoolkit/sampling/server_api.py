"""What any server of completions is asked for and answers, apart from the words that one kind of server has for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pgtoolkit.config.schema import Config
from pgtoolkit.tasks.completion import Request
from pgtoolkit.tasks.stops import StopStrings

LOST = "Nothing that was trained is lost."


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    ends: token ids that end a completion; stops: texts that do. vocabulary_size: entries of the trainer's.
    seeded: whether each request passes on its seed.
    """

    temperature: float
    top_p: float
    max_tokens: int
    ends: list[int]
    stops: StopStrings
    vocabulary_size: int
    seeded: bool


@dataclass(frozen=True)
class Choice:
    """One completion as a server gives it, of any JSON; `Server` checks it.

    prompt_tokens: what it completed. finish_reason: "stop" or "length". stop_text: the stop string that ended it, if
    one did.
    """

    prompt_tokens: Any
    tokens: Any
    log_probs: Any
    finish_reason: Any
    stop_text: Any


@dataclass(frozen=True)
class Plan:
    """What to start: for each server the GPUs it sees, as CUDA_VISIBLE_DEVICES has them (None: all).

    at_once: how many of them, the first on each of the GPUs, then the second on each: while a server measures its need
    of memory, it takes what others on its GPU allocate for its own. sleeps: whether the servers are on the GPUs that
    train, and give their memory back while they do. number_type, room: of the model, and most tokens of a document.
    """

    gpus: list[str | None]
    at_once: int
    sleeps: bool
    number_type: str
    room: int


Call = tuple[str, dict | None]
"""A path, and the JSON that is posted to it."""


class ServerApi(Protocol):
    """The words of one kind of server, such as vllm.py. What reads an answer may raise whatever JSON makes it raise."""

    NAME: str
    HEALTH: str  # the path that answers 200 once the server is up
    RESUME: str  # the path by which a paused server goes on
    KEY: str  # the environment variable with the key that it lets requests in with
    START_WITH: str  # how it is started so that it has all paths
    PROCESSED: str  # the option with which log-probs are those of what was sampled from
    FIXED_MEMORY: str  # the option without which it measures how much memory is free
    VARIABLES: dict[str, str]  # of its environment, where this process has none of that name

    def command(self, config: Config, folder: Path, plan: Plan, host: str, port: int) -> list[str]:
        """Starts it on the weights in a folder."""
        ...

    def completions(self, request: Request, sampling: Sampling, salt: str) -> Call:
        """Every setting that would otherwise be the server's or its model's own is said.

        salt: what the server may have cached of another salt's prompts is of other weights, and is not used.
        """
        ...

    def choices(self, answer: Any) -> list[Choice]: ...

    def scores(self, tokens: list[int], salt: str) -> Call: ...

    def log_probs(self, answer: Any, tokens: list[int]) -> list[float]:
        """Of a text's tokens from the second on, before temperature and cuts."""
        ...

    def load(self, folder: Path) -> Call:
        """Take the weights that lie in a folder."""
        ...

    def forget(self) -> Call:
        """Drop what was cached of prompts."""
        ...

    def sleep(self) -> Call:
        """Give the GPU's memory back."""
        ...

    def wake(self, part: str) -> Call:
        """Take it again. part: "weights", or "cache" once they are loaded."""
        ...

    def advice(self, last_words: str) -> str:
        """What to do about a server that ended with these words, if that is known."""
        ...
