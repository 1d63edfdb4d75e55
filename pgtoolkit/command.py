"""The console script `pgtk`: refuses to start beside another project's package of the same name.

The distribution is called pgtk, since `pgtoolkit` on PyPI is another project, for PostgreSQL. Both
install a folder pgtoolkit, and where both are installed some of our modules are theirs. So this
file imports no other of the package before it has looked.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line; return the exit status."""
    problem = other_project()
    if problem is not None:
        # print, since the modules with `say` may be missing
        print(f"pgtk: error: {problem}", file=sys.stderr)
        return 2
    from pgtoolkit.cli import run

    run()


def other_project() -> str | None:
    """Return the problem if the other project's distribution `pgtoolkit` is installed, or None."""
    if not any(_may_hold_pgtoolkit(folder) for folder in sys.path):
        return None
    from importlib import metadata  # slow: a third of the time of `pgtk --help`

    for distribution in metadata.distributions(name="pgtoolkit"):
        if not any(script.name == "pgtk" for script in distribution.entry_points):
            return (
                f"this environment has the package pgtoolkit {distribution.version}, another "
                "project's, which works with PostgreSQL. It and pgtk install files into the same "
                "folder, so that either may run code of the other. Use an environment of its own "
                "for pgtk, or pip uninstall pgtoolkit and then pip install --force-reinstall "
                "--no-deps pgtk."
            )
    return None


def _may_hold_pgtoolkit(folder: str) -> bool:
    """Return whether a folder of sys.path holds what pip writes for a distribution of this name."""
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # an archive, or nothing
        return False
    return any(name.startswith(("pgtoolkit-", "pgtoolkit.egg")) for name in names)
