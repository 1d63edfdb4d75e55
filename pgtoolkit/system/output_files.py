"""Refuses files that a command is to write and cannot, before its work and not after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.pictures import FORMATS, format_of
from pgtoolkit.system.report import beside, refusal, with_ending


def refuse_unwritable(files: dict[str, Path], pictures: Collection[str] = ()) -> None:
    """Raise ConfigError with the problems of all files that cannot be written.

    files: by the option that names each. pictures: the options of those whose name says the format.
    """
    problems = []
    for option, path in files.items():
        problem = unwritable(f"{option}=", path)
        if problem is None and option in pictures and not format_of(path):
            problem = refusal(
                setting=f"{option}={path}",
                needs=f"a name that ends in {', '.join(f'.{ending}' for ending in FORMATS)}",
                got=path.name,
                reason="The end of the name is the format of the picture.",
                use=f"{option}={with_ending(path, '.png')}",
            )
        first = next(name for name, other in files.items() if other.absolute() == path.absolute())
        if problem is None and first != option:
            problem = refusal(
                setting=f"{option}={path}",
                needs=f"another file than {first}",
                got=path,
                reason="One would be written over the other.",
                use=f"{option}={beside(path)}",
            )
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))


def unwritable(option: str, path: Path) -> str | None:
    """Return the refusal of a file that cannot be written; None for one that can.

    option: what stands before the path in the command, such as `--html=`; "" for the argument OUT.
    """
    folder = path.parent
    needs = "a folder that exists"
    better = path.name or "file"
    if path.is_dir():
        needs = "the name of a file"
        got = "a folder"
        endings = {"--figure=": "png", "--runs-csv=": "csv", "--latex=": "tex"}
        better = path / f"file.{endings.get(option, option.strip('-='))}"
    elif path.exists():
        if os.access(path, os.W_OK):
            return None
        needs = "a file that can be written"
        got = f"{path}: Permission denied"
        better = beside(path)
    elif not folder.exists():
        got = f"{folder}: no such folder"
    elif not folder.is_dir():
        got = f"{folder}: a file"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            needs = "a folder that can be written"
            got = f"{folder}: {error.strerror}"
            better = Path(tempfile.gettempdir(), path.name)
        else:
            return None
    return refusal(
        setting=f"{option or 'OUT='}{path}",
        needs=needs,
        got=got,
        reason="It would be lost after all the work.",
        use=f"{option}{better}",
    )
