"""The metrics that the loss gives: their names, and their sums and extrema over the pieces of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.exchange import all_max, all_sum

_BASIC_MEANS = (
    "new_logprobs",
    "old_logprobs",
    "ratio_new_old",
    "advantage",
    "kl_new_old",
    "clipped_ratio_fraction",
    "clipped_low_fraction",
    "clipped_high_fraction",
    "clamped_log_ratio_fraction",
)
_MEANS = {"none": ("new_logprobs",), "basic": _BASIC_MEANS, "with_entropy": (*_BASIC_MEANS, "entropy")}
LEVELS = tuple(_MEANS)
_OF_BOTH_LOG_PROBS = frozenset(
    {
        *("old_logprobs", "ratio_new_old", "kl_new_old", "clamped_log_ratio_fraction", "effective_sample_size"),
        *("clipped_ratio_fraction", "clipped_low_fraction", "clipped_high_fraction"),
        *("ratio_new_old_sum", "ratio_new_old_squared_sum", "max_ratio_new_old", "min_ratio_new_old"),
    }
)
"""Those that say nothing where the documents have no old log-probs."""
_MAXIMA = ("max_advantage", "max_ratio_new_old")
_MINIMA = ("min_advantage", "min_ratio_new_old")


@dataclass(frozen=True)
class MetricSums:
    """The additive part of a step's metrics: one vector to be summed and one to be maximised over pieces and ranks.

    sums: (K,) float64, numerators in the order of `_MEANS`, then three sums over ratios. maxima: (M,) float64; minima
    travel negated, and a piece without a trained token holds -inf, so that no placeholder can win.
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

    def finalize(self, totals: StepTotals, with_old_log_probs: bool = True) -> dict[str, Tensor]:
        """Metric name -> 0-dim tensor, over the documents merged so far; means are divided by the step's totals.

        with_old_log_probs: whether the documents have any; else the metrics that need them are left out.

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
        if not with_old_log_probs:
            metrics = {name: value for name, value in metrics.items() if name not in _OF_BOTH_LOG_PROBS}
        for name in ("num_tokens", "num_documents", "num_empty_documents", "num_groups"):
            value = getattr(totals, name)
            if value is not None:
                metrics[name] = torch.as_tensor(value)
        return metrics
