"""Records the rollouts of a run, so that they can be trained on again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pgtoolkit.batch import Document
from pgtoolkit.config.rules.run import occupied_by_rollouts
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.rollouts.files import DIGEST_KEY
from pgtoolkit.rollouts.rows import Row, row_of
from pgtoolkit.system.plain_files import replacing

ROW_GROUP_TOKENS = 2**20


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
        rows, measures = [row_of(document) for document in documents], [document.measures for document in documents]
        try:
            with replacing(path) as file:
                (_write_jsonl if path.suffix == ".jsonl" else _write_parquet)(file, rows, measures)
        except OSError as error:
            raise StorageError(f"rollouts cannot be written to {path}: {error.strerror or error}") from error
        return path


def batch_file(folder: Path, number: int) -> Path:
    """Where the documents of batch `number` are recorded in a folder."""
    return folder / f"batch-{number:06d}{'.jsonl' if folder.suffix == '.jsonl' else '.parquet'}"


_SCHEMA = pa.schema(
    {
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "old_log_probs": pa.list_(pa.float32()),
        "advantage": pa.list_(pa.float32()),
        "reward": pa.float64(),
        "group_id": pa.int64(),
        "id": pa.string(),
        "model_version": pa.int64(),
        "truncated": pa.bool_(),
        "exact_match": pa.bool_(),
        "sampling_log_probs": pa.list_(pa.float32()),
        "ref_log_probs": pa.list_(pa.float32()),
    }
)


def write_parts(file: BinaryIO, parts: Iterable[list[Row]]) -> None:
    """Parquet with page checksums, a row group of each part, so that one part at a time is in memory.

    The columns are what the first row knows. Raises StorageError where the disk does not take it.
    """
    writer = None
    for rows in parts:
        if writer is None:
            schema = pa.schema([field for field in _SCHEMA if getattr(rows[0], field.name) is not None])
            writer = pq.ParquetWriter(file, schema, write_page_checksum=True)
        writer.write_table(pa.table([[getattr(row, name) for row in rows] for name in schema.names], schema=schema))
    if writer is not None:
        writer.close()


def _write_parquet(file: BinaryIO, rows: list[Row], measures: list[dict[str, float]]) -> None:
    """measures: of each document, more columns for whoever reads the file; training ignores them."""
    digest = 0
    for row in rows:
        digest = row.digest(digest)
    known = [field for field in _SCHEMA if not rows or any(getattr(row, field.name) is not None for row in rows)]
    table = pa.table([[getattr(row, field.name) for row in rows] for field in known], schema=pa.schema(known))
    for name in dict.fromkeys(name for one in measures for name in one):
        table = table.append_column(name, pa.array([one.get(name) for one in measures], pa.float64()))
    table = table.replace_schema_metadata({DIGEST_KEY: str(digest)})
    rows_per_group = max(1, ROW_GROUP_TOKENS * len(rows) // max(1, sum(len(row.token_ids) for row in rows)))
    pq.write_table(table, file, row_group_size=rows_per_group, write_page_checksum=True)


def _write_jsonl(file: BinaryIO, rows: list[Row], measures: list[dict[str, float]]) -> None:
    for row, more in zip(rows, measures, strict=True):
        plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in vars(row).items()} | more
        file.write(json.dumps({key: value for key, value in plain.items() if value is not None}).encode() + b"\n")
