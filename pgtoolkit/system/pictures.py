"""Draws pictures in settings of their own, and says in a line why one could not be drawn."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgtoolkit.errors import first_line, refused_by_disk
from pgtoolkit.system.imports import imports_skipping, variables
from pgtoolkit.system.report import shell_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "jpg", "pdf", "svg")
"""What a picture can be written as; the end of its file's name says which."""

_OTHER_SETTINGS = {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
"""Variables with which matplotlib can be imported where the user's own keep it from that."""


def format_of(path: Path) -> str:
    """Return the format that a picture's file is written in; "" for a name that says none."""
    ending = path.suffix[1:].lower()
    return ending if ending in FORMATS else ""


def import_matplotlib() -> None:
    """Import matplotlib, also where its variables or its file of settings are broken.

    A notebook's MPLBACKEND names a backend that may not be installed here. The user's settings stay
    where they can be read, for the user's own pictures in this process.
    """
    if "matplotlib" in sys.modules:
        return
    with imports_skipping():
        try:
            importlib.import_module("matplotlib")
        except Exception:
            for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
                del sys.modules[name]  # of the import that failed half-way
            with variables(_OTHER_SETTINGS):
                importlib.import_module("matplotlib")


@contextlib.contextmanager
def own_settings(settings: Mapping[str, object] | None = None) -> Iterator[None]:
    """Draw in the block with the settings that matplotlib comes with, whatever the user's are.

    settings: replace some of them. No text is read as a formula, since names of folders and keys
        may hold dollar signs.
    """
    import_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        parameters: dict[Any, Any] = {**matplotlib.rcParamsDefault, "text.parse_math": False}
        del parameters["backend"]
        parameters.update(settings or {})
        matplotlib.rcParams.update(parameters)
        yield


def for_notebook(figure: Figure) -> Figure:
    """Return the figure, which a notebook now shows also where pyplot was never imported."""
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", backend="agg")
    return file.getvalue()


@contextlib.contextmanager
def saying_why_not_drawn(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Draw a picture in the block; where that fails, tell its path and the reason in a line.

    A picture shows what other files hold, so a failure of any kind ends nothing.
    """
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, OSError):
            reason = str(refused_by_disk(path, error)).partition(" written: ")[2]
        tell(f"the picture {shell_path(path)} was not drawn: {reason}")
