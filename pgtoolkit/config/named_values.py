"""Finds the meaning here of a value of TRL or verl that is typed with the name of its key."""

from __future__ import annotations

import re

from pgtoolkit.config.their_values import FORMULA, NO_VALUE, TheirValues
from pgtoolkit.config.trainer_keys import OVERRIDE, Theirs, known_as, tables
from pgtoolkit.config.translate_file import TheirConfig
from pgtoolkit.system.report import text


def named_value(name: str, value: object) -> dict[str, object] | None:
    """Return our keys with their values for a value of theirs that their table names, or for a key
    that is a number in what stands for another one, beside their defaults; {} where that value has
    no equal. None where no table names the value.

    name: with or without the sections of that trainer.
    """
    has_no_equal = False
    for full_name, row in known_as(name):
        if not f".{full_name}".endswith(f".{name}") and not name.endswith(f".{full_name}"):
            continue
        values = TheirValues(TheirConfig(tables()[row.trainer], {full_name: value}))
        try:
            meant = _named(values, row, text(value))
        except NO_VALUE:
            named = [here for _, here in row.cases if isinstance(here, dict)]
            has_no_equal |= any(text(value) in here for here in named)
            continue
        if meant:
            return meant
    return {} if has_no_equal else None


def _named(values: TheirValues, row: Theirs, value: str) -> dict[str, object]:
    """Return what is typed for a value that the cases of a row name; {} for any other, and where
    there is nothing to type. Raises LookupError where it follows from further keys, too."""
    owner = values.theirs.table.rows[row.see] if row.see else row
    typed = "" if owner.acts and not values.evaluated(owner.acts) else values.case(owner)
    is_named = any(isinstance(here, dict) and here.get(value) == typed for _, here in row.cases)
    if not row.see and not is_named:
        return {}
    overrides: dict[str, object] = {}
    for key, written in OVERRIDE.findall(typed):
        formula = FORMULA.fullmatch(written)
        is_of_this = formula is not None and row.name.endswith(f".{formula[1].rpartition('.')[2]}")
        if formula is None and "{" not in written and not row.see:
            overrides[key] = written
        elif formula is not None and (is_of_this or not row.see):
            if not re.fullmatch(r"[\w.]+", formula[1]):
                raise LookupError(row.name)
            other = values.theirs.table.row(formula[1])
            if other is None or not other.keys:  # else it has its own override
                overrides[key] = values.evaluated(formula[1])
    if None in overrides.values():
        raise LookupError(row.name)
    return overrides
