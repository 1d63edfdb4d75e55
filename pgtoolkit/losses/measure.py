"""Computes a piece's part of the step's metrics from its objective and its log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import clamped, over_scope
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.metrics import CLIP_METRICS, MetricSums
from pgtoolkit.losses.objective import Objective
from pgtoolkit.losses.trial import measured_by


def evaluate_objective(
    objective: Objective, log_probs: Tensor, entropy: Tensor | None, level: str
) -> tuple[Tensor, Tensor, MetricSums]:
    """Return (loss, coefficients, metric sums): 0-dim, (T,), and those of the level.

    entropy: (T,), if it is measured.
    """
    losses, coefficients = objective.losses_and_coefficients(log_probs)
    loss = objective.penalties.with_rows(losses.sum(), entropy)
    return loss, coefficients, sum_metrics(objective, level, log_probs, entropy)


@torch.no_grad()
def sum_metrics(
    objective: Objective, level: str, log_probs: Tensor, entropy: Tensor | None
) -> MetricSums:
    """Return the metric sums of the level, and of a sampler, a reference and a correction.

    log_probs: (T,).
    entropy: (T,), if it is measured.
    """
    if level == "none":
        sums = torch.cat([_left_out(objective), _sums(objective, [log_probs])])
        return MetricSums(level, sums, sums.new_empty(0))

    terms = objective.token_terms(log_probs)
    ratio = terms.ratio.double()
    log_ratio = terms.log_ratio.double()
    low, high, *cuts = clips(objective, log_probs)
    assert objective.old_log_probs is not None
    values = [
        log_probs,
        objective.old_log_probs,
        ratio,
        objective.advantages,
        log_ratio.expm1() - log_ratio,
        low | high,
        *cuts,
        terms.clamped,
    ]
    if level == "with_entropy":
        assert entropy is not None
        values.append(entropy)
    # For the effective sample size, the ratio of a document counts once, not once per token.
    shares = objective.shares if terms.ratio_by_document else objective.mask.double()
    weighted = shares * ratio
    sums = _sums(objective, values, [weighted, weighted * ratio, shares])
    sums = torch.cat([_left_out(objective), sums])
    advantages = objective.advantages.double()
    maxima = _maxima(objective, [advantages, ratio, -advantages, -ratio])
    more = _with_more(objective, MetricSums(level, sums, maxima), log_probs)
    return _with_own(objective, more, log_probs)


def clips(objective: Objective, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (below, above, cut below, cut above), (T,) bool each.

    The first two are True outside of the family's bounds, the others where that bound changes the
    coefficient.
    """
    terms = objective.token_terms(log_probs)
    if terms.bounds is not None:
        lower, upper = terms.bounds
        low = terms.ratio < lower
        high = terms.ratio > upper
    else:
        low, high = objective.family.outside(terms.ratio, terms.token_log_ratio, log_probs)
    return low, high, *objective.family.cuts(low, high, terms.ratio, objective.scope_advantages)


def _with_more(objective: Objective, sums: MetricSums, log_probs: Tensor) -> MetricSums:
    """Return the sums with those of sampling log-probs, a reference, the penalty, score centering
    and a correction appended."""
    kinds = []
    means = []
    of_sample_size = []
    maxima = []
    log_ratio = objective.sampling_log_ratio
    if log_ratio is not None:
        kinds.append("sampling")
        limited = clamped(log_ratio)
        distance = log_ratio.abs().double()
        outside = _outside(objective, log_probs, log_ratio)
        means += [limited.expm1() - limited, distance, outside]
        maxima += [distance]
    if objective.penalties.ref_log_probs is not None or objective.penalties.divergence is not None:
        kinds.append("reference")
        means += [objective.penalties.distance(log_probs)]
    if objective.penalties.measures_terms:
        kinds.append("penalty")
        means += [objective.penalties.terms(log_probs)]
    if objective.centering is not None:
        kinds.append("centering")
        means += [objective.centering.terms, *objective.centering.masses]
    factors = objective.factors
    if objective.off_policy is not None:
        factors = objective.token_terms(log_probs).factors
    if factors is not None:  # the last kind, since the sums of its sample size follow all means
        kinds.append("correction")
        rho = factors.values.double()
        means += [rho, factors.outside, factors.clamped]
        of_sample_size += [rho, rho * rho, torch.ones_like(rho)]
        maxima += [rho, -rho]
    if not kinds:
        return sums
    largest = [_maxima(objective, maxima)] if maxima else []
    all_sums = torch.cat([sums.sums, _sums(objective, means, of_sample_size)])
    all_maxima = torch.cat([sums.maxima, *largest])
    return MetricSums(sums.level, all_sums, all_maxima, tuple(kinds))


def _with_own(objective: Objective, sums: MetricSums, log_probs: Tensor) -> MetricSums:
    """Return the sums with those of the loss's own metrics, if it is a function that has some, and
    without those of a clip for a loss of the user's own that names no bounds."""
    family = objective.family
    if not isinstance(family, FunctionFamily):
        has_none = type(family) not in FAMILIES.values() and not family.has_clip
        return replace(sums, absent=CLIP_METRICS) if has_none else sums
    if objective.coefficients_of_step is not None:
        return replace(sums, absent=CLIP_METRICS)  # the first pass has these metrics
    if objective.calls_function:
        terms = objective.token_terms(log_probs)
        has_bounds = terms.bounds is not None
        names = tuple(sorted(terms.own_metrics))
    else:
        # Such a piece has to have the same metrics as the others.
        has_bounds, names = measured_by(family)
        terms = None
    if names:
        vectors = [log_probs if terms is None else terms.own_metrics[name] for name in names]
        further = _sums(objective, vectors)
        sums = replace(sums, sums=torch.cat([sums.sums, further]), own_metrics=names)
    return replace(sums, absent=() if has_bounds else CLIP_METRICS)


def _outside(objective: Objective, log_probs: Tensor, log_ratio: Tensor) -> Tensor:
    """Return (T,) bool, True where the ratio of old to sampling probability is out of bounds.

    log_ratio: the old minus the sampling log-probs.
    """
    family = objective.family
    if isinstance(family, FunctionFamily):
        bounds = objective.token_terms(log_probs).bounds
        if bounds is None:
            return torch.zeros_like(objective.mask)
        ratio = objective.ratio_from_sampler()
        return (ratio < bounds[0]) | (ratio > bounds[1])
    of_tokens, _ = family.token(log_ratio, objective.scope_advantages)
    ratio = clamped(over_scope(family.scope, of_tokens, objective.documents)).exp()
    assert objective.old_log_probs is not None
    low, high = family.outside(ratio, log_ratio, objective.old_log_probs)
    return low | high


def _left_out(objective: Objective) -> Tensor:
    """Return (2,) float64: the trained tokens of documents of weight 0, and their documents."""
    if objective.has_weight is None:
        return objective.shares.new_zeros(2)
    left_out = objective.mask & ~objective.measured
    # Ranks that share a document have shares of it that add up to 1.
    return torch.stack([left_out.double().sum(), objective.shares.where(left_out, 0.0).sum()])


def _sums(objective: Objective, means: list[Tensor], others: Sequence[Tensor] = ()) -> Tensor:
    """Return the sum of each vector over the trained tokens of documents that have a weight.

    means: vectors that are multiplied by `objective.shares` before. Divided by the number of
        documents, their sums are means over documents of means over tokens.
    """
    # On a GPU, an operation costs about the same for a stack as for a single vector.
    stacked = torch.stack([vector.double() for vector in (*means, *others)])
    values = torch.where(objective.measured, stacked, 0.0)
    values[: len(means)] *= objective.shares
    return values.sum(1)


def _maxima(objective: Objective, values: list[Tensor]) -> Tensor:
    stacked = torch.stack([vector.double() for vector in values])
    if not len(objective.mask):  # no maximum to take
        return stacked.new_full((len(values),), -torch.inf)
    return torch.where(objective.measured, stacked, -torch.inf).amax(1)
