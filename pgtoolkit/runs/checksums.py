"""Checksums of a run's rows, which each checkpoint keeps so that readers notice damage."""

from __future__ import annotations

import zlib
from pathlib import Path

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import newest_checkpoint, read_saved_rows, storage
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.report import shell_path

_BLOCK_BYTES = 2**22


def checksum(path: Path, limit: int | None = None) -> dict[str, int]:
    """Return the size and CRC-32 of a file, or of its first `limit` bytes."""
    size = 0
    value = 0
    with path.open("rb") as file:
        while True:
            block_bytes = _BLOCK_BYTES if limit is None else min(_BLOCK_BYTES, limit - size)
            block = file.read(block_bytes)
            if not block:
                return {"bytes": size, "crc32": value}
            value = zlib.crc32(block, value)
            size += len(block)


def check_rows(run_dir: Path, checkpoint: Path | None = None) -> None:
    """Raise StorageError where the rows up to a checkpoint have changed since it was saved.

    checkpoint: None for the newest one. Nothing is compared where there is none, where it was saved
    without checksums, or where a file lacks only its last rows, as after a power failure.
    """
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    if checkpoint is None:
        return
    for name, saved in read_saved_rows(checkpoint).items():
        path = run_dir / name
        if not path.is_file():
            continue
        with storage(path):
            current = checksum(path, saved["bytes"])
        is_shorter = current["bytes"] < saved["bytes"]
        if (is_shorter and _lacks_rows_between(path)) or (not is_shorter and current != saved):
            raise StorageError(
                f"{path} is damaged: it does not hold the rows that the run had recorded by its "
                f"checkpoint {checkpoint.name}. Restore it from a backup, or delete "
                f"{shell_path(path)} to continue without these rows."
            )


def _lacks_rows_between(path: Path) -> bool:
    """Return whether a file of metrics lacks rows before its last one."""
    if path.name != "metrics.jsonl":
        return False  # evaluations are not made after every step
    steps = read_metrics(path, ())["step"].tolist()
    return steps != list(range(1, len(steps) + 1))
