"""Documents: what was sampled, and what training adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.errors import DataError

OPTIONAL_VECTORS = ("old_log_probs", "sampling_log_probs", "ref_log_probs")
"""Numbers of each trained token that not every source knows.

A step has those that all its documents have. Old log-probs are an exception: each micro-batch has
them unless it is on_policy.
"""

TOP_VECTORS = ("sampling_top_ids", "sampling_top_log_probs")
"""Rows of each trained token that the documents of a sampler with `sampler.keep_top` have."""

ROWS = (*TOP_VECTORS, "sampling_kept_ids")
"""All that documents have of each trained token in the form of a row."""

CRITIC_VECTORS = ("values", "returns")
"""Numbers of each trained token that the documents of a run with a critic have."""


@dataclass(frozen=True, kw_only=True)
class SampledDocument:
    """One prompt with one completion, as it was sampled and scored.

    tokens: (S,) int64, prompt followed by completion.
    loss_mask: (S,) bool, True where the token is trained, that is, predicted from the tokens before
        it. The first token has nothing before it and is never trained.
    group: number of the document's prompt group, unique within the run's data.
    name: the name in messages, such as `rollouts.jsonl:12`.
    trajectory: number of the attempt at the prompt that it is a part of, unique in the same way;
        None: it is an attempt by itself.
    sampling_log_probs: (N,) float32 or None, log-prob of each trained token, in order, as the
        sampler gave it.
    sampling_top_ids, sampling_top_log_probs: (N, k) int32 and float32, or None: the k likeliest
        tokens of the sampler in the place of each trained token, each once, and their log-probs; -1
        and -inf where unused.
    sampling_kept_ids: (N, k) int32 or None, the tokens that truncated sampling has kept in the
        place of each trained token, over which its log-probs are taken, -1 where unused; a row
        without a token stands for a set that is not known, since it was too large. None where all
        tokens were kept.
    reward, exact_match, truncated, model_version: as far as the source knows them, or None.
    score_failed: True where no verifier could score it. Without a reward it is then left out: see
        `is_excluded`.
    task_reward: the reward before a deduction for the completion's length; None where there is no
        such deduction.
    measures: further numbers by name, such as reward/format; their means over a step are metrics of
        these names.
    logged: texts that reward functions have logged, by name, to be shown with the completion.
    reference_tokens: (R,) int64, read by the reference instead of tokens: another prompt, then the
        same trained tokens; None where it reads tokens.

    Raises ValueError where the numbers do not belong to these tokens.
    """

    _vectors: ClassVar[tuple[str, ...]] = ("sampling_log_probs", *ROWS)
    """The fields that have a number for each trained token, or are None."""

    tokens: Tensor
    loss_mask: Tensor
    group: int
    name: str
    trajectory: int | None = None
    sampling_log_probs: Tensor | None = None
    sampling_top_ids: Tensor | None = None
    sampling_top_log_probs: Tensor | None = None
    sampling_kept_ids: Tensor | None = None
    reward: float | None = None
    exact_match: bool | None = None
    truncated: bool | None = None
    model_version: int | None = None
    score_failed: bool = False
    task_reward: float | None = None
    measures: dict[str, float] = field(default_factory=dict)
    logged: dict[str, str] = field(default_factory=dict)
    reference_tokens: Tensor | None = None

    def __post_init__(self):
        # A GPU waits while a batch's documents are made, so this asks torch for little.
        if not isinstance(self.group, Integral):
            raise ValueError(
                f"group of {self.name} needs a whole number (got {self.group!r:.60}). Completions "
                "of one prompt have the same. Use the number of the prompt: group=0, group=1, ..."
            )
        if not isinstance(self.reward, Real | None):
            raise ValueError(
                f"reward of {self.name} needs a number of Python or None (got "
                f"{self.reward!r:.60}). Use reward=float(...)."
            )
        for name in ("tokens", "loss_mask"):
            values = getattr(self, name)
            dtype = torch.bool if name == "loss_mask" else torch.int64
            if not isinstance(values, Tensor) or values.dtype != dtype:
                got = values.dtype if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"{name} of {self.name} needs a tensor of {dtype} (got {got}). Use "
                    f"torch.as_tensor({name}, dtype={dtype})."
                )
        trained = self.num_trained
        fits = self.loss_mask.shape == self.tokens.shape
        for name in self._vectors:
            vector = getattr(self, name)
            if vector is not None and not isinstance(vector, Tensor):
                raise ValueError(
                    f"{name} of {self.name} needs a tensor with a number for each of its {trained} "
                    f"trained tokens (got {type(vector).__name__})."
                )
            if name not in ROWS and vector is not None and vector.dim() != 1:
                raise ValueError(
                    f"{name} of {self.name} needs a number for each of its {trained} trained "
                    f"tokens, ({trained},) (got {tuple(vector.shape)}). Use {name}.flatten()."
                )
            fits = fits and (vector is None or vector.shape[0] == trained)
        if not fits:
            lengths = {
                name: len(getattr(self, name))
                for name in ("loss_mask", *self._vectors)
                if getattr(self, name) is not None
            }
            raise ValueError(
                f"{self.name} has {len(self.tokens)} tokens, {trained} of them trained, and "
                f"{lengths}. loss_mask is of its tokens, the others are of the trained ones, as "
                "advantages[loss_mask] would be"
            )
        if trained and self.loss_mask[0]:
            raise ValueError(f"{self.name} trains its first token, which nothing stands before")

    @property
    def num_tokens(self) -> int:
        """Return the room that the document takes in a micro-batch, in tokens, trained or not.

        It is the longer one of tokens and reference_tokens.
        """
        if self.reference_tokens is None:
            return len(self.tokens)
        return max(len(self.tokens), len(self.reference_tokens))

    @cached_property
    def num_trained(self) -> int:
        """Return N_d, the number of trained tokens."""
        return int(self.loss_mask.count_nonzero())

    @cached_property
    def num_untrained_first(self) -> int:
        """Return the number of tokens before the first trained one; all where none is trained."""
        if not self.num_trained:
            return len(self.tokens)
        return int(self.loss_mask.to(torch.uint8).argmax())

    @property
    def is_excluded(self) -> bool:
        """Return True if the document has weight 0 and no part in a baseline.

        It is counted all the same, with its tokens.
        """
        return self.score_failed and self.reward is None

    @property
    def kept_set_overflows(self) -> bool:
        """Return True if the tokens that sampling has kept are not known at a trained token.

        The document then has weight 0; its reward stays in the baseline.
        """
        kept = self.sampling_kept_ids
        return kept is not None and bool((kept < 0).all(-1).any())

    def as_the_reference_reads_it(self) -> Self:
        """Return the document with `reference_tokens` as its tokens.

        The trained tokens are the last ones of both.
        """
        assert self.reference_tokens is not None
        mask = functional.pad(self.loss_mask, (len(self.reference_tokens) - len(self.tokens), 0))
        return replace(self, tokens=self.reference_tokens, loss_mask=mask, reference_tokens=None)


@dataclass(frozen=True, kw_only=True)
class Document(SampledDocument):
    """A SampledDocument, with all its fields, and the numbers that training adds.

    advantages: (N,) float32, of each trained token; 0 until they are made.
    old_log_probs: (N,) float32, log-prob of each trained token under the policy that ratios are
        anchored at: the one that generated it, or the one that training on its batch began with.
        None where the document is on_policy, or where they are unknown and the loss does not need
        them. Where they are the sampler's, sampling_log_probs is None.
    on_policy: True where that policy is the one that its step begins with, after `anchor_version`
        updates: its old log-probs are the new ones, which the step's forward pass gives, and every
        ratio is 1.
    ref_log_probs: (N,) float32 or None, log-prob of each trained token under a frozen reference.
    kl_reward: added to the reward for the distance from the reference, before advantages are made;
        0 or less in the mean. None where there is no such term, or no score.
    values: (N,) float32 or None, the critic's value of the state in which each trained token was
        drawn, when training on the document's batch begins.
    returns: (N,) float32 or None, the values that the critic learns.
    left_out: True where it takes no part in any step, since its group has no signal.
    dropped_prompt_fraction: share of the prompts sampled for its batch that were dropped; None
        where the run drops none.
    dropped_group_fraction: share of its batch's groups that are left out; None where the run leaves
        out none.
    retired_prompts: number of prompts that are not asked again once its batch is scored; None where
        the run retires none.
    """

    _vectors: ClassVar[tuple[str, ...]] = (
        "advantages",
        *OPTIONAL_VECTORS,
        *ROWS,
        *CRITIC_VECTORS,
    )

    advantages: Tensor
    old_log_probs: Tensor | None
    on_policy: bool = False
    anchor_version: int | None = None
    ref_log_probs: Tensor | None = None
    kl_reward: float | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    left_out: bool = False
    dropped_prompt_fraction: float | None = None
    dropped_group_fraction: float | None = None
    retired_prompts: int | None = None


AnyDocument = TypeVar("AnyDocument", bound=SampledDocument)
"""One class of documents, for what takes and returns documents of either."""


def fields_of(document: SampledDocument) -> dict[str, Any]:
    """Return what the document was made of, by name, without the numbers that it has kept since."""
    return {each.name: getattr(document, each.name) for each in fields(document)}


def vectors_of_critic(documents: Sequence[Document]) -> tuple[str, ...]:
    """Return the names in CRITIC_VECTORS that the documents of a step have: all or none."""
    return CRITIC_VECTORS if documents and documents[0].values is not None else ()


def have_old_log_probs(documents: list[Document]) -> bool:
    """Return True if each document has old log-probs or is on_policy, so that ratios exist."""
    return all(document.old_log_probs is not None or document.on_policy for document in documents)


def trajectories_of(documents: list[Document]) -> list[tuple[bool, int]]:
    """Return a key of each document's trajectory; a document that names none is one by itself."""
    keys = []
    for index, document in enumerate(documents):
        is_alone = document.trajectory is None
        keys.append((is_alone, index if document.trajectory is None else document.trajectory))
    return keys


def num_shared(before: SampledDocument, document: SampledDocument) -> int:
    """Return how many tokens from its start on a document has in common with the one before it.

    None of them is trained in this document, and at least one of its tokens is left over.
    """
    limit = min(len(before.tokens), len(document.tokens) - 1, document.num_untrained_first)
    if limit < 1:
        return 0
    ours = document.tokens[:limit]
    others = before.tokens[:limit]
    if torch.equal(ours, others):
        return limit
    return int((ours != others).to(torch.uint8).argmax())


def rooms_behind(documents: Sequence[SampledDocument]) -> list[int]:
    """Return the room that each document takes in a micro-batch behind the one before it, with
    which it shares; the first one has none before it."""
    rooms = [document.num_tokens for document in documents[:1]]
    for before, document in pairwise(documents):
        room = len(document.tokens) - num_shared(before, document)
        if document.reference_tokens is not None:
            as_read = [each.as_the_reference_reads_it() for each in (before, document)]
            room = max(room, len(document.reference_tokens) - num_shared(*as_read))
        rooms.append(room)
    return rooms


def cut(
    documents: Sequence[AnyDocument], max_tokens: int, shares: bool = False
) -> list[list[AnyDocument]]:
    """Cut the documents in their order into parts of at most max_tokens; each takes all that fit.

    shares: whether a document shares with the one before it in its part. A group is then divided
        only where it fits no part as a whole, since each part computes its prompt anew.
    Raises DataError for a document that is longer, since documents are never split.
    """
    for document in documents:
        if document.num_tokens > max_tokens:
            raise DataError(
                f"{document.name} has {document.num_tokens} tokens and does not fit a micro-batch "
                f"of max_tokens={max_tokens}. Documents are never split. Use "
                f"accumulation.max_tokens={document.num_tokens} or more, in Python "
                f"max_tokens={document.num_tokens}."
            )
    rooms = Rooms.of(documents, shares)
    return [[documents[place] for place in part] for part in rooms.parts(max_tokens)]


def cut_evenly(
    shares_of_ranks: Sequence[Sequence[AnyDocument]], max_tokens: int, shares: bool = False
) -> list[list[list[AnyDocument]]]:
    """Cut the documents of each rank like `cut`, but with about the same tokens in each part.

    A small part costs nearly the time of a large one, since the host queues as many kernels for it.
    All ranks get as many parts as the one that needs most; where a rank has fewer documents than
    that, its last parts are empty.
    """
    num_parts = max(len(cut(documents, max_tokens, shares)) for documents in shares_of_ranks)
    return [
        [
            [documents[place] for place in part]
            for part in Rooms.of(documents, shares).shares_of(num_parts, max_tokens)
        ]
        for documents in shares_of_ranks
    ]


@dataclass(frozen=True)
class Rooms:
    """The tokens that documents take in a micro-batch.

    alone: of each document at the start of a part.
    behind: of each document behind the one before it.
    units: numbers of documents that follow each other and stay together where a part has room.
    """

    alone: Sequence[int]
    behind: Sequence[int]
    units: Sequence[int]

    @staticmethod
    def of(documents: Sequence[SampledDocument], shares: bool) -> Rooms:
        """Return the rooms of documents that share with those before them, or do not."""
        alone = [document.num_tokens for document in documents]
        if not shares:
            return Rooms(alone, alone, [1] * len(alone))
        groups = groupby(document.group for document in documents)
        return Rooms(alone, rooms_behind(documents), [len([*group]) for _, group in groups])

    def parts(self, max_tokens: int) -> list[list[int]]:
        """Return the places of the documents of each part.

        max_tokens: of a part, at least those of the longest document.
        """
        parts: list[list[int]] = []
        free = 0
        start = 0
        for end in accumulate(self.units):
            others = sum(self.behind[start + 1 : end])
            if self.behind[start] + others > free and self.alone[start] + others <= max_tokens:
                free = 0  # The next part has room for all of the group.
            for place in range(start, end):
                room = self.behind[place]
                if not parts or room > free:
                    parts.append([])
                    free = max_tokens
                    room = self.alone[place]
                parts[-1].append(place)
                free -= room
            start = end
        return parts

    def shares_of(self, count: int, enough: int | None = None) -> list[list[int]]:
        """Return the places of each share's documents, which follow each other.

        The share with the most tokens has as few as can be, but for groups that stay together.
        enough: tokens of a share with which there are no more shares than `count`; None: all.
        """
        too_few = max(self.alone, default=0) - 1
        enough = sum(self.alone) if enough is None else enough
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if len(self.parts(middle)) <= count:
                enough = middle
            else:
                too_few = middle
        parts = self.parts(enough)
        return parts + [[] for _ in range(count - len(parts))]
