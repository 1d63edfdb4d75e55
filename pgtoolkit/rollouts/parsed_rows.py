"""Rows of a file parsed and checked: one by one, or a batch of a Parquet file at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.rollouts.conversations import TEXTS, has_texts
from pgtoolkit.rollouts.rows import FIELDS, PER_TOKEN, RecordedRow, Rules, TooManyTokens, Unusable
from pgtoolkit.tasks.row_files import rows_of
from pgtoolkit.tasks.settings import TooLong


@dataclass(frozen=True)
class WrongRow:
    """Everything that is wrong with a row, and its fields that are right.

    problems: (field, reason); the field "" for a line that is no row.
    """

    problems: list[tuple[str, str]]
    row: RecordedRow

    def has_problem(self, name: str) -> bool:
        """Return whether a field is wrong, or nothing of the row is known."""
        return any(field in ("", name) for field, _ in self.problems)


_NOTHING = dict.fromkeys(FIELDS)


def parse_rows(batch: pa.RecordBatch, rules: Rules) -> Iterator[RecordedRow | WrongRow | None]:
    """Return the result of `parse_row` for each row of a batch.

    Where all lists of the batch are right, they are checked at once.
    """
    vectors = _checked_vectors(batch, rules)
    rows = zip(*vectors.values(), strict=True) if vectors else itertools.repeat(())
    for raw, checked in zip(rows_of(batch.drop_columns([*vectors])), rows, strict=False):
        yield parse_row(raw, rules, dict(zip(vectors, checked, strict=True)))


def parse_row(
    raw: dict[str, object] | str,
    rules: Rules,
    checked: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> RecordedRow | WrongRow | None:
    """Return the checked row, or what is wrong with it, or None if it is too long and left out.

    raw: fields by name, whose lists are Python lists or NumPy arrays; or why a line is no row.
    checked: fields that are known to be right.
    """
    row = RecordedRow(**{**_NOTHING, **checked})
    if isinstance(raw, str):
        return WrongRow([("", raw)], row)
    problems = []
    fields = ", ".join([*checked, *raw]) or "no fields"
    of_texts: tuple[str, ...] = ()
    if rules.texts is not None and raw.get("token_ids") is None and "token_ids" not in checked:
        try:
            raw = _with_tokens(raw, rules)
        except ConfigError:  # of the chat template, for all rows
            raise
        except Exception as error:  # tokenizers raises Exception for a character without a token
            name = "messages" if raw.get("messages") is not None else "completion"
            is_ours = isinstance(error, ValueError)
            reason = str(error) if is_ours else f"cannot be encoded: {first_line(error)}"
            problems.append((name, reason))
            of_texts = ("token_ids", "loss_mask")
    for name, (_, read) in FIELDS.items():
        if name in checked:
            continue
        value = raw.get(name)
        if value is not None:
            try:
                setattr(row, name, read(value, row, rules))
            except Unusable as error:
                if isinstance(error, TooManyTokens) and rules.too_long == TooLong.skip:
                    return None
                problems.append((name, str(error)))
        elif name == "reward" and row.score_failed:
            continue  # Nobody could score it: it has weight 0.
        elif name in of_texts:
            continue  # They are made of texts, whose problem is named.
        elif name in ("token_ids", "loss_mask") or name in rules.required:
            advice = rules.advice_without(name)
            problems.append((name, f"is missing; the row has {fields}{advice}"))
    return WrongRow(problems, row) if problems else row


def _with_tokens(raw: dict[str, object], rules: Rules) -> dict[str, object]:
    """Return the fields of a row with token_ids and loss_mask where it has texts."""
    assert rules.texts is not None
    if not has_texts({name for name in TEXTS if raw.get(name) is not None}):
        return raw
    return raw | rules.texts.tokens(raw)


def _checked_vectors(batch: pa.RecordBatch, rules: Rules) -> dict[str, list[np.ndarray]]:
    """Return the lists of all rows by field, as `parse_row` gives them.

    Return nothing where a list of some row has to be looked at by itself.
    """
    names = [name for name in ("token_ids", "loss_mask", *PER_TOKEN) if name in batch.schema.names]
    lists = {
        name: batch.column(name)
        for name in names
        if isinstance(batch.column(name), (pa.ListArray, pa.LargeListArray))
    }
    if not {"token_ids", "loss_mask"} <= set(lists):
        return {}
    if any(column.null_count or column.values.null_count for column in lists.values()):
        return {}
    ends, *others = [
        column.offsets.to_numpy() - column.offsets[0].as_py() for column in lists.values()
    ]
    lengths = np.diff(ends)
    if lengths.min(initial=1) == 0 or not all(np.array_equal(ends, other) for other in others):
        return {}
    # All lists as one list. It is right if each of them is, and if each keeps the limits that hold
    # for a list as such.
    flat = {name: column.flatten().to_numpy(zero_copy_only=False) for name, column in lists.items()}
    row = parse_row(flat, Rules(rules.vocabulary_size))
    if not isinstance(row, RecordedRow) or row.loss_mask[ends[:-1]].any():
        return {}
    if lengths.max() > (rules.max_tokens or math.inf):
        return {}
    trained = np.add.reduceat(row.loss_mask, ends[:-1], dtype=np.int64)
    if trained.max() > (rules.max_completion_length or math.inf):
        return {}
    cuts = list(itertools.pairwise(ends.tolist()))
    return {name: [getattr(row, name)[start:end] for start, end in cuts] for name in lists}
