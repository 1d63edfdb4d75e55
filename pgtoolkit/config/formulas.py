"""The formulas and conditions of trl.yaml and verl.yaml: Python's operators on the keys of another
trainer, by their dotted names."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from types import CodeType
from typing import Any

from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.tasks.settings import is_data_set_name


def evaluate(formula: str, value: Callable[[str], Any] = str, **functions: Any) -> Any:
    """Return the value of a formula. value: returns that of a key. A formula comes from a table, or
    is made of digits and signs: it is never what a user wrote."""
    result = eval(_compiled(formula), {**_FUNCTIONS, **functions, "value": value})
    return float(f"{result:.12g}") if isinstance(result, float) else result


def _only(value: object) -> object:
    """Return the one element of a list, or a value that is no list; else an empty text."""
    if not isinstance(value, list):
        return value or ""
    return value[0] if len(value) == 1 else ""


def _bound(threshold: object, index: int) -> float | None:
    """Return a bound of `low_high`, and None where there is only one."""
    bounds = str(threshold).split("_")
    return float(bounds[index]) if len(bounds) == 2 else None


_FUNCTIONS = {
    "__builtins__": {},
    **{"ceil": math.ceil, "int": int, "max": max, "str": str},
    **{"only": _only, "bound": _bound},
    **{"is_dotted_path": is_dotted_path, "is_data_set_name": is_data_set_name},
}


@functools.cache
def _compiled(formula: str) -> CodeType:
    tree = _Keys().visit(ast.parse(formula.strip(), mode="eval"))
    return compile(ast.fix_missing_locations(tree), formula, "eval")


class _Keys(ast.NodeTransformer):
    """Puts the value of a key in the place of its dotted name."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        call = ast.Name("value", ast.Load())
        return ast.Call(call, [ast.Constant(ast.unparse(node))], [])

    visit_Attribute = visit_Name
