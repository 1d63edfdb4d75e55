"""What any server of completions is asked for and answers, apart from the words that vLLM, in vllm.py, has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
