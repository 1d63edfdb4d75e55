"""The arguments that a reward function is called with, by its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal

SINGLE = ("completion", "answer", "prompt", "row")
"""Names of the parameters that a function that scores one completion may have."""

OF_A_BATCH = (
    "completions",
    "prompts",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""Names of the parameters, as TRL has them, that a function that scores a batch may have, besides
the columns of the file."""


OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names of the parameters of verl's compute_score."""

OF_A_BATCH_OF_VERL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Names of the parameters of verl's compute_score where it scores a batch."""


class Signature(NamedTuple):
    """The arguments that a reward function is called with.

    is_batch: whether one call scores all completions. is_async: whether it is awaited.
    names: the parameters that it gets by name; None: it gets (completion, answer) by position.
    takes_all: whether it gets all other arguments by name as well.
    needed: parameters without a default.
    """

    is_batch: bool
    is_async: bool
    names: tuple[str, ...] | None
    takes_all: bool
    needed: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        return self.names or ("completion", "answer")

    @property
    def is_verl(self) -> bool:
        """Return whether it is a compute_score of verl's."""
        return bool({"solution_str", "solution_strs"} & set(self.named))

    def wants(self, name: str) -> bool:
        return self.takes_all or name in self.named

    @property
    def reads_answer(self) -> bool:
        """Return whether it names the answer among its parameters."""
        return bool({"answer", "ground_truth", "ground_truths"} & set(self.named))

    @property
    def wants_rows(self) -> bool:
        """Return whether it asks for more of a row than its prompt and its answer."""
        if self.is_verl:
            return True
        if not self.is_batch:
            return self.wants("row")
        return self.takes_all or bool(set(self.named) - set(OF_A_BATCH))

    @property
    def of_another_trainer(self) -> bool:
        """Return whether it is in TRL's form or verl's, whose texts have no special tokens."""
        return self.is_batch or self.is_verl

    @property
    def columns(self) -> list[str]:
        """Return the columns that every row must have."""
        if self.is_verl:
            is_needed = bool({"data_source", "data_sources"} & set(self.needed))
            return ["data_source"] if is_needed else []
        return [
            name for name in self.needed if self.is_batch and name not in (*OF_A_BATCH, "answer")
        ]


def signature_of(setting: str, function: Callable[..., object]) -> Signature:
    """Return how a function is called, by its parameters.

    Raises ConfigError if they ask for other arguments, or for a class or a function with `yield`.
    """
    _refuse_other_kinds(setting, function)
    call = getattr(function, "__call__", None)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # The parameters of some functions written in C are not known.
        return Signature(False, is_async, None, False, ())
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    plain = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    by_name = [
        parameter.name for parameter in plain if parameter.kind is not parameter.POSITIONAL_ONLY
    ]
    needed = [parameter.name for parameter in plain if parameter.default is parameter.empty]
    for of_verl in (OF_VERL, OF_A_BATCH_OF_VERL):
        if of_verl[1] in by_name and set(needed) <= set(of_verl):
            names = tuple(name for name in of_verl if takes_all or name in by_name)
            is_batch = of_verl is OF_A_BATCH_OF_VERL
            return Signature(is_batch, is_async, names, False, tuple(needed))
    if {"completions", "completion_ids", "prompts"} & set(by_name):
        names = tuple(by_name)
        return Signature(True, is_async, names, takes_all, tuple(needed))
    names = tuple(name for name in by_name if name in SINGLE)
    if (names or takes_all) and set(needed) <= set(names):
        return Signature(False, is_async, names, takes_all, tuple(needed))
    first_two = [parameter.name for parameter in plain[:2]]
    in_other_order = any(
        name in SINGLE and name != SINGLE[place] for place, name in enumerate(first_two)
    )
    if not in_other_order and _takes_two(function):
        return Signature(False, is_async, None, False, ())
    name = getattr(function, "__name__", type(function).__name__)
    raise ConfigError(
        refusal(
            setting=setting,
            needs=f"a function with parameters among {', '.join(SINGLE)}, or with completions for "
            "a whole batch",
            got=f"{name}{inspect.signature(function)}",
            reason="It gets arguments by the names of its parameters; two parameters of other "
            "names get the completion and its answer.",
            use="def score(completion, answer)",
        )
    )


def _refuse_other_kinds(setting: str, function: Callable[..., object]) -> None:
    """Raise ConfigError for a class, and for a function with `yield`."""
    module, _, name = setting.partition("=")[2].rpartition(".")
    key = setting.partition("=")[0]
    reason = "What is called must return the score."
    if inspect.isclass(function):
        got = f"the class {name}"
        use = f"a line such as score = {name}() in {module}, and {key}={module}.score"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        got = f"{name} with yield"
        use = "return in place of yield"
    else:
        return
    raise ConfigError(
        refusal(
            setting=setting,
            needs="a function, or an object that can be called",
            got=got,
            reason=reason,
            use=use,
        )
    )


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("", "")
    except TypeError:
        return False
    return True
