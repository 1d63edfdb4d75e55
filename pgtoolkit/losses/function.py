"""A loss that is a plain function of the user's own.

The names of its parameters say what it wants, and from that follows its level:

    token       vectors alone: a token's loss depends on numbers of this token
    document    `documents`: it also depends on other tokens of the document
    step        `groups` or `step`: it also depends on other documents

It returns a number for each token, document or group. A document's value stands for each of its
trained tokens, and a group's for each of its documents, so that the loss of a step is the sum over
tokens of w_t l_t here, too. Autograd gives the coefficients c_t, the derivatives of this sum by the
log-probs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.losses.checks import shown
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.family import Family, clamped
from pgtoolkit.losses.views import DocumentView, GroupView, Ratio, StepView

NEW = ("log_probs", "log_ratio")
"""Vectors that the forward pass gives; the gradient flows through them."""

OF_DATA = ("old_log_probs", "advantages", "sampling_log_probs", "ref_log_probs")
"""Vectors that come with the data."""

KNOWN_BEFORE = ("rewards", "group_rewards", "lengths", "position")
"""Vectors that are known before the forward pass, and that only such functions read."""

VECTORS = (*NEW, *OF_DATA, *KNOWN_BEFORE)
_VIEWS = ("ratio", "documents", "groups", "step")
ASKED = (*VECTORS, *_VIEWS)
"""All that a function may ask for by the names of its parameters."""


@dataclass(frozen=True)
class Evaluated:
    """The results of a function for T tokens, (T,) each.

    losses: l_t.
    coefficients: c_t, the derivative of the sum of w_t l_t by each log-prob; it includes the
        weights.
    log_ratio: s_t, whose exp is the ratio of the metrics: the argument of the first call of
        `ratio`, or the token's own log-ratio.
    clamped: bool, True where the clamp of a `ratio` acted.
    ratio_by_document: True if that is the ratio of a document.
    metrics: the function's own, by name.
    bounds: those of the ratio, or None.
    """

    losses: Tensor
    coefficients: Tensor
    log_ratio: Tensor
    clamped: Tensor
    ratio_by_document: bool
    metrics: dict[str, Tensor]
    bounds: tuple[float, float] | None


@dataclass(frozen=True)
class FunctionLoss(Family):
    """A loss family that is a function of the user's own.

    options: values of its parameters with a default that are none of ASKED.
    Raises ValueError for a parameter that is neither, and for an option that it does not have.
    """

    function: Callable
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        parameters = inspect.signature(self.function).parameters
        unknown = [
            str(parameter)
            for name, parameter in parameters.items()
            if name not in ASKED
            and (
                parameter.default is parameter.empty
                or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            )
        ]
        if unknown:
            raise ValueError(
                f"{self.name} asks for {', '.join(unknown)}, which a loss function is not given. "
                f"It may ask for {', '.join(ASKED)}; a parameter of another name needs a default."
            )
        if not {*NEW} & {*parameters}:
            raise ValueError(
                f"{self.name} asks for neither log_probs nor log_ratio, so it has no gradient."
            )
        missing = sorted(self.options.keys() - self.defaults.keys())
        if missing:
            raise ValueError(
                f"{self.name} has no {', '.join(missing)}; its parameters with a default are "
                f"{', '.join(self.defaults) or 'none'}"
            )

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @cached_property
    def asked(self) -> frozenset[str]:
        """Return the names in ASKED that the function has as parameters."""
        return frozenset(inspect.signature(self.function).parameters) & {*ASKED}

    @cached_property
    def may_lack(self) -> frozenset[str]:
        """Return the vectors that the function does without, since it has a default for them."""
        parameters = inspect.signature(self.function).parameters
        return frozenset(
            name for name in self.asked if parameters[name].default is not inspect.Parameter.empty
        )

    @cached_property
    def defaults(self) -> dict[str, object]:
        """Return the function's own parameters with their defaults."""
        parameters = inspect.signature(self.function).parameters
        return {
            name: parameter.default for name, parameter in parameters.items() if name not in ASKED
        }

    @property
    def level(self) -> str:
        """Return "token", "document" or "step"."""
        if self.asked & {"groups", "step"}:
            return "step"
        return "document" if "documents" in self.asked else "token"

    @property
    def by_document(self) -> bool:
        return self.level == "document"

    @property
    def reads_old_log_probs(self) -> bool:
        return bool(self.asked & {"log_ratio", "old_log_probs"} - self.may_lack)

    @property
    def equation(self) -> str:
        documentation = inspect.getdoc(self.function) or ""
        first = documentation.partition("\n")[0].strip() or f"as {self.name} computes it"
        values = self.defaults | dict(self.options)
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"{first}  ({listed})" if listed else first

    @cached_property
    def measured(self) -> tuple[bool, tuple[str, ...]]:
        """Return whether it gives bounds, and the names of its metrics, from made-up documents.

        A piece of a step without a trained token has to have the same metrics as the others.
        """
        log_probs = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
        sums = DocumentSums.of_tokens(torch.tensor([0, 0, 1]), log_probs < 0, 2)
        index = torch.zeros(2, dtype=torch.int64)
        evaluated = self.evaluate(
            log_probs,
            torch.ones_like(log_probs),
            dict.fromkeys((*OF_DATA, *KNOWN_BEFORE), log_probs),
            DocumentView(sums),
            GroupView(index, 1),
            StepView(3, 2, 1),
        )
        return evaluated.bounds is not None, tuple(evaluated.metrics)

    def evaluate(
        self,
        log_probs: Tensor,
        weights: Tensor,
        vectors: Mapping[str, Tensor],
        documents: DocumentView | None = None,
        groups: GroupView | None = None,
        step: StepView | None = None,
    ) -> Evaluated:
        """Return the function's results for T trained tokens.

        log_probs: (T,), the new ones.
        weights: (T,), w_t times the factors of a correction.
        vectors: (T,) each, by names of OF_DATA and KNOWN_BEFORE.
        documents, groups, step: what the function asks for. At the level of tokens there is none of
            them.
        Raises ValueError for a vector that the function needs and the data do not have, and for a
        result of another shape.
        """
        ratio = Ratio()
        spread = _Spread(len(log_probs), documents, groups)
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            given: dict[str, object] = {"log_probs": leaf, **vectors}
            if "old_log_probs" in vectors:
                given["log_ratio"] = leaf - vectors["old_log_probs"]
            given |= {"ratio": ratio, "documents": documents, "groups": groups, "step": step}
            losses, further = self._call(given)
            losses = spread(f"the loss function {self.name}", losses)
            coefficients = None
            if losses.requires_grad:
                (coefficients,) = torch.autograd.grad((weights * losses).sum(), leaf)
        # The function may have hidden a number that is not finite, as by a clip.
        read = {"old_log_probs" if name == "log_ratio" else name for name in self.asked}
        finite = torch.isfinite(leaf.detach())
        for name in read & vectors.keys():
            finite = finite & torch.isfinite(vectors[name])
        log_ratio = torch.zeros_like(log_probs)
        if ratio.arguments:
            log_ratio = spread("ratio", ratio.arguments[0])
        elif "old_log_probs" in vectors:
            log_ratio = log_probs.detach() - vectors["old_log_probs"]
        return Evaluated(
            losses=torch.where(finite, losses.detach(), torch.nan),
            coefficients=torch.zeros_like(log_probs) if coefficients is None else coefficients,
            log_ratio=torch.where(finite, clamped(log_ratio), torch.nan),
            clamped=ratio.was_clamped(lambda values: spread("ratio", values), log_probs),
            ratio_by_document=any(len(x) != len(leaf) for x in ratio.arguments[:1]),
            bounds=further.pop("bounds", None),
            metrics={
                name: spread(f"the metric {name} of {self.name}", values).detach().to(log_probs)
                for name, values in further.items()
            },
        )

    def _call(self, given: Mapping[str, object]) -> tuple[Tensor, dict]:
        """Call the function with what it asks for; return its loss, and its dictionary or {}.

        Raises ValueError for a vector that the data do not have.
        """
        arguments = {name: given[name] for name in self.asked if given.get(name) is not None}
        missing = sorted(self.asked - arguments.keys() - self.may_lack)
        if missing:
            raise ValueError(
                f"the loss function {self.name} asks for {', '.join(missing)}, which these "
                "documents do not have"
            )
        returned = self.function(**arguments, **self.options)
        if not isinstance(returned, tuple):
            return returned, {}
        if len(returned) != 2 or not isinstance(returned[1], dict):
            raise ValueError(
                f"the loss function {self.name} needs to return its loss, or its loss and a "
                f"dictionary of metrics (got a tuple of {len(returned)})"
            )
        return returned[0], dict(returned[1])


class _Spread:
    """Makes (T,) of one number per token, document or group."""

    def __init__(self, num_tokens: int, documents: DocumentView | None, groups: GroupView | None):
        self._num_tokens = num_tokens
        self._documents = documents
        self._groups = groups

    def __call__(self, name: str, values: object) -> Tensor:
        """Return the values at each token.

        name: of what has the values, in the message. Raises ValueError for another shape.
        """
        sizes = {"token": self._num_tokens}
        if self._documents is not None:
            sizes["document"] = len(self._documents)
        if self._groups is not None:
            sizes["group"] = len(self._groups)
        if not isinstance(values, Tensor) or values.dim() != 1 or len(values) not in sizes.values():
            needed = " or ".join(f"per {one}, {(size,)}" for one, size in sizes.items())
            raise ValueError(f"{name} needs to return one number {needed} (got {shown(values)})")
        if len(values) == self._num_tokens:
            return values
        if self._documents is not None and len(values) != len(self._documents):
            assert self._groups is not None
            values = self._groups.spread(values)
        assert self._documents is not None
        return self._documents.spread(values)
