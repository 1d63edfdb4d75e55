"""Checks that a value names something usable: a file or folder, a function, a package."""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence

from pgtoolkit.system.functions import is_dotted_path, kind_of
from pgtoolkit.system.report import Report, near_path, nearest


def existing(report: Report, path: str, value: str | None, hub: bool = False) -> None:
    """Refuse the value of the key `path` where there is no such file, folder or glob.

    hub: a name on the hub is allowed too, and is not looked up.
    """
    if value is None or (hub and value and not value.startswith((".", "/", "~"))):
        return
    place = os.path.expanduser(value)  # as the functions of os.path, at home with any text
    if value == "" or (not os.path.exists(place) and not glob.glob(place, recursive=True)):
        report.refuse_value(
            key=path,
            value=value,
            needs="an existing file, folder or glob",
            reason="There is nothing at that path, seen from the current directory.",
            better=near_path(value) or "PATH",
        )
        report.lacking.append(report.problems[-1])


def importable(
    report: Report, key: str, path: str, reason: str, options: Sequence[str] = ()
) -> None:
    """Refuse a text that is not a dotted path; importing it is tried before the start.

    options: the other values that the key has, the first of them for a name that is near to none.
    """
    if is_dotted_path(path):
        return
    alternatives = f"one of {', '.join(options)}, or " if options else ""
    near = nearest(path, options, 0.4)
    use = f"{key}={near or [*options, f'package.module.{kind_of(key)}'][0]}"
    if options and near is None and path.isidentifier():
        use += f", or {key}=my_module.{path} for a {kind_of(key)} {path} in my_module.py"
    report.refuse(
        setting=f"{key}={path}",
        needs=f"{alternatives}a dotted path to a {kind_of(key)}",
        got=path,
        reason=reason,
        use=use,
    )


def installed(report: Report, setting: str, module: str, extra: str) -> None:
    """Refuse a setting whose package, an extra of pgtk, is missing."""
    if not _is_installed(module):
        report.refuse(
            setting=setting,
            needs=f"the package {module.rpartition('.')[2]}",
            got="not installed",
            reason="The package is an extra, not installed by default.",
            use=f'pip install "pgtk[{extra}]"',
        )
        report.lacking.append(report.problems[-1])


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
