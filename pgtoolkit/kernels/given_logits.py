"""The loss of given logits, differentiable with respect to them, by the chosen implementation.

An implementation has the `Passes` over (T, V) logits: `forward`, `backward`, and the two in one.
They do not know the loss family, but for Triton's single pass: it computes each coefficient itself,
for families whose scope is the token and that have a slope in Triton.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.kernels import torch_passes
from pgtoolkit.kernels.products import accumulation_dtype
from pgtoolkit.kernels.torch_passes import Teacher, forward_score_, merge_shards
from pgtoolkit.losses.exchange import gather_stacked
from pgtoolkit.losses.measure import evaluate_objective
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss, Objective

IMPLEMENTATIONS = ("torch", "triton")


def choose_implementation(
    impl: str, like: Tensor, vocabulary: tuple[ProcessGroup, int] | None = None
) -> Passes:
    """Return the vocabulary-sized passes for logits like `like`; "auto" chooses by device and
    dtype.

    impl: "auto" or one of IMPLEMENTATIONS.
    vocabulary: the group over which the columns are spread, and the first column that is here; the
        result is then a `VocabularyShard`.
    """
    if vocabulary is not None:
        return VocabularyShard(_passes(impl, like), *vocabulary)
    return _passes(impl, like)


def _passes(impl: str, like: Tensor) -> ModuleType:
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
    """Return (loss, log_probs, metric sums) of logits (T, V); log_probs is (T,), 0 where labels <
    0, and detached.

    Loss and log-probs are float32 (float64 for float64 logits). implementation: of
    `choose_implementation`.
    overwrite: whether the gradient takes the place of the logits. ref_logits: (T, V), for a full
        KL.
    """
    bonus, temperature, teacher = objective.penalties.bonus, loss.temperature, None
    with_entropy = loss.level == "with_entropy" or bonus
    wanted = torch.is_grad_enabled() and logits.requires_grad
    values, results = logits.detach(), None
    with torch.no_grad():
        known = objective.old_log_probs is not None and ref_logits is None
        by_token = wanted and known and not objective.by_document
        if by_token and not isinstance(implementation, VocabularyShard) and implementation.one_pass:
            # A token's coefficient follows from its own log-prob: the gradient comes with the same
            # read.
            gradient = values if overwrite else torch.empty_like(values)
            results = implementation.forward_gradient(
                values, labels, temperature, with_entropy, objective, gradient
            )
        if results is not None:
            log_probs, entropy = results
        else:
            log_probs, normalizer, entropy = implementation.forward(
                values, labels, temperature, with_entropy
            )
            if ref_logits is not None:
                assert loss.kl is not None
                assert objective.penalties.divergence is not None
                given = loss.kl.kind, ref_logits.detach(), labels, temperature
                teacher = compared(implementation, values, normalizer, *given)
                assert teacher.divergence is not None
                objective.penalties.divergence.copy_(teacher.divergence)
        value, coefficients, sums = evaluate_objective(
            objective.at(log_probs), log_probs, entropy, loss.level
        )
        if wanted and results is None and (of_rows := objective.penalties.of_rows):
            coefficients = torch.stack([coefficients, *of_rows])
            if bonus:
                assert entropy is not None
                normalizer = torch.cat([normalizer, entropy[None]])
    if results is not None:
        value = GradientsFromForward.apply(value, [gradient], implementation.scale_, True, logits)
    elif wanted:
        arguments = labels, normalizer, coefficients, temperature, teacher
        value = _GradientInBackward.apply(
            value, implementation.backward, arguments, overwrite, logits
        )
    return value, log_probs, sums


def compared(
    passes: Passes,
    logits: Tensor,
    normalizer: Tensor,
    kind: str,
    ref_logits: Tensor,
    labels: Tensor,
    temperature: float,
) -> Teacher:
    """Return the reference at rows whose logits (T, V) have this normalizer, with its full KL."""
    ref_normalizer = passes.forward(ref_logits, labels, temperature, False)[1]
    teacher = Teacher(kind, ref_logits, ref_normalizer)
    return teacher._replace(
        divergence=passes.divergence(logits, normalizer, teacher, labels, temperature)
    )


class _GradientInBackward(torch.autograd.Function):
    """The loss, whose gradient by the logits is computed in the backward pass."""

    @staticmethod
    def forward(ctx, loss, compute, arguments, overwrite, logits):
        # Not by `save_for_backward`, which would refuse logits that were overwritten in between.
        ctx.logits, ctx.compute, ctx.arguments, ctx.overwrite = (
            logits.detach(),
            compute,
            arguments,
            overwrite,
        )
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        if ctx.logits is None:
            raise RuntimeError(
                "the logits were overwritten by the first backward; call the loss again"
            )
        logits, out = ctx.logits, None
        if ctx.overwrite:
            ctx.logits, out = None, logits
        labels, normalizer, coefficients, temperature, teacher = ctx.arguments
        coefficients = coefficients * upstream
        gradient = ctx.compute(
            logits, labels, normalizer, coefficients, temperature, out=out, teacher=teacher
        )
        return None, None, None, None, gradient


class GradientsFromForward(torch.autograd.Function):
    """The loss, whose gradients by the inputs, or None for some, the forward pass has computed
    already.

    scale_: multiplies a tensor by a 0-dim one in place.
    can_scale: False where a part of the gradients was added elsewhere, so that the loss must be
        backpropagated as it is.
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
            raise RuntimeError(
                "the gradients are handed out by the first backward; call the loss again"
            )
        if not ctx.can_scale:
            is_one = upstream == 1
            message = "weight_gradient holds the gradient of the loss as it was returned"
            torch._assert_async(is_one, message)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
        # In place: nothing else holds them, and the weight's is the largest tensor there is.
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        gradients = [
            None if gradient is None else ctx.scale_(gradient, upstream).to(dtype)
            for gradient, dtype in pairs
        ]
        ctx.gradients = None
        return None, None, None, None, *gradients


class VocabularyShard:
    """The passes where each rank's logits are the columns from `start` on; labels number the whole
    vocabulary.

    They use those of `implementation` for the columns here. Shards may differ in size, or be empty.
    There is no pass that reads the logits once: the gradient needs the other ranks' sums.
    """

    one_pass = False

    def __init__(self, implementation: ModuleType, group: ProcessGroup, start: int):
        self.implementation, self.group, self.start = implementation, group, start
        self.scale_rows, self.scale_ = implementation.scale_rows, implementation.scale_

    def forward(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `torch_passes.forward`, for all columns and the same on every rank; one collective of
        3 or 4 (T,)."""
        trained = labels >= 0
        if logits.shape[1]:
            parts = self.implementation.forward_shard(
                logits, labels, temperature, with_entropy, self.start
            )
        else:
            parts = logits.new_zeros(
                3 + with_entropy, len(labels), dtype=accumulation_dtype(logits)
            )
            parts[1] = torch.where(trained, -1e30, 0.0)
        # NaN says that the label is elsewhere: if none has it, or two do, there is no log-prob.
        inside = (labels >= self.start) & (labels < self.start + logits.shape[1])
        parts[0] = torch.where(inside, parts[0], torch.nan)
        shards = gather_stacked(parts, self.group)
        held = ~torch.isnan(shards[:, 0])
        shards[:, 0] = torch.where(held, shards[:, 0], 0.0)
        log_probs, normalizer, entropy = merge_shards(list(shards), labels, temperature)
        return torch.where(trained & (held.sum(0) != 1), torch.nan, log_probs), normalizer, entropy

    def divergence(self, logits: Tensor, *others) -> Tensor:
        """As `torch_passes.divergence`, over all columns; one collective of (T,)."""
        return gather_stacked(self.implementation.divergence(logits, *others), self.group).sum(0)

    def forward_score_(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `torch_passes.forward_score_`, of this rank's columns."""
        return forward_score_(
            logits, labels, temperature, with_entropy, dtype, self.forward, self.backward
        )

    def backward(
        self, logits: Tensor, *others, out: Tensor | None = None, teacher: Teacher | None = None
    ) -> Tensor:
        """As `torch_passes.backward`, of this rank's columns."""
        if logits.numel() == 0:
            return torch.empty_like(logits) if out is None else out
        return self.implementation.backward(logits, *others, self.start, out, teacher)


Passes = ModuleType | VocabularyShard
"""`torch_passes`, whose docstrings say what each function returns; `triton_passes`; or a rank's
columns by one of them.

one_pass: whether there is `forward_gradient` for an objective by token: loss and gradient from one
    read.
"""
