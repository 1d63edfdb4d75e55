"""Digests and copies of the user's own modules that a configuration names, and of their imports."""

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

COPIES = "code"
"""The folder of copies in a run directory."""

MOST_BYTES = 256 * 1024
"""The longest file of a module that is copied."""

MOST_BYTES_IN_ALL = 2 * 1024 * 1024
"""The most that one start of a run adds to the folder of copies."""


@dataclass(frozen=True)
class Module:
    """The code of a module.

    digest: eight digits for its statements. Comments, docstrings and layout do not change it.
    is_own: whether the module is the user's: neither Python's nor of an installed package.
    """

    file: Path
    code: bytes
    digest: str
    is_own: bool


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of `modules_of`."""
    return {name: module.digest for name, module in modules_of(names).items()}


def keep_copies(folder: Path, names: Iterable[str]) -> list[str]:
    """Copy the user's own modules of `modules_of` into a folder.

    Returns a sentence for each module that is left out. A copy is called MODULE-DIGEST.py, which no
    import can name. It is never replaced, so a run that is resumed with other code has both
    versions. Texts that look like secrets are hidden in it.
    """
    left_out = []
    size = 0
    for name, module in modules_of(names).items():
        file = folder / f"{name}-{module.digest}.py"
        if not module.is_own or file.exists():
            continue
        reason = None
        if any(map(is_named_as_secrets, (*name.split("."), module.file.name))):
            reason = "has the name of a file of secrets"
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
    """Return each of these modules, and those of the user's own that they import.

    Modules of pgtoolkit, of Python and of installed packages are not followed. Files are only read:
    nothing is imported. Modules that cannot be found or parsed are left out.
    """
    modules: dict[str, Module] = {}
    configured = {*names}
    waiting = [*configured]
    while waiting:
        name = waiting.pop()
        file = _file_of(name, name in configured)
        if name in modules or file is None or not (name in configured or _is_own(file)):
            continue
        try:
            code = file.read_bytes()
            tree = ast.parse(code)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        modules[name] = Module(file, code, _digest(tree), _is_own(file))
        if _is_own(file):
            parent = name.rpartition(".")[0]
            package = name if file.name == "__init__.py" else parent
            waiting += _imported(tree, package)
            if parent:
                waiting.append(parent)
    return dict(sorted(modules.items()))


def _file_of(name: str, is_configured: bool) -> Path | None:
    """Return the Python file of a module; None where it has none, or is pgtoolkit's.

    is_configured: whether the configuration names it. Then the current directory comes first, as in
        `system.functions`.
    """
    folders: Iterable[str] | None = [*sys.path, os.getcwd()]
    if is_configured and name.partition(".")[0] not in sys.stdlib_module_names:
        folders = [os.getcwd(), *sys.path]
    spec = None
    for part in name.split("."):
        if folders is None:
            return None  # the part before is no package
        try:
            spec = importlib.machinery.PathFinder.find_spec(part, [*folders])
        except (ImportError, ValueError, OSError):
            return None
        if spec is None:
            return None
        folders = spec.submodule_search_locations
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
    """Yield the names of all modules that the imports in this code may mean.

    package: the one that the code belongs to, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                ancestors = parts[: len(parts) - node.level + 1]
                base = ".".join([*ancestors, *filter(None, [node.module])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest(tree: ast.Module) -> str:
    """Return eight digits for the code of a module. Removes the docstrings from the tree."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]
