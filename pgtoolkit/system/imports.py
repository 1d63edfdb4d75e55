"""Imports large libraries without the parts that pgtoolkit never calls, which saves seconds at each
start."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def imports_skipping(**missing: tuple[str, ...]) -> Iterator[None]:
    """Keep these packages, unless they are loaded already, from being imported inside the block.

    missing: {package: names of its classes}. Without names a package counts as not installed, for
        importers that can do without it. With names it is a module of empty classes, for importers
        that only ask whether something is an instance of one.

    After the block the packages can be imported. Garbage collection is off inside the block. If
    a module was loaded there, it never looks at the objects made until then: imports make a million
    of them, none of which is garbage.
    """
    stand_ins = {
        package: _stand_in(package, names)
        for package, names in missing.items()
        if package not in sys.modules
    }
    is_collecting = gc.isenabled()
    loaded = len(sys.modules)
    gc.disable()
    sys.modules |= stand_ins
    try:
        yield
    finally:
        for package in stand_ins:
            sys.modules.pop(package, None)
        if len(sys.modules) > loaded:
            gc.freeze()
        if is_collecting:
            gc.enable()


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@atexit.register
def _leave_garbage() -> None:
    """Spare the interpreter's last search for garbage, which takes seconds; the end of the process
    frees all memory.

    Triton's bindings are nanobind's from Triton 3.9 on, and these report objects left at the end as
    leaks; so the search takes place where they are loaded.
    """
    bindings = getattr(sys.modules.get("triton._C.libtriton"), "ir", None)
    if type(getattr(bindings, "builder", None)).__module__ == "nanobind":
        gc.unfreeze()
    else:
        gc.freeze()


def _stand_in(package: str, names: tuple[str, ...]) -> types.ModuleType | None:
    """Return the entry of `sys.modules` for a package that is to be missing."""
    if not names:
        return None  # Python's own sign for a module that must not be found
    module = types.ModuleType(package)
    vars(module)["__version__"] = "99"
    for name in names:
        setattr(module, name, type(name, (), {"__module__": package}))
    return module


def import_metrics() -> None:
    """Import torchmetrics, before Lightning: callbacks of the user's own may log through it.

    Other runs do without it, which saves five seconds, see `training.frameworks`.
    """
    importlib.import_module("torchmetrics")
