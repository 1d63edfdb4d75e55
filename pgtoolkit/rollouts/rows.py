"""One recorded rollout (docs/data.md): its fields, how each is checked, and the document it
becomes."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch

from pgtoolkit.document import OPTIONAL_VECTORS, ROWS, Document
from pgtoolkit.losses.checks import LARGEST_GAP, LARGEST_MASS, MAX_LOG_PROB
from pgtoolkit.rollouts.advantages import MAX_REWARD, reward_problem
from pgtoolkit.rollouts.conversations import TEXTS, Conversations
from pgtoolkit.tasks.prompt_rows import TOOLS
from pgtoolkit.tasks.settings import TooLong

PER_TOKEN = (*OPTIONAL_VECTORS, "advantage")
"""Fields with a number for each token."""

OF_THE_DOCUMENT = ("reward", "model_version", "truncated", "exact_match")
"""Fields that a document has under the same names."""

_AT_MOST = f"a log-prob is at most 0, where rounding may make {MAX_LOG_PROB:g} of it"


@dataclass(frozen=True)
class Rules:
    """The rules by which the rows of a run are checked.

    vocabulary_size: token ids are below it; None: unknown.
    required: fields that each row needs besides token_ids and loss_mask.
    max_tokens: the longest document that fits; None: any length. too_long: what happens to a longer
        one.
    texts: makes tokens of texts; None: rows have tokens.
    one_advantage: whether all tokens of a row need the same advantage.
    instead_of_parts: what to type where rows have trajectories, which the loss does not take; None:
        it does.
    without_old_log_probs: what to type where rows have no old log-probs.
    """

    vocabulary_size: int | None
    required: Collection[str] = ()
    max_tokens: int | None = None
    max_completion_length: int | None = None
    too_long: TooLong = TooLong.refuse
    texts: Conversations | None = field(default=None, repr=False)
    one_advantage: bool = False
    instead_of_parts: str | None = None
    without_old_log_probs: str | None = None

    @property
    def num_ids(self) -> int:
        """Return a number that every token id is below: 2³¹ where the vocabulary is unknown."""
        return self.vocabulary_size or 2**31

    @property
    def range_of_ids(self) -> str:
        """Return the ids of the vocabulary in words."""
        size = self.vocabulary_size
        return "0 and more" if size is None else f"0 to {size - 1}"

    def advice_without(self, name: str) -> str:
        """Return what to type where rows lack a field, as the end of a sentence; often ""."""
        if name != "old_log_probs" or self.without_old_log_probs is None:
            return ""
        return f". Use {self.without_old_log_probs}, which trains without it"


class RecordedRow(SimpleNamespace):
    """A checked row: each of FIELDS, None if it is not recorded. Arrays have one entry per token.

    token_ids: (S,) int64. loss_mask: (S,) bool. Log-probs and advantage: (S,) float32, 0 where
        nothing is trained. sampling_top_ids, sampling_top_log_probs: (S, k) int32 and float32, -1
        and -inf where unused; read only where `Rules.required` has them. sampling_kept_ids: (S, k)
        int32, -1 where unused.
    measures: further numbers of the document, which a run records with it.
    """

    measures: ClassVar[dict[str, float]] = {}

    def digest(self) -> int:
        """Return the CRC-32 of everything in the row that was read."""
        checksum = 0
        others = []
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                checksum = zlib.crc32(value.data, checksum)
                others.append(len(value))
            else:
                others.append(value)
        return zlib.crc32(repr(others).encode(), checksum)

    def document(
        self, advantage: float | None, group: int, name: str, trajectory: int | None = None
    ) -> Document:
        """Return the row as a document.

        advantage: of all its trained tokens; None for the recorded advantages.
        """
        mask = self.loss_mask
        if advantage is None:
            advantages = self.advantage[mask]
        else:
            advantages = np.full(mask.sum(), advantage, np.float32)
        vectors = {name: getattr(self, name) for name in (*OPTIONAL_VECTORS, *ROWS)}
        return Document(
            tokens=torch.from_numpy(self.token_ids),
            loss_mask=torch.from_numpy(mask),
            advantages=torch.from_numpy(advantages),
            group=group,
            name=name,
            trajectory=trajectory,
            **{
                vector: None if values is None else torch.from_numpy(values[mask])
                for vector, values in vectors.items()
            },
            **{name: getattr(self, name) for name in OF_THE_DOCUMENT},
            score_failed=bool(self.score_failed),
        )


class Unusable(Exception):
    """The value of a field cannot be used; the text is the end of a sentence about the field."""


class TooManyTokens(Unusable):
    """A document has more tokens than fit."""


def _token_ids(value: object, _row: RecordedRow, rules: Rules) -> np.ndarray:
    tokens = _vector(value, "iu", "integers")
    if len(tokens) == 0:
        raise Unusable("is empty; a document has at least one token")
    place = _first((tokens < 0) | (tokens >= rules.num_ids))
    if place is not None:
        raise Unusable(
            f"needs tokens of the vocabulary, {rules.range_of_ids} (got "
            f"{tokens[place]} at position {place}). Use the model and the task of the run that "
            "recorded them, as its config.yaml has them: the tokens of model=tiny are those of its "
            "task, such as task=prompts task.path=FILE"
        )
    if rules.max_tokens is not None and len(tokens) > rules.max_tokens:
        raise TooManyTokens(
            f"has {len(tokens)} tokens and at most {rules.max_tokens} fit "
            "(accumulation.max_tokens, or the positions of the model); documents are never split"
        )
    return tokens.astype(np.int64)


def _loss_mask(value: object, row: RecordedRow, rules: Rules) -> np.ndarray:
    mask = _vector(value, "biu", "true and false, or 1 and 0,", row)
    place = _first((mask != 0) & (mask != 1))
    if place is not None:
        raise Unusable(
            f"is {mask[place]} at position {place}; a token is trained or not: true or false, or 1 "
            "or 0"
        )
    if len(mask) and mask[0]:
        raise Unusable(
            "is true for the first token, which has nothing before it to be predicted from"
        )
    trained = int(mask.sum())
    limit = rules.max_completion_length
    if limit is not None and trained > limit:
        raise Unusable(f"trains {trained} tokens, more than rollout.max_completion_length={limit}")
    return mask.astype(bool)


def _log_probs(value: object, row: RecordedRow, _rules: Rules) -> np.ndarray:
    log_probs = _numbers_per_token(value, row)
    place = _first(log_probs > MAX_LOG_PROB)
    if place is not None:
        raise Unusable(f"is {log_probs[place]:g} at position {place}; {_AT_MOST}")
    return log_probs


def _top_ids(value: object, row: RecordedRow, rules: Rules) -> np.ndarray | None:
    if "sampling_top_ids" not in rules.required:
        return None
    ids = _ids_per_token(value, row, rules)
    if row.loss_mask is not None and len(row.loss_mask) == len(ids):
        place = _first(row.loss_mask & (ids < 0).all(1))
        if place is not None:
            raise Unusable(f"has no token at position {place}, which is trained")
    return ids


def _kept_ids(value: object, row: RecordedRow, rules: Rules) -> np.ndarray:
    if "sampling_top_ids" in rules.required:
        raise Unusable(
            "is of sampling by top_p or top_k, and score centering needs untruncated sampling. Use "
            "loss.score_centering=false"
        )
    ids = _ids_per_token(value, row, rules)
    if row.token_ids is not None and len(row.token_ids) == len(ids):
        has_token = (ids == row.token_ids[:, None]).any(1)
        place = _first((ids >= 0).any(1) & ~has_token)
        if place is not None:
            raise Unusable(
                f"has {ids[place][ids[place] >= 0].tolist()} at position {place}, and not the "
                f"token that was sampled, {row.token_ids[place]}"
            )
    return ids


def _ids_per_token(value: object, row: RecordedRow, rules: Rules) -> np.ndarray:
    """Return (S, k) int32 tokens, each once in its row, -1 where unused or not trained."""
    ids = _rows_per_token(value, "iu", "integers", row, -1)
    if row.loss_mask is None or len(row.loss_mask) != len(ids):
        return ids.astype(np.int32)
    ids = np.where(row.loss_mask[:, None], ids, -1)
    is_outside = (ids < -1) | (ids >= rules.num_ids)
    place = _first(np.any(is_outside, axis=1))
    if place is not None:
        raise Unusable(
            f"has {ids[place].tolist()} at position {place}; the vocabulary is "
            f"{rules.range_of_ids}, and -1 an unused place"
        )
    in_order = np.sort(ids, axis=1)
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    place = _first(twice.any(1))
    if place is not None:
        raise Unusable(f"has a token twice at position {place}")
    return ids.astype(np.int32)


def _top_log_probs(value: object, row: RecordedRow, rules: Rules) -> np.ndarray | None:
    ids = row.sampling_top_ids
    if "sampling_top_log_probs" not in rules.required or ids is None:
        return None
    with np.errstate(over="ignore"):
        top = _rows_per_token(value, "fiu", "numbers", row, -np.inf).astype(np.float32)
    if top.shape != ids.shape:
        raise Unusable("needs as many numbers at each position as sampling_top_ids has")
    used = ids >= 0
    top = np.where(used, top, np.float32(-np.inf))
    place = _first((used & (np.isnan(top) | (top > MAX_LOG_PROB))).any(1))
    if place is not None:
        raise Unusable(f"has {top[place].tolist()} at position {place}; {_AT_MOST}")
    mass = np.exp(top, dtype=np.float64).sum(1)
    place = _first(mass > LARGEST_MASS)
    if place is not None:
        raise Unusable(
            f"has probabilities at position {place} that add up to {mass[place]:.4g}, more than 1"
        )
    _check_of_sampler(ids, top, row)
    return top


def _check_of_sampler(ids: np.ndarray, top: np.ndarray, row: RecordedRow) -> None:
    """Raise Unusable where old_log_probs are not those of the sampler."""
    old = row.old_log_probs
    sampling = row.sampling_log_probs
    if old is None:
        return
    if sampling is not None and not np.array_equal(old, sampling):
        place = _first(old != sampling)
        raise Unusable(
            f"is for old_log_probs that are the sampler's, and sampling_log_probs are others "
            f"({sampling[place]:g} and {old[place]:g} at position {place}). Leave one of the two "
            "columns out, so that old_log_probs are the sampler's"
        )
    gap = np.abs(np.where(ids == row.token_ids[:, None], top - old[:, None], 0))
    place = _first(~(gap <= LARGEST_GAP).all(1) & row.loss_mask)
    if place is not None:
        of_token = float(top[place][ids[place] == row.token_ids[place]][0])
        raise Unusable(
            f"gives the token at position {place} {of_token:g}, and old_log_probs "
            f"{old[place]:g}; they are the same number, at the sampler's temperature"
        )


def _rows_per_token(
    value: object, kinds: str, content: str, row: RecordedRow, unused: float
) -> np.ndarray:
    """Return (S, k) numbers from a list of lists, as wide as the longest; `unused` elsewhere.

    kinds, content: see `_vector`. An entry may be null where nothing is trained.
    """
    if not isinstance(value, (list, np.ndarray)):
        raise Unusable(f"needs a list of {content} for every token (got {value!r:.40})")
    tokens = value if row.token_ids is None else row.token_ids
    if len(value) != len(tokens):
        raise Unusable(
            f"has {len(value)} entries and token_ids has {len(tokens)}; there is one for every "
            "token"
        )
    lists = []
    for entry in value:
        if isinstance(entry, list):
            entry = [math.nan if x is None else x for x in entry] if unused != -1 else entry
        numbers = np.array([] if entry is None else entry)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in kinds):
            raise Unusable(f"needs a list of {content} for every token (got {entry!r:.40})")
        lists.append(numbers)
    result = np.full((len(lists), max(1, *map(len, lists), 1)), unused)
    for place, numbers in enumerate(lists):
        result[place, : len(numbers)] = numbers
    return result


def _advantage(value: object, row: RecordedRow, rules: Rules) -> np.ndarray | None:
    if not isinstance(value, (list, np.ndarray)):
        number = np.float32(_reward(value, row, rules))
        return None if row.loss_mask is None else np.where(row.loss_mask, number, np.float32(0))
    advantages = _numbers_per_token(value, row)
    place = _first(np.abs(advantages) > MAX_REWARD)
    if place is not None:
        raise Unusable(f"at position {place} {reward_problem(float(advantages[place]))}")
    if rules.one_advantage and row.loss_mask is not None:
        of_trained = advantages[row.loss_mask]
        place = _first(of_trained != of_trained[:1])
        if place is not None:
            raise Unusable(
                f"is {of_trained[0]:g} and {of_trained[place]:g} at trained tokens. Completions "
                "are counted by the sign of their advantage, which has to be one. Use "
                "aggregation=prompt_mean, in Python aggregation_of('prompt_mean')"
            )
    return advantages


def _numbers_per_token(value: object, row: RecordedRow) -> np.ndarray:
    """Return (S,) float32 numbers, finite where a token is trained.

    They are 0 elsewhere, where a null or NaN does no harm.
    """
    # A number beyond float32 becomes infinite, which is refused where it matters.
    with np.errstate(over="ignore"):
        values = _vector(value, "fiu", "numbers", row).astype(np.float32)
    mask = row.loss_mask
    if mask is None or len(mask) != len(values):
        return values
    place = _first(mask & ~np.isfinite(values))
    if place is not None:
        raise Unusable(
            f"is {values[place]} at position {place}, which is trained; it must be a finite number "
            "in float32"
        )
    return np.where(mask, values, np.float32(0))


def _first(is_wrong: np.ndarray) -> int | None:
    """Return the first place where something is wrong."""
    return int(is_wrong.argmax()) if is_wrong.any() else None


def _vector(value: object, kinds: str, content: str, row: RecordedRow | None = None) -> np.ndarray:
    """Return a list or array as an array of a dtype of these kinds.

    Where the kind may be "f", nulls become NaN.
    content: of the list, in words.
    row: has the tokens, each of which has an entry; None if these are the tokens.
    """
    if isinstance(value, list):
        numbers = value
        if "f" in kinds:
            numbers = [math.nan if number is None else number for number in value]
        with contextlib.suppress(ValueError):  # a list within the list
            value = np.array(numbers)
    if not isinstance(value, np.ndarray):
        raise Unusable(f"needs a list of {content} (got {value!r:.40})")
    if value.ndim != 1 or (value.size and value.dtype.kind not in kinds):
        raise Unusable(
            f"needs a list of {content} (got values of type {value.dtype.name}, such as "
            f"{value[0]!r:.40})"
        )
    tokens = value if row is None or row.token_ids is None else row.token_ids
    if len(value) != len(tokens):
        raise Unusable(
            f"has {len(value)} entries and token_ids has {len(tokens)}; there is one for every "
            "token"
        )
    return value


def _reward(value: object, _row: RecordedRow, _rules: Rules) -> float:
    reward = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # OverflowError for an integer that no float can hold.
        with contextlib.suppress(OverflowError):
            reward = float(value)
    if not math.isfinite(reward):
        raise Unusable(f"needs a finite number (got {value!r:.40})")
    problem = reward_problem(reward)
    if problem is not None:
        raise Unusable(problem)
    return reward


def _group_id(value: object, _row: RecordedRow, _rules: Rules) -> int | str:
    if isinstance(value, (int, str)) and not isinstance(value, bool) and value != "":
        return value
    raise Unusable(f"needs an integer or a text that is not empty (got {value!r:.40})")


def _id(value: object, row: RecordedRow, rules: Rules) -> str:
    return str(_group_id(value, row, rules))


def _truth(value: object, _row: RecordedRow, _rules: Rules) -> bool:
    if isinstance(value, bool):
        return value
    raise Unusable(f"needs true or false (got {value!r:.40})")


def _integer(value: object, _row: RecordedRow, _rules: Rules) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unusable(f"needs an integer (got {value!r:.40})")


_NUMBERS = pa.list_(pa.float32())

FIELDS = {
    "token_ids": (pa.list_(pa.int32()), _token_ids),
    "loss_mask": (pa.list_(pa.bool_()), _loss_mask),
    **dict.fromkeys(OPTIONAL_VECTORS, (_NUMBERS, _log_probs)),
    "sampling_top_ids": (pa.list_(pa.list_(pa.int32())), _top_ids),
    "sampling_top_log_probs": (pa.list_(pa.list_(pa.float32())), _top_log_probs),
    "sampling_kept_ids": (pa.list_(pa.list_(pa.int32())), _kept_ids),
    "score_failed": (pa.bool_(), _truth),
    "advantage": (_NUMBERS, _advantage),
    "reward": (pa.float64(), _reward),
    "group_id": (pa.int64(), _group_id),
    "trajectory": (pa.int64(), _group_id),
    "id": (pa.string(), _id),
    "model_version": (pa.int64(), _integer),
    "truncated": (pa.bool_(), _truth),
    "exact_match": (pa.bool_(), _truth),
}
"""Each field with its type in a Parquet file, and the function that checks and returns its value.

The function gets the value, the row with the fields before it, and the rules. It raises Unusable.
"""

COLUMNS = (*FIELDS, *TEXTS, TOOLS)
"""All columns that are read from a file."""
