"""How files of a run are opened and replaced: as plain files, never through a link, whole or not at all.

A run directory may come from somebody else. A link in it would lead what is written, or uploaded, to any file of the
user's, and a pipe would keep its reader waiting for ever. Links above the run directory are the user's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from pgtoolkit.errors import StorageError


def open_to_read(path: Path) -> BinaryIO:
    """The plain file of this name; StorageError for anything else there, OSError if it cannot be read."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_to_append(path: Path) -> TextIO:
    """The plain file of this name, made if there is none, to read and to append to; errors as of `open_to_read`."""
    return os.fdopen(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path`, all of it and on the disk, at the end of the block.

    A reader, or a kill at any moment, finds the old content or the new, never a part; a kill leaves at most one file
    `.NAME.tmp`, which the next one removes. After an exception everything is as before.
    """
    refuse_other(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a link, the link itself
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # the rename itself must reach the disk before anyone builds on it


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one piece, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def overwrite(path: Path, text: str) -> None:
    """Write over the beginning of a text file that is there, which takes no further block of a full disk.

    Not in one piece: only where `write_atomically` has failed. Spaces take the place of what was longer before.
    """
    with os.fdopen(_open(path, os.O_RDWR), "rb+") as file:
        content = text.encode()
        file.write(content.ljust(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())


def refuse_other(path: Path, what: str = "plain file") -> None:
    """StorageError if there is something under this name, inside a run directory, that is no plain file, or no folder.

    what: "plain file" or "folder".
    """
    if (kind := _kind(path)) not in (None, what):
        raise StorageError(
            f"{path} needs to be a {what} (got a {kind}). A run reads and writes its own files only, and follows no "
            f"link out of its directory, which may be one itself. Put the {what} in its place, or remove it."
        )


def remove(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a whole folder; of the last, a kill leaves none of it in its
    place. Nothing happens where there is none."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(f".{path.name.removeprefix('.')}.old")
    if removed != path:
        if removed.is_symlink() or removed.exists():
            remove(removed)
        path.rename(removed)
    shutil.rmtree(removed)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        # Without O_NONBLOCK a pipe would keep us waiting for its other end; to plain files it means nothing.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise
    except OSError:
        refuse_other(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse_other(path)
    return descriptor


def _kind(path: Path) -> str | None:
    """What lies there; None for nothing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    kinds = {stat.S_IFREG: "plain file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "special file")
