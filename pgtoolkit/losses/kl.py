"""The penalty on a policy's distance from a frozen reference: a further term of each token's loss.

p is the log-prob of a token under the policy in training, f under the reference, o under the policy that sampled it;
p_v and f_v are those of each token v of the vocabulary that could stand there. k1's gradient has mean 0 on the policy's
own samples; k3 is GRPO's (arXiv 2402.03300, equation 4), k3_ratio unbiased also off the policy (DeepSeek-V3.2, arXiv
2512.02556), and the full ones are for distillation (arXiv 2306.13649).
No torch is imported here, so that `pgtk check` may read equations; tensors bring their methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgtoolkit.losses.checks import check_name, check_positive
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, clamped

if TYPE_CHECKING:
    from torch import Tensor

_EQUATIONS = {
    "k1": "p_t - f_t",
    "k2": "(p_t - f_t)^2 / 2",
    "k3": "exp(f_t - p_t) - (f_t - p_t) - 1",
    "k3_ratio": "(exp(f_t - p_t) - (f_t - p_t) - 1) exp(p_t - o_t)",
    "full_reverse": "sum_v exp(p_tv) (p_tv - f_tv)",
    "full_forward": "sum_v exp(f_tv) (f_tv - p_tv)",
}
FULL_KINDS = ("full_reverse", "full_forward")
KINDS = tuple(kind for kind in _EQUATIONS if kind not in FULL_KINDS)
"""Those that know of the reference only the log-prob of the label."""
REWARD_KINDS = ("k1", "k2", "k3")
"""Those that can be taken off a reward: they know nothing of the new log-probs."""


@dataclass(frozen=True)
class KL:
    """coefficient times the term of its kind, weighted like the surrogate by w_t."""

    kind: str
    coefficient: float

    def __post_init__(self):
        check_name("kl", self.kind, (*KINDS, *FULL_KINDS))
        check_positive("kl.coefficient", self.coefficient)

    @property
    def equation(self) -> str:
        """What is added to l_t, with this object's numbers, for `pgtk check`."""
        return f"{self.coefficient:g} ({_EQUATIONS[self.kind]})"

    @property
    def full(self) -> bool:
        """Whether the term is of the whole vocabulary: its gradient is not one of a log-prob."""
        return self.kind in FULL_KINDS

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the term has the ratio of the new to the old log-probs."""
        return self.kind == "k3_ratio"

    def of_samples(self, old_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Return coefficient times the term of each token as the policy that sampled it has it: o - f for p - f.

        For REWARD_KINDS. (N,) each.
        """
        distance = old_log_probs - ref_log_probs
        return self.coefficient * self.terms(distance, distance * 0)[0]

    def terms(self, distance: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """(values, their derivatives by p), (T,) each, without the coefficient.

        distance: p - f. log_ratio: p - o. Both are clamped before exp, and there the
        derivative through them is 0. NaN where the distance is NaN.
        """
        if self.kind == "k1":
            return distance, distance * 0 + 1
        if self.kind == "k2":
            return distance**2 / 2, distance
        moves = distance.abs() <= LOG_RATIO_LIMIT
        values, slopes = k3(distance), (-(-distance).expm1()).where(moves, 0.0)
        if self.kind == "k3":
            return values, slopes
        ratio = clamped(log_ratio).exp()
        # Of both factors: together exp(p - o) (p - f).
        return values * ratio, ratio * (slopes + values.where(log_ratio.abs() <= LOG_RATIO_LIMIT, 0.0))


def k3(distance: Tensor) -> Tensor:
    """exp(-distance) + distance - 1 of the clamped distance: at least 0, and in the mean over samples the KL."""
    distance = clamped(distance)
    return (-distance).expm1() + distance


@dataclass(frozen=True)
class Penalties:
    """What the penalties add to a piece of a step: the terms of a reference and of the entropy, on vectors.

    mask: (T,) bool. weights: (T,) w_t, without the factor of a correction. old_log_probs, ref_log_probs: (T,), in the
    dtype of the log-probs; None where they are the new ones, and where no reference is known. divergence: (T,) the full
    KL of each row, 0 where masked: zeros, which the pass over the vocabulary fills in; None where the loss has none.
    """

    kl: KL | None
    entropy_coefficient: float
    mask: Tensor
    weights: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    divergence: Tensor | None = None

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

    @property
    def of_rows(self) -> list[Tensor]:
        """(T,) each: the derivatives of the loss by what of a row is not its log-prob, its entropy and its full KL."""
        by_divergence = []
        if self.divergence is not None:
            assert self.kl is not None
            by_divergence.append(self.kl.coefficient * self.weights)
        return [self.by_entropy, *by_divergence] if self.bonus else by_divergence

    def with_rows(self, loss: Tensor, entropy: Tensor | None) -> Tensor:
        """The loss with what the entropies (T,) and the full KL of the rows add to it."""
        if self.bonus:
            assert entropy is not None
            loss = loss + (self.by_entropy * entropy).sum()
        if self.divergence is not None:
            loss = loss + (self.of_rows[-1] * self.divergence.where(self.divergence.isfinite(), math.nan)).sum()
        return loss

    def with_kl(self, log_probs: Tensor, losses: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """(losses, their derivatives by each log-prob) of the surrogate, (T,) each, with those of the penalty added."""
        if self.kl is None or self.kl.full:
            return losses, coefficients
        assert self.old_log_probs is not None
        log_ratio = (log_probs - self.old_log_probs).where(self.mask, 0.0)
        values, slopes = self.kl.terms(self._distance(log_probs), log_ratio)
        weights = self.kl.coefficient * self.weights
        return losses + weights * values, coefficients + weights * slopes

    def distance(self, log_probs: Tensor) -> Tensor:
        """(T,) the full KL, or k3 of the new log-probs against the reference's: the metric kl_ref is its mean."""
        if self.divergence is not None:
            return self.divergence.double()
        return k3(self._distance(log_probs).double())

    def take(self, rows: Tensor | slice) -> Penalties:
        """The share of some rows."""
        names = "mask", "weights", "old_log_probs", "ref_log_probs", "divergence"
        return replace(self, **{name: x[rows] for name in names if (x := getattr(self, name)) is not None})

    def _distance(self, log_probs: Tensor) -> Tensor:
        """New log-prob less the reference's, 0 where masked; NaN for infinity, of which a clamp makes a number."""
        assert self.ref_log_probs is not None
        distance = (log_probs - self.ref_log_probs).where(self.mask, 0.0)
        return distance.where(distance.isfinite(), math.nan)
