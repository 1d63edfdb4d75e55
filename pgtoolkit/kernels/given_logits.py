"""The loss of given logits, differentiable with respect to them, by the chosen implementation.

An implementation is a module with the passes over (T, V) logits: `forward`, `backward`, and the two in one. No loss
family appears in them; Triton's single pass takes the family's surrogate along, since it needs each coefficient on the
spot, and leaves alone what is judged by document or has no formula in Triton.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Objective

IMPLEMENTATIONS = ("torch", "triton")


def choose_implementation(impl: str, like: Tensor, vocabulary: tuple[ProcessGroup, int] | None = None):
    """The module with the vocabulary-sized passes for logits like `like`; "auto" goes by device and dtype.

    impl: "auto" or one of IMPLEMENTATIONS.
    vocabulary: the group over which the columns are spread, and the first that is here; it makes a stand-in for the
    module.
    """
    if vocabulary is not None:
        from pgtoolkit.kernels.shards import VocabularyShard

        return VocabularyShard(choose_implementation(impl, like), *vocabulary)
    if impl == "auto":
        gpu = like.device.type == "cuda" and like.dtype != torch.float64
        impl = "triton" if gpu and importlib.util.find_spec("triton") else "torch"
    if impl == "torch":
        from pgtoolkit.kernels import torch_passes

        return torch_passes
    from pgtoolkit.kernels import triton_passes

    triton_passes.check_runs_on(like)
    return triton_passes


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    temperature: float,
    level: str,
    implementation,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, MetricSums]:
    """(loss, log_probs, metric sums) of logits (T, V); log_probs is (T,), 0 where labels < 0, and detached.

    Both in float32 (float64 for float64 logits). level: of the metrics. implementation: from `choose_implementation`.
    overwrite: the gradient takes the place of the logits.
    """
    with_entropy = level == "with_entropy"
    wanted = torch.is_grad_enabled() and logits.requires_grad
    values, gradient, results = logits.detach(), None, None
    with torch.no_grad():
        if wanted and not objective.family.by_document and hasattr(implementation, "forward_gradient"):
            # A token's coefficient follows from its own log-prob: the gradient comes with the same read.
            gradient = values if overwrite else torch.empty_like(values)
            results = implementation.forward_gradient(values, labels, temperature, with_entropy, objective, gradient)
        if results is not None:
            log_probs, entropy = results
        else:
            log_probs, normalizer, entropy = implementation.forward(values, labels, temperature, with_entropy)
        loss, coefficients, sums = implementation.judge(objective, log_probs, entropy, level)
    if results is not None:
        loss = _GradientAtHand.apply(logits, loss, gradient, implementation)
    elif wanted:
        backward = _Backward(values, labels, normalizer, coefficients, temperature, implementation, overwrite)
        loss = _GradientToCome.apply(logits, loss, backward)
    return loss, log_probs, sums


class _Backward:
    """What the backward pass needs; not saved by autograd, to which overwriting the logits must not look a mistake."""

    def __init__(self, logits, labels, normalizer, coefficients, temperature, implementation, overwrite):
        self.logits, self.labels, self.normalizer, self.coefficients = logits, labels, normalizer, coefficients
        self.temperature, self.implementation, self.overwrite = temperature, implementation, overwrite

    def __call__(self, upstream: Tensor) -> Tensor:
        if self.logits is None:
            raise RuntimeError("the logits were overwritten by the first backward; call the loss again")
        logits, out = self.logits, None
        if self.overwrite:
            self.logits, out = None, logits
        coefficients = self.coefficients * upstream
        return self.implementation.backward(
            logits, self.labels, self.normalizer, coefficients, self.temperature, out=out
        )


class _GradientToCome(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, loss, backward):
        ctx.compute = backward
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        return ctx.compute(upstream), None, None


class _GradientAtHand(torch.autograd.Function):
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
