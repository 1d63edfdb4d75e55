"""Aggregation is a weight: the loss of a step is the sum over its tokens of w_t times the surrogate.

Every weight is a function of the step's totals, so the pieces of a step add up however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.segments import Segments

Reducer = Callable[..., Tensor]
"""A custom reducer: `reducer(totals, mask=, document_index=, tokens_per_document=, group_index=)` returns w_t (T,)."""


def token_weights(
    mode: str,
    totals: StepTotals,
    segments: Segments,
    mask: Tensor,
    group_index: Tensor | None = None,
    divisor: float | None = None,
    reducer: Reducer | None = None,
) -> Tensor:
    """The weight w_t of each token: (T,) float64, 0 where mask is False.

    sample_mean 1 / (D N_d), prompt_mean 1 / (G N_g), token_mean 1 / N, constant 1 / (D divisor); `reducer`, if
    given, takes their place. group_index: (documents of this piece,) int64, numbered as in totals.tokens_per_group.
    """
    if reducer is not None:
        return _custom_weights(reducer, totals, segments, mask, group_index)
    if mode == "token_mean":
        denominator = mask.new_ones(mask.shape, dtype=torch.float64) * totals.num_tokens
    else:
        if mode == "sample_mean":
            per_document = segments.counts * totals.num_documents
        elif mode == "prompt_mean":
            per_document = totals.tokens_per_group.to(group_index.device)[group_index] * totals.num_groups
        else:
            per_document = torch.full_like(segments.counts, divisor, dtype=torch.float64) * totals.num_documents
        denominator = segments.broadcast(per_document.double())
    return torch.where(mask, 1.0 / torch.where(mask, denominator, 1.0), 0.0)


def _custom_weights(reducer, totals, segments, mask, group_index):
    weights = reducer(
        totals,
        mask=mask,
        document_index=segments.index,
        tokens_per_document=segments.counts,
        group_index=group_index,
    )
    if not isinstance(weights, Tensor) or weights.shape != mask.shape:
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"the reducer must return one weight per token, shape {tuple(mask.shape)} (got {shape})")
    return torch.where(mask, weights.double(), 0.0)
