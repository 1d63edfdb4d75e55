"""The penalty on a policy's distance from a frozen reference: a further term of each token's loss.

With p the log-prob of a token under the policy in training, f under the reference, o under the policy that sampled it:

    k1        p - f                              its gradient has mean 0 on the policy's own samples
    k2        (p - f)^2 / 2
    k3        exp(f - p) - (f - p) - 1           GRPO's (arXiv 2402.03300, equation 4)
    k3_ratio  k3 times exp(p - o)                unbiased also off the policy (DeepSeek-V3.2, arXiv 2512.02556)

No torch is imported here, so that `pgtk check` may read equations; tensors bring their methods.
"""

from __future__ import annotations

from dataclasses import dataclass
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
}
KINDS = tuple(_EQUATIONS)


@dataclass(frozen=True)
class KL:
    """coefficient times the term of its kind, weighted like the surrogate by w_t."""

    kind: str
    coefficient: float

    def __post_init__(self):
        check_name("kl", self.kind, KINDS)
        check_positive("kl.coefficient", self.coefficient)

    @property
    def equation(self) -> str:
        """What is added to l_t, with this object's numbers, for `pgtk check`."""
        return f"{self.coefficient:g} ({_EQUATIONS[self.kind]})"

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the term has the ratio of the new to the old log-probs."""
        return self.kind == "k3_ratio"

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
