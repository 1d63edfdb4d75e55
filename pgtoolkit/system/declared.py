"""The declarations of keys: a part's settings are dataclasses whose fields declare what is true of
them."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import EnumMeta, StrEnum
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args, get_origin, get_type_hints

from pgtoolkit.losses.checks import shown
from pgtoolkit.system.conditions import holds, joined_singles, parts, singles
from pgtoolkit.system.report import is_number, is_whole, text

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

    A condition, below, is a text such as `rollout.lag>0`, see `system.conditions.holds`.
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

    schema: type[Settings]
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


@dataclass(frozen=True)
class Needed:
    """Two conditions: where the first holds, the second has to hold, too.

    A group stands for the key that names its option, so that `advantage=gae` is written in the way
    that users type it.

    when: the condition under which it applies. A refusal names its first part.
    needs: the condition that has to hold.
    because: the reason, in one sentence.
    use: what to type, in the place of `needs`; several ways are joined by ` or `.
    """

    when: str
    needs: str
    because: str
    use: str = ""


@dataclass(frozen=True)
class Bounded:
    """A key that is at most another number of its settings, unless it is None.

    name, bound: the fields of both.
    because: the reason, in one sentence.
    """

    name: str
    bound: str
    because: str


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


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def _is_sequence_of_texts(value: object) -> bool:
    is_sequence = isinstance(value, list | tuple)
    return is_sequence and all(isinstance(entry, str) for entry in value)


TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a whole number", is_whole),
    "float": ("a number", is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "AutoOrBool": ("auto, true or false", lambda value: value == "auto" or isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
    "Dictionary": ("a dictionary", lambda value: isinstance(value, dict)),
    "list[str]": ("a list of texts", lambda value: _is_list_of(str, value)),
    "list[int]": ("a list of whole numbers", lambda value: _is_list_of(int, value)),
    "Sequence[str]": ("a list of texts", _is_sequence_of_texts),
}
"""Annotation of a key -> (the type in words, the test whether a value has it)."""

_IN_PYTHON = {"bool": "True or False", "AutoOrBool": "'auto', True or False"}
"""The types whose words are others in Python than in YAML."""


def names_of(annotation: object) -> tuple[str, ...]:
    """Return the values of the enumeration in an annotation; empty where there is none."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, EnumMeta) and issubclass(kind, StrEnum):
            return tuple(kind)
    return ()


def fits(
    annotation: str, names: Sequence[str], range: tuple[float, float] | None, value: object
) -> bool:
    """Return whether a key takes a value. names, range: see `Key`."""
    kind, _, optional = annotation.partition(" | ")
    if value is None:
        return bool(optional)
    if not (value in names if names else TYPES[kind][1](value)):
        return False
    if range is None:
        return True
    assert isinstance(value, int | float)  # since keys of other types have no range
    return range[0] <= value <= range[1]


@functools.cache
def _names_by_field(settings: type) -> dict[str, tuple[str, ...]]:
    """Return the names that the value of each field is one of; empty for another type."""
    return {
        name: get_args(hint) if get_origin(hint) is Literal else names_of(hint)
        for name, hint in get_type_hints(settings).items()
    }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base class of a part's settings, which refuse values that their keys do not take.

    A configuration makes them by `unchecked`, since it refuses all of its values together.
    needed: conditions between their keys.
    bounded: the keys that are at most another one.
    of_runs: keys that a run alone reads. Conditions on them do not count in Python.
    """

    needed: ClassVar[tuple[Needed, ...]] = ()
    bounded: ClassVar[tuple[Bounded, ...]] = ()
    of_runs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a value of another type, beyond its range or its names, without an
        effect beside the others, or that does not fit them."""
        self.check_values()
        _check_effects(self)
        _check_needed(self)
        _check_bounded(self)

    def check_values(self) -> None:
        """Raise ValueError for a value of another type, or beyond its range or its names.

        A name that is given as a text becomes the entry of its enumeration.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            names = _names_by_field(type(self))[each.name]
            if value is None and "default_if" in each.metadata:
                continue  # another key decides on the default
            if not fits(str(each.type), names, each.metadata.get("range"), value):
                raise ValueError(_refused(type(self).__name__, each, names, value))
            if value in names:
                object.__setattr__(self, each.name, names[names.index(value)])
        self._unify()

    def _unify(self) -> None:
        """Give values that mean the same one form."""

    @classmethod
    def unchecked(cls, values: Mapping[str, object]) -> Self:
        """Return settings of these values, whatever they are. values: of every key."""
        settings = object.__new__(cls)
        for each in fields(cls):
            object.__setattr__(settings, each.name, values[each.name])
        settings._unify()
        return settings


def _check_effects(settings: Settings) -> None:
    """Raise ValueError for a value that is not the default, and has no effect beside the others."""
    kind = type(settings)
    for each in fields(settings):
        condition = each.metadata.get("only_if")
        if not condition or each.metadata.get("option"):
            continue
        deciding = [_field_of(kind, parts(single)[0]) for single in singles(condition)]
        if {*deciding} & {*settings.of_runs}:
            continue
        value = getattr(settings, each.name)
        if value in (_default_of(each), None) or _holds_in(settings, condition):
            continue
        reason = each.metadata.get("why") or "It has no effect otherwise."
        use = f"leave {each.name} out"
        if not any(get_origin(get_type_hints(kind)[name]) is Literal for name in deciding):
            is_typed = "!=" not in condition and ">" not in condition
            typed = _in_python(kind, condition if is_typed else each.metadata["use"])
            use = f"use {typed}, or {use}"
        raise ValueError(
            f"{kind.__name__}({each.name}={_typed(value)}) needs {_in_python(kind, condition)} "
            f"(got {_got(settings, condition)}). {reason} {use[0].upper()}{use[1:]}."
        )


def _check_needed(settings: Settings) -> None:
    """Raise ValueError for values that do not fit each other."""
    kind = type(settings)
    for row in settings.needed:
        if not _holds_in(settings, row.when) or _holds_in(settings, row.needs):
            continue
        raise ValueError(
            f"{kind.__name__}({_in_python(kind, row.when)}) needs {_in_python(kind, row.needs)} "
            f"(got {_got(settings, row.needs)}). {row.because} Use "
            f"{_in_python(kind, row.use or row.needs)}."
        )


def _check_bounded(settings: Settings) -> None:
    """Raise ValueError for a number above the one that it is at most."""
    for row in settings.bounded:
        value = getattr(settings, row.name)
        bound = getattr(settings, row.bound)
        if value is not None and value > bound:
            raise ValueError(
                f"{type(settings).__name__}({row.name}={_typed(value)}) needs at most "
                f"{row.bound}={_typed(bound)} (got {_typed(value)}). {row.because} Use "
                f"{row.name}={_typed(bound)}, or leave it out."
            )


def _default_of(declared: Field) -> object:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def _holds_in(settings: Settings, condition: str) -> bool:
    """Return whether a condition on keys of their own group holds in settings."""
    words = ""
    for joiner, single in joined_singles(condition):
        name, operator, value = parts(single)
        words += f"{joiner}{_field_of(type(settings), name)}{operator}{value}"
    return holds(words, settings)


def _field_of(kind: type[Settings], name: str) -> str:
    """Return the field of a key, or the one that names the option of a group."""
    if "." in name:
        return name.rpartition(".")[2]
    return next(each.name for each in fields(kind) if each.metadata.get("option"))


def _got(settings: Settings, condition: str) -> str:
    """Return the values of the keys in a condition as Python types them."""
    names = [_field_of(type(settings), parts(single)[0]) for single in singles(condition)]
    values = {name: getattr(settings, name) for name in names}
    return ", ".join(f"{name}={_typed(value)}" for name, value in values.items())


def _typed(value: object) -> str:
    return repr(str(value) if isinstance(value, StrEnum) else value)


_IN_YAML = {"null": "None", "true": "True", "false": "False"}
_OPERATORS = {"=": "=", "!=": " other than ", ">": " above "}


def _in_python(kind: type[Settings], condition: str) -> str:
    """Return a condition, or what to type, in the words of Python."""
    words = ""
    for joiner, single in joined_singles(condition):
        name, operator, value = parts(single)
        field_name = _field_of(kind, name)
        if "." not in name and "." in value:  # a dotted path in place of an option
            field_name = next(each.name for each in fields(kind) if each.metadata.get("stands_for"))
        typed = "[...]" if ".." in value else python_value(value)
        words += f"{joiner}{field_name}{_OPERATORS[operator]}{typed}"
    return words


def python_value(typed: str) -> str:
    """Return the value of an override as Python types it."""
    if typed in _IN_YAML:
        return _IN_YAML[typed]
    return repr(typed) if re.fullmatch(r"[a-z][\w.]*", typed) else typed


def _refused(settings: str, declared: Field, names: Sequence[str], value: object) -> str:
    """Return the refusal of a value in Python, and say what to type there."""
    kind, _, optional = str(declared.type).partition(" | ")
    needs = f"one of {', '.join(repr(str(name)) for name in names)}"
    if not names:
        needs = _IN_PYTHON.get(kind, TYPES[kind][0])
    range = declared.metadata.get("range")
    if range:
        needs += f" from {text(range[0])} to {text(range[1])}"
    if optional:
        needs += " or None"
    message = f"{settings}({declared.name}={shown(value)}) needs {needs} (got {shown(value)})."
    # The end of many a help says what YAML's null means.
    reason = declared.metadata.get("help", "").partition("; null")[0].rstrip(".")
    if reason:
        message += f" {reason}."
    default = _default_of(declared)
    if default is not MISSING:
        shown_default = str(default) if isinstance(default, StrEnum) else default
        message += f" Use {declared.name}={shown_default!r}, the default."
    return message
