"""Rollouts recorded as Parquet files, which `rollout=recorded` reads."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pgtoolkit.document import OPTIONAL_VECTORS, ROWS, Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.recorded_folder import occupied_by_rollouts
from pgtoolkit.rollouts.rows import FIELDS, OF_THE_DOCUMENT, RecordedRow
from pgtoolkit.runs.records import storage
from pgtoolkit.system.plain_files import replacing

ROW_GROUP_TOKENS = 2**20
"""A row group ends with the row that reaches this many tokens, since readers load all of it."""


def recording_folder(path: str, resume: bool = False) -> Path:
    """Make the folder of a run's batches, and return it.

    Raises ConfigError where it holds batches and the run is not resumed.
    """
    folder = Path(path).expanduser()
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    problem = None if resume else occupied_by_rollouts(path)
    if problem:
        raise ConfigError(problem)
    return folder


def write_batch(folder: Path, number: int, documents: list[Document]) -> Path:
    """Record the documents of a batch; return the file, which gets its name once it is complete and
    on the disk.

    A resumed run writes the batches after its checkpoint again, each over itself, so no row is lost
    or doubled.
    """
    path = batch_file(folder, number)
    rows = map(row_of, documents)
    columns = []
    if any(document.score_failed for document in documents):
        rows = map(_row_with_failure, documents)
        columns = ["reward", "score_failed"]
    with storage(path), replacing(path) as file:
        write_parquet(file, rows, columns)
    return path


def _row_with_failure(document: Document) -> RecordedRow:
    """Return the row of a document with whether its score failed.

    Rows of batches without a failure leave this out.
    """
    row = row_of(document)
    row.score_failed = document.score_failed
    return row


def batch_file(folder: Path, number: int) -> Path:
    """Return the file of a folder in which the documents of batch `number` are recorded."""
    return folder / f"batch-{number:06d}.parquet"


def row_of(document: Document) -> RecordedRow:
    """Return the row that records a document; its name becomes the id, its group the group_id."""
    mask = document.loss_mask.numpy()

    def per_token(values: torch.Tensor | None) -> np.ndarray | None:
        """Return (S,) numbers from those of the trained tokens, 0 elsewhere."""
        if values is None:
            return None
        numbers = np.zeros(len(mask), np.float32)
        numbers[mask] = values.numpy()
        return numbers

    def rows_per_token(values: torch.Tensor | None) -> list[np.ndarray] | None:
        """Return a list for each token from the rows of the trained ones, empty elsewhere."""
        if values is None:
            return None
        rows = values.numpy()
        nothing = np.zeros(0, rows.dtype)
        of_trained = iter(rows)
        return [next(of_trained) if is_trained else nothing for is_trained in mask]

    return RecordedRow(
        token_ids=document.tokens.numpy(),
        loss_mask=mask,
        advantage=per_token(document.advantages),
        group_id=document.group,
        trajectory=document.trajectory,
        score_failed=None,
        id=document.name,
        measures=document.measures,
        **{name: per_token(getattr(document, name)) for name in OPTIONAL_VECTORS},
        **{name: rows_per_token(getattr(document, name)) for name in ROWS},
        **{name: getattr(document, name) for name in OF_THE_DOCUMENT},
    )


def write_parquet(
    file: BinaryIO, rows: Iterable[RecordedRow], columns: Collection[str] = ()
) -> None:
    """Write rows as Parquet with page checksums, a row group at a time.

    The columns are the fields that rows of the first group have, and their measures, which training
    ignores. columns: fields that the file has even if the first group does not have them.
    """
    groups = _row_groups(rows)
    first = next(groups)
    fields = [
        (name, kind)
        for name, (kind, _) in FIELDS.items()
        if name in columns or any(getattr(row, name) is not None for row in first)
    ]
    measures = [
        (name, pa.float64())
        for name in dict.fromkeys(name for row in first for name in row.measures)
    ]
    schema = pa.schema([*fields, *measures])
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for group in itertools.chain([first], groups):
            values = [[getattr(row, name) for row in group] for name, _ in fields]
            values += [[row.measures.get(name) for row in group] for name, _ in measures]
            writer.write_table(pa.table(values, schema=schema))


def _row_groups(rows: Iterable[RecordedRow]) -> Iterator[list[RecordedRow]]:
    """Split rows into consecutive groups of about ROW_GROUP_TOKENS tokens."""
    group = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += len(row.token_ids)
        if tokens >= ROW_GROUP_TOKENS:
            yield group
            group = []
            tokens = 0
    if group:
        yield group
