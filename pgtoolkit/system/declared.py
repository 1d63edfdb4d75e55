"""The declarations of keys: a part's settings are dataclasses whose fields declare what is true of
them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

Dictionary = dict[str, Any]
"""The value of a free-form key: the user's own names, and values of any type that YAML has."""

AutoOrBool = Any
"""The annotation of a key that is "auto", true or false: in YAML, the last two are no texts."""

REQUIRED = "???"
"""The default of a key that must be given, as OmegaConf writes it."""


class Alters(StrEnum):
    """Says what of a measured number a key changes, beside the policy that it measures.

    Of two runs that differ in such a key, the number does not say which policy is better, since it
    would differ for one and the same policy. `comparison.common_measure` has the numbers that each
    kind concerns.
    """

    nothing = "changes only what is learned, or nothing"
    prompts = "decides which prompts are asked, and how they are written"
    scores = "decides what a completion scores"
    reward = "changes the reward of a completion, and not whether it is right"
    selection = "leaves out prompts by how the policy itself does on them"
    sampling = "decides how completions are drawn from the policy"
    age = "decides how old the weights are that wrote the completions of a step"
    end = "ends a run by a number that is measured"
    evaluation = "decides on which held-out prompts the policy is measured, how, and when"
    formula = "is in the formula of the loss, and of numbers that are computed from it"


@dataclass(frozen=True)
class Key:
    """A key of the configuration, with everything that is true of it.

    A condition, below, is a text such as `rollout.lag>0`, see `config.conditions.holds`.
    """

    name: str
    """The dotted name, such as `rollout.lag`."""
    schema: str
    """The option that has the key, such as `rollout/policy`; the group alone where all of its
    options have the same keys; empty for a key of no group."""
    type: str
    """The annotation, such as `int | None`."""
    names: tuple[str, ...] = ()
    """The names that the value is one of; empty for a key of another type."""
    default: object = field(default=None, compare=False)  # A list could not be hashed.
    """A plain value, one computed from other keys (`config.defaults.Computed`), or REQUIRED."""
    help: str = ""
    """What the key means, in sentences: the comment in conf/ and the text of `pgtk explain`."""
    range: tuple[float, float] | None = None
    """The smallest and the largest number, both allowed."""
    learns: bool | str = True
    """Whether runs with different values learn differently, or the condition under which they do.
    The value is then part of a job's digest, and a difference in `pgtk compare`."""
    alters: Alters | None = None
    """What of a measured number the key changes. It has to be declared by each key, or for all keys
    of its group; None: it is not, which a test refuses."""
    last_counts: bool | str = False
    """Whether a run that was resumed with another value equals, step by step, one that had it from
    the start, or the condition under which it does."""
    fixed: str = ""
    """Why a resumed run cannot change the key; empty where it can."""
    fixed_if: str = ""
    """The condition under which `fixed` holds; empty for always."""
    only_if: str = ""
    """The condition without which the key has no effect; then only the default is allowed."""
    use: str = ""
    """The overrides that make `only_if` hold, where they are not the condition itself. They are
    joined by ` and `, one for each part of the condition."""
    why: str = ""
    """The reason for that refusal, if it is more than that the key has no effect."""
    reads: Literal["data", "model", "reference"] | None = None
    """The kind of data that the key names, if a run reads it from outside of its directory. Its
    path is made absolute, and its contents are digested. A model may be a name on the Hugging Face
    hub; a reference is a model or one of `NO_FOLDER`."""
    writes: bool = False
    """Whether the key names a folder that a run writes to; the path is made absolute."""
    code: Literal["function", "command"] | None = None
    """The kind of code that the key may name: a function by its dotted path, or a command, which
    has to be typed and is not taken from a run's file."""
    free: bool = False
    """Whether the value is a dictionary whose keys are the user's own."""
    gathers: bool = False
    """Whether names that its group does not have are entries of this free-form key: `loss.tau`
    stands for `loss.options.tau`."""
    option: bool = False
    """Whether the key names the option of its group: `loss=grpo` sets it."""
    evaluate: Literal["run", "model", "kept"] | None = None
    """Whether `pgtk evaluate` takes the key on the command line: for a run and for a model's folder
    ("run"), for a model's folder alone ("model"), or not, with the run's value ("kept"). Other keys
    get their defaults there, since nothing is trained."""
    added: bool = False
    """Whether there are runs from before the key existed. Where their configuration lacks it, its
    default holds."""
    machine: bool | str = False
    """Whether the key says how this machine computes or what it measures, which moves no number
    beyond rounding, or the condition under which it does. Such a key may differ where a step is
    repeated, and where a run goes on."""
    example: str = ""
    """What to type for a key that is REQUIRED, or a dictionary."""
    stands_for: str = ""
    """The option that a dotted path in place of an option chooses, with the path as this key's
    value: `loss=my_module.MyFamily` chooses `custom`. Empty for other keys."""

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Option:
    """An option of a group, which `loss=gspo` chooses.

    schema: the dataclass of its keys.
    help: its meaning, in sentences.
    base: the option of the same group whose values it takes.
    changes: the values that differ from those, by key.
    """

    schema: type
    help: str
    base: str = ""
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The declaration of a group.

    default: the option that is chosen by default.
    help: what the group decides, in sentences.
    """

    default: str
    help: str


class Needs(TypedDict, total=False):
    """A condition that several keys share; see `Key`."""

    only_if: str
    use: str


class Refusal(Needs, total=False):
    """A condition with the reason why the keys are refused without it."""

    why: str


class Declared(Refusal, total=False):
    """Declarations that several keys share; see `Key`."""

    learns: bool | str
    alters: Alters
    last_counts: bool | str
    machine: bool | str
    added: bool
    fixed: str
    fixed_if: str
    evaluate: Literal["run", "model", "kept"]


def key(*, least: float | None = None, most: float | None = None, **declared: object) -> Any:
    """Declare the field of a key in a dataclass of settings.

    least, most: the range of a number, both included. It is wide enough for everything that anybody
        may want, so that a number beyond it is a slip.
    declared: other attributes of `Key`. A key without a default here has to be given in Python.
    """
    if least is not None:
        declared["range"] = (least, most)
    default = declared.get("default", REQUIRED)
    if isinstance(default, list | dict):
        return field(default_factory=functools.partial(copy.deepcopy, default), metadata=declared)
    if default == REQUIRED:
        return field(metadata=declared)
    return field(default=default, metadata=declared)


def chosen(name: str, **declared: object) -> Any:
    """Declare the field that names the option of a group, in the settings of the option `name`.

    declared: other attributes of `Key`.
    """
    return field(default=name, metadata={"option": True, **declared})


def group(*, default: str, help: str, **declared: object) -> Any:
    """Declare the field of a group in `Config`.

    declared: attributes of `Key`, for those keys of the group that do not declare them.
    """
    return field(metadata={"group": Group(default, help), **declared})
