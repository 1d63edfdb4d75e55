"""The loss of given logits, differentiable with respect to them, by the chosen implementation.

An implementation has the `Passes` over (T, V) logits: `forward`, `backward`, and the two in one. They do not know the
loss family, but for Triton's single pass: it computes each coefficient itself, for families whose scope is
the token and that have a formula in Triton.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.kernels import torch_passes
from pgtoolkit.kernels.passes import Passes, VocabularyShard
from pgtoolkit.kernels.torch_passes import Teacher
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss, Objective

IMPLEMENTATIONS = ("torch", "triton")


def choose_implementation(impl: str, like: Tensor, vocabulary: tuple[ProcessGroup, int] | None = None) -> Passes:
    """The vocabulary-sized passes for logits like `like`; "auto" goes by device and dtype.

    impl: "auto" or one of IMPLEMENTATIONS.
    vocabulary: the group over which the columns are spread, and the first column that is here; the result is then a
    `VocabularyShard`.
    """
    if vocabulary is not None:
        return VocabularyShard(choose_implementation(impl, like), *vocabulary)
    if impl == "auto":
        gpu = like.device.type == "cuda" and like.dtype != torch.float64
        impl = "triton" if gpu and importlib.util.find_spec("triton") else "torch"
    if impl == "torch":
        return torch_passes
    from pgtoolkit.kernels import triton_passes

    triton_passes.check_runs_on(like)
    return triton_passes


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    loss: Loss,
    implementation: Passes,
    overwrite: bool = False,
    ref_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, MetricSums]:
    """(loss, log_probs, metric sums) of logits (T, V); log_probs is (T,), 0 where labels < 0, and detached.

    Both in float32 (float64 for float64 logits). implementation: from `choose_implementation`. overwrite: the gradient
    takes the place of the logits. ref_logits: (T, V), for a full KL.
    """
    bonus, temperature, teacher = objective.penalties.bonus, loss.temperature, None
    with_entropy = loss.level == "with_entropy" or bonus
    wanted = torch.is_grad_enabled() and logits.requires_grad
    values, results = logits.detach(), None
    with torch.no_grad():
        known = objective.old_log_probs is not None and ref_logits is None
        if wanted and known and not objective.by_document and implementation.one_pass:
            # A token's coefficient follows from its own log-prob: the gradient comes with the same read.
            gradient = values if overwrite else torch.empty_like(values)
            results = implementation.forward_gradient(values, labels, temperature, with_entropy, objective, gradient)
        if results is not None:
            log_probs, entropy = results
        else:
            log_probs, normalizer, entropy = implementation.forward(values, labels, temperature, with_entropy)
            if ref_logits is not None:
                given = loss.kl.kind, ref_logits.detach(), labels, temperature
                teacher = compared(implementation, values, normalizer, *given)
                objective.penalties.divergence.copy_(teacher.divergence)
        value, coefficients, sums = implementation.evaluate(objective.at(log_probs), log_probs, entropy, loss.level)
        if wanted and results is None and (of_rows := objective.penalties.of_rows):
            coefficients = torch.stack([coefficients, *of_rows])
            normalizer = torch.cat([normalizer, entropy[None]]) if bonus else normalizer
    if results is not None:
        value = GradientsFromForward.apply(value, [gradient], implementation.scale_, True, logits)
    elif wanted:
        arguments = labels, normalizer, coefficients, temperature, teacher
        value = _GradientInBackward.apply(value, implementation.backward, arguments, overwrite, logits)
    return value, log_probs, sums


def compared(passes: Passes, logits: Tensor, normalizer: Tensor, kind: str, ref_logits: Tensor, *how) -> Teacher:
    """The reference at rows whose logits (T, V) have this normalizer; how: labels and temperature."""
    teacher = Teacher(kind, ref_logits, passes.forward(ref_logits, *how, False)[1])
    return teacher._replace(divergence=passes.divergence(logits, normalizer, teacher, *how))


class _GradientInBackward(torch.autograd.Function):
    """The loss, whose gradient by the logits is computed in the backward pass."""

    @staticmethod
    def forward(ctx, loss, compute, arguments, overwrite, logits):
        # Not saved by autograd, which would take overwriting the logits for a mistake.
        ctx.logits, ctx.compute, ctx.arguments, ctx.overwrite = logits.detach(), compute, arguments, overwrite
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        if ctx.logits is None:
            raise RuntimeError("the logits were overwritten by the first backward; call the loss again")
        logits, out = ctx.logits, None
        if ctx.overwrite:
            ctx.logits, out = None, logits
        labels, normalizer, coefficients, temperature, teacher = ctx.arguments
        coefficients = coefficients * upstream
        gradient = ctx.compute(logits, labels, normalizer, coefficients, temperature, out=out, teacher=teacher)
        return None, None, None, None, gradient


class GradientsFromForward(torch.autograd.Function):
    """The loss, whose gradients by the inputs, or None for some, the forward pass has computed already.

    scale_: multiplies a tensor by a 0-dim one in place. can_scale: False where a part of the gradients was added
    elsewhere, so that the loss must be backpropagated as it is.
    """

    @staticmethod
    def forward(ctx, loss, gradients, scale_, can_scale, *inputs):
        ctx.gradients, ctx.scale_, ctx.can_scale = gradients, scale_, can_scale
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError("the gradients are handed out by the first backward; call the loss again")
        if not ctx.can_scale:
            torch._assert_async(upstream == 1, "weight_gradient holds the gradient of the loss as it was returned")
        # In place: nothing else holds them, and the weight's is the largest tensor there is.
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        gradients = [
            None if gradient is None else ctx.scale_(gradient, upstream).to(dtype) for gradient, dtype in pairs
        ]
        ctx.gradients = None
        return None, None, None, None, *gradients
