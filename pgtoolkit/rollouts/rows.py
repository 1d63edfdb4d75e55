"""One recorded rollout (docs/data.md): its fields, and how they are checked and turned into a
document."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.schema_tasks import TooLong
from pgtoolkit.errors import first_line
from pgtoolkit.losses.checks import MAX_LOG_PROB
from pgtoolkit.rollouts.advantages import MAX_REWARD, reward_problem
from pgtoolkit.rollouts.conversations import TEXTS, Conversations
from pgtoolkit.tasks.prompt_rows import TOOLS
from pgtoolkit.tasks.row_files import rows_of

_PER_TOKEN = (*OPTIONAL_VECTORS, "advantage")
OF_THE_DOCUMENT = ("reward", "model_version", "truncated", "exact_match")
"""Fields that a document has under the same names."""


@dataclass(frozen=True)
class Rules:
    """What this run asks of a row. required: fields that it needs besides token_ids and loss_mask.

    max_tokens: the longest document that fits; None: any length. too_long: what happens to a longer
        one.
    texts: makes tokens of texts; None: rows have tokens.
    """

    vocabulary_size: int
    required: Collection[str] = ()
    max_tokens: int | None = None
    max_completion_length: int | None = None
    too_long: TooLong = TooLong.refuse
    texts: Conversations | None = field(default=None, repr=False)


class Row(SimpleNamespace):
    """A checked row: each of FIELDS, None if it is not recorded. Arrays have one entry per token.

    token_ids: (S,) int64. loss_mask: (S,) bool. Log-probs and advantage: (S,) float32, 0 where
        nothing is trained.
    measures: further numbers of the document that it records.
    """

    measures: ClassVar[dict[str, float]] = {}

    def digest(self) -> int:
        """CRC-32 of everything in a row that was read."""
        checksum, others = 0, []
        for value in vars(self).values():
            if is_vector := isinstance(value, np.ndarray):
                checksum = zlib.crc32(value.data, checksum)
            others.append(len(value) if is_vector else value)
        return zlib.crc32(repr(others).encode(), checksum)

    def document(
        self, advantage: float | None, group: int, name: str, trajectory: int | None = None
    ) -> Document:
        """The row as a document; advantage: that of all its trained tokens, or None for the
        recorded ones."""
        mask = self.loss_mask
        advantages = (
            self.advantage[mask]
            if advantage is None
            else np.full(mask.sum(), advantage, np.float32)
        )
        vectors = {name: getattr(self, name) for name in OPTIONAL_VECTORS}
        return Document(
            tokens=torch.from_numpy(self.token_ids),
            loss_mask=torch.from_numpy(mask),
            advantages=torch.from_numpy(advantages),
            group=group,
            name=name,
            trajectory=trajectory,
            **{
                name: None if x is None else torch.from_numpy(x[mask])
                for name, x in vectors.items()
            },
            **{name: getattr(self, name) for name in OF_THE_DOCUMENT},
            score_failed=bool(self.score_failed),
        )


def parse_rows(batch: pa.RecordBatch, rules: Rules) -> Iterator[Row | list[tuple[str, str]] | None]:
    """What `parse_row` makes of each row of a batch; where all of the lists are right, these are
    checked at once."""
    vectors = _checked_vectors(batch, rules)
    rows = zip(*vectors.values(), strict=True) if vectors else itertools.repeat(())
    for raw, checked in zip(rows_of(batch.drop_columns([*vectors])), rows, strict=False):
        yield parse_row(raw, rules, dict(zip(vectors, checked, strict=True)))


def parse_row(
    raw: dict[str, Any] | str,
    rules: Rules,
    checked: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Row | list[tuple[str, str]] | None:
    """The checked row, or its problems as (field, reason). Lists are Python lists or NumPy arrays.

    None: it is too long, and left out. raw: fields by name, or why a line is no row, which is the
        problem of the field
    "". checked: fields that are right.
    """
    if isinstance(raw, str):
        return [("", raw)]
    if rules.texts is not None and raw.get("token_ids") is None and "token_ids" not in checked:
        try:
            raw = raw | (
                rules.texts.tokens(raw)
                if has_texts({x for x in TEXTS if raw.get(x) is not None})
                else {}
            )
        except (
            Exception
        ) as error:  # what the tokenizers library raises for a character it has no token for
            name = "messages" if raw.get("messages") is not None else "completion"
            return [
                (
                    name,
                    str(error)
                    if isinstance(error, ValueError)
                    else f"cannot be encoded: {first_line(error)}",
                )
            ]
    row = Row(**{**_NOTHING, **checked})
    problems = []
    for name, (_, read) in FIELDS.items():
        if name in checked:
            continue
        if (value := raw.get(name)) is not None:
            try:
                setattr(row, name, read(value, row, rules))
            except _TooLong as reason:
                if rules.too_long == TooLong.skip:
                    return None
                problems.append((name, str(reason)))
            except _Unusable as reason:
                problems.append((name, str(reason)))
        elif name == "reward" and row.score_failed:
            continue  # nobody could score it: it has weight 0
        elif name in ("token_ids", "loss_mask") or name in rules.required:
            problems.append(
                (name, f"is missing; the row has {', '.join([*checked, *raw]) or 'no fields'}")
            )
    return problems or row


def _checked_vectors(batch: pa.RecordBatch, rules: Rules) -> dict[str, list[np.ndarray]]:
    """By field, the lists of all rows as `parse_row` gives them; none where one of them needs a
    look of its own."""
    names = [name for name in ("token_ids", "loss_mask", *_PER_TOKEN) if name in batch.schema.names]
    lists = {
        x: batch.column(x)
        for x in names
        if isinstance(batch.column(x), (pa.ListArray, pa.LargeListArray))
    }
    if any(x.null_count or x.values.null_count for x in lists.values()) or not {
        "token_ids",
        "loss_mask",
    } <= set(lists):
        return {}
    ends, *others = [x.offsets.to_numpy() - x.offsets[0].as_py() for x in lists.values()]
    lengths = np.diff(ends)
    if lengths.min(initial=1) == 0 or not all(np.array_equal(ends, other) for other in others):
        return {}
    # All lists as one: right, if each is and none of what is asked of a list as a whole is broken.
    flat = {name: x.flatten().to_numpy(zero_copy_only=False) for name, x in lists.items()}
    row = parse_row(flat, Rules(rules.vocabulary_size))
    if (
        not isinstance(row, Row)
        or row.loss_mask[ends[:-1]].any()
        or lengths.max() > (rules.max_tokens or math.inf)
    ):
        return {}
    trained = np.add.reduceat(row.loss_mask, ends[:-1], dtype=np.int64)
    if trained.max() > (rules.max_completion_length or math.inf):
        return {}
    cuts = [*itertools.pairwise(ends.tolist())]
    return {name: [getattr(row, name)[start:end] for start, end in cuts] for name in lists}


class _Unusable(Exception):
    """Why the value of a field cannot be used."""


class _TooLong(_Unusable):
    """More tokens than fit."""


def has_texts(names: Collection[str]) -> bool:
    """Whether a row with these fields, or a file with these columns, has texts in the place of
    tokens."""
    return "messages" in names or {"prompt", "completion"} <= {*names}


def _token_ids(value: Any, _row: Row, rules: Rules) -> np.ndarray:
    tokens = _vector(value, "iu", "integers")
    if len(tokens) == 0:
        raise _Unusable("is empty; a document has at least one token")
    if (place := _first((tokens < 0) | (tokens >= rules.vocabulary_size))) is not None:
        raise _Unusable(
            f"is {tokens[place]} at position {place}; the vocabulary is 0 to "
            f"{rules.vocabulary_size - 1}"
        )
    if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
        raise _TooLong(
            f"has {len(tokens)} tokens and at most {rules.max_tokens} fit "
            "(accumulation.max_tokens, or the positions of the model); documents are never split"
        )
    return tokens.astype(np.int64)


def _loss_mask(value: Any, row: Row, rules: Rules) -> np.ndarray:
    mask = _vector(value, "biu", "true and false, or 1 and 0,", row)
    if (place := _first((mask != 0) & (mask != 1))) is not None:
        raise _Unusable(
            f"is {mask[place]} at position {place}; a token is trained or not: true or false, or 1 "
            "or 0"
        )
    if len(mask) and mask[0]:
        raise _Unusable(
            "is true for the first token, which has nothing before it to be predicted from"
        )
    trained, limit = int(mask.sum()), rules.max_completion_length
    if limit is not None and trained > limit:
        raise _Unusable(f"trains {trained} tokens, more than rollout.max_completion_length={limit}")
    return mask.astype(bool)


def _log_probs(value: Any, row: Row, _rules: Rules) -> np.ndarray:
    log_probs = _numbers_per_token(value, row)
    if (place := _first(log_probs > MAX_LOG_PROB)) is not None:
        raise _Unusable(f"is {log_probs[place]:g} at position {place}; a log-prob is at most 0")
    return log_probs


def _advantage(value: Any, row: Row, _rules: Rules) -> np.ndarray | None:
    if not isinstance(value, (list, np.ndarray)):
        number = np.float32(_reward(value))
        return None if row.loss_mask is None else np.where(row.loss_mask, number, np.float32(0))
    advantages = _numbers_per_token(value, row)
    if (place := _first(np.abs(advantages) > MAX_REWARD)) is not None:
        raise _Unusable(f"at position {place} {reward_problem(float(advantages[place]))}")
    return advantages


def _numbers_per_token(value: Any, row: Row) -> np.ndarray:
    """(S,) float32, finite where trained; 0 elsewhere, where a null or NaN does no harm."""
    with np.errstate(over="ignore"):  # becomes inf, which is refused where it matters
        values = _vector(value, "fiu", "numbers", row).astype(np.float32)
    mask = row.loss_mask
    if mask is None or len(mask) != len(values):
        return values
    if (place := _first(mask & ~np.isfinite(values))) is not None:
        raise _Unusable(
            f"is {values[place]} at position {place}, which is trained; it must be a finite number "
            "in float32"
        )
    return np.where(mask, values, np.float32(0))


def _first(bad: np.ndarray) -> int | None:
    """The first place where something is wrong."""
    return int(bad.argmax()) if bad.any() else None


def _vector(value: Any, kinds: str, content: str, row: Row | None = None) -> np.ndarray:
    """A list or array as an array whose dtype is of one of the kinds; where that may be "f", nulls
    become NaN.

    row: with the tokens, of which each has an entry. content: of the list, in words.
    """
    if isinstance(value, list):
        with contextlib.suppress(ValueError):  # of lists within the list
            value = np.array(
                [math.nan if x is None else x for x in value] if "f" in kinds else value
            )
    if not isinstance(value, np.ndarray):
        raise _Unusable(f"needs a list of {content} (got {value!r:.40})")
    if value.ndim != 1 or (value.size and value.dtype.kind not in kinds):
        raise _Unusable(
            f"needs a list of {content} (got values of type {value.dtype.name}, such as "
            f"{value[0]!r:.40})"
        )
    tokens = value if row is None or row.token_ids is None else row.token_ids
    if len(value) != len(tokens):
        raise _Unusable(
            f"has {len(value)} entries and token_ids has {len(tokens)}; there is one for every "
            "token"
        )
    return value


def _reward(value: Any, *_: Any) -> float:
    try:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise OverflowError
    except OverflowError:  # also of an integer beyond what a float can hold
        raise _Unusable(f"needs a finite number (got {value!r:.40})") from None
    if problem := reward_problem(float(value)):
        raise _Unusable(problem)
    return float(value)


def _group_id(value: Any, *_: Any) -> int | str:
    if type(value) in (int, str) and value != "":
        return value
    raise _Unusable(f"needs an integer or a text that is not empty (got {value!r:.40})")


def _of_type(value: Any, kind: type, needs: str) -> Any:
    if type(value) is not kind:
        raise _Unusable(f"needs {needs} (got {value!r:.40})")
    return value


_NUMBERS = pa.list_(pa.float32())

FIELDS = {
    "token_ids": (pa.list_(pa.int32()), _token_ids),
    "loss_mask": (pa.list_(pa.bool_()), _loss_mask),
    **dict.fromkeys(OPTIONAL_VECTORS, (_NUMBERS, _log_probs)),
    "score_failed": (pa.bool_(), lambda value, *_: _of_type(value, bool, "true or false")),
    "advantage": (_NUMBERS, _advantage),
    "reward": (pa.float64(), _reward),
    "group_id": (pa.int64(), _group_id),
    "trajectory": (pa.int64(), _group_id),
    "id": (pa.string(), lambda value, *_: str(_group_id(value))),
    "model_version": (pa.int64(), lambda value, *_: _of_type(value, int, "an integer")),
    "truncated": (pa.bool_(), lambda value, *_: _of_type(value, bool, "true or false")),
    "exact_match": (pa.bool_(), lambda value, *_: _of_type(value, bool, "true or false")),
}
"""Each field with its type in a Parquet file, and what reads it: (value, row with the fields before
it, rules)."""

COLUMNS = (*FIELDS, *TEXTS, TOOLS)
"""All that is read of a file."""

_NOTHING = dict.fromkeys(FIELDS)
