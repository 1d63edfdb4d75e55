"""Digests of the user's own modules: those that a configuration names, with what they import of the user's own."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_PYTHON = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """Return a digest in eight digits of each of these modules, and of those that they import.

    Imported modules are followed where they are the user's own: neither pgtoolkit's, nor Python's,
    nor installed packages. A module's comments, docstrings and layout do not change its digest.
    Files are read and nothing is imported; what cannot be found or parsed is left out.
    """
    digests: dict[str, str] = {}
    named = {*names}
    waiting = [*named]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in digests or file is None or not (name in named or _is_own(file)):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        digests[name] = _digest(tree)
        if _is_own(file):
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _imported(tree, package)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return dict(sorted(digests.items()))


def _file_of(name: str) -> Path | None:
    """Return the file of a module in Python's code; None where there is none, or it is pgtoolkit's."""
    places: Iterable[str] | None = [*sys.path, os.getcwd()]
    spec = None
    for part in name.split("."):
        if places is None:
            return None  # what stands before is no package
        try:
            spec = importlib.machinery.PathFinder.find_spec(part, [*places])
        except (ImportError, ValueError, OSError):
            return None
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin).resolve()
    return None if file.is_relative_to(_PACKAGE) else file


def _is_own(file: Path) -> bool:
    """Return whether a file is neither Python's nor of an installed package."""
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return not any(file.is_relative_to(folder) for folder in _PYTHON)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names of all modules that an import in this code may mean."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]
