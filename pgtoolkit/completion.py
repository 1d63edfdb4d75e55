"""What a sampler is asked and what it gives back: prompts, requests, completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `pgtk check` does without torch
    from torch import Tensor

Message = dict[str, Any]
"""{"role": ..., "content": ...}, and whatever else a chat template reads."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, its reference answer, the index it was asked for by, and where it comes from, such
    as `a.jsonl:12`.

    messages: of a chat, whose last content is the text; None where the prompt is a text.
    seed: of a conversation, below 2^32, for what its environment draws; the same whenever the
        prompt comes again.
    row: the whole line of the file, where a verifier asks for it.
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

    tokens: the prompt's token ids. completions: how many completions of it are wanted.
    seed: of this prompt in this run, below 2^32: with the number of a completion it decides all
        that is drawn for it.
    max_tokens: of a completion, where that is less than the sampler's own number; None: that.
    prompt: whose tokens these are, for whoever scores the completions.
    """

    tokens: list[int]
    completions: int
    seed: int
    max_tokens: int | None = None
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Completion:
    """What a sampler wrote after one prompt.

    tokens: (C,) int64, up to the end-of-sequence token or the one that completes a stop string
        (`StopStrings`), whichever comes first, and with it.
    log_probs: (N,) float32, of each drawn token under the distribution it was sampled from:
        tempered, and renormalised if top_p cuts it.
    finish_reason: "stop" after an end-of-sequence token or a stop string, else "length", at the
        longest allowed.
    model_version: of the weights that wrote it, as `publish` was told.
    drawn: (C,) bool, False for what an environment said; None: the model drew all tokens, and N =
        C.
    conversation: of a task of several turns, what its score is made of.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    model_version: int
    drawn: Tensor | None = None
    conversation: Any = None
