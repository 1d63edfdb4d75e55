"""The schema of one recorded rollout (docs/data.md): every field read, checked and turned into a document."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.losses.checks import MAX_LOG_PROB
from pgtoolkit.rollouts.advantages import MAX_REWARD, reward_problem

_LOG_PROBS = ("old_log_probs", *OPTIONAL_VECTORS)
_OF_THE_DOCUMENT = ("reward", "model_version", "truncated", "exact_match")
"""Fields that a document has under the same names."""


@dataclass(frozen=True)
class Rules:
    """What this run asks of a row. required: fields that it needs besides token_ids and loss_mask.

    max_tokens: the longest document that fits; None: any length.
    """

    vocabulary_size: int
    required: Collection[str] = ()
    max_tokens: int | None = None
    max_completion_length: int | None = None


class Row(SimpleNamespace):
    """A checked row: each of FIELDS, None if it is not recorded. Arrays have one entry per token.

    token_ids: (S,) int64. loss_mask: (S,) bool. Log-probs and advantage: (S,) float32, 0 where nothing is trained.
    measures: further numbers of the document that it records.
    """

    measures: ClassVar[dict[str, float]] = {}

    def digest(self, start: int) -> int:
        """CRC-32 of everything in the row, continued from `start`; independent of the file format."""
        for value in (getattr(self, name) for name in FIELDS):
            part = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            start = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), start))
        return start

    def document(self, advantage: float | None, group: int, name: str) -> Document:
        """The row as a document; advantage: that of all its trained tokens, or None for the recorded ones."""
        mask = self.loss_mask
        advantages = self.advantage[mask] if advantage is None else np.full(mask.sum(), advantage, np.float32)
        vectors = {name: getattr(self, name) for name in _LOG_PROBS}
        return Document(
            tokens=torch.from_numpy(self.token_ids),
            loss_mask=torch.from_numpy(mask),
            advantages=torch.from_numpy(advantages),
            group=group,
            name=name,
            **{name: None if x is None else torch.from_numpy(x[mask]) for name, x in vectors.items()},
            **{name: getattr(self, name) for name in _OF_THE_DOCUMENT},
        )


def row_of(document: Document) -> Row:
    """The row that records a document; its name becomes the id and its group the group_id."""
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
        id=document.name,
        measures=document.measures,
        **{name: per_token(getattr(document, name)) for name in _LOG_PROBS},
        **{name: getattr(document, name) for name in _OF_THE_DOCUMENT},
    )


def parse_row(raw: dict[str, Any], rules: Rules) -> Row | list[tuple[str, str]]:
    """The checked row, or its problems as (field, reason). Lists are Python lists or NumPy arrays."""
    row, problems = Row(), []
    for name, (_, read) in FIELDS.items():
        value = raw.get(name)
        setattr(row, name, None)
        try:
            if value is not None:
                setattr(row, name, read(value, row, rules))
            elif name in ("token_ids", "loss_mask") or name in rules.required:
                raise _Unusable(f"is missing; the row has {', '.join(raw) or 'no fields'}")
        except _Unusable as reason:
            problems.append((name, str(reason)))
    return problems or row


class _Unusable(Exception):
    """Why the value of a field cannot be used."""


def _token_ids(value: Any, _row: Row, rules: Rules) -> np.ndarray:
    tokens = _vector(value, {int}, "iu", "integers")
    if len(tokens) == 0:
        raise _Unusable("is empty; a document has at least one token")
    if (place := _first((tokens < 0) | (tokens >= rules.vocabulary_size))) is not None:
        raise _Unusable(f"is {tokens[place]} at position {place}; the vocabulary is 0 to {rules.vocabulary_size - 1}")
    if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
        raise _Unusable(
            f"has {len(tokens)} tokens and at most {rules.max_tokens} fit "
            "(accumulation.max_tokens, or the positions of the model); documents are never split"
        )
    return tokens.astype(np.int64)


def _loss_mask(value: Any, row: Row, rules: Rules) -> np.ndarray:
    mask = _vector(value, {bool, int}, "biu", "true and false, or 1 and 0,", row)
    if (place := _first((mask != 0) & (mask != 1))) is not None:
        raise _Unusable(f"is {mask[place]} at position {place}; a token is trained or not: true or false, or 1 or 0")
    if len(mask) and mask[0]:
        raise _Unusable("is true for the first token, which has nothing before it to be predicted from")
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
        values = _vector(value, {float, int, type(None)}, "fiu", "numbers", row).astype(np.float32)
    mask = row.loss_mask
    if mask is None or len(mask) != len(values):
        return values
    if (place := _first(mask & ~np.isfinite(values))) is not None:
        raise _Unusable(
            f"is {values[place]} at position {place}, which is trained; it must be a finite number in float32"
        )
    return np.where(mask, values, np.float32(0))


def _first(bad: np.ndarray) -> int | None:
    """The first place where something is wrong."""
    return int(bad.argmax()) if bad.any() else None


def _vector(value: Any, types: set[type], kinds: str, what: str, row: Row | None = None) -> np.ndarray:
    """A list or array as an array whose dtype is of one of the kinds; `types` are those of a list's elements.

    row: with the tokens, of which each has an entry.
    """
    needs = f"needs a list of {what}"
    if isinstance(value, list):
        for kind in set(map(type, value)) - types:
            place = next(i for i, element in enumerate(value) if type(element) is kind)
            raise _Unusable(f"{needs} (got {value[place]!r:.40} at position {place})")
        if float in types:
            value = [math.nan if element is None else element for element in value]
        try:
            # Without a dtype an empty list would be one of floats, and an integer beyond 64 bits an object.
            value = np.array(value, dtype=np.float64 if float in types else np.int64)
        except OverflowError:
            raise _Unusable(f"{needs} (got a number beyond 64 bits)") from None
    if not isinstance(value, np.ndarray):
        raise _Unusable(f"{needs} (got {value!r:.40})")
    if value.size and value.dtype.kind not in kinds:
        raise _Unusable(f"{needs} (got {value.dtype.name} values or nulls)")
    tokens = value if row is None or row.token_ids is None else row.token_ids
    if len(value) != len(tokens):
        raise _Unusable(f"has {len(value)} entries and token_ids has {len(tokens)}; there is one for every token")
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


def _of_type(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _Unusable(f"needs {what} (got {value!r:.40})")
    return value


_PER_TOKEN = pa.list_(pa.float32())

FIELDS = {
    "token_ids": (pa.list_(pa.int32()), _token_ids),
    "loss_mask": (pa.list_(pa.bool_()), _loss_mask),
    "old_log_probs": (_PER_TOKEN, _log_probs),
    "advantage": (_PER_TOKEN, _advantage),
    "reward": (pa.float64(), _reward),
    "group_id": (pa.int64(), _group_id),
    "id": (pa.string(), lambda value, *_: str(_group_id(value))),
    "model_version": (pa.int64(), lambda value, *_: _of_type(value, int, "an integer")),
    "truncated": (pa.bool_(), lambda value, *_: _of_type(value, bool, "true or false")),
    "exact_match": (pa.bool_(), lambda value, *_: _of_type(value, bool, "true or false")),
    **dict.fromkeys(OPTIONAL_VECTORS, (_PER_TOKEN, _log_probs)),
}
"""Each field with its type in a Parquet file, and what reads it: (value, row with the fields before it, rules)."""
