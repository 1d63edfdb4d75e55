"""The sampler's log-probs against the old ones: what a correction makes of them, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.losses.corrections import Correction
from pgtoolkit.losses.documents import DocumentSums, over_scope
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, Family


@dataclass(frozen=True)
class Factors:
    """What a correction makes of each token, (T,) each, without gradient.

    values: rho. outside: bool, True beyond the correction's bounds. clamped: bool, True where the clamp acted on the
    log-ratio that it looks at.
    """

    values: Tensor
    outside: Tensor
    clamped: Tensor

    @classmethod
    def of(cls, correction: Correction, log_ratio: Tensor, advantages: Tensor, documents: DocumentSums) -> Factors:
        """log_ratio: (T,) of each token, not clamped, 0 where nothing is trained. advantages: over the scope."""
        over = over_scope(correction, log_ratio, documents)
        values, outside = correction.factors(_clamped(over), _clamped(log_ratio), advantages)
        # The clamp makes a number of an infinite log-ratio, and a mask of NaN.
        finite = torch.isfinite(over) & torch.isfinite(log_ratio)
        return cls(torch.where(finite, values, torch.nan), outside, over.abs() > LOG_RATIO_LIMIT)

    @property
    def means(self) -> list[Tensor]:
        """What is averaged over the documents, in the order of `losses.metrics`."""
        return [self.values, self.outside, self.clamped]

    @property
    def extrema(self) -> list[Tensor]:
        return [self.values, -self.values]


@dataclass(frozen=True)
class Mismatch:
    """How far a token's old log-prob lies from the sampling one, (T,) each.

    log_ratio: old less sampling log-prob, 0 where nothing is trained. outside: bool, True where this alone would make
    the family's clip act.
    """

    log_ratio: Tensor
    outside: Tensor

    @classmethod
    def of(cls, family: Family, log_ratio: Tensor, objective) -> Mismatch:
        """objective: the `Objective`, whose old log-probs take the place of the new ones."""
        own, _ = family.token(log_ratio, objective.scope_advantages)
        ratio = _clamped(over_scope(family, own, objective.documents)).exp()
        low, high = family.outside(ratio, log_ratio, objective.old_log_probs)
        return cls(log_ratio, low | high)

    @property
    def means(self) -> list[Tensor]:
        """What is averaged over the documents, in the order of `losses.metrics`."""
        limited = _clamped(self.log_ratio)
        return [limited.expm1() - limited, self.log_ratio.abs(), self.outside]

    @property
    def extrema(self) -> list[Tensor]:
        return [self.log_ratio.abs()]


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
