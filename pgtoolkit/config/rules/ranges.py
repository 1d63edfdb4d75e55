"""The rule on every number: it lies in the range that the schema gives its key, and rules between keys rely on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig

from pgtoolkit.config.defaults import comment, default
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.system.report import Report, is_number, is_whole, text


def ranges(config: DictConfig, plain: Any, report: Report) -> None:
    """Refuse each number outside of its range, and put the default in its place for the rules that follow.

    config: as composed; plain: the same, resolved, which is changed.
    """
    for key, place, field in _numbers(plain):
        value = getattr(place, field.name, None)
        if within(field, value):
            continue
        mend = default(config, key)
        mend = mend if within(field, mend) else field.metadata["range"][0]
        if value is not None:  # else `resolve` has said why
            report.refuse_value(key, value, describe(field), comment(config, key) or "Every number has a range.", mend)
        setattr(place, field.name, mend)


def within(field: Any, value: Any) -> bool:
    """Whether a value is one that the number of this field may have."""
    if value is None:
        return field.type.endswith("None")
    least, most = field.metadata["range"]
    is_right = is_whole if field.type.startswith("int") else is_number
    return is_right(value) and least <= value <= most


def describe(field: Any) -> str:
    """The range in words."""
    least, most = field.metadata["range"]
    kind = "a whole number" if field.type.startswith("int") else "a finite number"
    return f"{kind} from {text(least)} to {text(most)}"


def _numbers(plain: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, the object that holds it, its field) of each number in the schema of the chosen options."""
    for field in fields(Config):
        if "range" in field.metadata:
            yield field.name, plain, field
    for schema, types in SCHEMAS.items():
        group, _, option = schema.partition("/")
        place = getattr(plain, group)
        if option in ("", getattr(place, "name", "")):
            yield from ((f"{group}.{field.name}", place, field) for field in fields(types) if "range" in field.metadata)
