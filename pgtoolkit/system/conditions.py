"""Conditions that name keys, and the values of keys in a configuration."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pgtoolkit.system.report import text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Values = TypeVar("Values", bound="DataclassInstance")
"""A configuration that is an object of dataclasses."""


def holds(condition: str, config: object) -> bool:
    """Return whether a condition holds in a configuration, see `value_of`.

    A condition is `KEY=VALUE`, `KEY!=VALUE` or `KEY>NUMBER`, or several of these joined by ` and `
    and ` or `, of which ` and ` binds more tightly.
    """
    return any(
        all(_holds(single, config) for single in alternative)
        for alternative in _alternatives(condition)
    )


@functools.cache
def _alternatives(condition: str) -> list[list[str]]:
    """Return the parts that ` or ` joins, each as those that ` and ` joins."""
    return [alternative.split(" and ") for alternative in condition.split(" or ")]


def singles(condition: str) -> list[str]:
    """Return the parts of a condition that name one key each."""
    return [single for _, single in joined_singles(condition)]


def joined_singles(condition: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a condition that name one key each, with the word that joins them to those
    before: ` and ` or ` or `, and nothing for the first."""
    words = ["", *re.split("( and | or )", condition)]
    yield from zip(words[::2], words[1::2], strict=True)


@functools.cache
def parts(condition: str) -> tuple[str, str, str]:
    """Return (key, operator, value) of a condition that names one key."""
    match = re.fullmatch(r"([\w.]+)(!=|=|>)(.*)", condition)
    if match is None:
        raise ValueError(f"{condition!r} is not a condition")
    return match[1], match[2], match[3]


def value_of(config: object, name: str) -> Any:
    """Return the value of a key or of a group in a configuration; None where there is none.

    config: an object, nested dictionaries, or a single dictionary by dotted keys.
    """
    # Other mappings are nodes of OmegaConf, which takes long to say that it has no such key.
    is_flat = isinstance(config, dict | MappingProxyType) and name in config
    for part in [name] if is_flat else name.split("."):
        is_mapping = _is_mapping(type(config))
        config = config.get(part) if is_mapping else getattr(config, part, None)  # type: ignore[attr-defined]
    return config


@functools.cache
def _is_mapping(kind: type) -> bool:
    """Return whether objects of a type have their values by `get`, asked once for each type."""
    return issubclass(kind, Mapping)


def with_values(config: Values, values: Mapping[str, object]) -> Values:
    """Return a copy of a configuration in which some keys or groups have other values.

    values: by the name of a key or of a group.
    """
    leaves_by_group: dict[str, dict[str, object]] = {}
    groups: dict[str, object] = {}
    for name, value in values.items():
        group_name, _, leaf = name.partition(".")
        if leaf:
            leaves_by_group.setdefault(group_name, {})[leaf] = value
        else:
            groups[name] = value
    config = replace(config, **groups)
    changed = {}
    for name, leaves in leaves_by_group.items():
        before = getattr(config, name)
        changed[name] = type(before).unchecked({**vars(before), **leaves})
    return replace(config, **changed)


def _holds(single: str, config: object) -> bool:
    """Return whether a condition on a single key holds."""
    name, operator, expected = parts(single)
    value = value_of(config, name)
    if operator == ">":
        return isinstance(value, int | float) and value > float(expected)
    return (text(value) == expected) is (operator == "=")
