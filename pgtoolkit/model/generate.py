"""Completions by transformers' own `generate`, of tokens that its caller chooses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pgtoolkit.model.policy import Policy

if TYPE_CHECKING:
    from transformers import GenerationConfig


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: list[list[int]],
    settings: GenerationConfig,
    choose: Callable[[Tensor], Tensor],
    fp32_lm_head: bool = False,
    stopped: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """Return the tokens, (B, C), that transformers' own `generate` continues the prompts with.

    settings: ends, padding and number of tokens; what draws is ignored. choose: the next tokens,
        (B,) int64, of their
    logits, (B, V). stopped: which rows have ended otherwise, (B,) bool, given their new tokens, (B,
    C), and how many of these it has not seen.
    """
    from transformers.generation.logits_process import LogitsProcessorList

    model = policy.model
    longest = max(map(len, prompts))
    tokens = torch.tensor(
        [[settings.pad_token_id] * (longest - len(p)) + p for p in prompts], device=model.device
    )
    attention_mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )

    def chosen(_: Tensor, logits: Tensor) -> Tensor:
        """Leave a token of each row, and no other choice."""
        return torch.full_like(logits, -torch.inf).scatter_(-1, choose(logits)[:, None], 0.0)

    # `generate` takes the likeliest of what is left: its own temperature and top_p would come after
    #   every processor that it is given, and its draws from the global random state alone.
    settings = copy.deepcopy(settings)
    settings.update(temperature=1.0, top_p=1.0, do_sample=False)
    # Not transformers' own criterion for stop strings, which counts those that the prompt begins.
    criteria = (
        [] if stopped is None else [lambda written, *_, **__: stopped(written[:, longest:], 1)]
    )
    with policy.generating(fp32_lm_head), without_own_settings(model):
        written = cast("Any", model).generate(  # which transformers adds to its classes
            input_ids=tokens,
            attention_mask=attention_mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([chosen]),
            stopping_criteria=criteria,
        )
    return written[:, longest:]


@contextlib.contextmanager
def without_own_settings(model):
    """transformers fills what its caller leaves open from the model's settings: a repetition
    penalty, for one."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
