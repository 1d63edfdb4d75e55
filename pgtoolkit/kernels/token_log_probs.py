"""Log-prob (and entropy) of each label, differentiable with respect to the logits, by the chosen implementation.

An implementation is a module with the passes over (T, V) logits: `forward`, `backward` and the two in one. No loss
family appears in them, but for `grpo` in Triton's single pass, which needs each coefficient on the spot.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from pgtoolkit.losses.objective import Objective

IMPLEMENTATIONS = ("torch", "triton")


def choose_implementation(impl: str, like: Tensor):
    """The module with the vocabulary-sized passes for logits like `like`; "auto" goes by device and dtype."""
    if impl == "auto":
        gpu = like.device.type == "cuda" and like.dtype != torch.float64
        impl = "triton" if gpu and importlib.util.find_spec("triton") else "torch"
    if impl == "torch":
        from pgtoolkit.kernels import torch_impl

        return torch_impl
    if impl != "triton":
        raise ValueError(f"impl={impl!r} is unknown; choose one of auto, {', '.join(IMPLEMENTATIONS)}")
    from pgtoolkit.kernels import triton_impl

    triton_impl.check_runs_on(like)
    return triton_impl


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    impl: str = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(log_probs, entropy), each (T,) in float32 (float64 for float64 logits), 0 where labels < 0.

    Entropy is of the tempered distribution, detached, and None unless asked for. overwrite: the backward writes the
    gradient over the logits.
    """
    implementation = choose_implementation(impl, logits)
    return _TokenLogProbs.apply(logits, labels, temperature, with_entropy, implementation, overwrite)


def loss_in_one_pass(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    temperature: float,
    with_entropy: bool,
    impl: str = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(loss, log_probs, entropy) with the gradient computed in the same pass, or None where that cannot be done.

    It can where each token's coefficient follows from its own log-prob, the implementation knows how, and a gradient
    is wanted. overwrite: the gradient takes the place of the logits, at once.
    """
    implementation = choose_implementation(impl, logits)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if not wanted or objective.loss != "grpo" or not hasattr(implementation, "forward_gradient"):
        return None
    with torch.no_grad():
        gradient = logits.detach() if overwrite else torch.empty_like(logits)
        results = implementation.forward_gradient(
            logits.detach(), labels, temperature, with_entropy, objective, gradient
        )
        if results is None:
            return None
        loss = objective.value(results[0])
    return _GradientAtHand.apply(logits, loss, gradient, implementation), *results


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, with_entropy, implementation, overwrite):
        log_probs, normalizer, entropy = implementation.forward(logits, labels, temperature, with_entropy)
        ctx.save_for_backward(labels, normalizer)
        # Not saved by save_for_backward: overwriting them must not look like a mistake to autograd.
        ctx.logits = logits.detach()
        ctx.options = temperature, implementation, overwrite
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, coefficients, _):
        labels, normalizer = ctx.saved_tensors
        temperature, implementation, overwrite = ctx.options
        if ctx.logits is None:
            raise RuntimeError("the logits were overwritten by the first backward; call the loss again")
        out = ctx.logits if overwrite else None
        gradient = implementation.backward(ctx.logits, labels, normalizer, coefficients, temperature, out=out)
        if overwrite:
            ctx.logits = None
        return gradient, None, None, None, None, None


class _GradientAtHand(torch.autograd.Function):
    """A loss whose gradient by the logits has been computed already."""

    @staticmethod
    def forward(ctx, logits, loss, gradient, implementation):
        ctx.gradient, ctx.implementation = gradient, implementation
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        if ctx.gradient is None:
            raise RuntimeError("the gradient is handed out by the first backward; call the loss again")
        gradient, ctx.gradient = ctx.implementation.scale_(ctx.gradient, upstream), None
        return gradient, None, None, None
