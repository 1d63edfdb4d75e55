"""Samples completions from a transformers model, with the log-probs they were sampled with."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgtoolkit.errors import NumericalError
from pgtoolkit.system.model_folder import how_to_load

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True)
class Completion:
    """tokens: (C,) int64, ending with an end-of-sequence token if `finished`; log_probs: (C,) float32."""

    tokens: Tensor
    log_probs: Tensor
    finished: bool


_ACTING = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "guidance_scale", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing", "use_mtp"), False),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "force_words_ids"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "constraints", "top_h"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "stop_strings", "max_time"), None),
    **dict.fromkeys(("prompt_lookup_num_tokens", "dola_layers", "assistant_early_exit", "speculation_type"), None),
}
"""Settings of a GenerationConfig that change what is sampled, with the values that change nothing (or None)."""


def own_settings(path: str) -> GenerationConfig:
    """A model folder's own: of generation_config.json or, as transformers does, of config.json. Raises OSError."""
    from transformers import GenerationConfig

    place, only_here = os.path.expanduser(path), {"local_files_only": how_to_load(path)["local_files_only"]}
    try:
        return GenerationConfig.from_pretrained(place, **only_here)
    except OSError:
        others = {"config_file_name": "config.json", "_from_model_config": True}
        return GenerationConfig.from_pretrained(place, **others, **only_here)


def end_tokens(own: GenerationConfig, tokenizer) -> list[int]:
    """The ids that end a completion: the tokenizer's end-of-sequence token and all of the model's own settings."""
    ids = [tokenizer.eos_token_id, *(own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id])]
    return list(dict.fromkeys(token for token in ids if token is not None))


def sampling_settings(
    model, tokenizer, temperature: float, top_p: float | None = None, max_completion_length: int | None = None
) -> GenerationConfig:
    """How completions are sampled, for transformers; of the model's own settings only the ends are taken."""
    from transformers import GenerationConfig

    ends = end_tokens(model.generation_config, tokenizer)
    return GenerationConfig(
        max_new_tokens=max_completion_length,
        do_sample=True,
        temperature=float(temperature),
        top_p=1.0 if top_p is None else top_p,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id or 0,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
    )


def ignored_settings(model, used: GenerationConfig) -> dict:
    """What of the model's own settings, from its generation_config.json, would sample differently than `used` does."""
    own = model.generation_config.to_dict()
    found = {key: own.get(key) for key in _ACTING}
    return {
        key: value
        for key, value in found.items()
        if value not in (None, [], _ACTING[key]) and value != getattr(used, key, None)
    }


@torch.no_grad()
def generate(model, settings: GenerationConfig, prompts: list[list[int]]) -> list[Completion]:
    """One completion per prompt, all in one batch with a KV cache. Draws from torch's global random state.

    settings: of `sampling_settings`. The log-probs are those of the distribution sampled from: tempered, and
    renormalised if top_p cuts it.
    """
    device = model.device
    longest = max(map(len, prompts))
    padding = settings.pad_token_id
    tokens = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts], device=device)
    attention_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    settings = copy.deepcopy(settings)
    settings.update(output_scores=True, return_dict_in_generate=True)
    with _sampling(), _without_own_settings(model):
        out = model.generate(input_ids=tokens, attention_mask=attention_mask, generation_config=settings)
    sampled = out.sequences[:, longest:]
    log_probs = [
        scores.float().log_softmax(-1).gather(-1, sampled[:, i : i + 1]) for i, scores in enumerate(out.scores)
    ]
    sampled, log_probs = sampled.cpu(), torch.cat(log_probs, dim=-1).cpu()
    ends = torch.tensor([] if settings.eos_token_id is None else settings.eos_token_id).view(-1)
    return [_cut_at_end(row, row_log_probs, ends) for row, row_log_probs in zip(sampled, log_probs, strict=True)]


@contextlib.contextmanager
def _without_own_settings(model):
    """transformers fills what its caller leaves open from the model's settings: a repetition penalty, for one."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _sampling():
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise NumericalError(
            "the policy's probabilities are not finite, so no completion can be sampled. An update has driven its "
            "weights out of range: resume from the last checkpoint with a smaller optimizer.learning_rate."
        ) from error


def _cut_at_end(tokens: Tensor, log_probs: Tensor, ends: Tensor) -> Completion:
    places = torch.isin(tokens, ends).nonzero()
    length = int(places[0]) + 1 if len(places) else len(tokens)
    return Completion(tokens[:length].clone(), log_probs[:length].clone(), finished=len(places) > 0)
