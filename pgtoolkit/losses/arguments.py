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
        vectors[key] = tensor.long().contiguous() if whole else tensor
    return tuple(vectors.values())


def check_groups(impl: str, num_documents, vocabulary_group, vocabulary_start, sequence_group, data_group) -> None:
    """Refuse, with ValueError, groups of ranks that cannot mean what was asked."""
    named = {"vocabulary_group": vocabulary_group, "sequence_group": sequence_group, "data_group": data_group}
    for name, group in named.items():
        if group is not None and impl == "reference":
            raise ValueError(f"{name} needs another impl than 'reference', which computes whole steps on one rank")
    if vocabulary_start is not None and (vocabulary_group is None or vocabulary_start < 0):
        raise ValueError(f"vocabulary_start needs a vocabulary_group and a number >= 0 (got {vocabulary_start!r})")
    if sequence_group is not None and num_documents is None:
        raise ValueError("sequence_group needs num_documents: ranks must agree on the documents, whatever they hold")
