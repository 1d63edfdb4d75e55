"""The index of recorded rollouts: what is known of every row, kept beside the run."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from pgtoolkit.document import OPTIONAL_VECTORS
from pgtoolkit.errors import DataError
from pgtoolkit.runs.records import storage
from pgtoolkit.system.plain_files import replacing

FILE_NAME = "recorded_index.npz"

ROW = np.dtype(
    [
        ("file", "i4"),
        ("number", "i8"),
        ("place", "i8"),
        ("checksum", "u4"),
        ("tokens", "i4"),
        ("trained", "i4"),
        ("group", "i8"),
        ("trajectory", "i8"),
        ("reward", "f8"),
        ("advantage", "f8"),
        ("has_advantage", "?"),
        ("has_signal", "?"),
        ("score_failed", "?"),
        ("old_log_prob", "f8"),
        ("model_version", "f8"),
        ("truncated", "i1"),
        ("exact_match", "i1"),
        *[(name, "?") for name in OPTIONAL_VECTORS],
        ("sampling_kept_ids", "?"),
        ("kept_set_overflows", "?"),
    ]
)
"""The entries of a row. A number that is not recorded is NaN; a truth value, -1.

file: its place among the files. number: in its file, from 1. place: where `RowFile.row` finds it.
checksum: `Row.digest`.
tokens, trained: how many it has of each.
trajectory: the place among all rows of its trajectory's first document.
advantage: by the estimator. has_signal: whether an advantage is not 0.
score_failed: whether nobody could score it.
old_log_prob: the mean over its trained tokens.
OPTIONAL_VECTORS, sampling_kept_ids: whether it has them.
kept_set_overflows: whether the tokens that sampling has kept are not known at a trained token.
"""


class FileStamp(TypedDict):
    """Numbers of a file that change with its contents.

    They are its size, and the time of its last change in nanoseconds.
    """

    bytes: int
    changed_ns: int


class IndexedFile(FileStamp):
    """A file as it was when it was indexed."""

    name: str
    sha256: str


@dataclass
class RecordedIndex:
    """The facts about every row that are needed without reading it again.

    rows: (documents,) of dtype ROW, in the order of the files.
    rules: what the rows were checked for. has_groups: whether it is known which documents share a
        prompt.
    notes: for the user.
    prompts: (prompts,) uint64, the checksums of the different prompts of all rows
        (`recorded_prompts`).
    texts: the fingerprint of the template and tokenizer that made tokens of texts; None where rows
        have tokens.
    """

    rows: np.ndarray
    files: list[IndexedFile]
    rules: str
    has_groups: bool
    notes: list[str]
    prompts: np.ndarray
    texts: int | None = None

    def digests(self) -> dict[str, dict[str, int | str]]:
        """Return the size and the digest of each file, as data.json of a run keeps them."""
        return {
            file["name"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in self.files
        }

    def knows(self, name: str, path: Path) -> bool:
        """Return whether a file has the size and the time of its last change that it had when it
        was indexed."""
        return any(
            file["name"] == name and stamp_of(path).items() <= file.items() for file in self.files
        )

    def write(self, folder: Path) -> None:
        arrays = ("rows", "prompts")
        about = {name: value for name, value in vars(self).items() if name not in arrays}
        about_text = np.array(json.dumps(about))
        path = folder / FILE_NAME
        with storage(path), replacing(path) as file:
            np.savez(file, rows=self.rows, prompts=self.prompts, about=about_text)


def first_parts(rows: np.ndarray) -> np.ndarray:
    """Return the (documents,) place of the first document of each one's trajectory: its own place
    if it names none."""
    return np.where(rows["trajectory"] < 0, np.arange(len(rows)), rows["trajectory"])


def read_index(folder: Path) -> RecordedIndex | None:
    """Return the index in a run directory; None without a complete one of this version."""
    try:
        with np.load(folder / FILE_NAME) as kept:
            about = json.loads(str(kept["about"]))
            index = RecordedIndex(rows=kept["rows"], prompts=kept["prompts"], **about)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return index if index.rows.dtype == ROW else None


def stamp_of(path: Path) -> FileStamp:
    """Return the size and the time of the last change of a file. Raises DataError where it cannot
    be read."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
