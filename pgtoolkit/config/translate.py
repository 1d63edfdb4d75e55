"""`pgtk translate FILE`: a configuration of TRL or verl as a command here, by their tables.

Only what trl.yaml and verl.yaml know goes into the command, and what `pgtk check` accepts. All else
that the file sets to another value than their default is listed with its reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pgtoolkit.config.compose import compose
from pgtoolkit.config.elsewhere import OVERRIDE, Theirs
from pgtoolkit.config.formulas import evaluate
from pgtoolkit.config.keys import default, key_named
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.translate_file import TheirConfig, Unread, read
from pgtoolkit.config.validate import validated
from pgtoolkit.system.report import text

_FORMULA = re.compile(r"\{([^}]*)\}")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.]+)(?:,\s*(.*))?\}", re.S)

Typed = dict[str, tuple[Any, Theirs | None]]
"""Our key -> its value, and the row that it follows from."""


def translate(path: Path, processes: int | None) -> str:
    """Return the page on a file of TRL or verl. processes: how many train; None for as many as the
    file says."""
    translation = Translation(read(path), processes)
    translation.check()
    return "\n".join(translation.page(path))


class Translation:
    """What a configuration of theirs is here.

    typed: what the command has. left: (key with its value, why it has no equal, its row if other
    values have one). differing: what is not quite the same. lacking: what this machine lacks.
    """

    def __init__(self, theirs: TheirConfig, processes: int | None = None):
        self.theirs = theirs
        self.left: list[tuple[str, str, Theirs | None]] = []
        self.differing: list[str] = []
        self.lacking: list[str] = []
        self._table = theirs.table
        self._words = theirs.table.content["words"]
        self._processes = processes or theirs.processes or 1
        if processes is None and theirs.processes is None and "processes" in str(self._words):
            theirs.assumed.append("1 process trains: --processes N says another number")
        self._first = self._overrides(self._table.content["first"])
        self.typed = dict(self._first)
        for row in self._table.rows.values():
            if row.cases:
                self._translate(row)
        for name in theirs.values:
            row = self._table.row(name)
            if row is not None and (row.name != name or not (row.cases or row.see)):
                self._leave(name, row.reason or f"it has no equal beside that of {row.name}")

    def value(self, name: str) -> Any:
        """Return the value of a key, of a word of the table, or of the number of processes."""
        if name == "processes":
            return self._processes
        if name in self._words:
            return self._evaluate(self._words[name])
        first, _, rest = name.partition(".")
        if first in self._words:
            name = f"{self._words[first]}.{rest}"
        value = self._resolved(self._as_written(name), name)
        if isinstance(value, Unread):
            raise ValueError(f"the value of {name} is made when their program runs")
        return value

    def _as_written(self, name: str) -> Any:
        return self.theirs.values.get(name, self._default(name))

    def _default(self, name: str) -> Any:
        return self._table.rows[name].default if name in self._table.rows else None

    def _resolved(self, value: Any, name: str) -> Any:
        """Return the value that an interpolation in verl's files stands for."""
        match = _INTERPOLATION.fullmatch(value) if type(value) is str else None
        if match is None:
            return value
        section = name.rpartition(".")[0] if match[1].startswith(".") else ""
        other = f"{section}{match[1]}"
        if other in self.theirs.values or other in self._table.rows:
            return self._resolved(self._as_written(other), other)
        return {"null": None, "false": False, "False": False}.get(match[2], match[2])

    def _evaluate(self, formula: str) -> Any:
        return evaluate(formula, self.value, given=lambda name: name in self.theirs.values)

    def _translate(self, row: Theirs) -> None:
        """Find what is to be typed for a key, whether the file sets it or not."""
        try:
            if row.acts and not self._evaluate(row.acts):
                self._leave(row.name, row.reason or "it does nothing beside the other keys")
                return
            typed = self._case(row)
            if typed is None:
                raise ValueError(row.reason)
            self.typed |= self._overrides(typed, row)
            for condition, sentence in row.differs.items():
                if self._evaluate(condition):
                    self.differing.append(f"{self._shown(row.name)}: {sentence}")
        except (TypeError, ValueError, ZeroDivisionError) as error:
            self._leave_row(row, str(error))

    def _case(self, row: Theirs) -> str | None:
        """Return what is to be typed for a key; None where its value has no equal."""
        for condition, here in row.cases:
            if not condition or self._evaluate(condition):
                typed = here if isinstance(here, str) else here.get(text(self.value(row.name)))
                if typed is not None:
                    return typed
        return None

    def _overrides(self, typed: str, row: Theirs | None = None) -> Typed:
        """Return what is to be typed; a key alone takes the value of the row's."""
        alone = f"{{{row.name}}}" if row else ""
        return {key: (self._filled(value or alone), row) for key, value in OVERRIDE.findall(typed)}

    def _filled(self, value: str) -> Any:
        """Return a value with those of the formulas in it."""
        formula = _FORMULA.fullmatch(value)
        if formula is not None:
            return self._evaluate(formula[1])
        return _FORMULA.sub(lambda found: text(self._evaluate(found[1])), value)

    def _shown(self, name: str) -> str:
        by_default = "" if name in self.theirs.values else " (their default)"
        return f"{name}={text(self._as_written(name))}{by_default}"

    def _leave(self, name: str, reason: str) -> None:
        """List a key as one without an equal, unless it has their default."""
        values = (self._as_written(name), self._default(name))
        written, theirs = (text(self._resolved(value, name)) for value in values)
        if written != theirs:
            self.left.append((self._shown(name), reason, None))

    def _leave_row(self, row: Theirs, reason: str) -> None:
        """List a key that has equals here as one whose value has none, also where it is their
        default: the keys that are set, of it and of those that its row is about."""
        about = [name for name, other in self._table.rows.items() if other.see == row.name]
        names = [name for name in (row.name, *about) if name in self.theirs.values] or [row.name]
        self.left += [(self._shown(name), reason, row) for name in names]

    def check(self) -> None:
        """Take out of the command what is our default as well, and what `pgtk check` refuses."""
        self._compose()
        for key, (value, row) in [*self.typed.items()]:
            if row is not None and row.name not in self.theirs.values:
                known = key_named(key, self._composed.config)
                if known and (known.learns is False or self._ours(key) == text(value)):
                    del self.typed[key]
        problems = self._compose()
        while problems:
            setting = problems[0].partition(" needs ")[0]
            rows = {key: row for key, (_, row) in self.typed.items() if row and key in problems[0]}
            key = max(rows, key=lambda key: (key in setting, len(key)))
            value, _ = self.typed.pop(key)
            self.typed |= {key: self._first[key]} if key in self._first else {}
            self._leave_row(rows[key], f"{key}={text(value)} is refused here: {problems[0]}")
            problems = self._compose()

    def _compose(self) -> list[str]:
        """Compose what is typed; return the problems with it, beside those of this machine."""
        self._composed = compose(_overrides_of(self.typed))
        _, report = validated(self._composed)
        self.lacking = [problem for problem in report.lacking if "=PROMPTS" not in problem]
        return [problem for problem in report.problems if problem not in report.lacking]

    def _ours(self, key: str) -> str:
        """Return our default of a key, beside the others that are typed."""
        if key in default_options():
            return default_options()[key]
        return text(default(self._composed.config, key, self._composed.choices))

    def _with_instead(self, reason: str, row: Theirs | None) -> str:
        """Return a reason with what the command has instead."""
        keys = [
            key for key in dict.fromkeys(row.typed_keys if row else ()) if key not in self.typed
        ]
        keys = [key for key in keys if key_named(key, self._composed.config) is not None]
        keys = [key for key in keys if key in default_options()] or keys
        instead = [f"{key}={self._ours(key)}" for key in keys]
        return f"{reason}; the command has {' '.join(instead)}" if instead else reason

    def page(self, path: Path) -> Iterator[str]:
        """Yield the lines of the page."""
        name = f"{self._table.content['trainer']} {self._table.content['version']}"
        command = shlex.join(["pgtk", *_overrides_of(self.typed)])
        yield from (f"{path}, a configuration of {name}, is here", "", f"  {command}")
        by_default = [
            f"{key}={text(value)}: {self._shown(row.name)}; ours is {self._ours(key)}"
            for key, (value, row) in self.typed.items()
            if row is not None and row.name not in self.theirs.values
        ]
        to_fill = [key for key, (value, _) in self.typed.items() if value in ("MODEL", "PROMPTS")]
        left: dict[str, list[str]] = {}
        for shown, reason, row in self.left:
            left.setdefault(self._with_instead(reason, row), []).append(shown)
        unknown = [name for name in self.theirs.values if self._table.row(name) is None]
        sections = {
            "Assumed:": [*self.theirs.assumed, *(f"{key} is to be filled in" for key in to_fill)],
            f"What follows from defaults of {name} that are not ours:": by_default,
            "What is not quite the same:": self.differing,
            "What has no equal here, and is left out:": [
                f"{', '.join(names)}: {reason}" for reason, names in left.items()
            ],
            f"Keys that {name} is not known to have:": [", ".join(unknown)] if unknown else [],
            "What this machine lacks for it:": self.lacking,
        }
        for title, lines in sections.items():
            if lines:
                yield from ("", title, *(f"  {line}".replace("`", "") for line in lines))


def _overrides_of(typed: Typed) -> list[str]:
    return [f"{key}={_in_override(value)}" for key, (value, _) in typed.items()]


def _in_override(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {_in_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_override, value)) + "]"
    content = text(value)
    is_plain = re.fullmatch(r"[\w./:@+\[\]-]+", content)
    return content if is_plain else '"' + content.replace('"', '\\"') + '"'
