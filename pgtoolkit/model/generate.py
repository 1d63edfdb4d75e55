"""Completions by transformers' `generate`, of tokens that the caller chooses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pgtoolkit.model.policy import Policy

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: list[list[int]],
    settings: GenerationConfig,
    choose: Callable[[Tensor], Tensor],
    fp32_lm_head: bool = False,
    stopped: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """Return the tokens, (B, C), by which transformers' `generate` continues the prompts.

    settings: ends, padding and number of tokens; settings of drawing are ignored.
    choose: returns the next tokens, (B,) int64, given their logits, (B, V).
    stopped: returns which rows have ended otherwise, (B,) bool, given their new tokens, (B, C), and
        the number of those that it has not seen before.
    """
    from transformers.generation.logits_process import LogitsProcessorList

    model = policy.model
    longest = max(map(len, prompts))
    tokens, attention_mask = _padded(prompts, settings.pad_token_id, model.device)

    # `generate` takes the likeliest token, which is the chosen one. Its own temperature and top_p
    # would act after our processor, and it could draw from nothing but the global random state.
    settings = copy.deepcopy(settings)
    settings.update(temperature=1.0, top_p=1.0, do_sample=False)
    # transformers' own criterion for stop strings would count those that begin in the prompt.
    criteria = []
    if stopped is not None:
        criteria.append(lambda written, *_, **__: stopped(written[:, longest:], 1))
    with policy.generating(fp32_lm_head), _without_generation_config(model):
        written = cast("Any", model).generate(  # transformers adds this method to its classes
            input_ids=tokens,
            attention_mask=attention_mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([_LeaveChosen(choose)]),
            stopping_criteria=criteria,
        )
    return written[:, longest:]


class _LeaveChosen:
    """Gives all probability to the chosen token of each row.

    An object of a class of its own: of a function, `generate` would parse the signature anew at
    each token, which takes longer than choosing one.
    """

    def __init__(self, choose: Callable[[Tensor], Tensor]):
        self._choose = choose

    def __call__(self, _: Tensor, logits: Tensor) -> Tensor:
        chosen = self._choose(logits)
        return torch.full_like(logits, -torch.inf).scatter_(-1, chosen[:, None], 0.0)


def _padded(prompts: list[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts padded on the left, (B, P) int64, and a mask that is 1 at their tokens."""
    longest = max(map(len, prompts))
    tokens = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def _without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, the model has no settings of sampling.

    transformers would take settings from there that its caller leaves open, such as a repetition
    penalty.
    """
    from transformers import GenerationConfig

    model_settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = model_settings
