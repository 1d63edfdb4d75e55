"""The folder of checkpoints: which there are, and which stay."""

from __future__ import annotations

import logging
import re
import zlib
from pathlib import Path

from pgtoolkit.system.plain_files import open_to_read, refuse_other_than_folder, remove

log = logging.getLogger("pgtoolkit")


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first: files `step-NNNNNN.ckpt` of one process, folders `step-NNNNNN` of several.

    Raises StorageError if their folder is something else.
    """
    refuse_other_than_folder(folder)
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+(\.ckpt)?", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The number of the step after which a checkpoint was written."""
    return int(path.stem.removeprefix("step-"))


def prune(newest: Path, keep: int) -> None:
    """Delete all checkpoints beside `newest`, which was just written, but for the keep - 1 before it.

    One of a later step goes, too: the run was continued from before it, since it was damaged. What a kill left half
    written or half deleted goes as well. That one cannot be deleted is a warning.
    """
    step = step_of(newest)
    before = [path for path in list_checkpoints(newest.parent) if step_of(path) < step]
    kept = {newest, *(before[-(keep - 1) :] if keep > 1 else [])}
    for old in (*list_checkpoints(newest.parent), *newest.parent.glob(".step-*")):
        if old not in kept:
            try:
                remove(old)
            except OSError as error:
                log.warning(f"the old checkpoint {old} cannot be deleted: {error.strerror or error}")


def fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    checksum, size = 0, 0
    with open_to_read(file) as stream:
        while block := stream.read(2**22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"bytes": size, "crc32": checksum}
