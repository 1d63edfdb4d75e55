"""Records the rollouts of a run, so that they can be trained on again."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pgtoolkit.batch import Document
from pgtoolkit.config.paths import occupied_by_rollouts
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.rollouts.rows import FIELDS, Row, row_of
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.tasks.row_files import DIGEST_KEY

ROW_GROUP_TOKENS = 2**20
"""A row group is read whole: it ends with the row that reaches so many tokens."""


class RolloutWriter:
    """Records rollouts in a folder with one file per batch, which `rollout=recorded` reads.

    path: the folder; ending in .jsonl it gets JSONL files, else Parquet with page checksums. A file appears under its
    name once it is complete and on the disk. A resumed run writes the batches after its checkpoint again, each over
    itself, so no row is lost or doubled. Without resume, a folder that already has batches raises ConfigError.
    """

    def __init__(self, path: str | Path, resume: bool = False):
        self._folder = Path(path).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"rollout.save_path={path} cannot be made a folder: {error.strerror}") from error
        if not resume and (problem := occupied_by_rollouts(path)):
            raise ConfigError(problem)

    def write(self, number: int, documents: list[Document]) -> Path:
        """Record the documents of batch `number`; returns the file. Raises StorageError when that is not possible."""
        path = batch_file(self._folder, number)
        rows = [row_of(document) for document in documents]
        try:
            with replacing(path) as file:
                if path.suffix == ".jsonl":
                    _write_jsonl(file, rows)
                else:
                    write_parquet(file, rows, functools.reduce(lambda digest, row: row.digest(digest), rows, 0))
        except OSError as error:
            raise StorageError(f"rollouts cannot be written to {path}: {error.strerror or error}") from error
        return path


def batch_file(folder: Path, number: int) -> Path:
    """Where the documents of batch `number` are recorded in a folder."""
    return folder / f"batch-{number:06d}{'.jsonl' if folder.suffix == '.jsonl' else '.parquet'}"


def write_parquet(file: BinaryIO, rows: Iterable[Row], digest: int | None = None) -> None:
    """Parquet with page checksums, a row group at a time in memory; digest: of the rows, where it is known before.

    The columns are what the rows of the first group know, and further ones of their measures, which training ignores.
    """
    groups = _row_groups(rows)
    first = next(groups)
    known = [(name, kind) for name, (kind, _) in FIELDS.items() if any(getattr(row, name) is not None for row in first)]
    measures = [(name, pa.float64()) for name in dict.fromkeys(name for row in first for name in row.measures)]
    schema = pa.schema([*known, *measures], None if digest is None else {DIGEST_KEY: str(digest)})
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


def _write_jsonl(file: BinaryIO, rows: list[Row]) -> None:
    for row in rows:
        values = {name: getattr(row, name) for name in FIELDS} | row.measures
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}
        file.write(json.dumps({key: value for key, value in plain.items() if value is not None}).encode() + b"\n")
