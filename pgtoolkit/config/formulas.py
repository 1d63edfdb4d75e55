"""The formulas and conditions of trl.yaml and verl.yaml: Python's operators on the keys of another
trainer, by their dotted names."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable
from typing import Any

from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.tasks.settings import is_data_set_name

_NAME = re.compile(r'"[^"]*"|(?<![\w.])[a-z][\w.]*')


def evaluate(formula: str, value: Callable[[str], Any] = str, **functions: Any) -> Any:
    """Return the value of a formula. value: returns that of a key. A formula comes from a table, or
    is made of digits and signs: it is never what a user wrote."""
    functions |= _FUNCTIONS

    def called(match: re.Match[str]) -> str:
        name = match[0]
        is_key = name[0] != '"' and name not in functions and not keyword.iskeyword(name)
        return f"value({name!r})" if is_key else name

    scope = {**functions, "__builtins__": {}, "value": value}
    result = eval(_NAME.sub(called, formula.strip()), scope)
    return float(f"{result:.12g}") if isinstance(result, float) else result


def _only(value: object) -> object:
    """Return the one element of a list, or a value that is no list; else an empty text."""
    if not isinstance(value, list):
        return value or ""
    return value[0] if len(value) == 1 else ""


_FUNCTIONS = {"ceil": math.ceil, "int": int, "float": float, "max": max, "str": str, "only": _only}
_FUNCTIONS |= {"is_dotted_path": is_dotted_path, "is_data_set_name": is_data_set_name}
