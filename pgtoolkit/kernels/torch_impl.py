"""The two vocabulary-sized passes in plain PyTorch: runs anywhere, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS_PER_BLOCK = 2**24
"""Logits converted to float32 at once: 64 MiB, so that no second full copy of the logits exists."""


def forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log_probs, log_sum_exp, entropy) of logits (T, V) / temperature at labels (T,); each (T,).

    log_probs and entropy are 0 where labels < 0; entropy is log Z - sum p z, or None unless asked for.
    """
    log_sum_exp = logits.new_zeros(len(labels), dtype=_accumulation_dtype(logits))
    log_probs = torch.zeros_like(log_sum_exp)
    entropy = torch.zeros_like(log_sum_exp) if with_entropy else None
    for rows in _row_blocks(logits):
        scaled, trained = _scaled(logits[rows], temperature), labels[rows] >= 0
        log_sum_exp[rows] = scaled.logsumexp(-1)
        chosen = scaled.gather(-1, labels[rows].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        log_probs[rows] = torch.where(trained, chosen - log_sum_exp[rows], 0.0)
        if with_entropy:
            probs = (scaled - log_sum_exp[rows].unsqueeze(-1)).exp()
            # A token of probability 0 adds nothing, also where its logit is -inf.
            mean_logit = torch.where(probs > 0, probs * scaled, 0.0).sum(-1)
            entropy[rows] = torch.where(trained, log_sum_exp[rows] - mean_logit, 0.0)
    return log_probs, log_sum_exp, entropy


def forward_score_(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log_probs, entropy, score): as `forward`, and the logits overwritten by score = onehot(label) - softmax.

    All labels must be >= 0. score is (T, V) in `dtype`, in the memory of the logits where the dtypes are the same.
    """
    log_probs, log_sum_exp, entropy = forward(logits, labels, temperature, with_entropy)
    for rows in _row_blocks(logits):
        score = (_scaled(logits[rows], temperature) - log_sum_exp[rows].unsqueeze(-1)).exp().neg_()
        score.scatter_add_(-1, labels[rows].unsqueeze(-1), torch.ones_like(score[:, :1]))
        logits[rows] = score.to(logits.dtype)
    return log_probs, entropy, logits.to(dtype)


def backward(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, coefficients: Tensor, temperature: float) -> Tensor:
    """Gradient (T, V) in the logits' dtype: (c_t / temperature) (onehot(label) - softmax), 0 in rows with c_t = 0."""
    gradient = torch.empty_like(logits)
    for rows in _row_blocks(logits):
        scale = (coefficients[rows] / temperature).unsqueeze(-1)
        probs = (_scaled(logits[rows], temperature) - log_sum_exp[rows].unsqueeze(-1)).exp()
        block = -scale * probs
        block.scatter_add_(-1, labels[rows].clamp(min=0).unsqueeze(-1), scale)
        # Selected, not multiplied: an untrained row may hold NaN or infinity.
        active = ((labels[rows] >= 0) & (coefficients[rows] != 0)).unsqueeze(-1)
        gradient[rows] = torch.where(active, block, 0.0).to(gradient.dtype)
    return gradient


def _scaled(block: Tensor, temperature: float) -> Tensor:
    return block.to(_accumulation_dtype(block)) / temperature


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _row_blocks(logits: Tensor):
    rows = max(1, _ELEMENTS_PER_BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
