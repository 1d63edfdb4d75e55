"""What a step reports: sums and extrema travel between micro-batches and ranks, each mean is divided once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.exchange import all_max, all_sum

if TYPE_CHECKING:
    from pgtoolkit.losses.objective import Objective

LEVELS = ("none", "basic", "with_entropy")

_BASIC_MEANS = (
    "old_logprobs",
    "ratio_new_old",
    "advantage",
    "kl_new_old",
    "clipped_ratio_fraction",
    "clipped_low_fraction",
    "clipped_high_fraction",
    "clamped_log_ratio_fraction",
)
_MEANS = {
    "none": ("new_logprobs",),
    "basic": ("new_logprobs", *_BASIC_MEANS),
    "with_entropy": ("new_logprobs", *_BASIC_MEANS, "entropy"),
}
_MAXIMA = ("max_advantage", "max_ratio_new_old")
_MINIMA = ("min_advantage", "min_ratio_new_old")


@dataclass(frozen=True)
class MetricSums:
    """The additive part of a step's metrics: one vector to be summed and one to be maximised over pieces and ranks.

    sums: (K,) float64 numerators. maxima: (M,) float64; minima travel negated, and a piece without a trained token
    holds -inf, so that no placeholder can win.
    """

    level: str
    sums: Tensor
    maxima: Tensor

    def merge(self, other: MetricSums) -> MetricSums:
        return MetricSums(self.level, self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, loss: Tensor, group: ProcessGroup | None) -> tuple[Tensor, MetricSums]:
        """(loss, sums) over the ranks of a group, each giving its share of a step: the same on every rank.

        Two collectives, a sum in which the loss (0-dim) travels along and a maximum; one at level none, which has no
        extrema. Every rank takes part, also one without a trained token, and all with the same level.
        """
        loss, *sums = all_sum(torch.cat([loss.detach().double().reshape(1), self.sums]), group)
        maxima = all_max(self.maxima, group if self.level != "none" else None)
        return loss, MetricSums(self.level, torch.stack(sums), maxima)

    def finalize(self, totals: StepTotals) -> dict[str, Tensor]:
        """Metric name -> 0-dim tensor, over the documents merged so far; means are divided by the step's totals.

        Extrema are infinite and effective_sample_size is NaN where no token is trained.
        """
        means = _MEANS[self.level]
        metrics = {name: self.sums[i] / totals.num_documents for i, name in enumerate(means)}
        if self.level != "none":
            first, second, weight = self.sums[len(means) :]
            metrics["ratio_new_old_sum"] = first
            metrics["ratio_new_old_squared_sum"] = second
            metrics["effective_sample_size"] = first**2 / (weight * second)
            metrics |= zip(_MAXIMA, self.maxima[: len(_MAXIMA)], strict=True)
            metrics |= zip(_MINIMA, -self.maxima[len(_MAXIMA) :], strict=True)
        for name in ("num_tokens", "num_documents", "num_empty_documents", "num_groups"):
            value = getattr(totals, name)
            if value is not None:
                metrics[name] = torch.as_tensor(value)
        return metrics


@torch.no_grad()
def metric_sums(level: str, objective: Objective, log_probs: Tensor, entropy: Tensor | None) -> MetricSums:
    """The contribution of one piece of a step. log_probs, entropy: (T,), the latter None unless the level has it."""
    segments, mask, advantages = objective.segments, objective.mask, objective.advantages
    # u: one over the document's length at its trained tokens, so that each document sums to one.
    u = segments.broadcast(1.0 / segments.counts.clamp(min=1).double())

    def document_sums(values: list[Tensor]) -> Tensor:
        # All at once: on a GPU each operation on a vector costs the same, however little it does.
        return (u * torch.where(mask, torch.stack([x.double() for x in values]), 0.0)).sum(1)

    if level == "none":
        return MetricSums(level, document_sums([log_probs]), u.new_empty(0))

    family, judged = objective.family, objective.judged(log_probs)
    ratio, log_ratio = judged.ratio.double(), judged.log_ratio.double()
    low, high = family.outside(judged.ratio, judged.token_log_ratio, log_probs)
    values = [
        log_probs,
        objective.old_log_probs,
        ratio,
        advantages,
        log_ratio.expm1() - log_ratio,
        low | high,
        *family.cuts(low, high, judged.ratio, objective.judged_advantages),
        judged.clamped,
    ]
    if level == "with_entropy":
        values.append(entropy)
    v = u if family.by_document else mask.double()
    weighted = v * ratio
    sums = torch.cat([document_sums(values), torch.stack([weighted, weighted * ratio, v]).sum(1)])

    extrema = torch.stack([advantages.double(), ratio, -advantages.double(), -ratio])
    # A piece without tokens has no maximum to take: -inf joins in.
    lowest = extrema.new_full((len(extrema), 1), -torch.inf)
    maxima = torch.cat([torch.where(mask, extrema, -torch.inf), lowest], 1).amax(1)
    return MetricSums(level, sums, maxima)
