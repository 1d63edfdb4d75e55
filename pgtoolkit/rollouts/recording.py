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

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.paths import occupied_by_rollouts
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.rows import FIELDS, OF_THE_DOCUMENT, Row
from pgtoolkit.runs.records import storage
from pgtoolkit.system.plain_files import replacing

ROW_GROUP_TOKENS = 2**20
"""A row group is read whole: it ends with the row that reaches so many tokens."""


def recording_folder(path: str, resume: bool = False) -> Path:
    """The folder of a run's batches, made. Raises ConfigError where it has some and the run is not
    resumed."""
    folder = Path(path).expanduser()
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not resume and (problem := occupied_by_rollouts(path)):
        raise ConfigError(problem)
    return folder


def write_batch(folder: Path, number: int, documents: list[Document]) -> Path:
    """Record the documents of a batch; returns the file, which has its name once it is complete and
    on the disk.

    A resumed run writes the batches after its checkpoint again, each over itself, so no row is lost
    or doubled.
    """
    path = batch_file(folder, number)
    rows = map(row_of, documents)
    columns = []
    if any(document.score_failed for document in documents):
        columns = ["reward", "score_failed"]
        rows = (_with_failure(row, document) for row, document in zip(rows, documents, strict=True))
    with storage(path), replacing(path) as file:
        write_parquet(file, rows, columns)
    return path


def _with_failure(row: Row, document: Document) -> Row:
    """The row with whether its score failed, which rows of other batches leave out."""
    row.score_failed = document.score_failed
    return row


def batch_file(folder: Path, number: int) -> Path:
    """Where the documents of batch `number` are recorded in a folder."""
    return folder / f"batch-{number:06d}.parquet"


def row_of(document: Document) -> Row:
    """The row that records a document; its name becomes the id, its group the group_id."""
    mask = document.loss_mask.numpy()

    def per_token(values: torch.Tensor | None) -> np.ndarray | None:
        if values is None:
            return None
        row = np.zeros(len(mask), np.float32)
        row[mask] = values.numpy()
        return row

    return Row(
        token_ids=document.tokens.numpy(),
        loss_mask=mask,
        advantage=per_token(document.advantages),
        group_id=document.group,
        trajectory=document.trajectory,
        score_failed=None,
        id=document.name,
        measures=document.measures,
        **{name: per_token(getattr(document, name)) for name in OPTIONAL_VECTORS},
        **{name: getattr(document, name) for name in OF_THE_DOCUMENT},
    )


def write_parquet(file: BinaryIO, rows: Iterable[Row], columns: Collection[str] = ()) -> None:
    """Parquet with page checksums, a row group at a time in memory.

    The columns are what the rows of the first group know, and further ones of their measures, which
    training ignores.
    columns: fields that the file has also where the first group does not know them.
    """
    groups = _row_groups(rows)
    first = next(groups)
    known = [
        (name, kind)
        for name, (kind, _) in FIELDS.items()
        if name in columns or any(getattr(row, name) is not None for row in first)
    ]
    measures = [
        (name, pa.float64())
        for name in dict.fromkeys(name for row in first for name in row.measures)
    ]
    schema = pa.schema([*known, *measures])
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for group in itertools.chain([first], groups):
            values = [[getattr(row, name) for row in group] for name, _ in known]
            values += [[row.measures.get(name) for row in group] for name, _ in measures]
            writer.write_table(pa.table(values, schema=schema))


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group, tokens = [], 0
    for row in rows:
        group.append(row)
        tokens += len(row.token_ids)
        if tokens >= ROW_GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group
