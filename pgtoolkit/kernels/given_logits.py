"""The loss of given logits, differentiable with respect to them, by the chosen implementation.

T is the number of positions, V the size of the vocabulary.

An implementation has the `Passes` over (T, V) logits: `forward`, `backward`, and the two in one.
They do not know the loss family. Triton's single pass is an exception: it computes each coefficient
itself, for families whose scope is the token and that have a slope in Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.kernels import torch_passes
from pgtoolkit.kernels.products import accumulation_dtype
from pgtoolkit.kernels.torch_passes import Teacher, forward_score_, merge_shards
from pgtoolkit.losses.centering import CenteredRows
from pgtoolkit.losses.exchange import gather_stacked
from pgtoolkit.losses.kept import KeptRows, KeptSets
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.measure import evaluate_objective
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss, Objective

IMPLEMENTATIONS = ("torch", "triton")


def choose_implementation(
    impl: str, like: Tensor, vocabulary: tuple[ProcessGroup, int] | None = None
) -> Passes:
    """Return the vocabulary-sized passes for logits like `like`.

    impl: one of IMPLEMENTATIONS, or "auto", which chooses by device and dtype.
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
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor, MetricSums]:
    """Return (loss, log_probs, metric sums) of logits (T, V).

    log_probs: (T,), detached, 0 where labels < 0. Loss and log-probs are float32 (float64 for
        float64 logits).
    implementation: one of `choose_implementation`.
    overwrite: True if the gradient takes the place of the logits.
    ref_logits: (T, V), for a full KL.
    kept: the sets that log-probs are taken over; None for the vocabulary.
    """
    bonus = objective.penalties.bonus
    temperature = loss.temperature
    with_entropy = loss.level == "with_entropy" or bonus
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    values = logits.detach()
    one_pass = None
    teacher = None
    centering = objective.centering
    top_log_probs = None
    kept_rows = None
    with torch.no_grad():
        known = objective.old_log_probs is not None and ref_logits is None
        has_sets = centering is not None or kept is not None
        by_token = needs_gradient and known and not objective.by_document and not has_sets
        if by_token and not isinstance(implementation, VocabularyShard) and implementation.one_pass:
            # A token's coefficient follows from its log-prob alone, so the gradient comes from the
            # same read.
            gradient = values if overwrite else torch.empty_like(values)
            one_pass = implementation.forward_gradient(
                values, labels, temperature, with_entropy, objective, gradient
            )
        if one_pass is not None:
            log_probs, entropy = one_pass
        else:
            log_probs, normalizer, entropy = implementation.forward(
                values, labels, temperature, with_entropy
            )
            if centering is not None:
                top_log_probs = implementation.log_probs_at(
                    values, centering.top_ids, normalizer, temperature
                )
                log_probs = where_all_known(log_probs, top_log_probs)
            if kept is not None:
                log_probs, kept_rows = over_kept(
                    implementation, values, kept, log_probs, normalizer, temperature
                )
            if ref_logits is not None:
                assert loss.kl is not None
                assert objective.penalties.divergence is not None
                teacher = compared(
                    implementation,
                    values,
                    normalizer,
                    loss.kl,
                    ref_logits.detach(),
                    labels,
                    temperature,
                )
                assert teacher.divergence is not None
                objective.penalties.divergence.copy_(teacher.divergence)
        objective = objective.at(log_probs, top_log_probs)
        value, coefficients, sums = evaluate_objective(objective, log_probs, entropy, loss.level)
        of_rows = objective.penalties.of_rows if needs_gradient and one_pass is None else []
        if of_rows:
            coefficients = torch.stack([coefficients, *of_rows])
            if bonus:
                assert entropy is not None
                normalizer = torch.cat([normalizer, entropy[None]])
    if one_pass is not None:
        value = GradientsFromForward.apply(value, [gradient], implementation.scale_, True, logits)
    elif needs_gradient:
        centered = objective.centered_rows
        if kept_rows is not None:
            coefficients, centered = with_kept(coefficients, kept_rows)
        arguments = labels, normalizer, coefficients, temperature, teacher, centered
        value = _GradientInBackward.apply(
            value, implementation.backward, arguments, overwrite, logits
        )
    return value, log_probs, sums


def where_all_known(log_probs: Tensor, top_log_probs: Tensor) -> Tensor:
    """Return the log-probs (T,): NaN where one of the top tokens, (T, k), has none.

    It then lies outside of the vocabulary, which is refused like such a label.
    """
    return torch.where(top_log_probs.isnan().any(-1), torch.nan, log_probs)


def over_kept(
    passes: Passes,
    logits: Tensor,
    kept: KeptSets,
    log_probs: Tensor,
    normalizer: Tensor,
    temperature: float,
) -> tuple[Tensor, KeptRows]:
    """Return the log-probs (T,) over the kept sets, and what their gradient needs.

    log_probs, normalizer: of logits (T, V), over the vocabulary.
    """
    return kept.renormalised(
        log_probs, passes.log_probs_at(logits, kept.ids, normalizer, temperature)
    )


def with_kept(coefficients: Tensor, rows: KeptRows) -> tuple[Tensor, CenteredRows]:
    """Return coefficients, (T,) or (n, T), and rows for `backward`, of log-probs over kept sets."""
    of_log_probs, *others = torch.atleast_2d(coefficients)
    of_log_probs, on_ids = rows.gradient(of_log_probs)
    return torch.stack([of_log_probs, *others]), on_ids


def compared(
    passes: Passes,
    logits: Tensor,
    normalizer: Tensor,
    kl: KL,
    ref_logits: Tensor,
    labels: Tensor,
    temperature: float,
) -> Teacher:
    """Return the reference of rows with its full KL; logits (T, V) and normalizer: the policy's."""
    ref_normalizer = passes.forward(ref_logits, labels, temperature, False)[1]
    teacher = Teacher(kl.kind, ref_logits, ref_normalizer, kl.beta or 0.0)
    of_reference, *of_policy = passes.divergence(logits, normalizer, teacher, labels, temperature)
    if not of_policy:
        return teacher._replace(divergence=of_reference, of_policy=of_reference)
    divergence = teacher.beta * of_reference + (1 - teacher.beta) * of_policy[0]
    return teacher._replace(divergence=divergence, of_policy=of_policy[0])


class _GradientInBackward(torch.autograd.Function):
    """The loss, whose gradient by the logits is computed in the backward pass."""

    @staticmethod
    def forward(
        ctx,
        loss: Tensor,
        compute: Callable[..., Tensor],
        arguments: tuple[Tensor, Tensor, Tensor, float, Teacher | None, CenteredRows | None],
        overwrite: bool,
        logits: Tensor,
    ) -> Tensor:
        # `save_for_backward` would refuse logits that were overwritten in between.
        ctx.logits = logits.detach()
        ctx.compute = compute
        ctx.arguments = arguments
        ctx.overwrite = overwrite
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[None, None, None, None, Tensor]:
        if ctx.logits is None:
            raise RuntimeError(
                "the logits were overwritten by the first backward; call the loss again"
            )
        logits = ctx.logits
        out = None
        if ctx.overwrite:
            ctx.logits = None
            out = logits
        labels, normalizer, coefficients, temperature, teacher, centered = ctx.arguments
        gradient = ctx.compute(
            logits,
            labels,
            normalizer,
            coefficients * upstream,
            temperature,
            out=out,
            teacher=teacher,
            centered=None if centered is None else centered.times(upstream),
        )
        return None, None, None, None, gradient


class GradientsFromForward(torch.autograd.Function):
    """The loss, whose gradients by the inputs the forward pass has computed already.

    gradients: one for each input, or None.
    scale_: multiplies a tensor by a 0-dim one in place.
    can_scale: False where a part of the gradients was added elsewhere, so that the loss must be
        backpropagated without a factor.
    """

    @staticmethod
    def forward(
        ctx,
        loss: Tensor,
        gradients: list[Tensor | None],
        scale_: Callable[[Tensor, Tensor], None],
        can_scale: bool,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.scale_ = scale_
        ctx.can_scale = can_scale
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients are handed out by the first backward; call the loss again"
            )
        if not ctx.can_scale:
            unscaled = upstream == 1
            message = "weight_gradient holds the gradient of the loss as it was returned"
            torch._assert_async(unscaled, message)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
        # In place, since nothing else holds them, and the weight's is the largest tensor of all.
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        gradients = [
            None if gradient is None else ctx.scale_(gradient, upstream).to(dtype)
            for gradient, dtype in pairs
        ]
        ctx.gradients = None
        return None, None, None, None, *gradients


class VocabularyShard:
    """The passes over a vocabulary that is spread over ranks, by the passes of `implementation`.

    Each rank's logits are the columns from `start` on; labels number the full vocabulary. Shards
    may differ in size, or be empty. There is no pass that reads the logits once, since the gradient
    needs the other ranks' sums.
    """

    one_pass = False

    def __init__(self, implementation: ModuleType, group: ProcessGroup, start: int):
        self.implementation = implementation
        self.group = group
        self.start = start
        self.scale_rows = implementation.scale_rows
        self.scale_ = implementation.scale_

    def forward(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Do as `torch_passes.forward` for all columns, with one collective of 3 or 4 times (T,).

        The result is the same on every rank.
        """
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
        # NaN marks a label of another shard. If no shard has the label, or two do, there is no
        # log-prob.
        inside = (labels >= self.start) & (labels < self.start + logits.shape[1])
        parts[0] = torch.where(inside, parts[0], torch.nan)
        shards = gather_stacked(parts, self.group)
        held = ~torch.isnan(shards[:, 0])
        shards[:, 0] = torch.where(held, shards[:, 0], 0.0)
        log_probs, normalizer, entropy = merge_shards(list(shards), labels, temperature)
        return torch.where(trained & (held.sum(0) != 1), torch.nan, log_probs), normalizer, entropy

    def log_probs_at(
        self, logits: Tensor, ids: Tensor, normalizer: Tensor, temperature: float
    ) -> Tensor:
        """Do as `torch_passes.log_probs_at` for all columns, with one collective of (T, k)."""
        here = self.implementation.log_probs_at(logits, ids, normalizer, temperature, self.start)
        shards = gather_stacked(here, self.group)
        held = ~torch.isnan(shards) & (ids >= 0)
        log_probs = torch.where(held, shards, 0.0).sum(0)
        return torch.where((ids >= 0) & (held.sum(0) != 1), torch.nan, log_probs)

    def divergence(self, logits: Tensor, *others) -> Tensor:
        """Do as `torch_passes.divergence` for all columns, with one collective of (T,)."""
        return gather_stacked(self.implementation.divergence(logits, *others), self.group).sum(0)

    def forward_score_(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Do as `torch_passes.forward_score_`, with the score of this rank's columns."""
        return forward_score_(
            logits, labels, temperature, with_entropy, dtype, self.forward, self.backward
        )

    def backward(self, logits: Tensor, *others, out: Tensor | None = None, **more) -> Tensor:
        """Do as `torch_passes.backward`, for this rank's columns."""
        if logits.numel() == 0:
            return torch.empty_like(logits) if out is None else out
        return self.implementation.backward(logits, *others, self.start, out, **more)


Passes = ModuleType | VocabularyShard
"""The vocabulary-sized passes: `torch_passes`, `triton_passes`, or a rank's columns by one of them.

The docstrings of `torch_passes` hold for all.
one_pass: True if there is `forward_gradient`, for an objective by token: loss and gradient from one
    read.
"""
