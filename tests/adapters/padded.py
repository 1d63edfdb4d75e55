"""A step as other trainers hold it, with a row for each document, padded on the right; and our loss
of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pgtoolkit import log_prob_loss
from pgtoolkit.losses.family import Family

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""New and old log-probs (B, WIDTH), advantages (B,), mask (B, WIDTH)."""
LENGTHS = (7, 1, 5, 9, 3, 4)
WIDTH = 9


def batch() -> Batch:
    """Return new and old log-probs, advantages and the mask of documents of several lengths, some
    of whose ratios are clipped."""
    generator = torch.Generator().manual_seed(5)
    old = -2 + 0.5 * torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    drift = 0.03 * torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64)
    new = old + drift + 0.15 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    return new, old, torch.tensor([1.0, -0.5, 0.8, -1.2, 0.3, -0.9], dtype=torch.float64), mask


def ours(
    loss: str | Family,
    parameters: dict[str, float],
    aggregation: str,
    divisor: float | None = None,
    step: Batch | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Return our loss of a step, and its gradient by the log-probs (B, WIDTH).

    step: None for `batch()`. more: further keywords of log_prob_loss; tensors are (B, WIDTH).
    """
    new, old, advantages, mask = batch() if step is None else step
    leaf = new.clone().requires_grad_()
    index = torch.arange(len(LENGTHS))[:, None].expand_as(mask)
    vectors = (leaf, old, advantages[:, None].expand_as(old), index, mask)
    more = {name: x.flatten() if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    options = {"aggregation": aggregation, "divisor": divisor} | parameters | more
    out = log_prob_loss(*(x.flatten() for x in vectors), loss=loss, **options)
    out.loss.backward()
    return out.loss.detach(), leaf.grad


def summary(loss: Tensor | float, gradient: Tensor) -> tuple[float, float, float]:
    """Return the loss, the gradient's norm, and the sum of gradient times sin(1), sin(2), ..."""
    pattern = (
        torch.arange(1, gradient.numel() + 1, dtype=torch.float64).reshape(gradient.shape).sin()
    )
    return float(loss), float(gradient.norm()), float((gradient * pattern).sum())
