"""What is known of every key, from the schema and the files in conf/: for docs/keys.md, and for `pgtk explain`.

`python -m pgtoolkit.config.key_reference` prints docs/keys.md.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import EnumMeta
from typing import Any

from pgtoolkit.config import schema
from pgtoolkit.config.defaults import comment_of, group_comment, values_of
from pgtoolkit.config.files import default_options, options
from pgtoolkit.config.key import Key
from pgtoolkit.config.keys import KEYS, in_words
from pgtoolkit.system.report import text

_TYPES = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
_TYPES |= {"dict[str, Any]": "dictionary", "list[str]": "list of texts", "list[int]": "list of whole numbers"}


@dataclass
class Entry:
    """A key with the options of its group in which all that is said of it is the same. defaults: by option."""

    key: Key
    says: str
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As it is typed: the group, where the key names its option."""
        return self.key.group if self.key.option else self.key.name

    @property
    def type(self) -> str:
        """Type and range in words."""
        if self.key.option:
            return " or ".join(options()[self.key.group])
        kind, _, optional = self.key.type.partition(" | ")
        enum = getattr(schema, kind, None)
        words = " or ".join(enum) if isinstance(enum, EnumMeta) else _TYPES.get(kind, kind)
        if self.key.range is not None:
            least, most = self.key.range
            words += f" from {least:.15g} to {most:.15g}"
        return words + (" or null" if optional else "")

    @property
    def options(self) -> list[str]:
        """The options of its group that have it; empty where all do."""
        return [] if set(self.defaults) >= {*options().get(self.key.group, [""])} else [*self.defaults]

    @property
    def default(self) -> str:
        """The default; where options differ, of each."""
        if self.key.option:
            return default_options()[self.key.group]
        if len(set(self.defaults.values())) == 1:
            return next(iter(self.defaults.values()))
        by_value: dict[str, list[str]] = {}
        for option, value in self.defaults.items():
            by_value.setdefault(value, []).append(option)
        return ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())

    @property
    def conditions(self) -> Iterator[str]:
        """What it needs, and what it decides besides its own meaning; whole sentences."""
        key = self.key
        if key.only_if:
            yield f"It needs {in_words(key.only_if)}; without that any value but the default is refused."
        if key.fixed:
            yield f"`pgtk resume` keeps it{f', where {in_words(key.fixed_if)}' if key.fixed_if else ''}: {key.fixed}."
        if key.learns is not True:
            where = "" if key.learns is False else f", unless {in_words(key.learns)}"
            yield f"It does not change what is learned{where}: a finished job of a sweep stays finished."
        if key.code:
            yield "It may name code to be run, so it counts only where it is typed on the command line."
        if key.reads or key.writes:
            yield "A relative path is seen from the directory in which the run starts."


@functools.cache
def entries() -> list[Entry]:
    """Every key in the order of the schema, once for each meaning."""
    found: dict[tuple, Entry] = {}
    for key in KEYS:
        option = key.schema.partition("/")[2]
        usual = default_options().get(key.group)
        others = [name for name in options().get(key.group, ()) if name != usual]
        for name in [option] if option else [usual, *others]:
            says = group_comment(key.group) if key.option else comment_of(key.group, name, key.leaf)
            same = (key.name, key.type, key.range, says, key.only_if, key.fixed)
            entry = found.setdefault(same, Entry(key, says))
            entry.defaults[name or ""] = _default(values_of(key.group, name).get(key.leaf))
    return list(found.values())


def _default(value: Any) -> str:
    """A value as it stands in conf/, in words where it depends on other keys."""
    if value == "???":
        return "none"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    said = text(value)
    if chosen := re.fullmatch(r"\$\{pgtk\.by_weights:([^,]+),([^,}]+)(?:,([^}]+))?\}", said):
        random, trained, adapters = chosen.groups()
        return f"{random}, with model=huggingface {trained}" + (f" and with LoRA {adapters}" if adapters else "")
    return re.sub(r"\$\{([\w.]+)\}", r"\1", said)


def page() -> str:
    """docs/keys.md."""
    lines = [
        "# Keys",
        "",
        "Every key of the configuration: its type and range (both ends included), its default, and what it means.",
        "`pgtk explain KEY` prints the same. This page is made by `python -m pgtoolkit.config.key_reference` from the",
        "schema (`pgtoolkit/config/schema.py`) and the comments in [`conf/`](../conf); a test compares it.",
    ]
    group = None
    for entry in entries():
        if entry.key.group != group:
            group = entry.key.group
            lines += ["", f"## {group or 'seed'}", ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        of = f" ({', '.join(entry.options)})" if entry.options else ""
        cells = [f"`{entry.name}`{of}", entry.type, entry.default, " ".join([entry.says, *entry.conditions])]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
