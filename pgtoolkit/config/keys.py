"""The table of all keys, as the schema declares them, and what follows from it for a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import EnumMeta
from typing import Any

from pgtoolkit.config import schema
from pgtoolkit.config.key import Key, holds, parts, singles, value_of
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.system.report import is_number, is_whole, text


def _declared() -> Iterator[Key]:
    for group in fields(Config):
        options = {name: option for name, option in SCHEMAS.items() if name.partition("/")[0] == group.name}
        if not options:
            yield Key(group.name, "", group.type, **group.metadata)
        for name, option in options.items():
            for field in fields(option):
                yield Key(f"{group.name}.{field.name}", name, field.type, **{**group.metadata, **field.metadata})


KEYS = tuple(_declared())
"""Every key of every option, with all that it declares."""

OPTION_KEYS = {key.group: key.name for key in KEYS if key.option}
"""Group -> the key that names its option, of those groups that have one."""
_WITH_OPTIONS = {key.group for key in KEYS if "/" in key.schema}
_NAMED = {name: [key for key in KEYS if key.name == name] for name in {key.name for key in KEYS}}


def keys_of(config: object) -> Iterator[Key]:
    """The keys of the options that a configuration has chosen; config: see `value_of`."""
    chosen = {group: value_of(config, f"{group}.name") for group in _WITH_OPTIONS}
    for key in KEYS:
        group, _, option = key.schema.partition("/")
        if option in ("", chosen.get(group)):
            yield key


def _is_chosen(key: Key, config: object) -> bool:
    group, _, option = key.schema.partition("/")
    return not option or option == value_of(config, f"{group}.name")


def key_named(name: str, config: object) -> Key | None:
    """The key of this name in a configuration, or the free-form one that it lies in; of a group, the option's.

    None where there is none.
    """
    name = OPTION_KEYS.get(name, name)
    if name not in _NAMED:
        name = next((key.name for key in KEYS if key.free and is_inside(name, key.name)), "")
    return next((key for key in _NAMED.get(name, ()) if _is_chosen(key, config)), None)


def is_inside(name: str, place: str) -> bool:
    """Whether a dotted key is another one, or lies in it."""
    return f"{name}.".startswith(f"{place}.")


def changes_learning(name: str, config: object) -> bool:
    """Whether runs that differ in this key of a configuration learn differently."""
    learns = True if (key := key_named(name, config)) is None else key.learns
    return learns if isinstance(learns, bool) else holds(learns, config)


def evaluated_keys(source: str) -> list[str]:
    """The keys that `pgtk evaluate` takes on the command line, or groups where it takes all of theirs.

    source: whether a "run" is evaluated or a "model".
    """
    takes = {key: key.evaluate in ("run", source) for key in KEYS}
    whole = {key.group for key in KEYS} - {key.group for key, taken in takes.items() if not taken}
    names = [key.group if key.group and key.group in whole else key.name for key, taken in takes.items() if taken]
    return [*dict.fromkeys(names), *(["experiment"] if source == "model" else [])]


_TYPES = {
    "int": ("a whole number", is_whole),
    "float": ("a number", is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
    "dict[str, Any]": ("a dictionary", lambda value: isinstance(value, dict)),
    "list[str]": ("a list of texts", lambda value: _is_list_of(str, value)),
    "list[int]": ("a list of whole numbers", lambda value: _is_list_of(int, value)),
}
"""Annotation of a key -> the type in words, and whether a value is of it."""


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def names_of(key: Key) -> tuple[str, ...]:
    """The values of a key that has one of several names; none for other keys."""
    kind = getattr(schema, key.type.partition(" | ")[0], None)
    return tuple(kind) if isinstance(kind, EnumMeta) else ()


def describe(key: Key) -> str:
    """Which values a key takes, in words."""
    kind, _, optional = key.type.partition(" | ")
    words = f"one of {', '.join(names)}" if (names := names_of(key)) else _TYPES[kind][0]
    limits = " from {} to {}".format(*map(text, key.range)) if key.range else ""
    return words + limits + (" or null" if optional else "")


def fits(key: Key, value: Any) -> bool:
    """Whether a value is one that the key takes."""
    kind, _, optional = key.type.partition(" | ")
    if value is None:
        return bool(optional)
    if names := names_of(key):
        return value in names
    return _TYPES[kind][1](value) and (not key.range or key.range[0] <= value <= key.range[1])


def shown(name: str) -> str:
    """A key as it is typed: the group for the key that names its option."""
    group = name.rpartition(".")[0]
    return group if OPTION_KEYS.get(group) == name else name


def in_words(condition: str) -> str:
    """A condition as it is told: `model=huggingface`, `evaluation.every > 0`, `kl other than none`."""
    forms = {"=": "{}={}", ">": "{} > {}", "!=": "{} other than {}"}
    for single in singles(condition):
        name, operator, value = parts(single)
        condition = condition.replace(single, forms[operator].format(shown(name), value))
    return condition
