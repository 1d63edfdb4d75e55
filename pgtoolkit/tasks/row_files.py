"""Files of rollouts and prompts, JSONL, Parquet and Arrow, read one row at a time."""

from __future__ import annotations

import bisect
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from pgtoolkit.errors import DataError
from pgtoolkit.system.report import free_path, listed, plural, program, without_ending

SUFFIXES = (".jsonl", ".parquet")
MAX_ROW_GROUP_BYTES = 512 * 2**20
MAX_PROBLEMS = 10
_ALIKE = 3
"""Problems of one kind that are lines of their own."""

_MAX_ROWS_READ = 1000
"""Problems after which no further row is read."""


_COUNTED_BYTES = 2**30
"""The largest JSONL file whose lines are counted."""

_BATCH_ROWS = 256

RawRow = dict[str, Any]
"""A row of a file: its columns by name."""

_START = 64
"""Bytes by which a file of another kind is known."""

_PARQUET = b"PAR1"
_OTHER_CONTENT = {
    b"version https://git-lfs": "the pointer of Git LFS; `git lfs pull` puts the file in its place",
    b"\x1f\x8b": "gzip; gunzip unpacks it, where its name ends with .gz",
    b"\x28\xb5\x2f\xfd": "zstd; zstd -d unpacks it, where its name ends with .zst",
    b"PK\x03\x04": "a zip archive; unzip unpacks it",
    _PARQUET: "Parquet; rename it to end with .parquet",
    b"\xff\xfe": "UTF-16; `iconv -f UTF-16 -t UTF-8 OLD > NEW` makes it UTF-8",
    b"\xfe\xff": "UTF-16; `iconv -f UTF-16 -t UTF-8 OLD > NEW` makes it UTF-8",
    b"{\0": "UTF-16; `iconv -f UTF-16LE -t UTF-8 OLD > NEW` makes it UTF-8",
    b"<": "a page of HTML or XML",
}
"""How files begin that are no JSONL, and what they are."""

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Problems:
    """Collects the problems of data, and raises one DataError that lists them; at the tenth that
    differs from the others at once.

    A problem that more than _ALIKE rows share is one line, with the first of these rows.
    title: the first line of that error. advice: returns its last lines.
    """

    def __init__(self, title: str, advice: Callable[[], list[str]] = list):
        self._title = title
        self._advice = advice
        self._kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._count = 0

    def add(self, place: str, reason: str) -> None:
        """Add what is wrong at a place, FILE:ROW or FILE:ROW:FIELD."""
        self._count += 1
        field = place.rpartition(":")[2]
        kind = ("" if field.isdigit() else field, reason.partition(" (got ")[0])
        self._kinds.setdefault(kind, []).append((place, reason))
        lines = sum(len(lines) if len(lines) <= _ALIKE else 1 for lines in self._kinds.values())
        if lines >= MAX_PROBLEMS or self._count >= _MAX_ROWS_READ:
            self._raise(f"{self._count} problems or more, the first are")

    def __bool__(self) -> bool:
        """Return whether there is any problem so far."""
        return bool(self._kinds)

    def raise_if_any(self) -> None:
        if self._kinds:
            self._raise(plural(self._count, "problem"))

    def _raise(self, count: str) -> NoReturn:
        lines = [f"{self._title}: {count}"]
        for alike in self._kinds.values():
            if len(alike) <= _ALIKE:
                lines += [f"  {place}: {reason}" for place, reason in alike]
            else:
                place, reason = alike[0]
                others = listed([_row_of(place) for place, _ in alike[1:]], 8)
                lines.append(
                    f"  {place}: {reason}; the same in {len(alike) - 1} rows more: {others}"
                )
        raise DataError("\n".join([*lines, *(f"  {line}" for line in self._advice())]))


def _row_of(place: str) -> str:
    """Return the number of the row in FILE:ROW or FILE:ROW:FIELD."""
    return next(part for part in reversed(place.split(":")) if part.isdigit())


def count_rows(path: str, key: str) -> int | None:
    """Return the number of rows in the files of `find_files`; None where counting takes long."""
    count = 0
    for file in find_files(path, key):
        if file.suffix == ".parquet":
            count += pq.read_metadata(file).num_rows
        elif file.stat().st_size > _COUNTED_BYTES:
            return None
        else:
            with open(file, "rb") as lines:
                count += sum(1 for line in lines if line.strip())
    return count


def find_files(path: str, key: str) -> list[Path]:
    """Return the JSONL and Parquet files that a file, a folder or a glob names, in `in_order`.

    Raises DataError that starts with the configuration key and says what is there instead.
    """
    place = Path(path).expanduser()
    got = "no such file"
    if place.is_dir():
        files = [
            file
            for file in place.iterdir()
            if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
        ]
        names = sorted(file.name for file in place.iterdir())
        got = f"a folder with {listed(names, 8) or 'nothing'}"
    elif place.exists():
        files = [place]
    else:
        files = [Path(name) for name in glob.glob(str(place), recursive=True)]
    if not files:
        way_out = way_to_rows(place)
        raise DataError(f"{key}={path} needs .jsonl or .parquet files (got {got}).{way_out}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(
                f"{key}={path} needs .jsonl or .parquet files (got {file.name}).{way_to_rows(file)}"
            )
    return in_order(files)


def other_content(start: bytes) -> str | None:
    """Return what a file is that begins so, in words; None if it may be JSONL."""
    for beginning, words in _OTHER_CONTENT.items():
        if start.startswith(beginning):
            return words
    text = start.removeprefix(b"\xef\xbb\xbf").strip()
    if text.startswith(b"["):
        return "a list over the whole file; JSONL has one object per line, without commas between"
    if re.match(rb"\{[ \t\r]*\n", text):
        return "an object over several lines; JSONL has one per line"
    return None


_FROM_TABLE = (
    "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(open(sys.argv[1], "
    "encoding='utf-8-sig', newline=''){})]"
)
_FROM_LIST = (
    "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1], "
    "encoding='utf-8-sig'))]"
)


def _start_of(file: Path) -> bytes:
    with open(file, "rb") as content:
        return content.read(_START)


def way_to_rows(place: Path) -> str:
    """Return a sentence, after a space, on how to make JSONL of a file or a folder; "" where there
    is nothing to make it of."""
    if place.is_dir():
        below = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES)
        if below:
            pattern = shlex.quote(f"{place}/**/*{below[0].suffix}")
            return f" Use {pattern} for the files in its folders."
        files = [file for file in sorted(place.iterdir()) if file.is_file() and way_to_rows(file)]
        return f" For each file:{way_to_rows(files[0])}" if files else ""
    if not place.is_file():
        return ""
    new = shlex.quote(free_path(str(without_ending(place)), ".jsonl"))
    old = shlex.quote(str(place))
    python = program("python")
    match place.suffix.lower():
        case ".csv" | ".tsv":
            separator = ", delimiter=chr(9)" if place.suffix.lower() == ".tsv" else ""
            code = _FROM_TABLE.format(separator)
            return f' Convert it: {python} -c "{code}" {old} > {new}'
        case ".json" if _start_of(place).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return f' Convert it: {python} -c "{_FROM_LIST}" {old} > {new}'
        case ".json" | ".jsonl" | ".jsonlines" | ".ndjson":
            return f" If it has one object per line, rename it: mv {old} {new}"
        case ".gz":
            return f" Unpack it: gunzip -k {old}"
        case ".zst":
            return f" Unpack it: zstd -d {old}"
        case ".xlsx" | ".xls" | ".ods":
            return " Save it as CSV in the program that made it, and convert that."
        case ".txt":
            return ' Each row needs names: {"prompt": "...", "answer": "..."} in a line of JSONL.'
    return ' Convert it to JSONL: an object per line, such as {"prompt": "...", "answer": "..."}.'


def in_order(files: list[Path]) -> list[Path]:
    """Return files ordered by name, with 2 before 10."""

    def pieces(file: Path) -> list[int | str]:
        split = re.split(r"(\d+)", str(file))
        return [int(piece) if piece.isdigit() else piece for piece in split]

    return sorted(files, key=pieces)


def open_files(paths: Sequence[Path], columns: Collection[str] | None) -> list[RowFile]:
    """Return the files, ready to read `columns` (None: all).

    Their labels are their paths below the folder that holds them all.
    """
    common = os.path.commonpath([file.absolute().parent for file in paths])
    kinds = {".jsonl": JsonlFile, ".parquet": ParquetFile, ".arrow": ArrowFile}
    return [
        kinds[file.suffix](file, os.path.relpath(file.absolute(), common), columns)
        for file in paths
    ]


class RowFile:
    """A file of rows, which must stay as it was opened: `RecordedRollouts` compares a row that it
    reads again.

    names: all its columns, where the file has columns; known at the latest with its first row.
    rows(): number from 1, place, and fields of every row, or the reason why a line is no row;
    row(place): one of them. The bytes that rows() has read are in `digest`, which is the SHA-256 of
    the file once rows() has come to its end.

    Both raise DataError for a file that cannot be read or is damaged, and row() for one that was
    changed since.
    """

    names: list[str] | None = None

    def __init__(self, path: Path, label: str, columns: Collection[str] | None = ()):
        self.path = path
        self.label = label
        self.digest = hashlib.sha256()
        self._columns = columns

    def _is_wanted(self, column: str) -> bool:
        return self._columns is None or column in self._columns

    def _refuse_duplicates(self, names: Sequence[str]) -> None:
        """Raise DataError where two of the wanted columns have one name."""
        twice = [name for name in names if self._is_wanted(name) and names.count(name) > 1]
        if twice:
            raise DataError(
                f"{self.label} has the column {twice[0]!r} twice. Which of them is meant cannot be "
                "known. Write it again with one of them."
            )

    def rows(self) -> Iterator[tuple[int, int, RawRow | str]]:
        raise NotImplementedError

    def _row(self, place: int) -> RawRow | str:
        raise NotImplementedError

    def row(self, place: int) -> RawRow | str:
        try:
            return self._row(place)
        except (DataError, pa.ArrowException, OSError, IndexError) as error:
            raise self.changed() from error

    def changed(self) -> DataError:
        return DataError(
            f"{self.label} was changed while it was in use. A run reads its files again and again, "
            "and the rows were checked as they were at its start. Keep them as they are until the "
            "run has ended."
        )

    @contextlib.contextmanager
    def _naming_the_file(self, kind: str) -> Iterator[None]:
        """Inside the block, errors of a file that cannot be read or is damaged become DataError
        with its name."""
        try:
            yield
        except DataError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{self.label} is not a complete {kind}: {error}. Copy or write it again."
            ) from error


class JsonlFile(RowFile):
    """A JSONL file, one object per line; the place of a row is its byte offset."""

    def rows(self) -> Iterator[tuple[int, int, RawRow | str]]:
        with self._naming_the_file("JSONL file"), open(self.path, "rb") as file:
            other = other_content(file.read(_START))
            if other is not None:
                raise DataError(f"{self.label} needs an object in each line (got {other}).")
            file.seek(0)
            offset = 0
            for number, line in enumerate(file, 1):
                self.digest.update(line)
                if line.strip():
                    yield number, offset, _parse_line(line)
                offset += len(line)

    def _row(self, place: int) -> RawRow | str:
        with open(self.path, "rb") as file:
            file.seek(place)
            return _parse_line(file.readline())


class ParquetFile(RowFile):
    """A Parquet file; the place of a row is its number from 0. Page checksums are verified where
    there are some."""

    def __init__(self, path: Path, label: str, columns: Collection[str] | None):
        super().__init__(path, label, columns)
        self._row_group = functools.lru_cache(maxsize=2)(self._read_row_group)

    @functools.cached_property
    def names(self) -> list[str]:
        with self._opened() as file:
            names = file.schema_arrow.names
        self._refuse_duplicates(names)
        return names

    def rows(self) -> Iterator[tuple[int, int, RawRow | str]]:
        return _numbered(map(rows_of, self.batches()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, up to _BATCH_ROWS at a time."""
        with self._opened() as file, open(self.path, "rb") as raw:
            self._refuse_duplicates(file.schema_arrow.names)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                wanted = self._wanted(file, number)
                size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                # Before the group is decoded: it is then read from the disk only once.
                self._add_to_digest(raw, raw.tell() + size)
                yield from file.iter_batches(_BATCH_ROWS, [number], wanted, use_threads=False)
            self._add_to_digest(raw, math.inf)

    def _add_to_digest(self, raw: BinaryIO, end: float) -> None:
        """Add the bytes of the file to the digest, up to about this place."""
        while raw.tell() < end:
            block = raw.read(2**20)
            if not block:
                return
            self.digest.update(block)

    def _row(self, place: int) -> RawRow | str:
        group = bisect.bisect_right(self._starts, place) - 1
        return self._row_group(group)[place - self._starts[group]]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The number of the first row of each row group, and of all rows."""
        with self._opened() as file:
            sizes = [
                file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
            ]
        return [0, *itertools.accumulate(sizes)]

    def _read_row_group(self, group: int) -> list[RawRow]:
        with self._opened() as file:
            table = file.read_row_group(group, self._wanted(file, group), use_threads=False)
        return [row for batch in table.to_batches() for row in rows_of(batch)]

    def _wanted(self, file: pq.ParquetFile, group: int) -> list[str]:
        """Return the wanted columns that the file has.

        Raises DataError if those of a row group are too large.
        """
        metadata = file.metadata.row_group(group)
        columns = [metadata.column(place) for place in range(metadata.num_columns)]
        wanted = [
            column for column in columns if self._is_wanted(column.path_in_schema.partition(".")[0])
        ]
        size = sum(column.total_uncompressed_size for column in wanted)
        if size > MAX_ROW_GROUP_BYTES:
            raise DataError(
                f"{self.label} has a row group of {size / 2**20:.0f} MiB; the limit is "
                f"{MAX_ROW_GROUP_BYTES // 2**20} MiB. Row groups are read whole. Write the file "
                "again with a smaller row_group_size."
            )
        return [name for name in file.schema_arrow.names if self._is_wanted(name)]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        options = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": 2**20}
        with self._naming_the_file("Parquet file"):
            start = _start_of(self.path)
        if start[:4] != _PARQUET:
            other = other_content(start) or "another file"
            if start:
                raise DataError(f"{self.label} needs the content of a Parquet file (got {other}).")
        with (
            self._naming_the_file("Parquet file, truncated or damaged"),
            pq.ParquetFile(self.path, **options) as file,
        ):
            yield file


class ArrowFile(RowFile):
    """An Arrow stream, as `save_to_disk` of datasets writes it.

    Its rows can only be read in their order.
    """

    def rows(self) -> Iterator[tuple[int, int, RawRow | str]]:
        with self._naming_the_file("Arrow stream"), pa.memory_map(str(self.path)) as file:
            file.seek(max(0, file.size() - len(_END_OF_STREAM)))
            # Without this mark a stream could be cut off after any batch.
            if file.read() != _END_OF_STREAM:
                raise pa.ArrowInvalid("its end is missing")
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                names = stream.schema.names
                self.names = names
                self._refuse_duplicates(names)
                wanted = [name for name in names if self._is_wanted(name)]
                yield from _numbered(rows_of(batch.select(wanted)) for batch in stream)


def _numbered(batches: Iterable[list[RawRow]]) -> Iterator[tuple[int, int, RawRow]]:
    return (
        (place + 1, place, row) for place, row in enumerate(itertools.chain.from_iterable(batches))
    )


def rows_of(batch: pa.RecordBatch) -> list[RawRow]:
    """Return the rows of a batch; lists as NumPy arrays."""
    rows: list[RawRow] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row, value in zip(rows, _values(column), strict=True):
            row[name] = value
    return rows


def _values(column: pa.Array) -> list:
    """Return the value of a column in each row; lists as NumPy arrays, which share its memory."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not isinstance(column, (pa.ListArray, pa.LargeListArray)):
        return column.to_pylist()
    # Each list by itself, since a null in it changes the type of its array.
    if column.null_count or column.values.null_count:
        return [
            cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column
        ]
    values = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_pylist()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _parse_line(line: bytes) -> RawRow | str:
    """Return the row of a line, or why it is none."""
    try:
        row = json.loads(line, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return (
                "the file ends within this row: it was truncated, or is still being written. "
                "Remove the row"
            )
        return f"not JSON: {error}"
    if not isinstance(row, dict):
        return f"not a JSON object (got {type(row).__name__}); JSONL has one per line"
    return row


def _without_duplicates(pairs: list[tuple[str, object]]) -> RawRow:
    """Return a JSON object. ValueError for a key that appears twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {duplicate!r} appears twice")
    return row
