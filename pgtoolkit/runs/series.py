"""metrics.jsonl as columns, one per metric; a metric over the steps of a run in a number, or as a
smooth curve."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import METRICS_ROW, parse_row, storage

if TYPE_CHECKING:
    import numpy as np

Columns = dict[str, "np.ndarray"]
"""Of each metric its values over the rows, float64 of one length, NaN in a row without it; `step`
is always there."""

_BLOCK_BYTES = 2**24
"""So much of a file is parsed at a time."""

_READ_BYTES = 2**16
"""So much is read at a time where lines are looked at; a file's last row begins within as much."""

_MOST_POINTS = 10_000


def read_metrics(path: Path, names: Collection[str] | None = None) -> Columns:
    """The columns of a metrics.jsonl, in the order in which its rows name them; a value that is not
    finite is NaN.

    names: of those that are read, None for all. A torn last line, left by a kill, is passed over.
        Raises StorageError
    for a broken line anywhere else.
    """
    import numpy as np

    blocks: list[Columns] = []
    rows = 0
    with storage(path):
        for data in _whole_lines(path):
            blocks.append(_parsed(data, names) or _parsed_by_line(data, path, rows + 1, names))
            rows += len(blocks[-1]["step"])
    known = dict.fromkeys(
        name for block in blocks for name, column in block.items() if not np.isnan(column).all()
    )

    def joined(name: str) -> np.ndarray:
        parts = [block.pop(name, np.broadcast_to(np.nan, len(block["step"]))) for block in blocks]
        return np.concatenate([[], *parts])

    columns = {name: joined(name) for name in known if name != "step"}
    return {"step": joined("step")} | columns


def metric_names(path: Path) -> set[str]:
    """What the first and the last row of a metrics.jsonl name."""
    names: set[str] = set()
    if path.exists():
        with storage(path), path.open("rb") as file:
            rows = [file.readline()]
            file.seek(max(file.tell(), path.stat().st_size - _READ_BYTES))
            for row in rows + file.read().split(b"\n")[-2:-1]:
                with contextlib.suppress(ValueError):  # of a row that is torn, or longer than that
                    names |= json.loads(row).keys()
    return names


def rows_until(path: Path, step: int, shape: dict = METRICS_ROW) -> tuple[int, int]:
    """(number, bytes) of the rows at the beginning of a file of rows, up to the last one of this
    step or before.

    A row that begins as the next step's is not parsed, so that half a million are passed over in a
    second. Raises StorageError for a broken row among the others, and for steps that do not rise.
    """
    rows = kept = position = last = 0
    if not path.exists():
        return 0, 0
    with storage(path), path.open("rb", buffering=_READ_BYTES) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill
            position += len(line)
            before = last
            if line.startswith(b'{"step": %d, "time": ' % (last + 1)) and line.endswith(b"}\n"):
                last += 1
            else:
                last = parse_row(line, shape, path, number)["step"]
                is_second_row = last == before and number > 1 and shape is METRICS_ROW
                if last < before or is_second_row:
                    raise StorageError(
                        f"{path}:{number} is damaged (step {last} follows step {before})"
                    )
            if last <= step:
                rows, kept = number, position
    return rows, kept


def values(columns: Columns, name: str) -> list[float]:
    """The metric at every step that has it."""
    column = columns.get(name)
    return [] if column is None else column[column == column].tolist()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def final(values: list[float]) -> float:
    """The mean over the last tenth of a run's steps."""
    return mean(values[-_tenth(values) :])


def first(values: list[float]) -> float:
    """The mean over the first tenth."""
    return mean(values[: _tenth(values)])


def best(values: list[float]) -> float:
    """The highest mean over any tenth of a run's steps in a row: one lucky step is not a peak."""
    tenth, sums = _tenth(values), [0.0, *accumulate(values)]
    return max(end - begin for begin, end in zip(sums, sums[tenth:], strict=False)) / tenth


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points of a curve to be smoothed; of more than 10,000 the means of several in a row."""
    import numpy as np

    if (several := -(-len(x) // _MOST_POINTS)) < 2:
        return x, y
    starts = np.arange(0, len(x), several)
    counts = np.diff(starts, append=len(x))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """The moving mean over each value and `half` of them on either side, twice; half: less than
    half of the values.

    One pass leaves teeth where the metric has a period, such as the steps of one batch of rollouts.
    """
    import numpy as np

    window = np.ones(2 * half + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    for _ in range(2):
        values = np.convolve(values, window, "same") / counts
    return values


def _tenth(values: list[float]) -> int:
    return max(1, len(values) // 10)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The file in blocks that end with a line."""
    if path.exists():
        with path.open("rb") as file:
            while data := file.read(_BLOCK_BYTES) + file.readline():
                if whole := data[: data.rfind(b"\n") + 1]:
                    yield whole


def _parsed(data: bytes, names: Collection[str] | None) -> Columns | None:
    """These columns of the lines, or all; None where Arrow cannot tell that each is a row of
    numbers with a step."""
    import numpy as np
    import pyarrow as pa
    from pyarrow.json import ParseOptions, ReadOptions, read_json

    # Of a short file threads take longer than they save.
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
            kind = column.type
            if not (pa.types.is_integer(kind) or (pa.types.is_floating(kind) and name != "step")):
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
    if (
        "step" not in columns
        or not columns["step"].min() >= 0
        or any(np.isinf(one).any() for one in columns.values())
    ):
        return None
    return columns


def _parsed_by_line(data: bytes, path: Path, number: int, names: Collection[str] | None) -> Columns:
    """The same by Python alone. Raises StorageError with the number of a broken line; number: that
    of the first."""
    import numpy as np

    lines = data.split(b"\n")[:-1]
    rows = [
        parse_row(line, METRICS_ROW, path, place) for place, line in enumerate(lines, start=number)
    ]
    wanted = dict.fromkeys(
        name for row in rows for name in row if names is None or name in ("step", *names)
    )
    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in wanted}
    return {name: np.where(np.isfinite(column), column, np.nan) for name, column in columns.items()}
