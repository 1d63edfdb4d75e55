"""Recorded rollouts for tests: small rows that are right, and files of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from builders.runs import assert_equal
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig, TrainedTurns, Truncated
from pgtoolkit.config.schema_tasks import Chat, TooLong
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts

VOCABULARY_SIZE = 100


def good_row(number=0, group=0, length=5, **changes):
    """A row with two prompt tokens; every number in it can be told from those of other rows."""
    row = {
        "token_ids": [(7 * number + t) % VOCABULARY_SIZE for t in range(length)],
        "loss_mask": [t >= 2 for t in range(length)],
        "old_log_probs": [0.0 if t < 2 else -(number % 50 + t / 8 + 0.125) for t in range(length)],
        "reward": number / 4,
        "group_id": group,
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def write_jsonl(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def write_parquet(path, rows, checksums=True, **options):
    columns = {
        key: [row.get(key) for row in rows]
        for key in dict.fromkeys(key for row in rows for key in row)
    }
    pq.write_table(pa.table(columns), path, write_page_checksum=checksums, **options)
    return path


CHANGES = {"epochs": 1, "shuffle": False, "group_size": None, "max_completion_length": None}
CHANGES |= {"truncated": Truncated.train}
CHANGES |= {"chat": Chat.auto, "trained_turns": TrainedTurns.all, "too_long": TooLong.refuse}
"""Keys of a configuration that tests change."""


def recorded_config(path, **changes):
    return RecordedRolloutConfig(
        name="recorded", path=str(path), temperature=1.0, **(CHANGES | changes)
    )


def recorded_rollouts(path, estimator="dr_grpo", **options):
    """Recorded rollouts; options: of the configuration, and arguments of RecordedRollouts."""
    changes = {name: options.pop(name) for name in CHANGES if name in options}
    return RecordedRollouts(
        recorded_config(path, **changes), Estimator(estimator), VOCABULARY_SIZE, **options
    )


def all_documents(rollouts):
    return [rollouts.document(position) for position in range(rollouts.num_documents)]


def assert_documents_equal(first, second, but=()):
    """Two documents are equal in every field, bit for bit."""
    ours, theirs = (
        {name: x for name, x in vars(one).items() if name not in but} for one in (first, second)
    )
    assert_equal(ours, theirs)
