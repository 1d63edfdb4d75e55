"""What travels from rollouts to the loss: documents, micro-batches that they are packed into, steps
with totals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.errors import DataError

OPTIONAL_VECTORS = ("old_log_probs", "sampling_log_probs", "ref_log_probs")
"""Numbers of each trained token that not every source knows. A step has those that all its
documents have, but for old log-probs, which each micro-batch has that is not on_policy."""

CRITIC_VECTORS = ("values", "returns")
"""Numbers of each trained token that the documents of a run with a critic have."""


@dataclass(frozen=True)
class Document:
    """One prompt with one completion.

    tokens: (S,) int64, prompt followed by completion.
    loss_mask: (S,) bool, True where the token is trained, that is, predicted from the tokens before
        it. The first token has nothing before it and is never trained.
    old_log_probs: (N,) float32, log-prob of each trained token, in order, under the policy that
        ratios are anchored at: the one that generated it, or the one that training on its batch
        began with; None where nobody knows and the loss does not ask, and where the document is
        on_policy.
    on_policy: True where that policy is the one that its step begins with, after `anchor_version`
        updates: its old log-probs are the new ones, which the step's forward pass gives, and every
        ratio is 1.
    advantages: (N,) float32, of each trained token.
    sampling_log_probs, ref_log_probs: (N,) float32 or None, log-prob of each trained token as the
        engine that sampled it gave it, where old_log_probs are computed anew, and under a frozen
        reference.
    group: number of the document's prompt group, unique within the run's data.
    trajectory: number of the attempt at the prompt that it is a part of, as unique; None: it is one
        by itself.
    name: how messages call the document, such as `rollouts.jsonl:12`.
    reward, exact_match, truncated, model_version: what the source knows, or None.
    score_failed: whether nobody could score it. Without a reward it is then left out: see
        `is_excluded`.
    task_reward: the reward before anything was taken off for the completion's length, or None where
        nothing could be.
    values, returns: (N,) float32 or None, the critic's value of the state in which each trained
        token was drawn, when training on the document's batch begins, and what the critic learns in
        its place.
    kl_reward: what the distance from the reference adds to the reward before advantages are made of
        it, 0 or less in the mean; None where it adds nothing, or nobody could score the document.
    dropped_prompt_fraction: share of the prompts sampled for its batch that were dropped, or None
        where none could be.
    dropped_group_fraction: share of its batch's groups that are left out, or None where none could
        be.
    left_out: whether it takes no part in any step, since its group teaches nothing.
    retired_prompts: prompts that are asked no more once its batch is scored, or None where none
        could be.
    measures: further numbers by name, such as reward/format; their means over a step are metrics of
        these names.
    logged: what reward functions have logged of it, by name, for whoever looks at completions.
    reference_tokens: (R,) int64, what the reference reads in their place: another prompt, then the
        same tokens; None where it reads these.

    Raises ValueError where the numbers do not belong to these tokens.
    """

    tokens: Tensor
    loss_mask: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    group: int
    name: str
    reward: float | None = None
    exact_match: bool | None = None
    truncated: bool | None = None
    model_version: int | None = None
    sampling_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    task_reward: float | None = None
    dropped_prompt_fraction: float | None = None
    measures: dict[str, float] = field(default_factory=dict)
    on_policy: bool = False
    reference_tokens: Tensor | None = None
    trajectory: int | None = None
    anchor_version: int | None = None
    score_failed: bool = False
    dropped_group_fraction: float | None = None
    left_out: bool = False
    retired_prompts: int | None = None
    kl_reward: float | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    logged: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        trained = int(self.loss_mask.sum())
        vectors = "advantages", *known_vectors(self), *vectors_of_critic([self])
        lengths = {name: len(getattr(self, name)) for name in ("loss_mask", *vectors)}
        if lengths != {"loss_mask": len(self.tokens)} | dict.fromkeys(vectors, trained):
            raise ValueError(
                f"{self.name} has {len(self.tokens)} tokens, {trained} of them trained, and "
                f"{lengths}"
            )
        if trained and self.loss_mask[0]:
            raise ValueError(f"{self.name} trains its first token, which nothing stands before")

    @property
    def num_tokens(self) -> int:
        """Number of tokens the document takes in a micro-batch, trained or not, whoever reads more
        of them."""
        return max(len(read) for read in (self.tokens, self.reference_tokens) if read is not None)

    @property
    def num_trained(self) -> int:
        """N_d: number of trained tokens."""
        return len(self.advantages)

    @property
    def reward_for_advantage(self) -> float | None:
        """The reward with what the distance from the reference adds to it."""
        return (
            self.reward
            if self.reward is None or self.kl_reward is None
            else self.reward + self.kl_reward
        )

    @property
    def is_excluded(self) -> bool:
        """Whether the document has weight 0 and no part in a baseline, though every count has it
        and its tokens."""
        return self.score_failed and self.reward is None

    def as_the_reference_reads_it(self) -> Document:
        """With `reference_tokens` in the place of its tokens; what is trained stands at the end of
        both."""
        assert self.reference_tokens is not None
        mask = functional.pad(self.loss_mask, (len(self.reference_tokens) - len(self.tokens), 0))
        return replace(self, tokens=self.reference_tokens, loss_mask=mask, reference_tokens=None)


@dataclass(frozen=True)
class DocumentCounts:
    """What the fused head's plan must know of each document, where the caller knows it on the host.

    trained: tokens that are trained. informative: those of them whose advantage is not 0.
    """

    trained: list[int]
    informative: list[int]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the loss knows of the positions of a piece of a step, but for their logits.

    labels, document_index: (T,) int64; labels[t] is the token to predict at position t, which is
        token t + 1 of the document, negative where nothing is trained. advantages: (T,) floating,
        aligned with labels, read only where trained.
    old_log_probs, sampling_log_probs, ref_log_probs: the same, or None; see `OPTIONAL_VECTORS`.
        Where the old ones are None they are the new ones, without gradient: every ratio is 1.
    factors: the same, or None: rho_t as the caller has computed it; l_t is multiplied by it, beside
        any correction.
    num_documents: of this piece. group_index: (documents,) int64, each document's group as the
        totals number them.
    trajectory_index: the same of its trajectory; None where each document is one by itself.
    truncated: (documents,) bool, True where a completion is known to be cut off; or None.
    excluded: (documents,) bool, True where every weight is 0 since nobody could score the
        completion; None: of none.
    counts: of the documents, where they are known on the host.
    """

    labels: Tensor
    advantages: Tensor
    document_index: Tensor
    num_documents: int
    group_index: Tensor | None = None
    trajectory_index: Tensor | None = None
    truncated: Tensor | None = None
    excluded: Tensor | None = None
    counts: DocumentCounts | None = None
    old_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    factors: Tensor | None = None

    def counted(self) -> Self:
        """The same with `counts`, which are read from the tensors here: before they move to a
        GPU."""
        trained = self.labels >= 0
        documents = [
            self.document_index[mask] for mask in (trained, trained & (self.advantages != 0))
        ]
        counts = DocumentCounts(
            *(torch.bincount(x, minlength=self.num_documents).tolist() for x in documents)
        )
        return replace(self, counts=counts)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Tokens):
    """Whole documents packed on one token axis of length T; what one forward and backward pass
    sees.

    tokens, position_ids: (T,) int64. Position ids restart at each document.
    names, document_lengths: of each document; its tokens are counted whole, also where this is a
        rank's piece.
    for_reference: the same documents as the reference reads them, where it reads other prompts.
        places: (T,) int64, the position in it at which the same token is predicted, where one is
        trained.
    values, returns: (T,) float32, aligned with labels, where there is a critic; see `Document`.
    """

    tokens: Tensor
    position_ids: Tensor
    names: tuple[str, ...]
    document_lengths: tuple[int, ...]
    for_reference: MicroBatch | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: without_waiting(tensor, device) for name, tensor in tensors.items()}
        return replace(
            self, **moved, for_reference=self.for_reference and self.for_reference.to(device)
        )


@dataclass(frozen=True)
class StepTotals:
    """The denominators of one step, counted once over all its micro-batches and ranks (design: D,
    G, N, N_g).

    Every delivered document and group counts, also one without a trained token; such a document
    adds nothing to num_tokens. Counts are int or 0-dim int64 tensors; tokens_per_group is
    (num_groups,) int64. num_groups and tokens_per_group are None where the data has no groups.
    tokens_per_trajectory: (trajectories,) int64, of several documents where their context was
        rewritten on the way; None where each document is one.
    """

    num_documents: int | Tensor
    num_tokens: int | Tensor
    num_empty_documents: int | Tensor
    num_groups: int | Tensor | None = None
    tokens_per_group: Tensor | None = None
    tokens_per_trajectory: Tensor | None = None

    @property
    def num_trajectories(self) -> int | Tensor:
        """D in the weights: attempts at prompts, each counted once, however many documents it
        has."""
        return (
            self.num_documents
            if self.tokens_per_trajectory is None
            else len(self.tokens_per_trajectory)
        )

    @property
    def num_empty_trajectories(self) -> int | Tensor:
        """Those without a trained token."""
        counts = self.tokens_per_trajectory
        return self.num_empty_documents if counts is None else int((counts == 0).sum())


@dataclass(frozen=True)
class Step:
    """One optimizer update: its micro-batches, its totals, and where the data stands after it.

    micro_batches: those of this rank; all else is the same on every rank.
    documents: the step's documents, for messages and for the metrics that only the data knows.
    state_after: state of the step loader once this step is done, up to `rollouts.steps.loadable`;
        committed with the optimizer step.
    seconds: what making the documents took this process since the step before, by stage.
    """

    micro_batches: list[MicroBatch]
    totals: StepTotals
    documents: list[Document]
    state_after: dict
    seconds: dict[str, float] = field(default_factory=dict)


def known_vectors(*holders: Document | Tokens) -> tuple[str, ...]:
    """Which of OPTIONAL_VECTORS all of these have; none where nothing is given."""
    return tuple(
        name
        for name in OPTIONAL_VECTORS
        if holders and all(getattr(x, name) is not None for x in holders)
    )


def vectors_of_critic(documents: list[Document]) -> tuple[str, ...]:
    """Which of CRITIC_VECTORS the documents of a step have: all or none."""
    return CRITIC_VECTORS if documents and documents[0].values is not None else ()


def have_old_log_probs(documents: list[Document]) -> bool:
    """Whether a step of these documents has ratios: each knows its old log-probs, or is
    on_policy."""
    return all(document.old_log_probs is not None or document.on_policy for document in documents)


def trajectories_of(documents: list[Document]) -> list[tuple[bool, int]]:
    """What tells each document's trajectory from the others': a document that names none is one by
    itself."""
    names = (document.trajectory for document in documents)
    return [(name is None, place if name is None else name) for place, name in enumerate(names)]


def pack(
    documents: list[Document], known: tuple[str, ...] | None = None, has_trajectories: bool = False
) -> MicroBatch:
    """One micro-batch of the documents in their order, whose groups and trajectories are numbered
    within the step.

    known: the optional vectors that all documents of the step have; None: those that these
        documents have.
    has_trajectories: whether the step's documents name any.

    Here alone tokens become labels: position t predicts token t + 1 of its document, with that
    token's old log-prob and advantage; the last position of a document predicts nothing. No
    documents give a micro-batch of length 0.
    """
    lengths = [len(document.tokens) for document in documents]
    tokens = _concatenate([document.tokens for document in documents], torch.int64)
    trained = (
        _concatenate([document.loss_mask for document in documents], torch.bool)
        .nonzero()
        .squeeze(1)
    )

    def labelled(values: Tensor, elsewhere: float) -> Tensor:
        """(T,) from the values of the trained tokens: each stands where its token is predicted, one
        place earlier."""
        return values.new_full((len(tokens),), elsewhere).index_copy(0, trained - 1, values)

    def numbers(name: str) -> Tensor:
        return torch.tensor([getattr(document, name) for document in documents], dtype=torch.int64)

    vectors = {}
    if not any(document.on_policy for document in documents):
        # Zeros where nobody knows them: the loss then does not read them, and no metric of them is
        #   given.
        old = [
            torch.zeros(d.num_trained) if d.old_log_probs is None else d.old_log_probs
            for d in documents
        ]
        vectors["old_log_probs"] = labelled(_concatenate(old, torch.float32), 0.0)
    others = set(known_vectors(*documents) if known is None else known) - {"old_log_probs"}
    for name in ("advantages", *others, *vectors_of_critic(documents)):
        values = _concatenate([getattr(document, name) for document in documents], torch.float32)
        vectors[name] = labelled(values, 0.0)
    excluded = None
    if any(document.is_excluded for document in documents):
        excluded = torch.tensor([document.is_excluded for document in documents])
    for_reference = places = None
    if documents and documents[0].reference_tokens is not None:
        for_reference = pack([document.as_the_reference_reads_it() for document in documents], ())
        places = labelled((for_reference.labels >= 0).nonzero().squeeze(1), 0)
    return MicroBatch(
        tokens=tokens,
        position_ids=_concatenate([torch.arange(length) for length in lengths], torch.int64),
        labels=labelled(tokens[trained], -1),
        document_index=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
        ),
        **vectors,
        num_documents=len(documents),
        group_index=numbers("group"),
        trajectory_index=numbers("trajectory") if has_trajectories else None,
        truncated=torch.tensor([bool(document.truncated) for document in documents]),
        excluded=excluded,
        names=tuple(document.name for document in documents),
        document_lengths=tuple(lengths),
        for_reference=for_reference,
        places=places,
    )


def cut(documents: list[Document], max_tokens: int) -> list[list[Document]]:
    """The documents in their order, in runs of at most max_tokens tokens; each run takes as many as
    fit.

    Raises DataError for a document that alone is longer, since documents are never split.
    """
    parts: list[list[Document]] = []
    free = 0
    for document in documents:
        if document.num_tokens > max_tokens:
            raise DataError(
                f"{document.name} has {document.num_tokens} tokens and does not fit a micro-batch "
                f"of {max_tokens}. Documents are never split. Use "
                f"accumulation.max_tokens={document.num_tokens} or more."
            )
        if not parts or document.num_tokens > free:
            parts.append([])
            free = max_tokens
        parts[-1].append(document)
        free -= document.num_tokens
    return parts


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. A copy from memory that is not page-locked may wait for all that the GPU still
    has to do."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])
