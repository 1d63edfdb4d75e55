"""A made-up step as other trainers hold it: one row per document, padded on the right; and our loss
of it."""

from __future__ import annotations

import torch

from pgtoolkit import log_prob_loss

LENGTHS = (7, 1, 5, 9, 3, 4)
WIDTH = 9


def batch():
    """(new, old, advantages (B,), mask) padded to (B, WIDTH); documents differ in length, ratios
    leave clips."""
    generator = torch.Generator().manual_seed(5)
    old = -2 + 0.5 * torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    drift = 0.03 * torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64)
    new = old + drift + 0.15 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    return new, old, torch.tensor([1.0, -0.5, 0.8, -1.2, 0.3, -0.9], dtype=torch.float64), mask


def ours(loss, parameters, aggregation, divisor=None, step=None, **more):
    """(loss, gradient by the log-probs) of the whole step; more: keywords of log_prob_loss, tensors
    (B, WIDTH).

    step: as `batch` gives it; None for that one.
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


def summary(loss, gradient):
    """The loss, the norm of the gradient, and the sum of the gradient times sin(1), sin(2), ..."""
    pattern = (
        torch.arange(1, gradient.numel() + 1, dtype=torch.float64).reshape(gradient.shape).sin()
    )
    return float(loss), float(gradient.norm()), float((gradient * pattern).sum())
