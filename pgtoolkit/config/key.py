"""What a key declares where it stands in the schema, and the conditions that such a declaration may name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pgtoolkit.system.report import text


@dataclass(frozen=True)
class Key:
    """A key of one option of its group, with all that is true of it.

    default: its value where nothing else is chosen: plain, or computed from other keys (`defaults.py`).
    help: what it means, in sentences.
    name: such as `rollout.lag`. schema: the option that has it, `rollout/policy`; the group alone where all of its
    options have the same keys; empty for `seed`. type: as annotated, such as `int | None`. names: those it is one of.
    range: (least, most), both included, of a number.
    learns: whether runs with different values of it learn differently: it is then part of a job's digest and a
        difference between runs. A condition where it depends on other keys.
    last_counts: whether a run that was continued with another value is, step by step, one that had it from the start. A
        condition where it depends on other keys.
    fixed: why a resumed run cannot change it. fixed_if: the condition under which it cannot.
    only_if: the condition without which it has no effect; another value than the usual one is then refused.
    use: what to type for the condition to hold, where that is not the condition itself; of several, joined by ` and `.
    why: the reason to refuse it, where it is more than that it has no effect.
    reads: it names what a run reads from outside of its directory: "data", a "model", which may be a name on the
        Hugging Face hub, or a "reference", a model or what `NO_FOLDER` names. It is made absolute, and the contents are
        digested. writes: it names a folder that is written;
        it is made absolute.
    code: it may name code: a "function" by its dotted path, or a "command", which a run's file alone may not decide.
    free: its keys are not in the schema. option: it names the option of its group: `loss=grpo` sets it.
    evaluate: whether `pgtk evaluate` takes it on the command line: of a "run" and of a model's folder, or of a "model"
        alone; "kept": the run's value holds. Other keys get their defaults there, since nothing is trained.
    added: whether there are runs from before the key was added; where their configuration lacks it, its default holds.
    machine: it says how this machine computes, which may differ where a step is made again.
    example: what to type where there is no default.
    """

    name: str
    schema: str
    type: str
    names: tuple[str, ...] = ()
    default: Any = field(default=None, compare=False)  # lists cannot be hashed
    help: str = ""
    range: tuple[float, float] | None = None
    learns: bool | str = True
    last_counts: bool | str = False
    fixed: str = ""
    fixed_if: str = ""
    only_if: str = ""
    use: str = ""
    why: str = ""
    reads: Literal["data", "model", "reference"] | None = None
    writes: bool = False
    code: Literal["function", "command"] | None = None
    free: bool = False
    option: bool = False
    evaluate: Literal["run", "model", "kept"] | None = None
    added: bool = False
    machine: bool = False
    example: str = ""

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Option:
    """An option of a group, which `loss=gspo` chooses.

    schema: the dataclass of its keys. help: what it is, in sentences. base: the option of the same
    group whose values it takes. changes: the values that differ from those, by key.
    """

    schema: type
    help: str
    base: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """What is true of a group as a whole. default: its option. help: what it decides."""

    default: str
    help: str


def key(*, least: float | None = None, most: float | None = None, **declared: Any) -> Any:
    """Declare the field of a key in a schema.

    least, most: the range of a number, both included: wide enough for all that anybody means, so
    that beyond it lies a slip. declared: see `Key`.
    """
    if least is not None:
        declared["range"] = (least, most)
    return field(metadata=declared)


def group(*, default: str, help: str, **declared: Any) -> Any:
    """Declare the field of a group in `Config`.

    default: the option that is chosen where no other is. help: what the group decides, as one sentence or its end.
    declared: see `Key`; it holds for all keys of the group that do not declare it themselves.
    """
    return field(metadata={"group": Group(default, help), **declared})


def holds(condition: str, config: object) -> bool:
    """Whether a condition holds: `KEY=VALUE`, `KEY!=VALUE` or `KEY>NUMBER`, or several, joined by ` and `, ` or `."""
    return any(all(_holds(single, config) for single in every.split(" and ")) for every in condition.split(" or "))


def singles(condition: str) -> list[str]:
    """The single conditions of one."""
    return re.split(" and | or ", condition)


def parts(condition: str) -> tuple[str, str, str]:
    """(key, operator, value) of a single condition."""
    return re.fullmatch(r"([\w.]+)(!=|=|>)(.*)", condition).groups()


def value_of(config: object, name: str) -> Any:
    """The value of a key in a configuration: an object, nested dictionaries, or one dictionary by dotted keys.

    None where there is no such key. name: also of a group, for the option that was chosen.
    """
    for part in [name] if isinstance(config, Mapping) and name in config else name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config


def _holds(single: str, config: object) -> bool:
    name, operator, expected = parts(single)
    value = value_of(config, name)
    if operator == ">":
        return isinstance(value, int | float) and value > float(expected)
    return (text(value) == expected) is (operator == "=")
