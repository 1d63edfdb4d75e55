"""Samples completions from a transformers model, with the log-probs they were sampled with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.errors import NumericalError


@dataclass(frozen=True)
class Completion:
    """tokens: (C,) int64, ending with the end-of-sequence token if `finished`; log_probs: (C,) float32."""

    tokens: Tensor
    log_probs: Tensor
    finished: bool


@torch.no_grad()
def generate(
    model, tokenizer, prompts: list[list[int]], max_completion_length: int, temperature: float, top_p: float | None
) -> list[Completion]:
    """One completion per prompt, all in one batch with a KV cache. Draws from torch's global random state.

    The log-probs are those of the distribution sampled from: tempered, and renormalised if top_p cuts it.
    """
    device = model.device
    longest = max(map(len, prompts))
    padding = tokenizer.pad_token_id
    tokens = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts], device=device)
    attention_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    with _sampling():
        out = model.generate(
            input_ids=tokens,
            attention_mask=attention_mask,
            max_new_tokens=max_completion_length,
            do_sample=True,
            temperature=temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=0,
            pad_token_id=padding,
            eos_token_id=tokenizer.eos_token_id,
            output_scores=True,
            return_dict_in_generate=True,
        )
    sampled = out.sequences[:, longest:]
    log_probs = [
        scores.float().log_softmax(-1).gather(-1, sampled[:, i : i + 1]) for i, scores in enumerate(out.scores)
    ]
    sampled, log_probs = sampled.cpu(), torch.cat(log_probs, dim=-1).cpu()
    return [
        _cut_at_end(row, row_log_probs, tokenizer.eos_token_id)
        for row, row_log_probs in zip(sampled, log_probs, strict=True)
    ]


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


def _cut_at_end(tokens: Tensor, log_probs: Tensor, end: int) -> Completion:
    ends = (tokens == end).nonzero()
    length = int(ends[0]) + 1 if len(ends) else len(tokens)
    return Completion(tokens[:length].clone(), log_probs[:length].clone(), finished=len(ends) > 0)
