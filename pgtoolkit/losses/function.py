"""Losses that are plain functions, of the user's own or with a name.

The names of its parameters say what it wants, and from that follows its level:

    token       vectors alone: a token's loss depends on numbers of this token
    document    `documents`: it also depends on other tokens of the document
    step        `groups` or `step`: it also depends on other documents

It returns a number for each token, document or group. A document's value stands for each of its
trained tokens, and a group's for each of its documents, so that the loss of a step is the sum over
tokens of w_t l_t here, too. `losses.function_values` calls it. No torch is imported here, so that
`pgtk check` reads equations and defaults without it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pgtoolkit.losses.checks import name_of_function
from pgtoolkit.losses.family import Family

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


class FunctionFamily(Family):
    """The base class of families that are a function.

    function: it asks for what it wants by the names of its parameters.
    options: values of its parameters that ASKED does not name.
    """

    function: Callable
    options: Mapping[str, object] = {}

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
        # Also with a default: where documents lack them, the vectors of a step hold other numbers.
        return bool(self.asked & {"log_ratio", "old_log_probs"})


def reads_rewards(family: Family) -> bool:
    """Return whether a family is given the rewards of documents or of groups."""
    return isinstance(family, FunctionFamily) and bool(family.asked & {"rewards", "group_rewards"})


@dataclass(frozen=True)
class FunctionLoss(FunctionFamily):
    """A function of the user's own.

    options: values of its parameters with a default that ASKED does not name.
    Raises ValueError for a parameter that is neither, for an option that it does not have, and for
    words where its default is a number.
    """

    function: Callable
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        try:
            parameters = inspect.signature(self.function).parameters
        except ValueError:
            raise ValueError(
                f"the loss function {self.name} needs parameters with names, by which it asks for "
                "what it reads (got a function without a signature). Use a def around it, as "
                "def my_loss(log_ratio, advantages)"
            ) from None
        by_place = [name for name, each in parameters.items() if each.kind == each.POSITIONAL_ONLY]
        if by_place:
            raise ValueError(
                f"{self.name} needs parameters that can be given by name (got {', '.join(by_place)}"
                " before a slash). Use it without the slash"
            )
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
            near = [
                name for word in unknown for name in difflib.get_close_matches(word, ASKED, 1, 0.75)
            ]
            raise ValueError(
                f"{self.name} asks for {', '.join(unknown)}, which a loss function is not given. "
                + (f"Use {', '.join(near)}. " if near else f"It may ask for {', '.join(ASKED)}. ")
                + "A parameter of another name needs a default."
            )
        for name, default in self.defaults.items():
            near = difflib.get_close_matches(name, ASKED, 1, 0.85)
            if default is None and near:
                raise ValueError(
                    f"{self.name} has a parameter {name}=None, which nothing would ever fill. "
                    f"Use {near[0]}."
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

        for name, value in self.options.items():
            default = self.defaults[name]
            if isinstance(value, str) and isinstance(default, int | float):
                raise ValueError(
                    f"{name} of {self.name} needs a number, as its default is (got {value!r})"
                )

    @property
    def name(self) -> str:
        return name_of_function(self.function)

    @cached_property
    def defaults(self) -> dict[str, object]:
        """Return the function's own parameters with their defaults."""
        parameters = inspect.signature(self.function).parameters
        return {
            name: parameter.default for name, parameter in parameters.items() if name not in ASKED
        }

    @property
    def equation(self) -> str:
        documentation = inspect.getdoc(self.function) or ""
        first = documentation.partition("\n")[0].strip() or f"as {self.name} computes it"
        values = self.defaults | dict(self.options)
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"{first}  ({listed})" if listed else first
