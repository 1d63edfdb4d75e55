"""The table of all keys, made from the schema, and questions about keys that it answers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal, get_origin, get_type_hints

from pgtoolkit.config.across import CONDITIONS, DEFAULTS
from pgtoolkit.config.defaults import ByCondition, Computed
from pgtoolkit.config.files import leading_comment, option_file
from pgtoolkit.config.schema import OPTIONS, SCHEMAS, Config, default_options
from pgtoolkit.runs.records import plain
from pgtoolkit.system import declared as declared_types
from pgtoolkit.system.conditions import holds, joined_singles, parts, singles, value_of
from pgtoolkit.system.declared import REQUIRED, TYPES, Dictionary, Key, names_of
from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.system.report import Report, is_whole, text


def _declared() -> Iterator[Key]:
    """Yield every key of the schema.

    The attributes that a group declares hold for those of its keys that do not declare them.
    """
    for group in fields(Config):
        of_group = {name: value for name, value in group.metadata.items() if name != "group"}
        if group.name not in OPTIONS:
            yield Key(group.name, "", str(group.type), **of_group)
        for name, schema in SCHEMAS.items():
            if name.partition("/")[0] != group.name:
                continue
            types = get_type_hints(schema)
            for field in fields(schema):
                declared: Dictionary = {**of_group, **field.metadata}
                for named in (f"{group.name}.{field.name}", f"{name}.{field.name}"):
                    declared |= CONDITIONS.get(named, {})
                    if named in DEFAULTS:
                        declared["default"] = DEFAULTS[named]
                if "default_if" in declared:
                    cases = declared.pop("default_if")
                    otherwise: Any = declared["default"]
                    declared["default"] = ByCondition(cases, otherwise)
                yield Key(
                    name=f"{group.name}.{field.name}",
                    schema=name,
                    # The type of a key that names an option is a Literal in the option's class.
                    type="str" if get_origin(types[field.name]) is Literal else str(field.type),
                    names=names_of(types[field.name]),
                    **declared,
                )


KEYS = tuple(_declared())
"""Every key of every option, with its declaration."""

OPTION_KEYS = {key.group: key.name for key in KEYS if key.option}
"""Group -> the key that names its option, for the groups that have such a key."""

OWN_CODE = {key.group: key for key in KEYS if key.stands_for}
"""Group -> the key that a dotted path in the place of the group's options sets."""

_KEYS_BY_NAME = {
    name: [key for key in KEYS if key.name == name] for name in {key.name for key in KEYS}
}


def keys_of(config: object) -> Iterator[Key]:
    """Return the keys of the options that a configuration, see `value_of`, has chosen."""
    return _of_chosen_options(KEYS, _GROUPS_OF_OPTIONS, config)


def _groups_of_options(keys: Sequence[Key]) -> set[str]:
    """Return the groups of those keys that not every option of their group has."""
    return {key.group for key in keys if "/" in key.schema}


_GROUPS_OF_OPTIONS = _groups_of_options(KEYS)


def _of_chosen_options(
    keys: Sequence[Key], groups: Collection[str], config: object
) -> Iterator[Key]:
    """Return those keys whose option the configuration has chosen. groups: see
    `_groups_of_options`."""
    chosen = {
        f"{group}/{option_called(group, value_of(config, OPTION_KEYS[group]))}" for group in groups
    }
    return (key for key in keys if "/" not in key.schema or key.schema in chosen)


def is_own_code(group: str, name: object) -> bool:
    """Return whether a name that stands for an option is the dotted path of the user's own code."""
    is_path = group in OWN_CODE and isinstance(name, str) and is_dotted_path(name)
    return is_path and not str(name).endswith((".yaml", ".yml", ".json", ".jsonl", ".py"))


def option_called(group: str, name: object) -> object:
    """Return the option that a name stands for.

    It is the name itself, or the option for own code if the name is a dotted path.
    """
    return OWN_CODE[group].stands_for if is_own_code(group, name) else name


def key_named(name: str, config: object) -> Key | None:
    """Return the key of this name in a configuration; None where there is none.

    The name of an entry of a free-form key gives that key, and the name of a group gives the key of
    its option.
    """
    name = OPTION_KEYS.get(name, name)
    if name not in _KEYS_BY_NAME:
        name = next((key.name for key in KEYS if key.free and is_inside(name, key.name)), "")
    keys = _KEYS_BY_NAME.get(name, ())
    return next(_of_chosen_options(keys, _groups_of_options(keys), config), None)


def has_effect(name: str, config: object) -> bool:
    """Return whether the condition of a key holds in a configuration, where it has one."""
    key = key_named(name, config)
    return key is None or not key.only_if or holds(key.only_if, config)


def existing_key(name: str, config: object) -> Key:
    """Return the key of this name in a configuration; raises KeyError where there is none."""
    key = key_named(name, config)
    if key is None:
        raise KeyError(name)
    return key


def plain_value(config: object, name: str) -> Any:
    """Return the value of a key in the types that JSON and YAML know."""
    return plain(value_of(config, name))


def is_inside(name: str, place: str) -> bool:
    """Return whether a dotted key is `place`, or lies in it."""
    return f"{name}.".startswith(f"{place}.")


def changes_learning(name: str, config: object) -> bool:
    """Return whether runs that differ in this key of a configuration learn differently.

    A key that is not in the schema, such as one of an older version, may change anything.
    """
    key = key_named(name, config)
    if key is None:
        return True
    return declared(key.learns, config)


def declared(attribute: bool | str, config: object) -> bool:
    """Return whether what a key declares is true of a configuration. attribute: a condition, or a
    truth value."""
    return attribute if isinstance(attribute, bool) else holds(attribute, config)


@functools.cache
def evaluated_keys(source: str) -> tuple[str, ...]:
    """Return the keys that `pgtk evaluate` takes on the command line.

    A group stands for its keys if `pgtk evaluate` takes all of them.
    source: "run" or "model", whichever is evaluated.
    """
    taken = [key for key in KEYS if key.evaluate in ("run", source)]
    groups_with_others = {key.group for key in KEYS if key not in taken}
    names = [
        key.name if not key.group or key.group in groups_with_others else key.group for key in taken
    ]
    if source == "model":
        names.append("experiment")
    return tuple(dict.fromkeys(names))


def values_in_words(key: Key) -> str:
    """Return which values a key takes, in words."""
    kind, _, optional = key.type.partition(" | ")
    words = f"one of {', '.join(key.names)}" if key.names else TYPES[kind][0]
    if key.range:
        words += f" from {text(key.range[0])} to {text(key.range[1])}"
    return f"{words} or null" if optional else words


def has_type(key: Key, value: object) -> bool:
    """Return whether a value is of the type of a key."""
    return declared_types.fits(key.type, key.names, None, value)


def fits(key: Key, value: object) -> bool:
    """Return whether a key takes a value."""
    return declared_types.fits(key.type, key.names, key.range, value)


def shown(name: str) -> str:
    """Return the name under which the user types a key.

    For the key that names the option of a group, it is the group.
    """
    group = name.rpartition(".")[0]
    return group if OPTION_KEYS.get(group) == name else name


def in_words(condition: str) -> str:
    """Return a condition in words, such as `evaluation.every > 0` and `kl other than none`.

    Several values of a key are joined: `kl=k1 or k2`, `kl other than none and k1`.
    """
    words = ""
    before = ("", "")  # the key and the operator of the part before
    for joiner, single in joined_singles(condition):
        name, operator, value = parts(single)
        is_further_value = (name, operator) == before and joiner == _JOINERS.get(operator)
        words += joiner + (value if is_further_value else _single_in_words(name, operator, value))
        before = (name, operator)
    return words


_JOINERS = {"=": " or ", "!=": " and "}
"""Operator -> how several values of a key are joined."""


def _single_in_words(name: str, operator: str, value: str) -> str:
    if (operator, value) == ("!=", "null"):
        return f"a value of {shown(name)}"
    forms = {"=": "{}={}", ">": "{} > {}", "!=": "{} other than {}"}
    return forms[operator].format(shown(name), value)


def default(config: object, key: str, choices: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return the default of a key in this configuration; None for a key without one.

    choices: group -> the option that was chosen by name, since the values do not always show it.
    """
    group, _, leaf = key.rpartition(".")
    declared = option_values(group, _chosen(config, group, choices)).get(leaf)
    if isinstance(declared, Computed):
        return declared.resolve(config)
    return None if declared == REQUIRED else copy.deepcopy(declared)


def help_of(config: object, key: str, choices: Mapping[str, str]) -> str:
    """Return what a key of the chosen option means; empty if there is no such key."""
    group = key.rpartition(".")[0]
    option = _chosen(config, group, choices)
    for candidate in _KEYS_BY_NAME.get(key, ()):
        if _belongs(candidate, option):
            return candidate.help
    return ""


def _belongs(key: Key, option: str | None) -> bool:
    """Return whether an option of the key's group has the key."""
    return "/" not in key.schema or key.schema.partition("/")[2] == option


@functools.cache
def option_values(group: str, option: str | None) -> Dictionary:
    """Return the default of each key of an option, as declared; empty for an option of the user's.

    group: "" for the keys of no group.
    """
    if not group:
        return {key.name: key.default for key in KEYS if not key.schema}
    # The option may be the user's, and the group a free-form key.
    if option not in OPTIONS.get(group, {}):
        return {}
    chosen = OPTIONS[group][option]
    values = {key.leaf: key.default for key in KEYS if key.group == group and _belongs(key, option)}
    if chosen.base:
        values |= option_values(group, chosen.base)
    values |= chosen.changes
    if group in OPTION_KEYS:
        values[OPTION_KEYS[group].rpartition(".")[2]] = option
    return values


def group_help(group: str) -> str:
    """Return what a group of the schema decides."""
    return Config.__dataclass_fields__[group].metadata["group"].help


def with_required(choice: str, but: str = "") -> str:
    """Return an override that chooses an option, with an example for each key of the option that
    has no default; others are returned unchanged. but: such a key that gets a value elsewhere."""
    schema = choice.replace("=", "/")
    required = [key for key in KEYS if key.schema == schema and key.default == REQUIRED]
    examples = [f"{key.name}={key.example or 'VALUE'}" for key in required if key.name != but]
    return " ".join([choice, *examples])


def option_help(group: str, name: str) -> str:
    """Return what an option is, in sentences.

    For an experiment and for an option of the user's, it is the comment at the top of its file.
    """
    if name in OPTIONS.get(group, {}):
        return OPTIONS[group][name].help
    return leading_comment(option_file(group, name))


def _chosen(config: object, group: str, choices: Mapping[str, str]) -> str | None:
    """Return the chosen option of a group; None for a group that is not in the schema.

    Where the user has chosen an option file of their own, it is the option that its values name, or
    the default.
    """
    if group not in OPTIONS:
        return None
    names = [choices.get(group)]
    if group in OPTION_KEYS:
        names.append(plain_value(config, OPTION_KEYS[group]))
    names.append(default_options()[group])
    return next(name for name in names if isinstance(name, str) and name in OPTIONS[group])


def switched_off(
    config: Config, typed: Collection[str], choices: Mapping[str, str]
) -> dict[str, object]:
    """Return the default of each key that a file has set, and that has no effect beside a key or an
    option that was typed.

    typed: the keys, and the groups whose option was chosen. choices: see `default`.
    """
    values = {}
    has = functools.cache(functools.partial(holds, config=config))  # several keys share one
    for key in keys_of(config):
        if key.option or not key.only_if or has(key.only_if):
            continue
        if any(is_inside(name, key.name) for name in typed):
            continue
        failing = {parts(single)[0] for single in singles(key.only_if) if not holds(single, config)}
        of_choices = default(config, key.name, choices)
        is_set = value_of(config, key.name) not in (of_choices, None)
        if is_set and {*failing, *map(shown, failing)} & {*typed}:
            values[key.name] = of_choices
    return values


def ignored(c: Config, report: Report, group: str = "") -> None:
    """Refuse values that have no effect in this configuration and are neither the default nor null.

    group: the only group to be checked; empty for all.
    """
    # The keys of a refused option need no refusal of their own.
    groups_refused: set[str] = set()
    has = functools.cache(functools.partial(holds, config=c))  # several keys share a condition
    for key in keys_of(c):
        is_checked = group in ("", key.group) and key.group not in groups_refused
        if not is_checked or not key.only_if or has(key.only_if):
            continue
        default_value = default_options()[key.group] if key.option else report.default_of(key.name)
        if value_of(c, key.name) in (default_value, None):
            continue
        if key.option:
            groups_refused.add(key.group)
        _refuse_ignored(c, report, key, default_value)


_MOST_LISTED = 64
"""The most numbers that a remedy has one by one."""


def remedies_of(key: Key, value: object) -> list[str]:
    """Return what to type for each condition on a key; empty where that is the condition itself.

    [1..VALUE] in it are as many numbers as the value says, such as the GPUs of a server.
    """
    use = key.use
    if not use:
        return []
    if "[1..VALUE]" in use:
        count = int(str(value)) if is_whole(value) and fits(key, value) else 1
        numbers = text([*range(1, count + 1)]) if count <= _MOST_LISTED else f"[1,...,{count}]"
        use = use.replace("[1..VALUE]", numbers)
    return use.split(" and ")


def _refuse_ignored(c: Config, report: Report, key: Key, default_value: object) -> None:
    """Refuse a value whose condition does not hold.

    The refusal names the first part of the condition that fails.
    """
    conditions = singles(key.only_if)
    place = next(i for i, single in enumerate(conditions) if not holds(single, c))
    failing = conditions[place]
    decisive = parts(failing)[0]
    got = text(value_of(c, decisive))
    remedies = remedies_of(key, value_of(c, key.name))
    use = with_required(remedies[place] if place < len(remedies) else in_words(failing))
    if key.stands_for:
        use = f"{key.group}={value_of(c, key.name)}"
    name = shown(key.name)
    if key.default is None and not key.option:
        default_value = None  # an option's own default may be what the next rule refuses
    report.refuse(
        setting=f"{name}={text(value_of(c, key.name))}",
        needs=in_words(key.only_if if " or " in key.only_if else failing),
        got=got,
        reason=key.why or f"It has no effect while {shown(decisive)}={got}.",
        use=f"{use} or {name}={text(default_value)}",
    )
