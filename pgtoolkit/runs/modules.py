"""The user's own modules, those that a configuration names with what they import of the user's own:
digests, copies."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.redaction import is_named_as_secrets, redact

_PACKAGE = Path(__file__).resolve().parents[1]
_PYTHON = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]


MOST_BYTES = 256 * 1024
"""The longest file of a module that is copied."""

MOST_BYTES_IN_ALL = 2 * 1024 * 1024
"""The most that one start of a run adds to the folder of copies."""


@dataclass(frozen=True)
class Module:
    """The code of a module.

    digest: in eight digits, of its statements: comments, docstrings and layout do not change it.
    is_own: whether it is neither Python's nor of an installed package.
    """

    file: Path
    code: bytes
    digest: str
    is_own: bool


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of `modules_of`."""
    return {name: module.digest for name, module in modules_of(names).items()}


def keep_copies(folder: Path, names: Iterable[str]) -> list[str]:
    """Copy the user's own modules of `modules_of` into a folder, and return a sentence for each
    that is left out.

    A copy is called MODULE-DIGEST.py, which no import can name, and stays as it is once it is
    there: a run that is resumed with other code has both. What looks like a secret is hidden in it.
    """
    left_out = []
    size = 0
    for name, module in modules_of(names).items():
        file = folder / f"{name}-{module.digest}.py"
        if not module.is_own or file.exists():
            continue
        reason = None
        if any(map(is_named_as_secrets, (*name.split("."), module.file.name))):
            reason = "is named as what holds secrets"
        elif len(module.code) > MOST_BYTES:
            reason = f"has {len(module.code)} bytes, more than {MOST_BYTES}"
        elif size + len(module.code) > MOST_BYTES_IN_ALL:
            reason = f"would make the copies larger than {MOST_BYTES_IN_ALL} bytes"
        if reason is not None:
            left_out.append(f"{folder.name}/ has no copy of the module {name}, which {reason}")
            continue
        size += len(module.code)
        folder.mkdir(exist_ok=True)
        head = (
            f"# A copy of {module.file}, for the record: nothing imports it. Secrets are hidden "
            "as ***.\n"
        )
        write_atomically(file, redact(head + module.code.decode(errors="replace")))
    return left_out


def modules_of(names: Iterable[str]) -> dict[str, Module]:
    """Return each of these modules, and those that they import.

    Imported modules are followed where they are the user's own: neither pgtoolkit's, nor Python's,
    nor installed packages. Files are read and nothing is imported; what cannot be found or parsed
    is left out.
    """
    modules: dict[str, Module] = {}
    named = {*names}
    waiting = [*named]
    while waiting:
        name = waiting.pop()
        file = _file_of(name, name in named)
        if name in modules or file is None or not (name in named or _is_own(file)):
            continue
        try:
            code = file.read_bytes()
            tree = ast.parse(code)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        modules[name] = Module(file, code, _digest(tree), _is_own(file))
        if _is_own(file):
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _imported(tree, package)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return dict(sorted(modules.items()))


def _file_of(name: str, is_named: bool) -> Path | None:
    """Return the file of a module in Python's code; None where there is none, or it is pgtoolkit's.

    is_named: by the configuration, so that the current directory comes first, see
        `system.functions`.
    """
    places: Iterable[str] | None = [*sys.path, os.getcwd()]
    if is_named and name.partition(".")[0] not in sys.stdlib_module_names:
        places = [os.getcwd(), *sys.path]
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
