"""The folder of checkpoints: which there are, which stay, and what is surely on the disk."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path


def list_checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest first: files `step-NNNNNN.ckpt` of one process, folders of several."""
    found = [path for path in folder.glob("step-*") if path.suffix == ".ckpt" or path.is_dir()]
    return sorted(found, key=lambda path: path.stem)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in list_checkpoints(folder)[:-keep]:
        if old.is_dir():
            # Renamed first, so that a kill leaves no half of it under a checkpoint's name.
            removed = old.with_name(f".{old.name}.old")
            shutil.rmtree(removed, ignore_errors=True)
            shutil.rmtree(old.rename(removed))
        else:
            old.unlink()


def sync(file) -> None:
    """Everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}
