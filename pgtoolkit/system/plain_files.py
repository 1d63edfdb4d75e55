"""Replaces files of a run completely or not at all, and checks a run directory that somebody else
made.

Through a link in such a directory a command could overwrite or upload any file of the user's, and a
pipe would keep its reader waiting for ever. Links above the run directory are the user's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pgtoolkit.errors import StorageError

JsonObject = dict[str, Any]
"""A JSON object, whose values may be anything."""


def refuse_links(run_dir: Path) -> None:
    """Raise StorageError where a run directory holds a link or a special file.

    Each command that opens a run directory calls it once.
    """
    kinds = {stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
    for folder, folders, files in os.walk(run_dir):  # which follows no link
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise StorageError(
                    f"{path} needs to be a plain file or a folder (got a "
                    f"{kinds.get(kind, 'special file')}). A run reads and writes its own files "
                    "only; its directory may be a link itself. Use a copy without it."
                )


def plain_run(text: str) -> Path:
    """Return the path that the user typed. Raise StorageError for a run directory with links."""
    path = Path(text)
    if os.path.lexists(path / "config.yaml"):
        refuse_links(path)
    return path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of the block, since the error of a failed write, such as to
    a full disk, has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of `path` at the end of the block, complete and on the
    disk.

    At any moment, also after a kill, a reader finds the old content or the new, never a part. A
    kill leaves at most one file `.NAME.tmp`, which the next call removes. After an exception the
    old content stays. What is no file, such as /dev/stdout or a pipe, is written to and stays.
    """
    if path.exists() and not path.is_file():
        with naming(path), path.open("wb") as stream:
            yield stream
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with naming(path), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)  # the name that the user knows
        raise
    sync_folder(path.parent)  # the rename itself must reach the disk before anyone builds on it


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one piece, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def overwrite(path: Path, text: str) -> None:
    """Write over the text of an existing file, which needs no further block of a full disk.

    This is not atomic, so it is only for use after `write_atomically` has failed. The rest of a
    longer old text becomes spaces.
    """
    with path.open("rb+") as file:
        content = text.encode()
        file.write(content.ljust(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a file or folder, if there is one.

    A folder is renamed first, so that a kill leaves no part of it under its name.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(set_aside(path))


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `.NAME.old`, and return that path.

    One that a kill has left there is deleted. If that is impossible, the name is a longer one.
    """
    if path.name.endswith(".old"):
        return path
    aside = path.with_name(f".{path.name.removeprefix('.')}.old")
    shutil.rmtree(aside, ignore_errors=True)
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}.old")
    path.rename(aside)
    return aside


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_object(file: Path) -> JsonObject:
    """Return the JSON object that a file of somebody else's holds; raises OSError or ValueError."""
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def cannot_hold_files(folder: Path) -> str | None:
    """Try whether a folder can be made and take files; return why not, or None if it can."""
    place = folder.absolute()
    nearest = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    try:  # some file systems refuse what their permissions allow
        with tempfile.TemporaryDirectory(prefix=".pgtk-", dir=nearest) as trial:
            Path(trial, place.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{nearest}: {error.strerror}"
    return None
