"""Functions and classes of the user's own, by their dotted path in the configuration."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pgtoolkit.errors import ConfigError, PgtoolkitError, first_line
from pgtoolkit.system.report import nearest, refusal

_PACKAGE = Path(__file__).parents[1]

REDUCER_KEYWORDS = ("mask", "document_index", "tokens_per_document", "group_index")
"""What a reducer is called with, after the step's totals."""

ADVANTAGE_KEYWORDS = ("lengths", "measures")
"""What advantages of one's own are made of, besides the rewards."""


def import_function(key: str, path: str, arguments: Sequence[str] = (), keywords: Sequence[str] = ()) -> Callable:
    """The function or class at `package.module.name`, seen also from the current directory.

    key: the configuration key that holds the path. arguments, keywords: the names of what it is called with. Raises
    ConfigError if there is nothing such, or if it could not be called so.
    """
    module, _, name = path.rpartition(".")
    kind, setting = kind_of(key), f"{key}={path}"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command does not look there by itself
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # importing runs the user's code
        reason = "It is looked for in the current directory and where Python finds its packages."
        got, use = f"{type(error).__name__}: {first_line(error)}", f"{key}=package.module.{kind}"
        raise ConfigError(refusal(setting, f"a {kind} that can be imported", got, reason, use)) from error
    function = getattr(imported, name, None)
    if not callable(function):
        own = {other: value for other, value in vars(imported).items() if getattr(value, "__module__", None) == module}
        names = [other for other, value in own.items() if callable(value)]
        got = f"no {name}" if function is None else f"a value of type {type(function).__name__}"
        reason = f"{module} has {', '.join(names[:8]) or f'no {kind}'}."
        near = nearest(name, names, 0.6) or kind
        raise ConfigError(refusal(setting, f"a {kind} in the module {module}", got, reason, f"{key}={module}.{near}"))
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell their arguments
        return function
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*arguments, *(["*", *keywords] if keywords else [])])
        needs, got = f"a {kind} that can be called as {name}({call})", f"{name}{signature}"
        options = f"{key.partition('.')[0]}.options that fit {name}{signature}"
        use = options if kind == "class" else f"def {name}({call})"
        raise ConfigError(refusal(setting, needs, got, f"Python says of that call: {error}.", use)) from error
    return function


def kind_of(key: str) -> str:
    """What the dotted path in this key leads to."""
    return "class" if key in ("loss.path", "task.environment") else "function"


@contextlib.contextmanager
def blaming(what: str, kind: type[PgtoolkitError], on: str) -> Iterator[None]:
    """Around a call of the user's function `what`: an exception of it becomes one of `kind`, its own traceback below.

    on: what it was called with, in words; also said of an error of pgtoolkit's.
    """
    try:
        yield
    except PgtoolkitError as error:
        raise type(error)(f"{error}. It was called on {on}.") from error
    except (Exception, SystemExit) as error:
        own = error.__traceback__
        while own.tb_next and Path(own.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
            own = own.tb_next
        lines = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        raise kind(f"{what} raised {type(error).__name__} on {on}:\n{lines}") from error
