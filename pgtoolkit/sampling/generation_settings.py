"""The settings of sampling in the words of transformers, and those of a model's own settings that
are ignored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgtoolkit.model.policy import Policy
from pgtoolkit.sampling.draw import likeliest_tokens
from pgtoolkit.sampling.settings import SamplingSettings
from pgtoolkit.system.model_folder import end_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig


def generation_settings(policy: Policy, sampling: SamplingSettings) -> GenerationConfig:
    """Return the settings of sampling for transformers.

    Of the model's own settings only the end-of-sequence tokens are taken.
    """
    from transformers import GenerationConfig

    ends = end_tokens(policy.model.generation_config, policy.tokenizer)
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        do_sample=True,
        temperature=float(sampling.temperature),
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=sampling.top_k or 0,
        pad_token_id=policy.tokenizer.pad_token_id or 0,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
    )


Processor = Callable[[Tensor | None, Tensor], Tensor]
"""Returns scores, (B, V), made of others; the first parameter, the tokens so far, is not used."""


def processors(settings: GenerationConfig) -> list[Processor]:
    """Return what applies temperature, top_k and top_p to scores, in this order.

    A setting that changes nothing has none.
    """
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    if settings.temperature == 0:
        return [likeliest]
    chosen = []
    if settings.temperature != 1:
        chosen.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        chosen.append(functools.partial(_top_k, settings.top_k))
    if settings.top_p < 1:
        chosen.append(TopPLogitsWarper(settings.top_p))
    return chosen


def _top_k(count: int, _: Tensor | None, scores: Tensor) -> Tensor:
    """Return scores with -inf at all but the `count` largest of each row.

    transformers' own processor keeps more of them where scores are equal.
    """
    ids, _ = likeliest_tokens(scores, min(count, scores.shape[1]))
    kept = ids.long()
    return torch.full_like(scores, -torch.inf).scatter_(-1, kept, scores.gather(-1, kept))


def likeliest(input_ids: Tensor | None, scores: Tensor) -> Tensor:
    """Return scores, (B, V), with all the probability on the likeliest token.

    NaN stays NaN, for the caller to notice.
    """
    tokens = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0 * scores.gather(-1, tokens))


def ignored_settings(policy: Policy, sampling: SamplingSettings) -> dict[str, object]:
    """Return the settings of the model's generation_config.json that would sample differently.

    0 and 1 are taken for the values of settings that are off.
    """
    model_settings = policy.model.generation_config.to_diff_dict()
    used = generation_settings(policy, sampling)
    return {
        key: value
        for key, value in model_settings.items()
        if not key.endswith(("_version", "max_length", "max_new_tokens", "cache", "implementation"))
        if not key.startswith(("_", "output_", "return_dict", "bos_", "eos_", "pad_"))
        if value not in (None, [], 0, 1) and value != getattr(used, key, None)
    }
