"""Log-prob (and entropy) of each label, differentiable with respect to the logits, by the chosen implementation.

An implementation is a module with two functions on (T, V) logits: `forward` (one online-softmax pass) and
`backward` ((c / temperature) (onehot - softmax)); no loss family appears in either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.kernels import torch_impl

IMPLEMENTATIONS = {"torch": torch_impl}


def token_log_probs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, with_entropy: bool = False, impl: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """(log_probs, entropy), each (T,) in float32 (float64 for float64 logits), 0 where labels < 0.

    Entropy is of the tempered distribution, detached, and None unless asked for.
    """
    implementation = choose_implementation(impl, logits.device)
    return _TokenLogProbs.apply(logits, labels, temperature, with_entropy, implementation)


def choose_implementation(impl: str, device: torch.device):
    """The module with the vocabulary-sized passes; "auto" goes by device."""
    name = "torch" if impl == "auto" else impl
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; choose one of auto, {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, with_entropy, implementation):
        log_probs, log_sum_exp, entropy = implementation.forward(logits, labels, temperature, with_entropy)
        ctx.save_for_backward(logits, labels, log_sum_exp)
        ctx.temperature, ctx.implementation = temperature, implementation
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, coefficients, _):
        logits, labels, log_sum_exp = ctx.saved_tensors
        gradient = ctx.implementation.backward(logits, labels, log_sum_exp, coefficients, ctx.temperature)
        return gradient, None, None, None, None
