"""The loss families that come with pgtoolkit: parameters, equations, surrogates and slopes.

Nothing else in pgtoolkit knows a family; the rest asks the object. No torch is imported here, so
that `pgtk check` reads equations and defaults without it; tensors bring their methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from pgtoolkit.losses.checks import check_name, refuse_class
from pgtoolkit.losses.family import Choice, Family, parameter
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.group_families import Lpo, Tpo

if TYPE_CHECKING:
    from torch import Tensor


class Divergence(Choice):
    total_variation = "total_variation"
    binary_kl = "binary_kl"
    squared_log_ratio = "squared_log_ratio"


class Sides(Choice):
    moving = "moving"
    both = "both"


_RATIO = "r_t = exp(new - old log-prob of token t)"
_MEAN = "exp(mean over the trained tokens of document d of {})"


@dataclass(frozen=True)
class _Clipped(Family):
    """The base class of families that clip a ratio, of a token or of a document.

    l = -min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A), unless overridden.
    epsilon_low: None for no lower bound.
    """

    epsilon_low: float | None
    epsilon_high: float

    silent_without_advantage: ClassVar[bool] = True

    @property
    def bounds(self) -> tuple[float, float]:
        lower = 0.0 if self.epsilon_low is None else 1 - self.epsilon_low
        return lower, 1 + self.epsilon_high

    def clip(self, ratio: str) -> str:
        """Return the clipped ratio in the notation of `equation`."""
        low = "0" if self.epsilon_low is None else f"1 - {self.epsilon_low:g}"
        return f"clip({ratio}, {low}, 1 + {self.epsilon_high:g})"

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        lower, upper = self.bounds
        losses = -(ratio * advantages).minimum(ratio.clamp(lower, upper) * advantages)
        # A ratio equal to a bound keeps its gradient, as in autograd of minimum and clamp.
        passes = ((advantages > 0) & (ratio <= upper)) | (~(advantages > 0) & (ratio >= lower))
        return losses, (-ratio * advantages).where(passes, 0.0)


@dataclass(frozen=True, kw_only=True)
class Weighted(Family):
    """The base class of families of the form l = -f(ratio) A p, without a gradient through f.

    They may have score centering (`losses/centering.py`), which needs nothing of them but f.
    """

    score_centering: bool = parameter(
        False,
        help="Take the pull towards the sampler out of the gradient (arXiv 2609.20807), by the "
        "likeliest tokens of the sampler at each position: sampler.keep_top of them. It needs "
        "old log-probs that are the sampler's.",
        learns="loss.score_centering=true",
        added=True,
    )

    slope_of: ClassVar[str] = "log_prob"

    def factor(self, ratio: Tensor) -> Tensor:
        """Return f(ratio), in the shape of the ratio, which has no gradient."""
        raise TypeError(f"{type(self).__name__} needs a method factor(ratio)")

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        slope = -self.factor(log_ratio.detach().exp()) * advantages
        return slope * log_probs, slope

    @property
    def centered(self) -> str:
        """Return what score centering adds to the equation."""
        if not self.score_centering:
            return ""
        return (
            " + A_t sum over the sampler's likeliest tokens v of a_v ln pi_v, no gradient through "
            "a_v (score centering)"
        )


@dataclass(frozen=True)
class Grpo(_Clipped):
    """GRPO: one ratio per token, clipped per token (arXiv 2402.03300, equation 3; asymmetric clip
    arXiv 2503.14476)."""

    epsilon_low: float = parameter(
        0.2,
        least=1e-9,
        most=0.999,
        help="Lower clip: where the advantage is negative, a ratio below 1 - epsilon_low gets no "
        "gradient (0 < epsilon_low < 1).",
    )
    epsilon_high: float = parameter(
        0.2,
        least=1e-9,
        most=1e9,
        help="Upper clip: where the advantage is positive, a ratio above 1 + epsilon_high gets no "
        "gradient (> 0). DAPO uses 0.28.",
    )
    dual_clip: float | None = parameter(
        None,
        least=1,
        most=1e9,
        help="Where the advantage is negative, a ratio above this gets no gradient (>= 1; arXiv "
        "1912.09729); null: no such bound. verl always has 3.",
    )

    def notes(self) -> list[str]:
        high = self.epsilon_high
        note = (
            f"loss.epsilon_high={high:g} clips above a ratio of 1 + {high:g} = {1 + high:g}; "
            "DAPO's is 0.28."
        )
        return [note] if high >= 1 else []

    @property
    def equation(self) -> str:
        dual = "" if self.dual_clip is None else f", where A_t < 0 at most -{self.dual_clip:g} A_t"
        return f"-min(r_t A_t, {self.clip('r_t')} A_t){dual},  {_RATIO}"

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        if self.dual_clip is None:
            return losses, slope
        beyond = (advantages < 0) & (log_ratio.exp() > self.dual_clip)
        return (-self.dual_clip * advantages).where(beyond, losses), slope.where(~beyond, 0.0)

    def cuts(
        self, low: Tensor, high: Tensor, ratio: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = super().cuts(low, high, ratio, advantages)
        if self.dual_clip is None:
            return low, high
        return low, high | ((advantages < 0) & (ratio > self.dual_clip))


@dataclass(frozen=True)
class Gspo(_Clipped):
    """GSPO: one ratio per document, the exponential of its mean log-ratio (arXiv 2507.18071)."""

    epsilon_low: float = parameter(
        3e-4,
        least=1e-9,
        most=0.999,
        help="Lower clip of the document ratio (0 < epsilon_low < 1). The paper's value; a mean "
        "of many tokens stays close to 1.",
    )
    epsilon_high: float = parameter(
        4e-4,
        least=1e-9,
        most=1e9,
        help="Upper clip of the document ratio (> 0). The paper's value; from about 0.05 on the "
        "clip almost never acts.",
    )

    scope: ClassVar[str] = "document"

    @property
    def equation(self) -> str:
        return f"-min(R_d A_d, {self.clip('R_d')} A_d),  R_d = {_MEAN.format('new - old log-prob')}"

    def notes(self) -> list[str]:
        note = (
            f"loss=gspo with epsilon {self.epsilon_low:g}/{self.epsilon_high:g}: the mean "
            "log-ratio of a document stays so close to 0 that a clip of 0.05 or more almost never "
            "acts (the paper uses 3e-4/4e-4)."
        )
        return [note] if max(self.epsilon_low, self.epsilon_high) >= 0.05 else []


@dataclass(frozen=True)
class Cispo(Weighted, _Clipped):
    """CISPO: the clipped ratio weights each token's gradient and never removes it (arXiv
    2506.13585, equations 4 and 5)."""

    epsilon_low: float | None = parameter(
        None,
        least=1e-9,
        most=0.999,
        help="Lower bound of the weight: a smaller ratio weighs 1 - epsilon_low (0 < "
        "epsilon_low < 1); null: no bound, as in the paper.",
    )
    epsilon_high: float = parameter(
        4.0,
        least=1e-9,
        most=1e9,
        help="Upper bound of the weight: a larger ratio weighs 1 + epsilon_high (> 0). 4 "
        "gives ScaleRL's cap of 5 (arXiv 2510.13786).",
    )

    clips_by_sign: ClassVar[bool] = False

    @property
    def equation(self) -> str:
        return (
            f"-{self.clip('r_t')} A_t p_t{self.centered}, no gradient through the clip,  {_RATIO}, "
            "p_t the new"
        )

    def factor(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(*self.bounds)


@dataclass(frozen=True)
class Sapo(Family):
    """SAPO: a soft gate in place of the clip (arXiv 2511.20347)."""

    temperature_positive: float = parameter(
        1.0,
        least=1e-6,
        most=1e6,
        help="How fast the gate closes as the ratio leaves 1, where the advantage is positive "
        "(> 0).",
    )
    temperature_negative: float = parameter(
        1.05,
        least=1e-6,
        most=1e6,
        help="How fast the gate closes where the advantage is negative (> 0): a little faster, "
        "since these updates are less stable.",
    )

    silent_without_advantage: ClassVar[bool] = True

    @property
    def equation(self) -> str:
        tau = (
            f"{self.temperature_positive:g} where A_t > 0 and {self.temperature_negative:g} "
            "elsewhere"
        )
        return f"-(4 / tau) sigmoid(tau (r_t - 1)) A_t,  tau = {tau},  {_RATIO}"

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        tau = (0 * advantages + self.temperature_negative).where(
            ~(advantages > 0), self.temperature_positive
        )
        gate = (tau * (ratio - 1)).sigmoid()
        return -4 / tau * gate * advantages, -4 * gate * (1 - gate) * ratio * advantages


@dataclass(frozen=True)
class Gmpo(Family):
    """GMPO: the geometric mean of a document's ratios, each clipped (arXiv 2507.20673)."""

    epsilon_low: float = parameter(
        0.4,
        least=1e-9,
        most=20,
        help="Lower clip of a token's log-ratio (> 0): where the advantage is negative, a smaller "
        "one is raised to -epsilon_low.",
    )
    epsilon_high: float = parameter(
        0.4,
        least=1e-9,
        most=20,
        help="Upper clip of a token's log-ratio (> 0): where the advantage is positive, a larger "
        "one is lowered to epsilon_high.",
    )

    scope: ClassVar[str] = "document"
    silent_without_advantage: ClassVar[bool] = True

    @property
    def equation(self) -> str:
        clip = (
            f"below -{self.epsilon_low:g} where A_d < 0 and above {self.epsilon_high:g} where "
            "A_d > 0"
        )
        return f"-S_d A_d,  S_d = {_MEAN.format(f'log r_t, clipped {clip}')}"

    def token(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        above = log_ratio.clamp(max=self.epsilon_high).where(advantages > 0, log_ratio)
        clipped = log_ratio.clamp(min=-self.epsilon_low).where(advantages < 0, above)
        return clipped, (clipped == log_ratio).to(log_ratio.dtype)

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = -log_ratio.exp() * advantages
        return losses, losses

    def outside(
        self, ratio: Tensor, token_log_ratio: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return token_log_ratio < -self.epsilon_low, token_log_ratio > self.epsilon_high


_DELTA_IF = (("loss.divergence=binary_kl", 0.05), ("loss.divergence=squared_log_ratio", None))


@dataclass(frozen=True)
class Dppo(Family):
    """DPPO: tokens whose probability has moved too far are left out (arXiv 2602.04879).

    Its bounds are 0.2 by default, and 0.05 with divergence=binary_kl; with squared_log_ratio they
    must be given.
    """

    delta_low: float | None = parameter(
        0.2,
        default_if=_DELTA_IF,
        least=1e-9,
        most=100,
        help="Where the advantage is negative, a token whose probability has fallen by a "
        "divergence of more than this gets no gradient (> 0).",
    )
    delta_high: float | None = parameter(
        0.2,
        default_if=_DELTA_IF,
        least=1e-9,
        most=100,
        help="Where the advantage is positive, a token whose probability has risen by a "
        "divergence of more than this gets no gradient (> 0).",
    )
    ratio_cap: float = parameter(
        20.0,
        least=1e-6,
        most=1e9,
        help="Upper bound of the ratio that weighs a token (> 0). verl 0.9.1 ships 3, prime-rl's "
        "ipo 1e4; SkyRL has no cap.",
    )
    divergence: Divergence = parameter(
        Divergence.total_variation,
        help="How far a token's probability has moved: total_variation (the difference of the two "
        "probabilities), binary_kl (the KL of the old to the new policy, of this token against "
        "all others) or squared_log_ratio (half the square of the log-ratio; its bounds must be "
        "given).",
        learns="loss.divergence=binary_kl or loss.divergence=squared_log_ratio",
        added=True,
    )
    sides: Sides = parameter(
        Sides.moving,
        help="When a bound acts: moving (only where the advantage moves the probability further "
        "away, which is DPPO) or both (whatever the sign of the advantage: prime-rl's ipo).",
        learns="loss.sides=both",
        added=True,
    )

    slope_of: ClassVar[str] = "log_prob"
    silent_without_advantage: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("delta_low", "delta_high"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"divergence={str(self.divergence)!r} needs {name}, a number (got None): no "
                    "width of it is usual"
                )

    @property
    def clips_by_sign(self) -> bool:
        return self.sides == "moving"

    @property
    def equation(self) -> str:
        low = f"{self.delta_low:g}"
        high = f"{self.delta_high:g}"
        falls = " and A_t < 0" if self.clips_by_sign else ""
        rises = " and A_t > 0" if self.clips_by_sign else ""
        kept = f"0 where exp(p_t) - exp(o_t) < -{low}{falls}, or > {high}{rises}"
        if self.divergence != "total_variation":
            kept = (
                f"0 where d_t > {low} and p_t < o_t{falls}, or d_t > {high} and p_t > o_t{rises};  "
            )
        if self.divergence == "binary_kl":
            kept += (
                "d_t = exp(o_t) (o_t - p_t) + (1 - exp(o_t)) ln((1 - exp(o_t)) / (1 - exp(p_t)))"
            )
        if self.divergence == "squared_log_ratio":
            kept += "d_t = (p_t - o_t)^2 / 2"
        return (
            f"-min(r_t, {self.ratio_cap:g}) A_t p_t, no gradient through the ratio; {kept},  "
            f"{_RATIO}, p_t the new"
        )

    def notes(self) -> list[str]:
        low, high = self._deltas
        widest = max(low, high)
        if self.divergence == "binary_kl" and widest >= 0.2:
            return [
                f"loss.divergence=binary_kl with a bound of {widest:g}, which suits "
                "total_variation: a binary KL is smaller, and is bounded by 0.05 by default."
            ]
        if self.divergence == "total_variation" and widest >= 1:
            return [
                f"loss=dppo with a bound of {widest:g}: no probability moves by more than 1, so "
                "this bound never acts."
            ]
        return []

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_ratio = log_ratio.detach()
        low, high = self.outside(log_ratio.exp(), log_ratio, log_probs.detach())
        left_out = low | high
        if self.clips_by_sign:
            left_out = (low & (advantages < 0)) | (high & (advantages > 0))
        slope = (-log_ratio.exp().clamp(max=self.ratio_cap) * advantages).where(~left_out, 0.0)
        return slope * log_probs, slope

    def outside(
        self, ratio: Tensor, token_log_ratio: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = self._deltas
        if self.divergence == "squared_log_ratio":
            moved = token_log_ratio * token_log_ratio / 2
            return (moved > low) & (ratio < 1), (moved > high) & (ratio > 1)
        if self.divergence == "binary_kl":
            # The ratio is that of the clamped log-ratio, here and below. The clamp at 0 is for
            # probabilities that rounding has put above 1.
            old_log_probs = log_probs - ratio.log()
            others = -log_probs.expm1().clamp(max=0.0)
            old_others = -old_log_probs.expm1().clamp(max=0.0)
            of_others = old_others * ((old_others + 1e-8) / (others + 1e-8)).log()
            moved = of_others - old_log_probs.exp() * ratio.log()
            return (moved > low) & (ratio < 1), (moved > high) & (ratio > 1)
        moved = log_probs.exp() * (1 - 1 / ratio)  # exp(p) - exp(o)
        return moved < -low, moved > high

    @property
    def _deltas(self) -> tuple[float, float]:
        """Return (delta_low, delta_high), which are numbers since `__post_init__`."""
        assert self.delta_low is not None
        assert self.delta_high is not None
        return self.delta_low, self.delta_high


@dataclass(frozen=True)
class Icepop(Weighted):
    """IcePop's mask as the loss: the ratio weights each token's gradient, and tokens whose ratio
    lies outside of two bounds are left out (arXiv 2510.18855; prime-rl's icepop).

    The ratio is the new to the old policy's. In `corrections.TokenMask`, the paper's form, it is
    the old to the sampler's, and multiplies a loss that clips by itself.
    """

    low: float = parameter(
        0.2,
        least=0,
        most=1,
        help="Lower bound: a token with a ratio below it gets no gradient (0 to 1).",
    )
    high: float = parameter(
        5.0,
        least=1,
        most=1e9,
        help="Upper bound: a token with a ratio above it gets no gradient (>= 1).",
    )

    silent_without_advantage: ClassVar[bool] = True
    clips_by_sign: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def equation(self) -> str:
        kept = f"where {self.low:g} <= r_t <= {self.high:g}, else 0"
        return (
            f"-r_t A_t p_t {kept}{self.centered}, no gradient through the ratio,  {_RATIO}, p_t "
            "the new"
        )

    def factor(self, ratio: Tensor) -> Tensor:
        return ratio.where(~((ratio < self.low) | (ratio > self.high)), 0.0)


@dataclass(frozen=True)
class Vespo(Family):
    """VESPO: a smooth function of the document's ratio weights each token (arXiv 2602.10693)."""

    power_positive: float = parameter(
        2.0,
        least=0,
        most=1e3,
        help="The weight is W^power exp(decay (1 - W)) with W the product of the document's "
        "ratios. This is the power where A >= 0.",
    )
    decay_positive: float = parameter(
        3.0,
        least=0,
        most=1e3,
        help="Decay of that weight where A >= 0.",
    )
    power_negative: float = parameter(
        3.0,
        least=0,
        most=1e3,
        help="Power of that weight where A < 0.",
    )
    decay_negative: float = parameter(
        2.0,
        least=0,
        most=1e3,
        help="Decay of that weight where A < 0.",
    )

    scope: ClassVar[str] = "document_sum"
    slope_of: ClassVar[str] = "log_prob"
    silent_without_advantage: ClassVar[bool] = True

    @property
    def equation(self) -> str:
        phi = f"W^{self.power_positive:g} exp({self.decay_positive:g} (1 - W)) where A_d >= 0"
        phi += f", W^{self.power_negative:g} exp({self.decay_negative:g} (1 - W)) where A_d < 0"
        ratio = "W = exp(sum over the trained tokens of document d of new - old log-prob)"
        return f"-phi A_d p_t, no gradient through phi;  phi = {phi},  {ratio}"

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_ratio = log_ratio.detach()
        power = (0 * advantages + self.power_positive).where(advantages >= 0, self.power_negative)
        decay = (0 * advantages + self.decay_positive).where(advantages >= 0, self.decay_negative)
        slope = -(power * log_ratio - decay * log_ratio.expm1()).exp() * advantages
        return slope * log_probs, slope


@dataclass(frozen=True)
class Kimi(Family):
    """Kimi k1.5: REINFORCE with a square pull back to the old log-probs (arXiv 2501.12599)."""

    tau: float = parameter(
        0.1,
        least=0,
        most=1e6,
        help="Strength of the pull, (tau / 2) (new - old log-prob)^2. It also acts on tokens of "
        "advantage 0.",
    )

    slope_of: ClassVar[str] = "both"

    @property
    def equation(self) -> str:
        return (
            f"-A_t p_t + {self.tau:g} / 2 (p_t - o_t)^2,  p_t the new and o_t the old log-prob "
            "of token t"
        )

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = self.tau / 2 * log_ratio * log_ratio - advantages * log_probs
        return losses, self.tau * log_ratio - advantages


@dataclass(frozen=True)
class Reinforce(Weighted):
    """REINFORCE (Williams 1992): the log-prob weighted by the advantage; with advantages of 1,
    supervised fine-tuning."""

    silent_without_advantage: ClassVar[bool] = True
    reads_old_log_probs: ClassVar[bool] = False

    @property
    def equation(self) -> str:
        return f"-A_t p_t{self.centered},  p_t the new log-prob of token t"

    def factor(self, ratio: Tensor) -> Tensor:
        return ratio.new_ones(ratio.shape)


_ALL = (Grpo, Gspo, Cispo, Sapo, Gmpo, Dppo, Icepop, Vespo, Kimi, Reinforce, Tpo, Lpo)
FAMILIES: dict[str, type[Family]] = {family.__name__.lower(): family for family in _ALL}
"""Name in `loss=` -> family."""

LossName = Literal[
    "grpo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo",
    "icepop",
    "vespo",
    "kimi",
    "reinforce",
    "tpo",
    "lpo",
]
"""The names of FAMILIES, for type checkers."""


def family_of(loss: str | Family | Callable, **parameters: float | str | None) -> Family:
    """Return the family of this name, the object itself, or the family of a function.

    parameters: those of the family or of the function. None is a value like others, and not the
        default: "no bound" where a family says so.
    Raises ValueError for an unknown name, for a parameter that the family does not have, for None
    where a family needs a number, and for parameters next to an object.
    """
    if isinstance(loss, Family):
        if parameters:
            raise ValueError(
                f"{', '.join(parameters)} beside a family object: its parameters belong to it, "
                f"{type(loss).__name__}(...)"
            )
        return loss
    refuse_class("loss", loss, Family)
    if not isinstance(loss, str) and callable(loss):
        return FunctionLoss(loss, parameters)
    check_name("loss", loss, FAMILIES)
    assert isinstance(loss, str)
    known = {field.name: field for field in fields(FAMILIES[loss])}
    for name in sorted(parameters.keys() - known.keys()):
        raise ValueError(
            f"loss={loss!r} has no {name}; its parameters are {', '.join(sorted(known))}"
        )
    for name, value in parameters.items():
        if value is None and "default_if" in known[name].metadata:
            raise ValueError(f"{name} needs a number (got None). Leave it out for its default")
    return FAMILIES[loss](**parameters)
