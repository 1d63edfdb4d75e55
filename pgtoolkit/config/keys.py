"""The table of all keys, as the schema declares them, and what follows from it for a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from pgtoolkit.config.key import Key, holds, parts, singles, value_of
from pgtoolkit.config.schema import SCHEMAS, Config


def _declared() -> Iterator[Key]:
    for group in fields(Config):
        schemas = {name: schema for name, schema in SCHEMAS.items() if name.partition("/")[0] == group.name}
        if not schemas:
            yield Key(group.name, "", group.type, **group.metadata)
        for name, schema in schemas.items():
            for field in fields(schema):
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
