"""Corrections for the gap between the policy that sampled and the one that is trained.

A correction is a factor rho_t without gradient: the surrogate l_t becomes rho_t l_t, and its slope
c_t becomes rho_t c_t. The weights w_t keep counting every token.

No torch is imported here, so that `pgtk check` reads equations and defaults without it; tensors
bring their methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pgtoolkit.losses.checks import check_name, refuse_class
from pgtoolkit.losses.family import (
    LOG_RATIO_LIMIT,
    Choice,
    check_parameters,
    clamped,
    over_scope,
    parameter,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pgtoolkit.losses.documents import DocumentSums


class Mean(Choice):
    product = "product"
    geometric = "geometric"


class MaskMean(Choice):
    product = "product"
    geometric = "geometric"
    worst = "worst"


class Measure(Choice):
    ratio = "ratio"
    k2 = "k2"
    k3 = "k3"


class Normalize(Choice):
    none = "none"
    step = "step"


class Factor(Choice):
    document = "document"
    token = "token"
    one = "one"


_TOKEN = "v_t = exp(old - sampling log-prob of token t)"
_DISTANCE = {
    "k2": "k_t = x_t^2 / 2,  x_t = old - sampling log-prob of token t",
    "k3": "k_t = exp(x_t) - 1 - x_t,  x_t = old - sampling log-prob of token t",
}
_OF_RATIO = "correction.measure=ratio"
_NO_BAND = "A distance has a threshold instead of two bounds of a ratio."


_MEASURE: dict[str, Any] = {
    "learns": "correction.measure=k2 or correction.measure=k3",
    "added": True,
}
_MEASURE_HELP = (
    "What is bounded: ratio (by low and high), or a distance of the old from the sampling log-prob "
    "x apart (by threshold): k2 (x^2 / 2) or k3 (exp(x) - 1 - x). What stays under a distance has "
    "the factor 1. k1 is the ratio itself, in logarithms."
)
_THRESHOLD: dict[str, Any] = {
    **_MEASURE,
    "only_if": "correction.measure!=ratio",
    "use": "correction.measure=k3",
}
_THRESHOLD_HELP = "With measure=k2 or k3, the largest distance that stays (> 0); it must be given."
_NORMALIZE: dict[str, Any] = {"learns": "correction.normalize=step", "added": True}
_NORMALIZE_HELP = (
    "none, or step: every factor is divided by the mean over the step, of all ranks, after bounds "
    "and masks: over documents with a trained token where the factor is a document's, else over "
    "trained tokens. Factors of 0 count; a mean of 0 leaves them 0."
)


@dataclass(frozen=True)
class Correction(ABC):
    """The base class of corrections; the dataclass fields of a subclass are its parameters.

    scope: the ratio that is bounded: v_t itself ("token"), or its geometric mean ("document") or
        product ("document_sum") over the document.
    of_policy: True if v_t compares the new log-probs, and not the old ones, with those of the
        policy that sampled (the sampling log-probs where they are known, else the old ones). The
        factor is then known only after the forward pass, and only with all tokens of the document.
    by_worst: True if a token beyond the bounds gives all tokens of its document the factor 0.
    equal_within_documents: True if the tokens of a document have the same factor.
    measure: "ratio", or the distance of a token, k2 or k3, whose sum ("document_sum"), mean
        ("document") or own value is bounded in the place of a ratio.
    normalize: "step" if factors are divided by their mean over the step.
    mean_over_documents: True if that mean is over documents, False if it is over tokens.
    """

    scope: ClassVar[str] = "token"
    # Fields of some subclasses; with an annotation here they would be the first of their fields.
    measure = "ratio"
    normalize = "none"
    threshold = None
    mean_over_documents: ClassVar[bool] = False
    of_policy: ClassVar[bool] = False
    by_worst: ClassVar[bool] = False
    equal_within_documents: ClassVar[bool] = True

    def __post_init__(self):
        check_parameters(self)

    @property
    def name(self) -> str:
        """The name in `correction=`; that of its class for one of the user's own."""
        names = (name for name, kind in CORRECTIONS.items() if kind is type(self))
        return next(names, type(self).__name__)

    @property
    def by_document(self) -> bool:
        """True if a token's factor depends on the other tokens of its document."""
        return self.by_worst or self.scope != "token"

    @property
    @abstractmethod
    def equation(self) -> str:
        """rho_t with this object's numbers, for `pgtk check`."""

    @abstractmethod
    def factors(
        self, log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (rho, True where the ratio is outside of the bounds), (T,) each.

        log_ratio: over the scope. token_log_ratio: of each token alone. Both are clamped to plus or
            minus 20.
        advantages: over the scope; read only where the correction is `of_policy`.
        """


@dataclass(frozen=True)
class Factors:
    """The factors of a correction, (T,) each, without gradient.

    values: rho.
    outside: bool, True beyond the correction's bounds.
    clamped: bool, True where the log-ratio over the scope was clamped.
    """

    values: Tensor
    outside: Tensor
    clamped: Tensor

    @classmethod
    def of(
        cls, correction: Correction, log_ratio: Tensor, advantages: Tensor, documents: DocumentSums
    ) -> Factors:
        """Return the factors of these tokens.

        log_ratio: (T,) of each token, not clamped, 0 where nothing is trained. advantages: (T,),
            over the scope.
        """
        if correction.measure == "ratio":
            over = over_scope(correction.scope, log_ratio, documents)
            limited = clamped(over)
            distance = over.abs()
            of_tokens = limited if over is log_ratio else clamped(log_ratio)
        else:
            of_tokens = clamped(log_ratio)
            distance = log_ratio.abs()
            # The clamp would make an infinite difference a number.
            known = _distances(correction.measure, of_tokens).where(distance < math.inf, math.nan)
            limited = over_scope(correction.scope, known, documents)
        values, outside = correction.factors(limited, of_tokens, advantages)
        if correction.by_worst:
            outside = documents.broadcast(documents.sum(outside.to(values.dtype))) > 0
            values = values.where(~outside, 0.0)
        # An infinite or NaN log-ratio must give NaN, but the clamp turns the first into a number,
        # and a comparison the second into False. A document with such a token has no finite
        # log-ratio either.
        return cls(values.where(distance < math.inf, math.nan), outside, distance > LOG_RATIO_LIMIT)

    def over_mean(self, mean: Tensor | float) -> Factors:
        """Return the factors divided by their mean over the step; all 0 if that is 0."""
        divisor = (0 * self.values.sum().double() + 1) * mean
        return replace(self, values=self.values / divisor.where(divisor > 0, 1.0))


def _distances(measure: str, log_ratio: Tensor) -> Tensor:
    """Return k2 or k3 of each log-ratio."""
    if measure == "k2":
        return log_ratio * log_ratio / 2
    return log_ratio.expm1() - log_ratio


@dataclass(frozen=True)
class _Bounded(Correction):
    """The base class of factors with two bounds, beyond which they are cut, or 0 with `masks`.

    low: None for no lower bound.
    kept: with `masks`, the factor within the bounds and at them: "v_t", "V_d" or "1".
    """

    if TYPE_CHECKING:  # Each subclass declares them, with its default and meaning.
        low: float | None
        high: float

    masks: ClassVar[bool] = False
    kept: ClassVar[str] = "v_t"
    _ratio: ClassVar[tuple[str, str]] = ("v_t", _TOKEN)

    def __post_init__(self):
        super().__post_init__()
        if self.low is not None and self.low > self.high:
            raise ValueError(
                f"low needs a number that is not above high={self.high:g} (got {self.low!r})"
            )
        if self.measure != "ratio":
            self._check_distance()
        elif self.threshold is not None:
            raise ValueError(
                "threshold needs measure='k2' or 'k3' (got measure='ratio'); a ratio has low and "
                "high"
            )
        if self.normalize == "step" and not self.weighs:
            raise ValueError(
                "normalize='step' needs factors that weigh, of a ratio and with another factor "
                "than 'one' (got 0 and 1)"
            )

    def _check_distance(self) -> None:
        """Raise ValueError for parameters that a distance has no use for, or lacks."""
        if self.threshold is None:
            raise ValueError(f"measure={str(self.measure)!r} needs threshold, a number (got None)")
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("low", "high"):
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} needs measure='ratio' (got measure={str(self.measure)!r}), which has "
                    "threshold instead"
                )
        if self.kept != "1":
            raise ValueError(
                f"measure={str(self.measure)!r} needs factor='one': a distance is no weight"
            )

    @property
    def weighs(self) -> bool:
        """True if the factors that are kept are ratios, and not all 1."""
        return self.kept != "1"

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low or 0.0, self.high

    @property
    def equation(self) -> str:
        factor, _, meaning = self._factor.partition(",  ")
        if self.normalize == "step":
            over = "documents" if self.mean_over_documents else "trained tokens"
            factor = f"({factor}) / its mean over the step's {over}"
        return f"{factor},  {meaning}"

    @property
    def _factor(self) -> str:
        """The equation before it is divided by a mean."""
        ratio, meaning = self._ratio
        if self.measure != "ratio":
            distance = _DISTANCE[self.measure]
            return f"1 where {self._over_document} <= {self.threshold:g}, else 0,  {distance}"
        if self.masks:
            least = "" if self.low is None else f"{self.low:g} <= "
            return f"{self.kept} where {least}{ratio} <= {self.high:g}, else 0,  {meaning}"
        cut = (
            f"min({ratio}, {self.high:g})"
            if self.low is None
            else f"clip({ratio}, {self.low:g}, {self.high:g})"
        )
        return f"{cut},  {meaning}"

    @property
    def _over_document(self) -> str:
        """The distance that is bounded."""
        return "k_t"

    def factors(
        self, log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.measure != "ratio":  # what comes as a log-ratio is then a distance
            assert self.threshold is not None
            outside = log_ratio > self.threshold
            return (0 * log_ratio + 1).where(~outside, 0.0), outside
        ratio = log_ratio.exp()
        low, high = self.bounds
        within = ratio.clamp(low, high)
        outside = ratio != within
        if not self.masks:
            return within, outside
        if self.kept == "v_t":
            kept = token_log_ratio.exp()
        elif self.kept == "V_d":
            kept = ratio
        else:
            kept = ratio.new_ones(len(ratio))
        return kept.where(~outside, 0.0), outside


@dataclass(frozen=True)
class TokenTruncate(_Bounded):
    """Truncated importance sampling: multiplies each token's loss by exp(old - sampling log-prob),
    within bounds (Yao et al. 2025)."""

    low: float | None = parameter(
        None,
        least=0,
        most=1e9,
        help="Lower bound: a smaller factor is raised to it (0 <= low <= high); null: none.",
    )
    high: float = parameter(
        2.0,
        least=1e-6,
        most=1e9,
        help="Upper bound: a larger factor is lowered to it (> 0). 2 is verl's, slime's and "
        "open-instruct's.",
    )
    normalize: Normalize = parameter(Normalize.none, help=_NORMALIZE_HELP, **_NORMALIZE)

    equal_within_documents: ClassVar[bool] = False


@dataclass(frozen=True)
class TokenMask(_Bounded):
    """IcePop: multiplies each token's loss by exp(old - sampling log-prob), or by 0 where that lies
    outside of two bounds (arXiv 2510.18855)."""

    low: float | None = parameter(
        0.5,
        least=0,
        most=1e9,
        help="Lower bound: a token with a factor below it is left out (0 <= low <= high); null: "
        "none.",
        only_if=_OF_RATIO,
        why=_NO_BAND,
    )
    high: float = parameter(
        5.0,
        least=1e-6,
        most=1e9,
        help="Upper bound: a token with a factor above it is left out (> 0).",
        only_if=_OF_RATIO,
        why=_NO_BAND,
    )
    measure: Measure = parameter(Measure.ratio, help=_MEASURE_HELP, **_MEASURE)
    threshold: float | None = parameter(
        None, least=1e-12, most=1e9, help=_THRESHOLD_HELP, **_THRESHOLD
    )
    normalize: Normalize = parameter(
        Normalize.none,
        help=_NORMALIZE_HELP,
        **_NORMALIZE,
        only_if=_OF_RATIO,
        why="A distance gives factors of 0 and 1, which do not weigh.",
    )

    masks: ClassVar[bool] = True
    equal_within_documents: ClassVar[bool] = False

    @property
    def kept(self) -> str:
        return "v_t" if self.measure == "ratio" else "1"


@dataclass(frozen=True)
class _Sequence(_Bounded):
    """The base class of bounds on V_d, the product or the geometric mean of a document's v_t."""

    if TYPE_CHECKING:
        mean: Mean

    @property
    def scope(self) -> str:
        return "document" if self.mean == "geometric" else "document_sum"

    @property
    def _ratio(self) -> tuple[str, str]:
        mean = "geometric mean" if self.mean == "geometric" else "product"
        return "V_d", f"V_d = the {mean} of v_t over the trained tokens of document d,  {_TOKEN}"


@dataclass(frozen=True)
class SequenceTruncate(_Sequence):
    """Truncated importance sampling by document: multiplies the loss of its tokens by exp of the
    sum, or mean, of old - sampling log-probs, within bounds."""

    mean: Mean = parameter(
        Mean.product,
        help="The number of a document that is bounded: product or geometric (mean) of its ratios.",
    )
    low: float | None = parameter(
        None,
        least=0,
        most=1e9,
        help="Lower bound: a smaller factor is raised to it (0 <= low <= high); null: none.",
    )
    high: float = parameter(
        3.0,
        least=1e-6,
        most=1e9,
        help="Upper bound: a larger factor is lowered to it (> 0). 3 is TRL's; verl and SkyRL take "
        "2 to 10.",
    )
    normalize: Normalize = parameter(Normalize.none, help=_NORMALIZE_HELP, **_NORMALIZE)

    mean_over_documents: ClassVar[bool] = True


@dataclass(frozen=True)
class SequenceMask(_Sequence):
    """Documents whose product, geometric mean, or worst token of exp(old - sampling log-prob) lies
    outside of two bounds are left out."""

    mean: MaskMean = parameter(
        MaskMean.product,
        help="The number of a document that has to lie within the bounds: product or geometric "
        "(mean) of its ratios, or worst: every single ratio (with factor=one or token). Of "
        "distances: the sum, the mean, the largest.",
    )
    low: float | None = parameter(
        None,
        least=0,
        most=1e9,
        help="Lower bound: a document below it is left out (0 <= low <= high); null: none. With "
        "mean=geometric others take 0.999.",
        only_if=_OF_RATIO,
        why=_NO_BAND,
    )
    high: float = parameter(
        3.0,
        least=1e-6,
        most=1e9,
        help="Upper bound: a document above it is left out (> 0). 3 is TRL's; with mean=geometric "
        "others take 1.001 or 1.002.",
        only_if=_OF_RATIO,
        why=_NO_BAND,
    )
    factor: Factor = parameter(
        Factor.document,
        default_if=(("correction.measure=k2", Factor.one), ("correction.measure=k3", Factor.one)),
        help="Factor of the tokens of a document that stays: document (its product or mean), token "
        "(the ratio of each token) or one.",
    )
    measure: Measure = parameter(Measure.ratio, help=_MEASURE_HELP, **_MEASURE)
    threshold: float | None = parameter(
        None, least=1e-12, most=1e9, help=_THRESHOLD_HELP, **_THRESHOLD
    )
    normalize: Normalize = parameter(
        Normalize.none,
        help=_NORMALIZE_HELP,
        **_NORMALIZE,
        only_if="correction.measure=ratio and correction.factor!=one",
        use="correction.measure=ratio and correction.factor=document",
        why="Factors of 0 and 1 do not weigh.",
    )

    masks: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.by_worst and self.factor == "document":
            raise ValueError(
                "factor='document' needs mean='product' or 'geometric' (got mean='worst'): the "
                "worst token is no ratio of the document; factor='one' keeps the others as they are"
            )

    @property
    def scope(self) -> str:
        return "token" if self.by_worst else super().scope

    @property
    def by_worst(self) -> bool:
        return self.mean == "worst"

    @property
    def mean_over_documents(self) -> bool:
        return self.factor == "document"

    @property
    def _over_document(self) -> str:
        over = {"product": "the sum", "geometric": "the mean", "worst": "the largest"}[self.mean]
        return f"{over} of k_t over the trained tokens of document d"

    @property
    def _factor(self) -> str:
        if not self.by_worst or self.measure != "ratio":
            return super()._factor
        least = "" if self.low is None else f"{self.low:g} <= "
        return (
            f"{self.kept} where {least}v_u <= {self.high:g} for each trained token u of "
            f"document d, else 0,  {_TOKEN}"
        )

    @property
    def equal_within_documents(self) -> bool:
        return self.factor != "token"

    @property
    def kept(self) -> str:
        return {"document": "V_d", "token": "v_t", "one": "1"}[self.factor]


@dataclass(frozen=True)
class OffPolicyMask(Correction):
    """Documents of negative advantage that the policy has moved away from are left out
    (DeepSeek-V3.2, arXiv 2512.02556)."""

    threshold: float = parameter(
        0.5,
        least=0,
        most=20,
        help="How far the new log-probs may lie below those of the sampler (the old ones, where "
        "the sampler's are not known), in the mean over the document (0 to 20). There is no "
        "usual value.",
    )

    scope: ClassVar[str] = "document"
    of_policy: ClassVar[bool] = True

    @property
    def equation(self) -> str:
        far = f"the mean over document d of sampling - new log-prob is above {self.threshold:g}"
        return (
            f"0 where A_d < 0 and {far}, else 1 (old - new where no sampling log-probs are known)"
        )

    def factors(
        self, log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        masked = (advantages < 0) & (-log_ratio > self.threshold)
        return (0 * log_ratio + 1).where(~masked, 0.0), masked


CORRECTIONS: dict[str, type[Correction]] = {
    "token_truncate": TokenTruncate,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "off_policy_mask": OffPolicyMask,
}
"""Name in `correction=` -> correction; `none` is the other name."""

CorrectionName = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off_policy_mask"
]
"""The names of CORRECTIONS, for type checkers."""


def correction_of(correction: str | Correction | None) -> Correction | None:
    """Return the correction of this name with its defaults, or the object itself.

    Raises ValueError for an unknown name.
    """
    if correction is None or isinstance(correction, Correction):
        return correction
    refuse_class("correction", correction, Correction)
    check_name("correction", correction, CORRECTIONS)
    return CORRECTIONS[correction]()
