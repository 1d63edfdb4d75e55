"""The penalty on a policy's distance from a frozen reference: a further term of each token's loss.

p is the log-prob of a token under the policy in training, f under the reference, o under the policy
that sampled it. p_v and f_v are the log-probs of each token v of the vocabulary in its place.

The gradient of k1 has mean 0 on the policy's own samples. k3 is GRPO's (arXiv 2402.03300, equation
4). k3_ratio is unbiased also on samples of another policy (DeepSeek-V3.2, arXiv 2512.02556). The
full kinds are for distillation (arXiv 2306.13649); full_jsd is its generalised Jensen-Shannon
divergence.

No torch is imported here, so that `pgtk check` reads equations without it; tensors bring their
methods.
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
    "full_jsd": "sum_v {beta:g} exp(f_tv) (f_tv - m_tv) + {rest:g} exp(p_tv) (p_tv - m_tv), m_tv = "
    "ln({rest:g} exp(p_tv) + {beta:g} exp(f_tv))",
}
FULL_KINDS = ("full_reverse", "full_forward", "full_jsd")
KINDS = tuple(kind for kind in _EQUATIONS if kind not in FULL_KINDS)
"""Kinds that need only the log-prob of the label under the reference."""

REWARD_KINDS = ("k1", "k2", "k3")
"""Kinds that can be subtracted from a reward: with o in place of p, no new log-probs are needed."""


@dataclass(frozen=True)
class KL:
    """A penalty: coefficient times the term of its kind, weighted like the surrogate by w_t.

    beta: of full_jsd, beta KL(f || M) + (1 - beta) KL(p || M) with M = (1 - beta) p + beta f, above
        0 and below 1. None for other kinds; for full_jsd 0.5.
    """

    kind: str
    coefficient: float
    beta: float | None = None

    def __post_init__(self):
        check_name("kl", self.kind, (*KINDS, *FULL_KINDS))
        check_positive("kl.coefficient", self.coefficient)
        if self.kind != "full_jsd" and self.beta is not None:
            raise ValueError(f"beta={self.beta!r} needs kl='full_jsd' (got kl={self.kind!r})")
        if self.kind == "full_jsd":
            beta = 0.5 if self.beta is None else self.beta
            if not 0 < beta < 1:
                raise ValueError(
                    f"beta needs a number above 0 and below 1 (got {beta!r}): there the divergence "
                    "is 0, and kl='full_forward' is the limit of D / beta at 0, kl='full_reverse' "
                    "that of D / (1 - beta) at 1"
                )
            object.__setattr__(self, "beta", beta)

    @property
    def equation(self) -> str:
        """Return the term that is added to l_t, with this object's numbers, for `pgtk check`."""
        beta = 0.0 if self.beta is None else self.beta
        term = _EQUATIONS[self.kind].format(beta=beta, rest=1 - beta)
        return f"{self.coefficient:g} ({term})"

    @property
    def full(self) -> bool:
        """Return True if the term is over the full vocabulary, not of a single log-prob."""
        return self.kind in FULL_KINDS

    @property
    def reads_old_log_probs(self) -> bool:
        """Return True if the term has the ratio of the new to the old probability."""
        return self.kind == "k3_ratio"

    def of_samples(self, old_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Return (N,), coefficient times the term of each token with o in place of p.

        This is the term under the policy that sampled the token. It exists for REWARD_KINDS.
        """
        distance = old_log_probs - ref_log_probs
        return self.coefficient * self.terms(distance, distance * 0)[0]

    def terms(self, distance: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Return (values, their derivatives by p), (T,) each, without the coefficient.

        distance: p - f.
        log_ratio: p - o.
        Both are clamped before exp, and where the clamp acts their derivative is 0. The results are
        NaN where the distance is NaN.
        """
        if self.kind == "k1":
            return distance, distance * 0 + 1
        if self.kind == "k2":
            return distance**2 / 2, distance
        values = k3(distance)
        slopes = (-(-distance).expm1()).where(distance.abs() <= LOG_RATIO_LIMIT, 0.0)
        if self.kind == "k3":
            return values, slopes
        ratio = clamped(log_ratio).exp()
        # The product rule. Where no clamp acts the slope is exp(p - o) (p - f).
        return values * ratio, ratio * (
            slopes + values.where(log_ratio.abs() <= LOG_RATIO_LIMIT, 0.0)
        )


def k3(distance: Tensor) -> Tensor:
    """Return exp(-d) + d - 1 of the clamped distance d; its mean over samples is the KL."""
    distance = clamped(distance)
    return (-distance).expm1() + distance


@dataclass(frozen=True)
class Penalties:
    """The penalties of a piece of a step, on vectors: the terms of the reference and of the
    entropy.

    mask: (T,) bool.
    weights: (T,) w_t, without the factor of a correction.
    old_log_probs: (T,), in the dtype of the log-probs; None where they are the new ones.
    ref_log_probs: (T,) log-probs under the reference; None where they are not known.
    divergence: (T,) full KL of each row, 0 where masked. It begins as zeros, which the pass over
        the vocabulary fills in; None where the loss has no full KL.
    measures_terms: whether the mean of the penalty's own term is among the metrics.
    """

    kl: KL | None
    entropy_coefficient: float
    mask: Tensor
    weights: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    divergence: Tensor | None = None
    measures_terms: bool = False

    @property
    def active(self) -> bool:
        """Return True if the loss has any penalty or bonus."""
        return self.kl is not None or self.bonus

    @property
    def bonus(self) -> bool:
        """Return True if the loss has an entropy bonus."""
        return self.entropy_coefficient != 0

    @property
    def by_entropy(self) -> Tensor:
        """Return (T,), the derivative of the loss by the entropy of each row's softmax."""
        return -self.entropy_coefficient * self.weights

    @property
    def of_rows(self) -> list[Tensor]:
        """Return the derivatives, (T,), by each row's entropy and full KL, where there are any."""
        by_divergence = []
        if self.divergence is not None:
            assert self.kl is not None
            by_divergence.append(self.kl.coefficient * self.weights)
        return [self.by_entropy, *by_divergence] if self.bonus else by_divergence

    def with_rows(self, loss: Tensor, entropy: Tensor | None) -> Tensor:
        """Return the loss plus the terms of the entropies (T,) and of the full KL of the rows."""
        if self.bonus:
            assert entropy is not None
            loss = loss + (self.by_entropy * entropy).sum()
        if self.divergence is not None:
            divergence = self.divergence.where(self.divergence.isfinite(), math.nan)
            loss = loss + (self.of_rows[-1] * divergence).sum()
        return loss

    def with_kl(
        self, log_probs: Tensor, losses: Tensor, coefficients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (losses, coefficients), (T,) each, plus those of the penalty by token."""
        if self.kl is None or self.kl.full:
            return losses, coefficients
        values, slopes = self._terms(self.kl, log_probs)
        weights = self.kl.coefficient * self.weights
        return losses + weights * values, coefficients + weights * slopes

    def distance(self, log_probs: Tensor) -> Tensor:
        """Return (T,), the full KL, or k3 against the reference; the metric kl_ref is its mean."""
        if self.divergence is not None:
            return self.divergence.double()
        return k3(self._distance(log_probs).double())

    def terms(self, log_probs: Tensor) -> Tensor:
        """Return (T,) float64, the penalty's term of each token, for a kind by token."""
        assert self.kl is not None
        return self._terms(self.kl, log_probs)[0].double()

    def _terms(self, kl: KL, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        assert self.old_log_probs is not None
        log_ratio = (log_probs - self.old_log_probs).where(self.mask, 0.0)
        return kl.terms(self._distance(log_probs), log_ratio)

    def take(self, rows: Tensor | slice) -> Penalties:
        """Return the penalties of some rows."""
        names = ("mask", "weights", "old_log_probs", "ref_log_probs", "divergence")
        vectors = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: vector[rows] for name, vector in vectors.items() if vector is not None}
        )

    def _distance(self, log_probs: Tensor) -> Tensor:
        """Return the new minus the reference's log-probs: 0 where masked, NaN where infinite.

        A clamp would turn an infinity into a finite number.
        """
        assert self.ref_log_probs is not None
        distance = (log_probs - self.ref_log_probs).where(self.mask, 0.0)
        return distance.where(distance.isfinite(), math.nan)
