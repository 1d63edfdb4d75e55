"""The questions and answers of a sampler: prompts, requests, completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `pgtk check` does without torch
    from torch import Tensor

Message = dict[str, Any]
"""{"role": ..., "content": ...}, and all else that a chat template reads."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with its reference answer.

    index: its number in the task.
    place: its origin, such as `a.jsonl:12`.
    messages: of a chat, whose last content is the text; None where the prompt is a text.
    seed: of a conversation, below 2^32, for the draws of its environment; the same whenever the
        prompt comes again.
    row: all of its row in the file, where a verifier asks for it.
    """

    text: str
    answer: str
    index: int
    place: str
    messages: tuple[Message, ...] | None = None
    seed: int = 0
    row: dict[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Request:
    """One prompt to be completed.

    tokens: the prompt's token ids.
    completions: the number of completions that are wanted.
    seed: of this prompt in this run, below 2^32: with the number of a completion it decides all
        draws for it.
    max_tokens: of a completion, where that is less than the sampler's number; None: that number.
    prompt: the prompt of these tokens, for scoring the completions.
    """

    tokens: list[int]
    completions: int
    seed: int
    max_tokens: int | None = None
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Completion:
    """The text that a sampler wrote after one prompt, as tokens.

    tokens: (C,) int64, up to the end-of-sequence token or the one that completes a stop string
        (`StopStrings`), whichever comes first, and with it.
    log_probs: (N,) float32, of each drawn token under the distribution it was sampled from:
        tempered, and renormalised if top_k or top_p truncates it.
    top_ids, top_log_probs: (N, k) int32 and float32, the k likeliest tokens in the place of each
        drawn one, each once, ties by the smaller id, and their log-probs under the same
        distribution; None unless they are asked for.
    finish_reason: "stop" after an end-of-sequence token or a stop string, else "length", at the
        longest allowed.
    model_version: of the weights that wrote it, as `publish` was told.
    drawn: (C,) bool, False for tokens of an environment; None: the model drew all tokens, and
        N = C.
    conversation: of a task of several turns, the record that its score is made of.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    model_version: int
    drawn: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None
    conversation: Any = None
