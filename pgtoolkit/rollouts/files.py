"""Reads the files that rollouts and prompts are kept in, JSONL and Parquet, one row at a time."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pgtoolkit.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
MAX_ROW_BYTES = 256 * 2**20
MAX_ROW_GROUP_BYTES = 512 * 2**20
MAX_PROBLEMS = 10
DIGEST_KEY = b"pgtoolkit_rows_crc32"

UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises for a damaged file."""

Key = tuple[int, int]
"""Where a file has a row: (0, byte offset) in JSONL, (row group, row within it) in Parquet."""


class Problems:
    """Collects what is wrong with the data and raises one DataError that lists it; at once at the tenth problem."""

    def __init__(self, what: str):
        self._what = what
        self._lines: list[str] = []

    def add(self, place: str, reason: str) -> None:
        self._lines.append(f"  {place}: {reason}")
        if len(self._lines) == MAX_PROBLEMS:
            self._raise(f"{self._what}: {MAX_PROBLEMS} problems or more, the first {MAX_PROBLEMS} are")

    def raise_if_any(self) -> None:
        if self._lines:
            self._raise(f"{self._what}: {len(self._lines)} problem{'s' if len(self._lines) > 1 else ''}")

    def _raise(self, title: str) -> None:
        raise DataError("\n".join([title, *self._lines]))


def find_files(path: str, key: str) -> list[Path]:
    """The JSONL and Parquet files that a file, a folder or a glob names, ordered by name with 2 before 10.

    Raises DataError that starts with the configuration key and says what is there instead.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = [file for file in place.iterdir() if file.suffix in SUFFIXES and file.is_file()]
        files = [file for file in files if not file.name.startswith(".")]
        if not files:
            raise DataError(f"{key}={path} needs .jsonl or .parquet files (got a folder with {_listing(place)}).")
    else:
        files = [place] if place.exists() else [Path(name) for name in glob.glob(str(place), recursive=True)]
        if not files:
            parent = next(folder for folder in place.absolute().parents if folder.is_dir())
            raise DataError(
                f"{key}={path} needs a file, a folder or a glob (got no such file). "
                f"The folder {parent} has {_listing(parent)}."
            )
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(f"{key}={path} needs .jsonl or .parquet files (got {file.name}). Convert it: docs/data.md.")
    return sorted(files, key=lambda file: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", str(file))])


def open_files(path: str, key: str, columns: Sequence[str]) -> list[JsonlFile | ParquetFile]:
    """The found files, ready to read `columns`; labelled by their paths below the folder that holds them all."""
    paths = find_files(path, key)
    common = os.path.commonpath([file.absolute().parent for file in paths])
    kinds = {".jsonl": JsonlFile, ".parquet": ParquetFile}
    return [kinds[file.suffix](file, os.path.relpath(file.absolute(), common), columns) for file in paths]


class Watched:
    """A file that must stay as it was opened: its size and time are looked at whenever it is read.

    Not its inode, which some network file systems number anew, and not its contents: `RecordedRollouts` compares those.
    """

    def __init__(self, path: Path, label: str):
        self.path = path
        self.label = label
        self._stamp = self._stamp_now()

    def check_unchanged(self) -> None:
        """Raises DataError if the file was changed, replaced or removed."""
        if self._stamp_now() != self._stamp:
            raise self.changed()

    def changed(self) -> DataError:
        return DataError(
            f"{self.label} was changed while it was in use. A run reads its files again and again, and the rows were "
            "checked as they were at its start. Keep them as they are until the run has ended."
        )

    def _stamp_now(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.label} cannot be read: {error.strerror}") from error
        return found.st_size, found.st_mtime_ns


class JsonlFile(Watched):
    """Rows of a JSONL file, one object per line."""

    names = None
    digest = None
    has_checksums = True

    def __init__(self, path: Path, label: str, columns: Sequence[str] = ()):
        super().__init__(path, label)

    def rows(self) -> Iterator[tuple[int, Key, dict | str]]:
        """Line number, key, and fields of every row; in place of the fields, the reason why a line is no row."""
        try:
            with open(self.path, "rb") as file:
                number = offset = 0
                while line := file.readline(MAX_ROW_BYTES):
                    number += 1
                    if line.strip():
                        yield number, (0, offset), _parse_line(line)
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{self.label} cannot be read: {error.strerror}") from error
        self.check_unchanged()

    def row(self, key: Key) -> dict | str:
        self.check_unchanged()
        with open(self.path, "rb") as file:
            file.seek(key[1])
            return _parse_line(file.readline(MAX_ROW_BYTES))


class ParquetFile(Watched):
    """Rows of a Parquet file, with page checksums verified; single rows come from a cache of two row groups.

    names: all its columns. digest: CRC-32 of the rows, which `RolloutWriter` leaves in its files because page
    checksums do not cover the footer with the types of the columns. has_checksums: whether the first page has one;
    known once the rows have been read.
    """

    def __init__(self, path: Path, label: str, columns: Sequence[str]):
        super().__init__(path, label)
        self.has_checksums = True
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        try:
            with self._open() as file:
                self._columns = [name for name in file.schema_arrow.names if name in columns]
                self.names = file.schema_arrow.names
                self._starts = [0]
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    self._starts.append(self._starts[-1] + group.num_rows)
                    if group.total_byte_size > MAX_ROW_GROUP_BYTES:
                        raise DataError(
                            f"{label} has a row group of {group.total_byte_size / 2**20:.0f} MiB; the limit is "
                            f"{MAX_ROW_GROUP_BYTES // 2**20} MiB. Row groups are read whole. "
                            "Write the file again with a smaller row_group_size."
                        )
                digest = (file.schema_arrow.metadata or {}).get(DIGEST_KEY)
                self.digest = None if digest is None else int(digest)
        except UNREADABLE as error:
            raise self._damaged(error) from error

    def rows(self) -> Iterator[tuple[int, Key, dict | str]]:
        """Row number from 1, key, and fields of every row."""
        try:
            with self._open() as file:
                for group in range(file.num_row_groups):
                    place = 0
                    for batch in file.iter_batches(64, [group], self._columns, use_threads=False):
                        for i in range(batch.num_rows):
                            yield self._starts[group] + place + 1, (group, place), _fields(batch, i)
                            place += 1
                # Only now: pyarrow ends the process when asked for a column whose metadata are damaged, where
                # reading that column raises.
                if file.num_row_groups and self._columns:
                    leaves = [file.schema.column(i).path for i in range(file.metadata.num_columns)]
                    first = next(i for i, leaf in enumerate(leaves) if leaf.split(".")[0] == self._columns[0])
                    self.has_checksums = _first_page_has_checksum(self.path, file.metadata.row_group(0).column(first))
        except UNREADABLE as error:
            raise self._damaged(error) from error
        self.check_unchanged()

    def row(self, key: Key) -> dict | str:
        group, place = key
        self.check_unchanged()
        try:
            if group not in self._cache:
                with self._open() as file:
                    self._cache[group] = file.read_row_group(group, self._columns, use_threads=False)
            self._cache.move_to_end(group)
            if len(self._cache) > 2:
                self._cache.popitem(last=False)
            return _fields(self._cache[group], place)
        except UNREADABLE as error:
            raise self._damaged(error) from error

    def _open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, page_checksum_verification=True, pre_buffer=False, buffer_size=2**20)

    def _damaged(self, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return error
        return DataError(
            f"{self.label} is not a whole Parquet file, truncated or damaged: {error}. Copy or write it again."
        )


def _fields(table: pa.Table | pa.RecordBatch, row: int) -> dict[str, Any]:
    """One row; lists as NumPy arrays."""
    fields = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        value = column[row]
        is_list = isinstance(value, (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)) and value.is_valid
        fields[name] = value.values.to_numpy(zero_copy_only=False) if is_list else value.as_py()
    return fields


def _parse_line(line: bytes) -> dict | str:
    try:
        row = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if len(line) == MAX_ROW_BYTES:
            return f"the line is longer than {MAX_ROW_BYTES // 2**20} MiB; JSONL has one object per line"
        if not line.endswith(b"\n"):
            return "the file ends within this row: it was truncated, or is still being written. Remove the row"
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"not a JSON object (got {type(row).__name__}); JSONL has one per line"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return row


def _first_page_has_checksum(path: Path, column: pq.ColumnChunkMetaData) -> bool:
    """Whether field 4, `crc`, is in the first page's header: a Thrift compact struct of i32 fields 1, 2, 3, [4], ..."""
    with open(path, "rb") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        header = file.read(64)
    place = 0
    for _ in range(3):
        place += 1  # the byte 0x15: the next field, of type i32
        while header[place] & 0x80:
            place += 1
        place += 1
    return header[place] == 0x15


def _listing(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
