"""The rules that follow from what each key declares: its type, the range of a number, that no value is ignored."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from pgtoolkit.config.defaults import comment, default
from pgtoolkit.config.key import Key, holds, parts, singles, value_of
from pgtoolkit.config.keys import in_words, keys_of, shown
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report, is_number, is_whole, text


def values(config: DictConfig, resolved: Config, report: Report) -> None:
    """Refuse each number outside of its range and each value that should be a list or dictionary and is not;
    the default takes its place for the rules that follow.

    config: as composed; resolved: the same as an object, which is changed.
    """
    for key in keys_of(resolved):
        value = value_of(resolved, key.name)
        if within(key, value) if key.range else _is_container(key.type, value):
            continue
        usual, reason = default(config, key.name), comment(config, key.name)
        if key.range:
            usual = usual if within(key, usual) else key.range[0]
            if value is not None:  # else `resolve` has said why
                report.refuse_value(key.name, value, describe(key), reason or "Every number has a range.", usual)
        else:
            needs = "a dictionary" if key.free else "a list of texts"
            needs = "a list of whole numbers" if "int" in key.type else needs
            report.refuse(key.name, needs, "something else", reason, f"{key.name}={text(usual)}")
        setattr(value_of(resolved, key.group) if key.group else resolved, key.leaf, usual)


def _is_container(annotated: str, value: Any) -> bool:
    """Whether a value is the list or dictionary that its annotation says; True for other types."""
    if annotated.startswith("dict"):
        return isinstance(value, dict)
    if not annotated.startswith("list") or value is None:
        return True
    kind = int if "int" in annotated else str
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def within(key: Key, value: Any) -> bool:
    """Whether a value is one that the number of this key may have."""
    if value is None:
        return key.type.endswith("None")
    least, most = key.range
    is_right = is_whole if key.type.startswith("int") else is_number
    return is_right(value) and least <= value <= most


def describe(key: Key) -> str:
    """The range in words."""
    least, most = key.range
    kind = "a whole number" if key.type.startswith("int") else "a finite number"
    return f"{kind} from {text(least)} to {text(most)}"


def ignored(c: Config, report: Report, group: str = "") -> None:
    """Refuse each value without effect, unless it is the usual one, which is none anywhere; of all groups, or one."""
    for key in keys_of(c):
        if not key.only_if or holds(key.only_if, c) or group not in ("", key.group):
            continue
        value, usual = value_of(c, key.name), report.usual(key.name)
        if value != usual:
            conditions, ways = singles(key.only_if), key.use.split(" and ") if key.use else []
            number = next(i for i, single in enumerate(conditions) if not holds(single, c))
            lacking, decides = conditions[number], parts(conditions[number])[0]
            needs, got = in_words(key.only_if if " or " in key.only_if else lacking), text(value_of(c, decides))
            reason = key.why or f"It has no effect while {shown(decides)}={got}."
            use = ways[number] if number < len(ways) else in_words(lacking)
            report.refuse(f"{key.name}={text(value)}", needs, got, reason, f"{use} or {key.name}={text(usual)}")
