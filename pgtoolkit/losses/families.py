"""The loss families: what a token contributes, whether its document is averaged, and the surrogate of the result.

    x_t = token(log_ratio_t, A_t)                        what a token contributes
    s_t = x_t, or the mean of x over its document        scope "token" or "document"
    l_t = surrogate(s_t, A_t, log_prob_t)                with its slope

Nothing else in the package knows a family: objective, metrics, rules, `pgtk check` and Triton's kernels ask the object.
No torch is imported here, so that `pgtk check` may read equations and defaults; tensors bring their methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pgtoolkit.losses.checks import check_name, check_positive

if TYPE_CHECKING:
    from torch import Tensor


def parameter(default: Any, least: float, most: float) -> Any:
    """A field of a family, with the range that the configuration allows it, both ends included."""
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True)
class Family:
    """The base class of a loss family. A subclass defines `surrogate` and overrides what is different; its dataclass
    fields are its parameters.

    scope: "token" if s_t is the token's own, "document" if it is the mean over the document; the advantage is then
        the document's mean, too, and all tokens of the document must be in the same call.
    slope_of: what `surrogate`'s slope is a derivative by: the "log_ratio" s_t, or, where s_t is only a factor without
        gradient, the "log_prob" p_t.
    silent_without_advantage: True if a token of advantage 0 has slope 0 whatever its log-ratio; its row then takes no
        part in the backward products.
    clips_by_sign: True if the lower bound acts only where A < 0 and the upper one only where A > 0; False if both
        act whatever the sign of A.
    """

    scope: ClassVar[str] = "token"
    slope_of: ClassVar[str] = "log_ratio"
    silent_without_advantage: ClassVar[bool] = False
    clips_by_sign: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The family's name in messages."""
        return type(self).__name__.lower()

    @property
    def by_document(self) -> bool:
        """Whether a token's coefficient depends on the other tokens of its document."""
        return self.scope == "document"

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios (low, high) between which nothing counts as clipped in the metrics."""
        return 0.0, math.inf

    @property
    def equation(self) -> str:
        """l_t with this object's numbers, for `pgtk check`."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def notes(self) -> list[str]:
        """Sentences on parameters that are allowed but may surprise, for `pgtk check`."""
        return []

    def token(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, dx by log_ratio), each (T,); None stands for a derivative of 1."""
        return log_ratio, None

    def surrogate(self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(l, slope), each (T,), of s clamped to plus or minus 20, the advantages over the scope, and new log-probs.

        All are 0 where nothing is trained. The slope is compared with what autograd makes of l, so l needs `detach`
        where the paper has a stop-gradient.
        """
        raise TypeError(f"{type(self).__name__} needs a method surrogate(log_ratio, advantages, log_probs)")

    def cuts(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) bool each: where the ratio is below the lower, or above the upper bound, and the clip acts."""
        below, above = ratio < self.bounds[0], ratio > self.bounds[1]
        if self.clips_by_sign:
            return below & (advantages < 0), above & (advantages > 0)
        return below & (advantages != 0), above & (advantages != 0)


@dataclass(frozen=True)
class _Clipped(Family):
    """-min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A), of a token's or a document's ratio."""

    epsilon_low: float
    epsilon_high: float

    silent_without_advantage: ClassVar[bool] = True

    def __post_init__(self):
        check_positive("epsilon_low", self.epsilon_low)
        _check_bounds(self.epsilon_low, self.epsilon_high)

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.epsilon_low, 1 + self.epsilon_high

    def surrogate(self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        ratio, (lower, upper) = log_ratio.exp(), self.bounds
        losses = -(ratio * advantages).minimum(ratio.clamp(lower, upper) * advantages)
        # A ratio equal to a bound keeps its gradient, as in autograd of minimum and clamp.
        passes = ((advantages > 0) & (ratio <= upper)) | (~(advantages > 0) & (ratio >= lower))
        return losses, (-ratio * advantages).where(passes, 0.0)


@dataclass(frozen=True)
class Grpo(_Clipped):
    """One ratio per token (arXiv 2402.03300, eq. 3; the asymmetric clip is 2503.14476's)."""

    epsilon_low: float = parameter(0.2, 1e-9, 0.999)
    epsilon_high: float = parameter(0.2, 1e-9, 1e9)

    @property
    def equation(self) -> str:
        clip = f"clip(r_t, 1 - {self.epsilon_low:g}, 1 + {self.epsilon_high:g})"
        return f"-min(r_t A_t, {clip} A_t),  r_t = exp(new - old log-prob of token t)"


@dataclass(frozen=True)
class Gspo(_Clipped):
    """One ratio per document, with its mean advantage (arXiv 2507.18071, eq. 5 and 7)."""

    epsilon_low: float = parameter(3e-4, 1e-9, 0.999)
    epsilon_high: float = parameter(4e-4, 1e-9, 1e9)

    scope: ClassVar[str] = "document"

    @property
    def equation(self) -> str:
        clip = f"clip(R_d, 1 - {self.epsilon_low:g}, 1 + {self.epsilon_high:g})"
        ratio = "R_d = exp(mean over the trained tokens of document d of new - old log-prob)"
        return f"-min(R_d A_d, {clip} A_d),  {ratio}"

    def notes(self) -> list[str]:
        low, high = self.epsilon_low, self.epsilon_high
        if max(low, high) < 0.05:
            return []
        return [
            f"loss=gspo with epsilon {low:g}/{high:g}: the mean log-ratio of a document stays so close to 0 that a "
            "clip of 0.05 or more almost never acts (the paper uses 3e-4/4e-4)."
        ]


@dataclass(frozen=True)
class Cispo(Family):
    """REINFORCE with a clipped ratio as its weight: every token keeps a gradient (arXiv 2506.13585, eq. 4 and 5).

    epsilon_low: None for no lower bound, as in the paper. epsilon_high: 4.0 is ScaleRL's cap of 5 (2510.13786).
    """

    epsilon_low: float | None = parameter(None, 1e-9, 0.999)
    epsilon_high: float = parameter(4.0, 1e-9, 1e9)

    slope_of: ClassVar[str] = "log_prob"
    silent_without_advantage: ClassVar[bool] = True
    clips_by_sign: ClassVar[bool] = False

    def __post_init__(self):
        _check_bounds(self.epsilon_low, self.epsilon_high)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0 if self.epsilon_low is None else 1 - self.epsilon_low, 1 + self.epsilon_high

    @property
    def equation(self) -> str:
        low = "0" if self.epsilon_low is None else f"1 - {self.epsilon_low:g}"
        clip = f"clip(r_t, {low}, 1 + {self.epsilon_high:g})"
        return f"-{clip} A_t p_t, no gradient through the clip,  r_t = exp(new - old log-prob of token t), p_t the new"

    def surrogate(self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        slope = -log_ratio.detach().exp().clamp(*self.bounds) * advantages
        return slope * log_probs, slope


FAMILIES: dict[str, type[Family]] = {"grpo": Grpo, "gspo": Gspo, "cispo": Cispo}
"""Name -> family, as `loss=` has them."""


def family_of(loss: str | Family, **parameters: float | None) -> Family:
    """The family of a name, with the paper's values for what is None, or the object that was given.

    Raises ValueError for an unknown name, for a parameter that the family does not have, and beside an object.
    """
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if isinstance(loss, Family):
        if parameters:
            raise ValueError(f"{', '.join(parameters)} belong to the family object: {type(loss).__name__}(...)")
        return loss
    check_name("loss", loss, FAMILIES)
    known = {field.name for field in fields(FAMILIES[loss])}
    for name in parameters:
        if name not in known:
            raise ValueError(f"loss={loss!r} has no {name}; its parameters are {', '.join(sorted(known))}")
    return FAMILIES[loss](**parameters)


def configured(loss: Any) -> Family:
    """The family that the keys of the group `loss` describe, of those that come with pgtoolkit."""
    return FAMILIES[loss.name](**{one.name: getattr(loss, one.name) for one in fields(FAMILIES[loss.name])})


def _check_bounds(epsilon_low: float | None, epsilon_high: float) -> None:
    if epsilon_low is not None:
        check_positive("epsilon_low", epsilon_low)
        if epsilon_low >= 1:
            raise ValueError(f"epsilon_low needs a number < 1 (got {epsilon_low!r}); the ratio is never negative")
    check_positive("epsilon_high", epsilon_high)
