"""The schema of one recorded rollout (docs/data.md): every field read, checked and turned into a document."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pgtoolkit.batch import Document
from pgtoolkit.rollouts.advantages import MAX_REWARD, reward_problem

FIELDS = (
    "token_ids",
    "loss_mask",
    "old_log_probs",
    "reward",
    "advantage",
    "group_id",
    "id",
    "model_version",
    "truncated",
    "exact_match",
)

MAX_LOG_PROB = 1e-3
"""Log-probs may exceed 0 by rounding, not by more than this."""


@dataclass(frozen=True)
class Rules:
    """What this run asks of a row. max_tokens: the longest document that fits; None: any length."""

    vocabulary_size: int
    needs_reward: bool
    needs_advantage: bool
    max_tokens: int | None = None
    max_completion_length: int | None = None


@dataclass(frozen=True)
class Row:
    """A checked row. Arrays have one entry per token; what is not trained is 0.

    tokens: (S,) int64. loss_mask: (S,) bool. old_log_probs, advantages: (S,) float32; advantages None if not recorded.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray | None
    reward: float | None
    group_id: int | str | None
    id: str | None
    model_version: int | None
    truncated: bool | None
    exact_match: bool | None

    def digest(self, start: int) -> int:
        """CRC-32 of everything in the row, continued from `start`; independent of the file format."""
        advantages = b"" if self.advantages is None else self.advantages.tobytes()
        scalars = (self.reward, self.group_id, self.id, self.model_version, self.truncated, self.exact_match)
        parts = (self.tokens.tobytes(), self.loss_mask.tobytes(), self.old_log_probs.tobytes(), advantages)
        for part in (*parts, repr(scalars).encode()):
            start = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), start))
        return start

    def document(self, advantages: np.ndarray, group: int, name: str) -> Document:
        """The row as a document with these advantages, (S,) float32."""
        return Document(
            tokens=torch.from_numpy(self.tokens),
            loss_mask=torch.from_numpy(self.loss_mask),
            old_log_probs=torch.from_numpy(self.old_log_probs),
            advantages=torch.from_numpy(advantages),
            group=group,
            name=name,
            reward=self.reward,
            exact_match=self.exact_match,
            truncated=self.truncated,
            model_version=self.model_version,
        )


def row_of(document: Document) -> Row:
    """The row that records a document; its name becomes the id and its group the group_id."""
    mask = document.loss_mask.numpy()
    return Row(
        tokens=document.tokens.numpy(),
        loss_mask=mask,
        old_log_probs=np.where(mask, document.old_log_probs.numpy(), np.float32(0)),
        advantages=np.where(mask, document.advantages.numpy(), np.float32(0)),
        reward=None if document.reward is None else float(document.reward),
        group_id=document.group,
        id=document.name,
        model_version=document.model_version,
        truncated=document.truncated,
        exact_match=document.exact_match,
    )


def parse_row(raw: dict[str, Any], rules: Rules) -> Row | list[tuple[str, str]]:
    """The checked row, or its problems as (field, reason). Lists are Python lists or NumPy arrays."""
    problems: list[tuple[str, str]] = []

    def read(field: str, reader, *arguments):
        value = raw.get(field)
        try:
            if value is None:
                if field in required:
                    raise _Unusable(f"is missing; the row has {', '.join(key for key in raw) or 'no fields'}")
                return None
            return reader(value, *arguments)
        except _Unusable as reason:
            problems.append((field, str(reason)))
            return None

    required = {"token_ids", "loss_mask", "old_log_probs"}
    required |= {"reward"} if rules.needs_reward else set()
    required |= {"advantage"} if rules.needs_advantage else set()
    tokens = read("token_ids", _token_ids, rules)
    mask = read("loss_mask", _loss_mask, tokens, rules)
    row = Row(
        tokens=tokens,
        loss_mask=mask,
        old_log_probs=read("old_log_probs", _old_log_probs, tokens, mask),
        advantages=read("advantage", _advantages, tokens, mask),
        reward=read("reward", _reward),
        group_id=read("group_id", _group_id),
        id=read("id", lambda value: str(_group_id(value))),
        model_version=read("model_version", _typed, int, "an integer"),
        truncated=read("truncated", _typed, bool, "true or false"),
        exact_match=read("exact_match", _typed, bool, "true or false"),
    )
    return problems or row


class _Unusable(Exception):
    """Why the value of a field cannot be used."""


def _token_ids(value: Any, rules: Rules) -> np.ndarray:
    tokens = _vector(value, {int}, "iu", "integers")
    outside = (tokens < 0) | (tokens >= rules.vocabulary_size)
    if len(tokens) == 0:
        raise _Unusable("is empty; a document has at least one token")
    if outside.any():
        place = int(outside.argmax())
        raise _Unusable(f"is {tokens[place]} at position {place}; the vocabulary is 0 to {rules.vocabulary_size - 1}")
    if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
        raise _Unusable(
            f"has {len(tokens)} tokens and at most {rules.max_tokens} fit "
            "(accumulation.max_tokens, or the positions of the model); documents are never split"
        )
    return tokens.astype(np.int64)


def _loss_mask(value: Any, tokens: np.ndarray | None, rules: Rules) -> np.ndarray:
    mask = _vector(value, {bool, int}, "biu", "true and false, or 1 and 0,")
    neither = (mask != 0) & (mask != 1)
    if neither.any():
        place = int(neither.argmax())
        raise _Unusable(f"is {mask[place]} at position {place}; a token is trained or not: true or false, or 1 or 0")
    _check_length(mask, tokens)
    if len(mask) and mask[0]:
        raise _Unusable("is true for the first token, which has nothing before it to be predicted from")
    trained = int(mask.sum())
    if rules.max_completion_length is not None and trained > rules.max_completion_length:
        raise _Unusable(
            f"trains {trained} tokens, more than rollout.max_completion_length={rules.max_completion_length}"
        )
    return mask.astype(bool)


def _old_log_probs(value: Any, tokens: np.ndarray | None, mask: np.ndarray | None) -> np.ndarray:
    log_probs = _floats(_vector(value, {float, int, type(None)}, "fiu", "numbers"))
    log_probs = _trained(log_probs, tokens, mask)
    if (log_probs > MAX_LOG_PROB).any():
        place = int((log_probs > MAX_LOG_PROB).argmax())
        raise _Unusable(f"is {log_probs[place]:g} at position {place}; a log-prob is at most 0")
    return log_probs


def _advantages(value: Any, tokens: np.ndarray | None, mask: np.ndarray | None) -> np.ndarray | None:
    if not isinstance(value, (list, np.ndarray)):
        number = np.float32(_reward(value))
        return None if mask is None else np.where(mask, number, np.float32(0))
    advantages = _trained(_floats(_vector(value, {float, int, type(None)}, "fiu", "numbers")), tokens, mask)
    if (np.abs(advantages) > MAX_REWARD).any():
        place = int(np.abs(advantages).argmax())
        raise _Unusable(f"at position {place} {reward_problem(float(advantages[place]))}")
    return advantages


def _trained(values: np.ndarray, tokens: np.ndarray | None, mask: np.ndarray | None) -> np.ndarray:
    """The values of trained tokens, which must be finite; 0 elsewhere, where a null or NaN does no harm."""
    _check_length(values, tokens)
    if mask is None or len(mask) != len(values):
        return values
    bad = mask & ~np.isfinite(values)
    if bad.any():
        place = int(bad.argmax())
        raise _Unusable(
            f"is {values[place]} at position {place}, which is trained; it must be a finite number in float32"
        )
    return np.where(mask, values, np.float32(0))


def _check_length(values: np.ndarray, tokens: np.ndarray | None) -> None:
    if tokens is not None and len(values) != len(tokens):
        raise _Unusable(f"has {len(values)} entries and token_ids has {len(tokens)}; there is one for every token")


def _vector(value: Any, types: set[type], kinds: str, what: str) -> np.ndarray:
    """A list or array as an array whose dtype is of one of the kinds; `types` are those of a list's elements."""
    if isinstance(value, list):
        for kind in set(map(type, value)) - types:
            place = next(i for i, element in enumerate(value) if type(element) is kind)
            raise _Unusable(f"needs a list of {what} (got {value[place]!r:.40} at position {place})")
        if float in types:
            value = [math.nan if element is None else element for element in value]
        try:
            # Without a dtype an empty list would be one of floats, and an integer beyond 64 bits an object.
            value = np.array(value, dtype=np.float64 if float in types else np.int64)
        except OverflowError:
            raise _Unusable(f"needs a list of {what} (got a number beyond 64 bits)") from None
    if not isinstance(value, np.ndarray):
        raise _Unusable(f"needs a list of {what} (got {value!r:.40})")
    if value.size and value.dtype.kind not in kinds:
        raise _Unusable(f"needs a list of {what} (got {value.dtype.name} values or nulls)")
    return value


def _floats(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # becomes inf, which is refused where it matters
        return values.astype(np.float32)


def _finite(value: Any) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise _Unusable(f"needs a finite number (got {value!r:.40})")


def _reward(value: Any) -> float:
    number = _finite(value)
    if problem := reward_problem(number):
        raise _Unusable(problem)
    return number


def _group_id(value: Any) -> int | str:
    if type(value) in (int, str) and value != "":
        return value
    raise _Unusable(f"needs an integer or a text that is not empty (got {value!r:.40})")


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _Unusable(f"needs {what} (got {value!r:.40})")
    return value
