"""Causal attention of one document by PyTorch's own operations, on every device and in every number
type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def one_document(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Return attention's output (queries, heads, width).

    query: (queries, heads, width), the last tokens of the document.
    key, value: (keys, heads, width), of all its tokens.
    window: number of keys that a query sees at most, its own among them; None: all up to itself.
    """
    keys = torch.arange(len(key), device=key.device)
    queries = keys[len(key) - len(query) :, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    heads = (x.transpose(0, 1) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scaling)
    return out.transpose(0, 1)


def repeated(keys: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with a head for each head of the query."""
    repeats = query.shape[1] // keys.shape[1]
    return keys.repeat_interleave(repeats, 1) if repeats > 1 else keys
