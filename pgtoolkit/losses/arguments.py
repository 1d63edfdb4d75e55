"""What the entry points of the library refuse, before anything is computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pgtoolkit.losses.metrics import LEVELS
from pgtoolkit.losses.surrogates import DEFAULT_EPSILONS, FAMILIES


def check_choices(
    loss: str, metrics: str, epsilon_low: float | None, epsilon_high: float | None, temperature: float
) -> tuple[float, float]:
    """(epsilon_low, epsilon_high), the family's own where None; ValueError for what cannot be right."""
    if loss not in FAMILIES:
        raise ValueError(f"loss={loss!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if metrics not in LEVELS:
        raise ValueError(f"metrics={metrics!r} is unknown; choose one of {', '.join(LEVELS)}")
    low, high = DEFAULT_EPSILONS[loss]
    epsilon_low = low if epsilon_low is None else epsilon_low
    epsilon_high = high if epsilon_high is None else epsilon_high
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high), ("temperature", temperature)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} needs a finite number > 0 (got {value!r})")
    if epsilon_low >= 1:
        raise ValueError(f"epsilon_low needs a number < 1 (got {epsilon_low!r}); the ratio is never negative")
    return epsilon_low, epsilon_high


def check_tensors(
    name: str, rows: Tensor, labels: Tensor, old_log_probs: Tensor, advantages: Tensor, document_index: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four T-vectors, whole numbers as int64; ValueError if one does not fit `rows`, the (T, V) or (T, H) input.

    name: what the caller calls `rows`.
    """
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name} needs two dimensions of floating point (got {tuple(rows.shape)}, {rows.dtype})")
    vectors = {
        "labels": labels,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "document_index": document_index,
    }
    for key, tensor in vectors.items():
        if tensor.shape != rows.shape[:1]:
            raise ValueError(f"{key} needs one entry per row of {name}, {len(rows)} (got shape {tuple(tensor.shape)})")
        whole = key in ("labels", "document_index")
        if whole and tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{key} needs dtype int64 (got {tensor.dtype})")
        vectors[key] = tensor.long() if whole else tensor
    return tuple(vectors.values())
