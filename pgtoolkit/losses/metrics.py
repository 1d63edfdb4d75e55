"""The metrics of the loss: their names, and their sums and extrema over the pieces of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.exchange import all_max, all_sum


@dataclass(frozen=True)
class _Kind:
    """Metrics that are computed together.

    means: means over documents, of which the numerators are added up.
    maxima, minima: extrema; a minimum is kept as the maximum of the negated values.
    sample_size: the name of an effective sample size, from three more sums over tokens: of a
        factor, of its square, and of their weights.
    sums: the names of the first two sums, where these are metrics as well.
    """

    means: tuple[str, ...]
    maxima: tuple[str, ...] = ()
    minima: tuple[str, ...] = ()
    sample_size: str | None = None
    sums: tuple[str, ...] = ()

    def finalize(
        self, sums: Iterator[Tensor], maxima: Iterator[Tensor], num_documents: int | Tensor
    ) -> dict:
        """Return the metrics by name, from the next numbers of both iterators."""
        metrics = {name: next(sums) / num_documents for name in self.means}
        if self.sample_size is not None:
            first = next(sums)
            second = next(sums)
            weight = next(sums)
            metrics |= zip(self.sums, (first, second), strict=False)
            metrics[self.sample_size] = first**2 / (weight * second)
        metrics |= {name: next(maxima) for name in self.maxima}
        return metrics | {name: -next(maxima) for name in self.minima}


_CLIPPED = "clipped_ratio_fraction", "clipped_low_fraction", "clipped_high_fraction"
CLIP_METRICS = (*_CLIPPED, "clipped_sampling_fraction")
_SUMS = "ratio_new_old_sum", "ratio_new_old_squared_sum"
_MEANS = "new_logprobs", "old_logprobs", "ratio_new_old", "advantage", "kl_new_old"
_BASIC = _Kind(
    (*_MEANS, *_CLIPPED, "clamped_log_ratio_fraction"),
    ("max_advantage", "max_ratio_new_old"),
    ("min_advantage", "min_ratio_new_old"),
    "effective_sample_size",
    _SUMS,
)
_LEVELS = {
    "none": _Kind(("new_logprobs",)),
    "basic": _BASIC,
    "with_entropy": replace(_BASIC, means=(*_BASIC.means, "entropy")),
}
LEVELS = tuple(_LEVELS)
_KINDS = _LEVELS | {
    "reference": _Kind(("kl_ref",)),
    "penalty": _Kind(("kl_penalty",)),
    "sampling": _Kind(
        ("kl_old_sampling", "difference_old_sampling", "clipped_sampling_fraction"),
        ("max_difference_old_sampling",),
    ),
    "centering": _Kind(("score_centering", "top_mass_sampling", "top_mass_new")),
    "correction": _Kind(
        ("correction_factor", "correction_outside_fraction", "correction_clamped_fraction"),
        ("max_correction_factor",),
        ("min_correction_factor",),
        "correction_effective_sample_size",
    ),
}
"""Name -> metrics: of each level, of a reference's and the sampler's log-probs, of the penalty, of
score centering, of a correction."""
_OF_BOTH_LOG_PROBS = {
    "old_logprobs",
    "ratio_new_old",
    "kl_new_old",
    "clamped_log_ratio_fraction",
    "effective_sample_size",
    "max_ratio_new_old",
    "min_ratio_new_old",
    *_SUMS,
    *_CLIPPED,
    "kl_old_sampling",
    "difference_old_sampling",
    "clipped_sampling_fraction",
    "max_difference_old_sampling",
}
"""Metrics that mean nothing where the documents have no old log-probs."""


@dataclass(frozen=True)
class MetricSums:
    """The metrics of a piece of a step, before division, to be merged over pieces and ranks.

    sums: (K,) float64, to be added up: the trained tokens of documents of weight 0, the number of
        these documents, then those of the level.
    maxima: (M,) float64, of which the maximum is taken. A piece without a trained token has -inf,
        so that no placeholder can win.
    more: the kinds that follow the level, the same in all pieces of a step.
    own_metrics: the names of the loss's own metrics, whose sums come last.
    absent: metrics of the level that have no meaning under the loss.
    """

    level: str
    sums: Tensor
    maxima: Tensor
    more: tuple[str, ...] = ()
    own_metrics: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def merge(self, other: MetricSums) -> MetricSums:
        here = (*self.more, *self.own_metrics)
        there = (*other.more, *other.own_metrics)
        if here != there:
            raise ValueError(f"pieces of one step need the same metrics (got {here} and {there})")
        return replace(
            self, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima)
        )

    def all_reduce(self, loss: Tensor, group: ProcessGroup | None) -> tuple[Tensor, MetricSums]:
        """Return (loss, sums) over the ranks of a group, each giving its share of a step.

        They are the same on every rank. There are two collectives, a sum with the loss (0-dim) and
        a maximum; only the first at level none, which has no extrema. Every rank takes part, also
        without a trained token, and all with the same level.
        """
        loss, *sums = all_sum(torch.cat([loss.detach().double().reshape(1), self.sums]), group)
        maxima = all_max(self.maxima, group if self.level != "none" else None)
        return loss, replace(self, sums=torch.stack(sums), maxima=maxima)

    def finalize(self, totals: StepTotals, with_old_log_probs: bool = True) -> dict[str, Tensor]:
        """Return 0-dim tensors by name, over the documents merged so far.

        Means are divided by the step's totals. A document of weight 0 counts as one without a
        trained token. Extrema are infinite and effective_sample_size is NaN where no token is
        trained.
        with_old_log_probs: False leaves out the metrics that need old log-probs.
        """
        metrics = {}
        sums = iter(self.sums)
        maxima = iter(self.maxima)
        tokens_left_out = next(sums).round().long()
        documents_left_out = next(sums).round().long()
        for name in (self.level, *self.more):
            metrics |= _KINDS[name].finalize(sums, maxima, totals.num_documents)
        metrics |= {name: next(sums) / totals.num_documents for name in self.own_metrics}
        metrics = {name: value for name, value in metrics.items() if name not in self.absent}
        if not with_old_log_probs:
            metrics = {
                name: value for name, value in metrics.items() if name not in _OF_BOTH_LOG_PROBS
            }
        counts = {
            "num_tokens": totals.num_tokens - tokens_left_out,
            "num_documents": totals.num_documents,
            "num_empty_documents": totals.num_empty_documents + documents_left_out,
            "num_groups": totals.num_groups,
        }
        if totals.tokens_per_trajectory is not None:
            counts["num_trajectories"] = totals.num_trajectories
        return metrics | {
            name: torch.as_tensor(count) for name, count in counts.items() if count is not None
        }
