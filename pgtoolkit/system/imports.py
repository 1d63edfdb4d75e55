"""Imports large libraries without those of their parts that pgtoolkit never calls, which take seconds of each start."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def without(**missing: tuple[str, ...]) -> Iterator[None]:
    """Meanwhile each package is missing, unless it is loaded already: {package: names that its importers need}.

    Without names it counts as not installed, for importers that can do without it; with names it is a module of empty
    classes, for importers that only ask whether something is an instance of one. Afterwards it can be imported as ever.
    Garbage collection waits, and never looks at what was made meanwhile if a module was loaded: of the million objects
    that imports make, none is garbage.
    """
    stand_ins = {package: _stand_in(package, names) for package, names in missing.items() if package not in sys.modules}
    collects, loaded = gc.isenabled(), len(sys.modules)
    gc.disable()
    sys.modules |= stand_ins
    try:
        yield
    finally:
        for package in stand_ins:
            sys.modules.pop(package, None)
        if len(sys.modules) > loaded:
            gc.freeze()
        if collects:
            gc.enable()


@atexit.register
def _leave_garbage() -> None:
    """The end of the process frees all its memory; to look for garbage in it first would take seconds.

    Except where Triton's bindings are nanobind's, as since Triton 3.9: these print what is left at the end as leaks.
    """
    bindings = getattr(sys.modules.get("triton._C.libtriton"), "ir", None)
    if type(getattr(bindings, "builder", None)).__module__ == "nanobind":
        gc.unfreeze()
    else:
        gc.freeze()


def _stand_in(package: str, names: tuple[str, ...]) -> types.ModuleType | None:
    if not names:
        return None  # Python's own sign for a module that must not be found
    module = types.ModuleType(package)
    vars(module)["__version__"] = "99"
    for name in names:
        setattr(module, name, type(name, (), {"__module__": package}))
    return module
