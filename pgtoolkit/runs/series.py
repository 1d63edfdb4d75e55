"""metrics.jsonl as columns, one for each metric, and the means and smooth curves of a metric."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import METRICS_ROW, parse_row, storage

if TYPE_CHECKING:
    import numpy as np

Columns = dict[str, "np.ndarray"]
"""The values of each metric over the rows: float64 of equal lengths, NaN in a row without a value.
`step` is always among them."""

_BLOCK_BYTES = 2**24
"""Bytes of a file that are parsed at a time."""

_READ_BYTES = 2**16
"""Bytes that are read at a time where single lines are read; a file's last row is no longer."""

_MOST_POINTS = 10_000

_ROUNDING = 1e-12
"""Numbers that differ by at most this share of the largest are equal. Those that were summed in
another order differ by less."""


def read_metrics(path: Path, names: Collection[str] | None = None) -> Columns:
    """Return the columns of a metrics.jsonl, in the order in which its rows name them.

    names: of the columns to read; None for all.
    Values that are not finite are NaN. A torn last line, left by a kill, is ignored. Raises
    StorageError for a broken line anywhere else.
    """
    import numpy as np

    blocks: list[Columns] = []
    num_rows = 0
    with storage(path):
        for data in _blocks_of_lines(path):
            block = _parse_by_arrow(data, names)
            if block is None:
                block = _parse_by_line(data, path, num_rows + 1, names)
            blocks.append(block)
            num_rows += len(block["step"])
    names_with_values = dict.fromkeys(
        name for block in blocks for name, column in block.items() if not np.isnan(column).all()
    )

    def joined(name: str) -> np.ndarray:
        # Popped, so that the memory of a block's column is free once it is copied.
        parts = [block.pop(name, np.broadcast_to(np.nan, len(block["step"]))) for block in blocks]
        return np.concatenate([[], *parts])

    columns = {name: joined(name) for name in names_with_values if name != "step"}
    return {"step": joined("step")} | columns


def metric_names(path: Path) -> set[str]:
    """Return the names in the first and the last row of a metrics.jsonl."""
    names: set[str] = set()
    if path.exists():
        with storage(path), path.open("rb") as file:
            first_row = file.readline()
            file.seek(max(file.tell(), path.stat().st_size - _READ_BYTES))
            last_row = file.read().split(b"\n")[-2:-1]
            for row in [first_row, *last_row]:
                with contextlib.suppress(ValueError):  # a torn row, or one longer than expected
                    names |= json.loads(row).keys()
    return names


def rows_until(path: Path, step: int, shape: dict = METRICS_ROW) -> tuple[int, int]:
    """Return (number, bytes) of the rows of a file up to the last one of this step or before.

    shape: of a row, see `records.expect`.
    Rows that begin as the next step's are not parsed, so half a million take a second. Raises
    StorageError for a broken row among the others, and for steps that do not rise.
    """
    if not path.exists():
        return 0, 0
    num_rows = 0
    num_bytes = 0
    position = 0
    last_step = 0
    with storage(path), path.open("rb", buffering=_READ_BYTES) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill
            position += len(line)
            next_row = b'{"step": %d, "time": ' % (last_step + 1)
            if line.startswith(next_row) and line.endswith(b"}\n"):
                last_step += 1
            else:
                row_step = parse_row(line, shape, path, number)["step"]
                is_repeated = row_step == last_step and number > 1 and shape is METRICS_ROW
                if row_step < last_step or is_repeated:
                    raise StorageError(
                        f"{path}:{number} is damaged (step {row_step} follows step {last_step})"
                    )
                last_step = row_step
            if last_step <= step:
                num_rows = number
                num_bytes = position
    return num_rows, num_bytes


def values(columns: Columns, name: str) -> list[float]:
    """Return the values of a metric at the steps that have one."""
    column = columns.get(name)
    return [] if column is None else column[column == column].tolist()


def mean(values: list[float]) -> float:
    """Return the mean, the same in whichever order the values stand."""
    return math.fsum(values) / len(values)


def without_rounding(differences: float | np.ndarray, largest: float | np.ndarray) -> np.ndarray:
    """Return the differences, with 0 in the place of those that come from rounding alone.

    largest: the highest absolute value among the numbers that were subtracted.
    """
    import numpy as np

    return np.where(np.abs(differences) <= _ROUNDING * largest, 0.0, differences)


def ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each value, from 0 for the lowest.

    Values that are equal but for rounding have the same rank.
    """
    import numpy as np

    order = np.argsort(values)
    largest = max(map(abs, values), default=0.0)
    is_higher = without_rounding(np.diff(np.asarray(values)[order]), largest) > 0
    of_values = np.empty(len(order), int)
    of_values[order] = np.cumsum([0, *is_higher])[: len(order)]
    return of_values.tolist()


def final(values: list[float]) -> float:
    """Return the mean over the last tenth of a run's steps."""
    return mean(values[-_tenth(values) :])


def first(values: list[float]) -> float:
    """Return the mean over the first tenth of a run's steps."""
    return mean(values[: _tenth(values)])


def best(values: list[float]) -> float:
    """Return the highest mean over any tenth of a run's steps in a row.

    So a single lucky step is not a peak.
    """
    length = _tenth(values)
    sums = [0.0, *accumulate(values)]
    return max(end - begin for begin, end in zip(sums, sums[length:], strict=False)) / length


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a curve; of more than 10,000 the means of several in a row."""
    import numpy as np

    points_per_mean = -(-len(x) // _MOST_POINTS)
    if points_per_mean < 2:
        return x, y
    starts = np.arange(0, len(x), points_per_mean)
    counts = np.diff(starts, append=len(x))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """Return the moving mean over each value and `half` values on either side, taken twice.

    half: less than half of the number of values.
    A single pass leaves teeth where the metric has a period, such as the steps of one batch of
    rollouts.
    """
    import numpy as np

    window = np.ones(2 * half + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    for _ in range(2):
        values = np.convolve(values, window, "same") / counts
    return values


def _tenth(values: list[float]) -> int:
    return max(1, len(values) // 10)


def _blocks_of_lines(path: Path) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines, without a torn last line."""
    if path.exists():
        with path.open("rb") as file:
            while data := file.read(_BLOCK_BYTES) + file.readline():
                lines = data[: data.rfind(b"\n") + 1]
                if lines:
                    yield lines


def _parse_by_arrow(data: bytes, names: Collection[str] | None) -> Columns | None:
    """Return the named columns of lines, or all.

    None where Arrow cannot be sure that each line is a row of numbers with a step.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow.json import ParseOptions, ReadOptions, read_json

    # For a short file threads take longer than they save.
    reading = ReadOptions(use_threads=len(data) > 2**20, block_size=2**20)
    parsing = None
    if names is not None:
        schema = pa.schema(
            [("step", pa.int64()), *((name, pa.float64()) for name in names if name != "step")]
        )
        parsing = ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    columns = {}
    try:
        table = read_json(pa.BufferReader(data), reading, parsing)
        for name, column in zip(table.column_names, table.columns, strict=True):
            is_integer = pa.types.is_integer(column.type)
            if not is_integer and (name == "step" or not pa.types.is_floating(column.type)):
                return None
            parts = [
                part.cast("float64").fill_null(np.nan) if part.null_count else part
                for part in column.chunks
            ]
            columns[name] = np.concatenate([np.from_dlpack(part) for part in parts]).astype(
                float, copy=False
            )
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    if "step" not in columns or any(np.isinf(column).any() for column in columns.values()):
        return None
    if not columns["step"].min() >= 0:  # also false for NaN, in a row without a step
        return None
    return columns


def _parse_by_line(
    data: bytes, path: Path, first_number: int, names: Collection[str] | None
) -> Columns:
    """Return the named columns of lines, or all, parsed by Python's json.

    first_number: of the first line. Raises StorageError with the number of a broken line.
    """
    import numpy as np

    lines = data.split(b"\n")[:-1]
    rows = [
        parse_row(line, METRICS_ROW, path, number)
        for number, line in enumerate(lines, start=first_number)
    ]
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if names is None or name == "step" or name in names:
            column = np.array([row.get(name, np.nan) for row in rows], float)
            columns[name] = np.where(np.isfinite(column), column, np.nan)
    return columns
