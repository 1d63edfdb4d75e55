"""The metrics that the loss gives: their names, and their sums and extrema over the pieces of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        *("kl_old_sampling", "difference_old_sampling", "clipped_sampling_fraction", "max_difference_old_sampling"),
    }
)
"""Those that say nothing where the documents have no old log-probs."""
_MAXIMA = ("max_advantage", "max_ratio_new_old")
_MINIMA = ("min_advantage", "min_ratio_new_old")


@dataclass(frozen=True)
class _More:
    """Metrics that a step has beside those of its level. sample_size: whether the last is an effective sample size, of
    three sums over tokens: of a factor, of its square, and their number."""

    means: tuple[str, ...]
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()
    sample_size: str | None = None

    def finalize(self, sums: Tensor, maxima: Tensor, num_documents: int | Tensor) -> dict[str, Tensor]:
        found = {name: sums[i] / num_documents for i, name in enumerate(self.means)}
        found |= zip(self.maxima, maxima[: len(self.maxima)], strict=True)
        found |= zip(self.minima, -maxima[len(self.maxima) :], strict=True)
        if self.sample_size is not None:
            found[self.sample_size] = _sample_size(*sums[len(self.means) :])
        return found


_MORE = {
    "reference": _More(("kl_ref",)),
    "sampling": _More(
        ("kl_old_sampling", "difference_old_sampling", "clipped_sampling_fraction"), ("max_difference_old_sampling",)
    ),
    "correction": _More(
        ("correction_factor", "correction_outside_fraction", "correction_clamped_fraction"),
        ("max_correction_factor",),
        ("min_correction_factor",),
        "correction_effective_sample_size",
    ),
}
"""What the loss measures where a reference's or the sampler's log-probs are known, and where there is a correction."""


@dataclass(frozen=True)
class MetricSums:
    """The additive part of a step's metrics: one vector to be summed and one to be maximised over pieces and ranks.

    sums: (K,) float64, numerators in the order of `_MEANS`, then three sums over ratios. maxima: (M,) float64; minima
    travel negated, and a piece without a trained token holds -inf, so that no placeholder can win.
    more: (name, number of its sums, of its maxima) of what follows these, the same in all pieces of a step.
    """

    level: str
    sums: Tensor
    maxima: Tensor
    more: tuple[tuple[str, int, int], ...] = ()

    def joined(self, name: str, sums: Tensor, maxima: Tensor) -> MetricSums:
        """With the metrics that `_MORE` has by this name."""
        more = (*self.more, (name, len(sums), len(maxima)))
        return MetricSums(self.level, torch.cat([self.sums, sums]), torch.cat([self.maxima, maxima]), more)

    def merge(self, other: MetricSums) -> MetricSums:
        if self.more != other.more:
            raise ValueError(f"pieces of one step need the same metrics (got {self.more} and {other.more})")
        return replace(self, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def all_reduce(self, loss: Tensor, group: ProcessGroup | None) -> tuple[Tensor, MetricSums]:
        """(loss, sums) over the ranks of a group, each giving its share of a step: the same on every rank.

        Two collectives, a sum in which the loss (0-dim) travels along and a maximum; one at level none, which has no
        extrema. Every rank takes part, also one without a trained token, and all with the same level.
        """
        loss, *sums = all_sum(torch.cat([loss.detach().double().reshape(1), self.sums]), group)
        maxima = all_max(self.maxima, group if self.level != "none" else None)
        return loss, replace(self, sums=torch.stack(sums), maxima=maxima)

    def finalize(self, totals: StepTotals, with_old_log_probs: bool = True) -> dict[str, Tensor]:
        """Metric name -> 0-dim tensor, over the documents merged so far; means are divided by the step's totals.

        with_old_log_probs: whether the documents have any; else the metrics that need them are left out.

        Extrema are infinite and effective_sample_size is NaN where no token is trained.
        """
        means = _MEANS[self.level]
        metrics = {name: self.sums[i] / totals.num_documents for i, name in enumerate(means)}
        if self.level != "none":
            at, top = len(means) + 3, len(_MAXIMA) + len(_MINIMA)
            metrics["ratio_new_old_sum"], metrics["ratio_new_old_squared_sum"], _ = self.sums[len(means) : at]
            metrics["effective_sample_size"] = _sample_size(*self.sums[len(means) : at])
            metrics |= zip(_MAXIMA, self.maxima[: len(_MAXIMA)], strict=True)
            metrics |= zip(_MINIMA, -self.maxima[len(_MAXIMA) : top], strict=True)
            for name, num_sums, num_maxima in self.more:
                own = self.sums[at : at + num_sums], self.maxima[top : top + num_maxima]
                metrics |= _MORE[name].finalize(*own, totals.num_documents)
                at, top = at + num_sums, top + num_maxima
        if not with_old_log_probs:
            metrics = {name: value for name, value in metrics.items() if name not in _OF_BOTH_LOG_PROBS}
        for name in ("num_tokens", "num_documents", "num_empty_documents", "num_groups"):
            value = getattr(totals, name)
            if value is not None:
                metrics[name] = torch.as_tensor(value)
        return metrics


def _sample_size(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    return first**2 / (weight * second)
