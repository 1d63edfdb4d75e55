"""Every key with its meaning, range and defaults in words, for docs/keys.md and `pgtk explain`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config.defaults import Computed
from pgtoolkit.config.files import options, own_folder
from pgtoolkit.config.keys import (
    KEYS,
    OWN_CODE,
    group_help,
    in_words,
    option_values,
    values_in_words,
)
from pgtoolkit.config.schema import default_options
from pgtoolkit.system.declared import REQUIRED, Key
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.report import text


@dataclass
class Entry:
    """A key, with those options of its group for which everything about it is the same but the
    default.

    meaning: see `Key.help`. defaults: by option, in words.
    """

    key: Key
    meaning: str
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> str:
        """The options of its group that have it; empty if all do."""
        if set(self.defaults) >= {*options().get(self.key.group, [""])}:
            return ""
        return ", ".join(self.defaults)

    def description(self, brief: bool = False) -> dict[str, str]:
        """Return the type with its range, the default, and the meaning, as they are printed.

        brief: end with marks in the place of sentences.
        """
        key = self.key
        if key.option:
            kind = f"one of {', '.join(options()[key.group])}"
            if key.group in OWN_CODE:
                kind += f", or the dotted path of a {kind_of(key.group)} of your own"
            default = default_options()[key.group]
        else:
            kind = values_in_words(key)
            default = self._default()
        conditions = (mark if brief else sentence for mark, sentence in self._conditions())
        meaning = " ".join([self.meaning, *conditions])
        return {"type": kind, "default": default, "meaning": meaning}

    def _default(self) -> str:
        """Return the default, with the options that have it where they have different ones."""
        options_by_value: dict[str, list[str]] = {}
        for option, value in self.defaults.items():
            options_by_value.setdefault(value, []).append(option)
        if len(options_by_value) == 1:
            return next(iter(options_by_value))
        return ", ".join(
            f"{value} ({', '.join(names)})" for value, names in options_by_value.items()
        )

    def _conditions(self) -> Iterator[tuple[str, str]]:
        """Yield what the key needs, and what it decides besides its meaning: (a mark, the same as a
        sentence)."""
        key = self.key
        if key.only_if:
            needs = in_words(key.only_if)
            sentence = f"It needs {needs}; otherwise any value but the default is refused."
            yield f"Needs {needs}.", sentence
        if key.fixed:
            condition = f", if {in_words(key.fixed_if)}" if key.fixed_if else ""
            yield f"*Kept*{condition}.", f"`pgtk resume` keeps it{condition}: {key.fixed}."
        if key.learns is not True:
            exception = "" if key.learns is False else f", except with {in_words(key.learns)}"
            sentence = (
                f"It does not change what is learned{exception}: a finished job of a sweep stays "
                "finished."
            )
            yield f"*Not learned*{exception}.", sentence
        if key.code == "function":
            sentence = (
                "It may name code of your own, which is imported when a run starts: see "
                "docs/configuration.md."
            )
            yield "*Own code*.", sentence
        if key.code == "command":
            sentence = (
                "It is run as a command: `pgtk resume` takes it only if it is typed on the command "
                "line."
            )
            yield "*Command*.", sentence
        if key.reads or key.writes:
            sentence = "A relative path is seen from the directory in which the run starts."
            yield "*Path*.", sentence


def entries() -> list[Entry]:
    """Return every key in the order of the schema, once for each meaning."""
    return _entries(own_folder())


@functools.cache
def _entries(_folder: Path | None) -> list[Entry]:
    by_meaning: dict[tuple, Entry] = {}
    for key in KEYS:
        option_of_key = key.schema.partition("/")[2]
        default = default_options().get(key.group)
        others = [name for name in options().get(key.group, ()) if name != default]
        for option in [option_of_key] if option_of_key else [default, *others]:
            meaning = group_help(key.group) if key.option else key.help
            alike = (key.name, key.type, key.range, meaning, key.only_if, key.fixed)
            entry = by_meaning.setdefault(alike, Entry(key, meaning))
            value = option_values(key.group, option).get(key.leaf)
            entry.defaults[option or ""] = _default_in_words(value)
    return list(by_meaning.values())


def _default_in_words(value: object) -> str:
    if value == REQUIRED:
        return "none"
    return str(value) if isinstance(value, dict | Computed) else text(value)
