"""Aggregation is a weight: the loss of a step is the sum over its tokens of w_t times the surrogate.

Every weight is a function of the step's totals, so the pieces of a step add up however it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.segments import Segments

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")

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

    Raises ValueError for an unknown mode, missing groups, or a divisor that is not finite and positive (constant) or
    given in vain (any other mode).
    """
    if reducer is not None:
        return _custom_weights(reducer, totals, segments, mask, group_index)
    check_mode(mode, divisor, group_index is not None and totals.tokens_per_group is not None)
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


def check_mode(mode: str, divisor: float | None, has_groups: bool) -> None:
    """Refuse, with ValueError, an aggregation that cannot mean what was asked."""
    if mode not in MODES:
        raise ValueError(f"aggregation={mode!r} is unknown; choose one of {', '.join(MODES)}")
    if mode == "constant":
        number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
        if not (number and math.isfinite(divisor) and divisor > 0):
            raise ValueError(f"aggregation='constant' needs a finite divisor > 0 (got {divisor!r})")
    elif divisor is not None:
        raise ValueError(f"divisor={divisor!r} has no effect with aggregation={mode!r}; it belongs to 'constant'")
    if mode == "prompt_mean" and not has_groups:
        raise ValueError(
            "aggregation='prompt_mean' needs group_index, each document's group (and totals that count groups)"
        )


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
