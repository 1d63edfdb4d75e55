"""The base class of loss families.

    x_t = token(log_ratio_t, A_t)             the term of a token
    s_t = x_t                                 for scope "token"
          the mean of x over the document     for scope "document"
          the sum of x over the document      for scope "document_sum"
    l_t = surrogate(s_t, A_t, log_prob_t)     with its slope

No torch is imported here, so that `pgtk check` may read equations and defaults; tensors bring their
methods.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from pgtoolkit.losses.checks import check_name, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

    from pgtoolkit.losses.documents import DocumentSums

Kind = TypeVar("Kind", bound="DataclassInstance")
"""A family or a correction: a dataclass whose fields are its parameters."""

Value = TypeVar("Value")
"""The value of a parameter."""


class Choice(StrEnum):
    """The values of a parameter that is one of several names."""

    def __repr__(self) -> str:
        """Return the name in quotes, as in a call."""
        return repr(self.value)


class ChosenOption(Protocol):
    """The chosen option of a group of the configuration, with the parameters of its class."""

    @property
    def name(self) -> str: ...


LOG_RATIO_LIMIT = 20.0
"""The log-ratio is clamped to plus or minus this before exp: exp overflows float32 at 89, and the
infinity would reach the gradient as 0 * inf through the branch that the clip did not select."""


def clamped(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio clamped to plus or minus the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def parameter(
    default: Value,
    *,
    help: str,
    least: float | None = None,
    most: float | None = None,
    default_if: tuple[tuple[str, Value | None], ...] = (),
    **declared: object,
) -> Value:
    """Declare a parameter of a family or a correction.

    It is a field of the dataclass, and a key of the option in the configuration.

    help: its meaning, in sentences.
    least, most: the range of a number, both ends included.
    default_if: (condition, default), several times: the default where another parameter has a
        value, such as "loss.divergence=binary_kl"; None where the parameter must then be given.
        The field is None until `_default` fills it in.
    declared: other attributes of the key, see `system.declared.Key`.
    """
    declared |= {"default": default, "help": help}
    if default_if:
        declared["default_if"] = default_if
    if least is not None:
        declared["range"] = (least, most)
    if not default_if:
        return field(default=default, metadata=declared)
    return cast("Value", field(default=None, metadata=declared))


def _default(declared: DataclassInstance, parameter: Field) -> object:
    """Return the default of a parameter of a family that depends on another one."""
    for condition, default in parameter.metadata["default_if"]:
        key, _, value = condition.partition("=")
        if getattr(declared, key.rpartition(".")[2]) == value:
            return default
    return parameter.metadata["default"]


def check_parameters(declared: DataclassInstance) -> None:
    """Fill in defaults that depend on other fields, and raise ValueError for a field of a family or
    correction beyond its range or its names."""
    for attribute in fields(declared):
        if "default_if" in attribute.metadata and getattr(declared, attribute.name) is None:
            object.__setattr__(declared, attribute.name, _default(declared, attribute))
        value = getattr(declared, attribute.name)
        default = attribute.metadata.get("default", attribute.default)
        if isinstance(default, StrEnum):
            check_name(attribute.name, value, tuple(type(default)))
            continue
        if isinstance(attribute.default, bool) and not isinstance(value, bool):
            raise ValueError(f"{attribute.name} needs True or False (got {shown(value)})")
        may_be_none = "None" in str(attribute.type)
        if "range" not in attribute.metadata or (value is None and may_be_none):
            continue
        lowest, highest = attribute.metadata["range"]
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest:
            raise ValueError(
                f"{attribute.name} needs a number from {lowest:g} to {highest:g} (got "
                f"{shown(value)})"
            )


def numbers_of_bounds(name: str, values: Any) -> tuple[float, float] | None:
    """Return the bounds of the ratio that code of the user's own names; a None becomes infinite.

    name: of the function or the family. Raises ValueError for other values.
    """
    if values is None:
        return None
    try:
        low, high = values
        low = -math.inf if low is None else float(low)
        high = math.inf if high is None else float(high)
    except (TypeError, ValueError, RuntimeError):
        low = high = math.nan
    if not low <= high:
        raise ValueError(
            f"the bounds of {name} need to be a pair of numbers, (low, high), with None for a side "
            f"without a bound, as in (None, 1.2) (got {shown(values)})"
        )
    return low, high


@dataclass(frozen=True)
class Family:
    """The base class of a loss family.

    A subclass defines `surrogate` and overrides what differs from the defaults; its dataclass
    fields are its parameters.

    scope: "token" if s_t is the token's own, "document" or "document_sum" if it is the mean or the
        sum over the document; the advantage is then the document's mean, and all tokens of the
        document must be in the same call.
    slope_of: the variable of the slope that `surrogate` returns: "log_ratio", by s_t; "log_prob",
        by p_t, where s_t is only a factor without gradient; "both", where the loss has s_t and p_t
        and s_t is the token's own log-ratio.
    silent_without_advantage: True if a token of advantage 0 has slope 0 whatever its log-ratio; its
        row then takes no part in the backward products.
    reads_old_log_probs: False if neither loss nor slope depends on the log-ratio, so that documents
        without old log-probs can be trained on.
    clips_by_sign: True if the lower bound acts only where A < 0 and the upper one only where A > 0;
        False if both act whatever the sign of A.
    score_centering: True if the loss has the term of `centering.py`.
    """

    scope: ClassVar[str] = "token"
    slope_of: ClassVar[str] = "log_ratio"
    silent_without_advantage: ClassVar[bool] = False
    reads_old_log_probs: ClassVar[bool] = True
    clips_by_sign: ClassVar[bool] = True
    score_centering = False

    def __post_init__(self):
        check_parameters(self)

    @property
    def name(self) -> str:
        """The family's name in messages."""
        return type(self).__name__.lower()

    @property
    def by_document(self) -> bool:
        """True if a token's coefficient depends on the other tokens of its document."""
        return self.scope != "token"

    @property
    def bounds(self) -> tuple[float | None, float | None] | None:
        """The ratios exp(s) (low, high) outside of which a token counts as clipped in the metrics,
        each None for an open side; None: no clip."""
        return None

    @property
    def limits(self) -> tuple[float, float]:
        """`bounds` as two numbers, infinite where there is none."""
        return numbers_of_bounds(self.name, self.bounds) or (-math.inf, math.inf)

    @property
    def has_clip(self) -> bool:
        """True if the metrics of a clip mean something: the class has bounds, or its own
        `outside`."""
        return self.bounds is not None or type(self).outside is not Family.outside

    @property
    def equation(self) -> str:
        """l_t with this object's numbers, for `pgtk check`."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def notes(self) -> list[str]:
        """Sentences on parameters that are allowed but may surprise, for `pgtk check`."""
        return []

    def token(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (x, its derivative by the log-ratio), each (T,); None for a derivative of 1."""
        return log_ratio, None

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (l, slope), each (T,).

        log_ratio: s, clamped to plus or minus 20.
        advantages: those over the scope.
        log_probs: the new ones.
        All are 0 where nothing is trained. `check_family` compares the slope with autograd's
        derivative of l, so l needs `detach` where the paper has a stop-gradient.
        """
        raise TypeError(
            f"{type(self).__name__} needs a method surrogate(log_ratio, advantages, log_probs)"
        )

    def outside(
        self, ratio: Tensor, token_log_ratio: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (T,) bool each: below the lower bound, and above the upper one.

        ratio: exp(s).
        token_log_ratio: that of each token alone, before `token`.
        """
        low, high = self.limits
        return ratio < low, ratio > high

    def cuts(
        self, low: Tensor, high: Tensor, ratio: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (T,) bool each: where the lower and the upper bound change the coefficient.

        low, high: the results of `outside`.
        """
        if self.clips_by_sign:
            return low & (advantages < 0), high & (advantages > 0)
        return low & (advantages != 0), high & (advantages != 0)


def scope_mean(scope: str, values: Tensor, documents: DocumentSums | None) -> Tensor:
    """Return (T,), the values for scope "token", else their means over each document."""
    if scope == "token":
        return values
    assert documents is not None
    return documents.broadcast(documents.mean(values))


def over_scope(scope: str, values: Tensor, documents: DocumentSums | None) -> Tensor:
    """Return (T,), by the scope the values, or their means or sums over each document."""
    if scope == "document_sum":
        assert documents is not None
        return documents.broadcast(documents.sum(values))
    return scope_mean(scope, values, documents)


def configured(group: ChosenOption, classes: dict[str, type[Kind]]) -> Kind | None:
    """Return the family or correction that a group of the configuration describes.

    group: has a name, and the fields of the class of this name as keys.
    classes: the families or corrections by name.
    Returns None for a name that is not among them, such as `none`.
    """
    kind = classes.get(group.name)
    if kind is None:
        return None
    values = {field.name: getattr(group, field.name) for field in fields(kind)}
    return kind(**values)
