"""Paths as the user can paste them into a shell."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def shell_path(path: str | Path) -> str:
    """The path quoted for a shell; relative to the current directory where that is shorter."""
    return shlex.quote(shortest_path(path))


def shortest_path(path: str | Path) -> str:
    """Absolute, or relative to the current directory, whichever is shorter."""
    absolute = os.path.abspath(path)
    return min(os.path.relpath(absolute), absolute, key=len)
