"""The front door: policy-gradient losses from logits, or from hidden states and the LM head's weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.kernels.token_log_probs import token_log_probs
from pgtoolkit.losses.aggregation import Reducer
from pgtoolkit.losses.metrics import LEVELS, MetricSums
from pgtoolkit.losses.objective import make_objective
from pgtoolkit.losses.surrogates import FAMILIES


@dataclass(frozen=True)
class PolicyLoss:
    """What `policy_loss` returns.

    loss: 0-dim, differentiable. log_probs: (T,) log-prob of each label, 0 where nothing is trained; detached.
    metrics: name -> 0-dim tensor. metric_sums: the same before division, to merge over the pieces of a step.
    """

    loss: Tensor
    log_probs: Tensor
    metrics: dict[str, Tensor]
    metric_sums: MetricSums


def policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    document_index: Tensor,
    *,
    loss: str = "gspo",
    epsilon_low: float = 3e-4,
    epsilon_high: float = 4e-4,
    aggregation: str = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Tensor | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    metrics: str = "none",
    impl: str = "auto",
    check_finite: bool = True,
) -> PolicyLoss:
    """Clipped policy-gradient loss of packed documents, from their logits.

    logits: (T, V) floating. labels: (T,) int64, the token to predict at each position, negative where not trained.
    old_log_probs, advantages: (T,) floating, read only where trained. document_index: (T,) int64, 0-based.
    loss: "grpo" (arXiv 2402.03300; asymmetric clip 2503.14476) or "gspo" (2507.18071).
    aggregation: "sample_mean", "prompt_mean" (needs group_index, (documents,) int64), "token_mean", or
        "constant" (needs divisor, Dr. GRPO's L, 2503.20783 eq. 2); a reducer takes the place of all of them.
    totals: the step's totals when this call is a piece of a step; then group_index counts as totals.tokens_per_group
        does. Without totals the call is a whole step of num_documents documents (default: largest index + 1).
    temperature: log-probs are log_softmax(logits / temperature).
    metrics: "none", "basic" or "with_entropy". impl: "auto", "torch" or "reference" (plain loops, for tests).
    check_finite: look for non-finite numbers at trained positions; costs one synchronisation on a GPU.

    Raises ValueError for arguments that cannot be right and DataError for non-finite data, naming the document.
    """
    _check_choices(loss, metrics, epsilon_low, epsilon_high, temperature)
    _check_shapes(logits, labels, old_log_probs, advantages, document_index)
    objective = make_objective(
        labels,
        old_log_probs,
        advantages,
        document_index,
        loss=loss,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        aggregation=aggregation,
        divisor=divisor,
        reducer=reducer,
        group_index=group_index,
        num_documents=num_documents,
        totals=totals,
        dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
    )
    log_probs, entropy = token_log_probs(logits, labels, temperature, metrics == "with_entropy", impl)
    if check_finite:
        objective.check_finite(log_probs.detach())
    sums = objective.metrics(metrics, log_probs.detach(), entropy)
    return PolicyLoss(objective.value(log_probs), log_probs.detach(), sums.finalize(objective.totals), sums)


def _check_choices(loss, metrics, epsilon_low, epsilon_high, temperature):
    if loss not in FAMILIES:
        raise ValueError(f"loss={loss!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if metrics not in LEVELS:
        raise ValueError(f"metrics={metrics!r} is unknown; choose one of {', '.join(LEVELS)}")
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high), ("temperature", temperature)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} needs a finite number > 0 (got {value!r})")
    if epsilon_low >= 1:
        raise ValueError(f"epsilon_low needs a number < 1 (got {epsilon_low!r}); the ratio is never negative")


def _check_shapes(logits, labels, *vectors):
    for tensor in (labels, *vectors):
        if tensor.shape != logits.shape[:1]:
            raise ValueError(
                f"expected one entry per row of logits, shape {tuple(logits.shape[:1])} (got {tuple(tensor.shape)})"
            )
