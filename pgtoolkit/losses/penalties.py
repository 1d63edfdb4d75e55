"""What the penalties add to a piece of a step: the terms of a reference and of the entropy, on vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.losses.kl import KL, k3


@dataclass(frozen=True)
class Penalties:
    """Further terms of the sum over tokens, and what they need.

    mask: (T,) bool. weights: (T,) w_t, without the factor of a correction. old_log_probs, ref_log_probs: (T,), in the
    dtype of the log-probs; the second is None where no reference is known.
    """

    kl: KL | None
    entropy_coefficient: float
    mask: Tensor
    weights: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None

    @property
    def active(self) -> bool:
        """Whether the loss has any."""
        return self.kl is not None or self.bonus

    @property
    def bonus(self) -> bool:
        """Whether the loss has the entropies of the softmax."""
        return self.entropy_coefficient != 0

    @property
    def by_entropy(self) -> Tensor:
        """(T,) the derivative of the loss by the entropy of each row's softmax."""
        return -self.entropy_coefficient * self.weights

    def with_bonus(self, loss: Tensor, entropy: Tensor | None) -> Tensor:
        """The loss with what the entropies (T,) add to it."""
        return loss + (self.by_entropy * entropy).sum() if self.bonus else loss

    def with_kl(self, log_probs: Tensor, losses: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """(losses, their derivatives by each log-prob) of the surrogate, (T,) each, with those of the penalty added."""
        if self.kl is None:
            return losses, coefficients
        log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        values, slopes = self.kl.terms(self._distance(log_probs), log_ratio)
        weights = self.kl.coefficient * self.weights
        return losses + weights * values, coefficients + weights * slopes

    def distance(self, log_probs: Tensor) -> Tensor:
        """(T,) k3 of the new log-probs against the reference's: what the metric kl_ref is the mean of."""
        return k3(self._distance(log_probs).double())

    def take(self, rows: Tensor | slice) -> Penalties:
        """The share of some rows."""
        names = ("mask", "weights", "old_log_probs", *(["ref_log_probs"] if self.ref_log_probs is not None else []))
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def _distance(self, log_probs: Tensor) -> Tensor:
        """New log-prob less the reference's, 0 where masked; NaN for infinity, of which a clamp makes a number."""
        distance = torch.where(self.mask, log_probs - self.ref_log_probs, 0.0)
        return torch.where(torch.isfinite(distance), distance, torch.nan)
