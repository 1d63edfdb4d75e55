"""Functions and classes of the user's own, by their dotted path in the configuration."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pgtoolkit.errors import ConfigError, PgtoolkitError

_PACKAGE = Path(__file__).parents[1]

REDUCER_KEYWORDS = ("mask", "document_index", "tokens_per_document", "group_index")
"""What a reducer is called with, after the step's totals."""


def import_function(key: str, path: str, *arguments: Any, **keywords: Any) -> Callable:
    """The function or class at `package.module.name`, seen also from the current directory; arguments: an example call.

    key: the configuration key that holds the path. Raises ConfigError if there is nothing such, or if
    it could not be called with these arguments.
    """
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command does not look there by itself
    try:
        function = getattr(importlib.import_module(module), name)
        with contextlib.suppress(ValueError):  # some functions written in C do not tell their arguments
            inspect.signature(function).bind(*arguments, **keywords)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"{key}={path} needs a {kind_of(key)} that can be imported and called "
            f"(got {type(error).__name__}: {error}). Use {key}=package.module.{kind_of(key)}."
        ) from error
    return function


def kind_of(key: str) -> str:
    """What the dotted path in this key leads to."""
    return "class" if key == "loss.path" else "function"


@contextlib.contextmanager
def blaming(what: str, kind: type[PgtoolkitError], on: str) -> Iterator[None]:
    """Around a call of the user's function `what`: an exception of it becomes one of `kind`, its own traceback below.

    on: what it was called with, in words; also said of an error of pgtoolkit's.
    """
    try:
        yield
    except PgtoolkitError as error:
        raise type(error)(f"{error}. It was called on {on}.") from error
    except Exception as error:
        own = error.__traceback__
        while own.tb_next and Path(own.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
            own = own.tb_next
        lines = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        raise kind(f"{what} raised {type(error).__name__} on {on}:\n{lines}") from error


def is_findable(path: str) -> bool:
    """Whether the top-level package of a dotted path is there; nothing is imported."""
    root = path.partition(".")[0]
    return root in sys.modules or importlib.machinery.PathFinder.find_spec(root, [os.getcwd(), *sys.path]) is not None
