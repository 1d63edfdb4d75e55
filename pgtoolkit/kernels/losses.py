"""The loss of a piece of a step: from logits, from hidden states and a head, or from log-probs.

T is the number of positions, V the size of the vocabulary, H the width of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels.chunks import default_logits_memory_mb, rows_within
from pgtoolkit.kernels.fused_head import HeadOptions, linear_log_probs, linear_loss
from pgtoolkit.kernels.given_logits import (
    IMPLEMENTATIONS,
    choose_implementation,
    logits_loss,
    over_kept,
)
from pgtoolkit.kernels.products import LMHead, accumulation_dtype, linear
from pgtoolkit.losses import reference
from pgtoolkit.losses.checks import check_name, check_positive, check_switches, check_whole
from pgtoolkit.losses.data_faults import MadeFrom
from pgtoolkit.losses.exchange import Ranks, copy, largest
from pgtoolkit.losses.kept import KeptSets
from pgtoolkit.losses.kl import KINDS
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.measure import sum_metrics
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.reference_terms import correction_names

_PRODUCT = "hidden @ lm_head_weight.T"
"""What messages call the logits where the caller gives no logits."""


@dataclass(frozen=True, repr=False)
class PolicyLoss:
    """The result of a call: the loss, its log-probs, and its metrics.

    loss: 0-dim, differentiable.
    log_probs: (T,) log-prob of each label, 0 where nothing is trained; detached.
    metric_sums: the metrics before division, to merge over the pieces of a step.
    totals: the step's.

    With ranks that share a sequence or the data, loss and metric_sums are this rank's share, and
    add up over the ranks.
    """

    loss: Tensor
    log_probs: Tensor
    metric_sums: MetricSums
    totals: StepTotals

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Return 0-dim tensors by name: sums of this call on this rank over the step's totals."""
        return self.metric_sums.finalize(self.totals)

    def __repr__(self) -> str:
        """Return the loss and the metrics by their numbers."""
        numbers = {"loss": self.loss, **self.metrics}
        words = [f"{name}={value.item():.6g}" for name, value in numbers.items()]
        return f"PolicyLoss({', '.join(words)})"


@dataclass(frozen=True)
class Computation:
    """Options that do not change the loss, as in `pgtoolkit.linear_policy_loss`."""

    impl: str = "auto"
    check_finite: bool = True
    num_splits: int = 1
    logits_memory_mb: float | None = None
    overwrite_logits: bool = False

    def __post_init__(self):
        check_name("impl", self.impl, ("auto", "fused_linear", *IMPLEMENTATIONS, "reference"))
        check_whole("num_splits", self.num_splits, 1)
        if self.logits_memory_mb is not None:
            check_positive("logits_memory_mb", self.logits_memory_mb)
        check_switches(check_finite=self.check_finite, overwrite_logits=self.overwrite_logits)
        if self.num_splits > 1 and self.impl in ("fused_linear", "reference"):
            raise ValueError(
                f"num_splits={self.num_splits} has no effect with impl={self.impl!r}; it cuts "
                "materialised logits. Use impl='auto'"
            )
        if self.logits_memory_mb is not None and not self.fused:
            got = f"{self.impl!r}" + (f" and num_splits={self.num_splits}" * (self.num_splits > 1))
            raise ValueError(
                f"logits_memory_mb={self.logits_memory_mb!r} needs impl='fused_linear' (got {got})"
            )

    @property
    def fused(self) -> bool:
        """True if the head is fused with the loss."""
        return self.impl == "fused_linear" or (self.impl == "auto" and self.num_splits == 1)


def check_splits(loss: Loss, method: Computation) -> None:
    """Raise ValueError for splits of a loss that needs complete documents."""
    if method.num_splits == 1:
        return
    splits = f"num_splits={method.num_splits}"
    family = loss.family
    correction = loss.correction
    if family.by_document:
        raise ValueError(
            f"{splits} needs a family by token (got {family.name!r}): its ratio is a whole "
            "document's. Use num_splits=1"
        )
    if correction is not None and correction.of_policy:
        raise ValueError(
            f"{splits} needs another correction (got {correction.name!r}): it masks whole "
            "documents. Use num_splits=1"
        )


def loss_of_logits(
    logits: Tensor,
    tokens: Tokens,
    totals: StepTotals | None,
    loss: Loss,
    ranks: Ranks,
    method: Computation,
    ref_logits: Tensor | None = None,
    name: str = "logits",
) -> PolicyLoss:
    """Return the loss of given logits.

    logits: (T, V) floating, or this rank's columns of them.
    ref_logits: the same of the reference, for a full KL.
    name: what the caller calls the logits.
    """
    objective = make_objective(tokens, totals, loss, accumulation_dtype(logits), ranks)
    if method.impl == "reference":
        if totals is not None:
            raise ValueError(
                "impl='reference' computes whole steps, so totals need to be None (got totals). "
                "Use impl='torch' for a piece of a step"
            )
        value, log_probs, entropy, divergence = _by_reference(logits, tokens, loss, ref_logits)
        if ref_logits is not None:
            assert objective.penalties.divergence is not None
            objective.penalties.divergence.copy_(divergence)
        # The reference's clamps would hide a NaN.
        value = torch.where(objective.not_finite(log_probs).any(), torch.nan, value)
        if objective.centering is not None:
            top_log_probs = _log_probs_at(logits, objective.centering.top_ids, loss.temperature)
            objective = objective.at(log_probs, top_log_probs)
        sums = sum_metrics(objective, loss.level, log_probs, entropy)
    else:
        implementation = choose_implementation(method.impl, logits, ranks.shard(logits.shape[1]))
        value, log_probs, sums = logits_loss(
            logits,
            tokens.labels,
            objective,
            loss,
            implementation,
            method.overwrite_logits,
            ref_logits,
            KeptSets.of(tokens.sampling_kept_ids, tokens.labels),
        )
    if method.check_finite:
        vocabulary = logits.shape[1] if ranks.vocabulary is None else None
        objective.check_finite(log_probs, MadeFrom(name, tokens, vocabulary))
        objective.check_function(log_probs)
    return PolicyLoss(value, log_probs, sums, objective.totals)


def loss_of_hidden(
    hidden: Tensor,
    head: LMHead,
    tokens: Tokens,
    totals: StepTotals | None,
    loss: Loss,
    ranks: Ranks,
    method: Computation,
) -> PolicyLoss:
    """Return the loss of hidden states (T, H) and the LM head.

    Their logits need never exist in full.
    """
    if not method.fused and method.num_splits == 1:
        method = Computation(method.impl, method.check_finite, overwrite_logits=True)
        with torch.no_grad():
            ref_logits = head.reference and _logits(*head.reference, ranks)
        return loss_of_logits(
            _logits(hidden, head, ranks),
            tokens,
            totals,
            loss,
            ranks,
            method,
            ref_logits,
            _PRODUCT,
        )
    options = _head_options(hidden, head, tokens, loss, ranks, method)
    objective = make_objective(tokens, totals, loss, accumulation_dtype(hidden), ranks)
    kept = KeptSets.of(tokens.sampling_kept_ids, tokens.labels)
    value, log_probs, sums, not_finite = linear_loss(
        hidden, head, tokens.labels, objective, options, kept
    )
    if method.check_finite:
        if not_finite:
            vocabulary = len(head.weight) if ranks.vocabulary is None else None
            objective.check_finite(log_probs, MadeFrom(_PRODUCT, tokens, vocabulary))
        objective.check_function(log_probs)
    return PolicyLoss(value, log_probs, sums, objective.totals)


@torch.no_grad()
def log_probs_of_hidden(
    hidden: Tensor,
    head: LMHead,
    tokens: Tokens,
    loss: Loss,
    ranks: Ranks,
    method: Computation,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-prob of each label, entropy of each row's softmax or None), (T,) each.

    They are 0 where labels < 0, and computed as for a loss with these options, but without one.
    """
    kept = KeptSets.of(tokens.sampling_kept_ids, tokens.labels)
    if not method.fused and method.num_splits == 1:
        logits = _logits(hidden, head, ranks)
        implementation = choose_implementation(method.impl, logits, ranks.shard(logits.shape[1]))
        log_probs, normalizer, entropy = implementation.forward(
            logits, tokens.labels, loss.temperature, with_entropy
        )
        if kept is not None:
            log_probs, _ = over_kept(
                implementation, logits, kept, log_probs, normalizer, loss.temperature
            )
        return log_probs, entropy
    metrics = "with_entropy" if with_entropy else "none"
    loss = replace(loss, metrics=metrics, entropy_coefficient=0.0)
    options = _head_options(hidden, head, tokens, loss, ranks, method)
    return linear_log_probs(hidden, head, tokens.labels, options, kept)


def loss_of_log_probs(
    log_probs: Tensor,
    tokens: Tokens,
    totals: StepTotals | None,
    loss: Loss,
    ranks: Ranks,
    check_finite: bool,
) -> PolicyLoss:
    """Return the loss of the policy's log-probs, (T,) floating; of labels only the sign is read."""
    if loss.kl is not None and loss.full_kl:
        kinds = ", ".join(KINDS)
        raise ValueError(
            f"kl={loss.kl.kind!r} needs logits, since it is over the whole vocabulary. Use one of "
            f"{kinds}"
        )
    objective = make_objective(tokens, totals, loss, accumulation_dtype(log_probs), ranks)
    wide = torch.where(objective.mask, log_probs.to(accumulation_dtype(log_probs)), 0.0)
    new = wide.detach()
    if check_finite:
        objective.check_finite(new, MadeFrom("log_probs", tokens, None))
    with torch.no_grad():  # data may have a graph, and are constants
        losses, coefficients = objective.losses_and_coefficients(new)
    if check_finite:
        objective.check_function(new)
    # The slopes come from a formula. This expression has the value and the derivative of the loss.
    value = losses.sum() + (torch.where(coefficients == 0, 0.0, wide - new) * coefficients).sum()
    return PolicyLoss(value, new, sum_metrics(objective, loss.metrics, new, None), objective.totals)


class LossOfStep:
    """The loss of a whole step, computed in float64 on the CPU from all of its log-probs.

    Coefficients come first, since a second pass waits for them; all else can be asked for while a
    GPU makes that pass.
    """

    @torch.no_grad()
    def __init__(self, log_probs: Tensor, tokens: Tokens, loss: Loss, check_finite: bool):
        """log_probs: (T,) floating, of all documents."""
        tokens = tokens.on_the_host()
        objective = make_objective(tokens, None, loss, torch.float64, Ranks(), is_whole_step=True)
        self._new = torch.where(objective.mask, log_probs.cpu().double(), 0.0)
        if check_finite:
            objective.check_finite(self._new, MadeFrom("log_probs", tokens, None))
        self._objective = objective.at(self._new)
        if check_finite:
            self._objective.check_function(self._new)
        self._level = loss.metrics

    @torch.no_grad()
    def coefficients(self) -> Tensor:
        """Return the coefficients of the surrogate, (T,)."""
        return self._objective.gradient_weights * self._objective.token_terms(self._new).slope

    @torch.no_grad()
    def measured(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics), 0-dim each."""
        losses, _ = self._objective.losses_and_coefficients(self._new)
        sums = sum_metrics(self._objective, self._level, self._new, None)
        return losses.sum(), sums.finalize(self._objective.totals)


def _head_options(
    hidden: Tensor, head: LMHead, tokens: Tokens, loss: Loss, ranks: Ranks, method: Computation
) -> HeadOptions:
    """Return the options of the fused head, with the rows of logits that may exist at once."""
    columns = head.weight.shape[0]
    impl = "auto" if method.fused else method.impl
    implementation = choose_implementation(impl, hidden, ranks.shard(columns))
    rows = -(-len(hidden) // method.num_splits)
    if method.fused:
        memory_mb = method.logits_memory_mb
        if memory_mb is None:
            memory_mb = default_logits_memory_mb(hidden.device)
        if head.reference is not None:
            columns *= 2  # the logits of the reference need the same memory
        dtype = accumulation_dtype(hidden) if head.fp32_logits else hidden.dtype
        rows = rows_within(memory_mb, max(1, columns), dtype)
        if ranks.vocabulary_start is not None or method.logits_memory_mb is None:
            # Shards, or GPUs, may differ in size, so the ranks agree on the smallest number.
            rows = -largest(-rows, ranks.vocabulary, hidden.device)
    return HeadOptions(
        implementation, max(1, rows), loss, method.check_finite, tokens.counts, ranks.vocabulary
    )


def _logits(hidden: Tensor, head: LMHead, ranks: Ranks) -> Tensor:
    if ranks.vocabulary is not None:
        hidden = copy(hidden, ranks.vocabulary)
    return linear(hidden, head.weight, head.bias, head.fp32_logits)


def _log_probs_at(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return (T, k), the log-probs of the tokens ids (T, k), 0 where ids < 0."""
    log_probs = (logits.detach().double() / temperature).log_softmax(-1)
    return torch.where(ids < 0, 0.0, log_probs.gather(-1, ids.clamp(min=0)))


def _by_reference(
    logits: Tensor, tokens: Tokens, loss: Loss, ref_logits: Tensor | None
) -> tuple[Tensor, ...]:
    """Return (loss, log_probs, entropy, full KL) by the reference, differentiable by the logits."""
    assert tokens.old_log_probs is not None
    penalty = {}
    if loss.kl is not None:
        penalty = {
            "kl": loss.kl.kind,
            "kl_coefficient": loss.kl.coefficient,
            "kl_beta": loss.kl.beta,
        }
    result = reference.policy_loss(
        logits.detach(),
        tokens.labels,
        tokens.old_log_probs,
        tokens.advantages,
        tokens.document_index,
        **reference.names(loss.family, loss.aggregation),
        group_index=tokens.group_index,
        trajectory_index=tokens.trajectory_index,
        num_documents=tokens.num_documents,
        temperature=loss.temperature,
        metrics="none",
        sampling_log_probs=tokens.sampling_log_probs,
        **correction_names(loss.correction),
        entropy_coefficient=loss.entropy_coefficient,
        **penalty,
        ref_log_probs=tokens.ref_log_probs,
        ref_logits=ref_logits,
        factors=tokens.factors,
        sampling_top_ids=tokens.sampling_top_ids,
        sampling_top_log_probs=tokens.sampling_top_log_probs,
        sampling_kept_ids=tokens.sampling_kept_ids,
    )
    vectors = result.log_probs, result.entropy, result.divergence
    vectors = logits.new_tensor(vectors, dtype=torch.float64)
    # The gradient is known. This expression has the value and the derivative of the loss.
    shift = logits.double() - logits.detach().double()
    value = result.loss + (torch.nan_to_num(shift) * result.gradient.to(logits.device)).sum()
    return value, *vectors
