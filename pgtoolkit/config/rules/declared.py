"""The rules that follow from what each key declares: its type, the range of a number, that no value is ignored."""

from __future__ import annotations

from omegaconf import DictConfig

from pgtoolkit.config.defaults import comment, default
from pgtoolkit.config.key import holds, parts, singles, value_of
from pgtoolkit.config.keys import describe, fits, in_words, keys_of, shown
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report, text


def values(config: DictConfig, resolved: Config, report: Report) -> None:
    """Refuse each value that its key does not take; the default takes its place for the rules that follow.

    config: as composed; resolved: the same as an object, which is changed.
    """
    for key in keys_of(resolved):
        value = value_of(resolved, key.name)
        if fits(key, value):
            continue
        usual = default(config, key.name)
        if key.range and not fits(key, usual):
            usual = key.range[0]
        if value is not None:  # else `resolve` has said why
            reason = comment(config, key.name) or "Every key has a type."
            report.refuse_value(key.name, value, describe(key), reason, usual)
        setattr(value_of(resolved, key.group) if key.group else resolved, key.leaf, usual)


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
