"""Recorded rollouts for the tests: small valid rows, and files of them."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from builders.runs import assert_equal
from pgtoolkit.document import Document
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.settings import RecordedRolloutSettings, TrainedTurns, Truncated
from pgtoolkit.tasks.settings import Chat, TooLong

VOCABULARY_SIZE = 100


def good_row(number: int = 0, group: object = 0, length: int = 5, **changes: object) -> dict:
    """Return a valid row with two prompt tokens, whose numbers differ from those of other rows.

    changes: other values by key; `...` leaves the key out.
    """
    row = {
        "token_ids": [(7 * number + t) % VOCABULARY_SIZE for t in range(length)],
        "loss_mask": [t >= 2 for t in range(length)],
        "old_log_probs": [0.0 if t < 2 else -(number % 50 + t / 8 + 0.125) for t in range(length)],
        "reward": number / 4,
        "group_id": group,
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def write_jsonl(path: Path, rows: Iterable[dict | str]) -> Path:
    """Write a line for each row; a row that is text is a line already."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict], checksums: bool = True, **options: object) -> Path:
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in keys}
    pq.write_table(pa.table(columns), path, write_page_checksum=checksums, **options)
    return path


DEFAULTS = {
    "epochs": 1,
    "shuffle": False,
    "group_size": None,
    "max_completion_length": None,
    "truncated": Truncated.train,
    "chat": Chat.auto,
    "trained_turns": TrainedTurns.all,
    "too_long": TooLong.refuse,
}
"""The keys of a configuration that tests change."""


def recorded_config(path: Path | str, **changes: object) -> RecordedRolloutSettings:
    return RecordedRolloutSettings(
        name="recorded", path=str(path), temperature=1.0, **(DEFAULTS | changes)
    )


def recorded_rollouts(
    path: Path | str, estimator: str | Estimator = "dr_grpo", **options: object
) -> RecordedRollouts:
    """Read recorded rollouts.

    estimator: an estimator, or the name of one.
    options: keys of the configuration (DEFAULTS), and arguments of RecordedRollouts.
    """
    changes = {name: options.pop(name) for name in DEFAULTS if name in options}
    config = recorded_config(path, **changes)
    if isinstance(estimator, str):
        estimator = Estimator(estimator)
    return RecordedRollouts(config, estimator, VOCABULARY_SIZE, **options)


def all_documents(rollouts: RecordedRollouts) -> list[Document]:
    return [rollouts.document(position) for position in range(rollouts.num_documents)]


def assert_documents_equal(
    document: Document, expected: Document, but: Collection[str] = ()
) -> None:
    """Check that two documents are equal, bit for bit, in every field that `but` does not name."""

    def fields(of: Document) -> dict[str, object]:
        return {name: value for name, value in vars(of).items() if name not in but}

    assert_equal(fields(document), fields(expected))
