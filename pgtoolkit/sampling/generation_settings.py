"""The settings of sampling in the words of transformers, and those of a model's own settings that
are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgtoolkit.model.policy import Policy
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
        top_k=0,
        pad_token_id=policy.tokenizer.pad_token_id or 0,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
    )


def temperature_and_top_p(
    settings: GenerationConfig,
) -> list[Callable[[Tensor | None, Tensor], Tensor]]:
    """Return processors that apply temperature and top_p to scores, (B, V).

    A setting that changes nothing has none. Their first parameter, the tokens so far, is not used.
    """
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    if settings.temperature == 0:
        return [likeliest]
    processors = []
    if settings.temperature != 1:
        processors.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    return processors


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
