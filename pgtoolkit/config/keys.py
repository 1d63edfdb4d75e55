"""The table of all keys: what the schema declares and conf/ says of each, and what follows for a configuration."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import EnumMeta
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.files import config_directory, default_options, options
from pgtoolkit.config.key import Key, holds, parts, singles, value_of
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.system.report import Report, is_number, is_whole, text


def _declared() -> Iterator[Key]:
    for group in fields(Config):
        schemas = {name: shape for name, shape in SCHEMAS.items() if name.partition("/")[0] == group.name}
        if not schemas:
            yield Key(group.name, "", group.type, **group.metadata)
        for name, shape in schemas.items():
            kinds = get_type_hints(shape)
            for field in fields(shape):
                kind, declared = kinds[field.name], {**group.metadata, **field.metadata}
                names = next((tuple(one) for one in (kind, *get_args(kind)) if isinstance(one, EnumMeta)), ())
                yield Key(f"{group.name}.{field.name}", name, field.type, names, **declared)


KEYS = tuple(_declared())
"""Every key of every option, with all that it declares."""

OPTION_KEYS = {key.group: key.name for key in KEYS if key.option}
"""Group -> the key that names its option, of those groups that have one."""
_NAMED = {name: [key for key in KEYS if key.name == name] for name in {key.name for key in KEYS}}


def keys_of(config: object) -> Iterator[Key]:
    """The keys of the options that a configuration has chosen; config: see `value_of`."""
    return _of_chosen(KEYS, config)


def _of_chosen(keys: Sequence[Key], config: object) -> Iterator[Key]:
    groups = {key.group for key in keys if "/" in key.schema}
    chosen = {f"{group}/{value_of(config, OPTION_KEYS[group])}" for group in groups}
    return (key for key in keys if "/" not in key.schema or key.schema in chosen)


def key_named(name: str, config: object) -> Key | None:
    """The key of this name in a configuration, or the free-form one that it lies in; of a group, the option's.

    None where there is none.
    """
    name = OPTION_KEYS.get(name, name)
    if name not in _NAMED:
        name = next((key.name for key in KEYS if key.free and is_inside(name, key.name)), "")
    return next(_of_chosen(_NAMED.get(name, ()), config), None)


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
    "AutoOrBool": ("auto, true or false", lambda value: value == "auto" or isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
    "dict[str, Any]": ("a dictionary", lambda value: isinstance(value, dict)),
    "list[str]": ("a list of texts", lambda value: _is_list_of(str, value)),
    "list[int]": ("a list of whole numbers", lambda value: _is_list_of(int, value)),
}
"""Annotation of a key -> the type in words, and whether a value is of it."""


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def describe(key: Key) -> str:
    """Which values a key takes, in words."""
    kind, _, optional = key.type.partition(" | ")
    words = f"one of {', '.join(key.names)}" if key.names else _TYPES[kind][0]
    limits = " from {} to {}".format(*map(text, key.range)) if key.range else ""
    return words + limits + (" or null" if optional else "")


def fits(key: Key, value: Any) -> bool:
    """Whether a value is one that the key takes."""
    kind, _, optional = key.type.partition(" | ")
    if value is None:
        return bool(optional)
    if key.names:
        return value in key.names
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


def default(config: DictConfig, key: str) -> Any:
    """The value that the chosen option gives the key, as it resolves in this configuration; None without one."""
    value, leaf = written(config, key), key.rpartition(".")[2]
    if not is_computed(value):
        return copy.deepcopy(value)
    values = OmegaConf.create({leaf: value})
    values._set_parent(config)  # for interpolations
    try:
        return values.get(leaf)
    except OmegaConfBaseException:
        return None


def written(config: DictConfig, key: str) -> Any:
    """The same as it stands in the file."""
    group, _, leaf = key.rpartition(".")
    return values_of(group, _chosen(config, group)).get(leaf)


def is_computed(value: Any) -> bool:
    """Whether a value that stands in a file is made of others', or is still to be given."""
    return re.search(r"\$\{|\?\?\?", str(value)) is not None


def comment(config: DictConfig, key: str) -> str:
    """What stands above the key in the file of the chosen option; empty without one."""
    group, _, leaf = key.rpartition(".")
    return comment_of(group, _chosen(config, group), leaf)


@functools.cache
def values_of(group: str, option: str | None) -> dict[str, Any]:
    """The values of an option, not resolved, those of the options that it changes included; group "": of no group."""
    values: dict[str, Any] = {}
    for file in reversed(_files(group, option)):
        values |= OmegaConf.to_container(OmegaConf.load(file))
    return values


def comment_of(group: str, option: str | None, leaf: str) -> str:
    """What stands above a key of an option, on one line."""
    for file in _files(group, option):
        above = re.search(rf"((?:^#.*\n)+){leaf}:", file.read_text(), re.MULTILINE)
        if above:
            return " ".join(line.lstrip("# ") for line in above[1].splitlines())
    return ""


def group_comment(group: str) -> str:
    """What stands above a group in conf/config.yaml, without the list of its options, as a sentence."""
    above = re.search(rf"((?:^  #.*\n)+)  - {group}: ", (config_directory() / "config.yaml").read_text(), re.MULTILINE)
    says = " ".join(line.lstrip("# ") for line in above[1].splitlines()).rpartition(": ")[0]
    return f"{says[:1].upper()}{says[1:]}."


def head_of(group: str, name: str) -> str:
    """What stands at the top of an option's file, without the command that it may begin with."""
    above = re.match(r"(?:#.*\n)*", (config_directory() / group / f"{name}.yaml").read_text())[0]
    lines = [line.lstrip("# ") for line in above.splitlines()]
    return " ".join(line for line in lines if not line.startswith(("@package", "pgtk ")))


@functools.cache
def _files(group: str, option: str | None) -> list[Path]:
    """The file of an option, then those of the options that it changes; none for an option that is not ours."""
    if not group:
        return [config_directory() / "config.yaml"]
    file = config_directory() / group / f"{option}.yaml"
    if not file.is_file():
        return []
    bases = [name for name in OmegaConf.load(file).get("defaults", []) if not name.startswith(("schema", "_self_"))]
    return [file, *(base for name in bases for base in _files(group, name))]


def _chosen(config: DictConfig, group: str) -> str | None:
    """The chosen option; where it is not ours, the one that the values name, or the default."""
    chosen = OmegaConf.select(config, f"hydra.runtime.choices.{group}") if group else None
    nodes = config._get_node(group) if group in config else None
    named = [nodes._get_node(name)._value() for name in nodes] if isinstance(nodes, DictConfig) else []
    ours = options().get(group, [])
    return next((name for name in (chosen, *named, default_options().get(group)) if name in ours), None)


def ignored(c: Config, report: Report, group: str = "") -> None:
    """Refuse each value without effect but the usual one, which is none anywhere, and null; of all groups, or one."""
    refused = set()  # options, whose keys come with them
    for key in keys_of(c):
        if not key.only_if or holds(key.only_if, c) or group not in ("", key.group) or key.group in refused:
            continue
        value, name = value_of(c, key.name), shown(key.name)
        usual = default_options()[key.group] if key.option else report.usual(key.name)
        if value not in (usual, None):
            refused |= {key.group} if key.option else set()
            conditions, ways = singles(key.only_if), key.use.split(" and ") if key.use else []
            number = next(i for i, single in enumerate(conditions) if not holds(single, c))
            lacking, decides = conditions[number], parts(conditions[number])[0]
            needs, got = in_words(key.only_if if " or " in key.only_if else lacking), text(value_of(c, decides))
            reason = key.why or f"It has no effect while {shown(decides)}={got}."
            use = ways[number] if number < len(ways) else in_words(lacking)
            report.refuse(f"{name}={text(value)}", needs, got, reason, f"{use} or {name}={text(usual)}")
