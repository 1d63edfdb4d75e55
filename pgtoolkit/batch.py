"""Documents, the micro-batches that they are packed into, and steps with their totals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.errors import DataError

OPTIONAL_VECTORS = ("old_log_probs", "sampling_log_probs", "ref_log_probs")
"""Numbers of each trained token that not every source knows.

A step has those that all its documents have. Old log-probs are an exception: each micro-batch has
them unless it is on_policy.
"""

CRITIC_VECTORS = ("values", "returns")
"""Numbers of each trained token that the documents of a run with a critic have."""

_TRAINED_VECTORS = ("advantages", *OPTIONAL_VECTORS, *CRITIC_VECTORS)
"""The fields of a document that have a number for each trained token, or are None."""


@dataclass(frozen=True)
class Document:
    """One prompt with one completion.

    tokens: (S,) int64, prompt followed by completion.
    loss_mask: (S,) bool, True where the token is trained, that is, predicted from the tokens before
        it. The first token has nothing before it and is never trained.
    old_log_probs: (N,) float32, log-prob of each trained token, in order, under the policy that
        ratios are anchored at: the one that generated it, or the one that training on its batch
        began with. None where the document is on_policy, or where they are unknown and the loss
        does not need them.
    on_policy: True where that policy is the one that its step begins with, after `anchor_version`
        updates: its old log-probs are the new ones, which the step's forward pass gives, and every
        ratio is 1.
    advantages: (N,) float32, of each trained token.
    sampling_log_probs: (N,) float32 or None, log-prob of each trained token as the sampler gave it,
        where old_log_probs are computed anew.
    ref_log_probs: (N,) float32 or None, log-prob of each trained token under a frozen reference.
    group: number of the document's prompt group, unique within the run's data.
    trajectory: number of the attempt at the prompt that it is a part of, unique in the same way;
        None: it is an attempt by itself.
    name: the name in messages, such as `rollouts.jsonl:12`.
    reward, exact_match, truncated, model_version: as far as the source knows them, or None.
    score_failed: True where no verifier could score it. Without a reward it is then left out: see
        `is_excluded`.
    task_reward: the reward before a deduction for the completion's length; None where there is no
        such deduction.
    values: (N,) float32 or None, the critic's value of the state in which each trained token was
        drawn, when training on the document's batch begins.
    returns: (N,) float32 or None, the values that the critic learns.
    kl_reward: added to the reward for the distance from the reference, before advantages are made;
        0 or less in the mean. None where there is no such term, or no score.
    dropped_prompt_fraction: share of the prompts sampled for its batch that were dropped; None
        where the run drops none.
    dropped_group_fraction: share of its batch's groups that are left out; None where the run leaves
        out none.
    left_out: True where it takes no part in any step, since its group has no signal.
    retired_prompts: number of prompts that are not asked again once its batch is scored; None where
        the run retires none.
    measures: further numbers by name, such as reward/format; their means over a step are metrics of
        these names.
    logged: texts that reward functions have logged, by name, to be shown with the completion.
    reference_tokens: (R,) int64, read by the reference instead of tokens: another prompt, then the
        same trained tokens; None where it reads tokens.

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
        # A GPU waits while a batch's documents are made, so this asks torch for little.
        trained = int(self.loss_mask.count_nonzero())
        fits = self.loss_mask.shape == self.tokens.shape
        for name in _TRAINED_VECTORS:
            vector = getattr(self, name)
            fits = fits and (vector is None or vector.shape[0] == trained)
        if not fits:
            lengths = {
                name: len(getattr(self, name))
                for name in ("loss_mask", *_TRAINED_VECTORS)
                if getattr(self, name) is not None
            }
            raise ValueError(
                f"{self.name} has {len(self.tokens)} tokens, {trained} of them trained, and "
                f"{lengths}"
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

    @property
    def num_trained(self) -> int:
        """Return N_d, the number of trained tokens."""
        return len(self.advantages)

    @property
    def reward_for_advantage(self) -> float | None:
        """Return the reward with the term for the distance from the reference."""
        if self.reward is None or self.kl_reward is None:
            return self.reward
        return self.reward + self.kl_reward

    @property
    def is_excluded(self) -> bool:
        """Return True if the document has weight 0 and no part in a baseline.

        It is counted all the same, with its tokens.
        """
        return self.score_failed and self.reward is None

    def as_the_reference_reads_it(self) -> Document:
        """Return the document with `reference_tokens` as its tokens.

        The trained tokens are the last ones of both.
        """
        assert self.reference_tokens is not None
        mask = functional.pad(self.loss_mask, (len(self.reference_tokens) - len(self.tokens), 0))
        return replace(self, tokens=self.reference_tokens, loss_mask=mask, reference_tokens=None)


@dataclass(frozen=True)
class DocumentCounts:
    """Numbers of tokens of each document, where the caller knows them on the host.

    The fused head plans its chunks by them.
    trained: tokens that are trained.
    informative: those of them whose advantage is not 0.
    """

    trained: list[int]
    informative: list[int]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The inputs of the loss at the T positions of a piece of a step, but for the logits.

    labels: (T,) int64; labels[t] is the token to predict at position t, which is token t + 1 of the
        document, negative where nothing is trained.
    document_index: (T,) int64.
    advantages: (T,) floating, aligned with labels, read only where trained.
    old_log_probs, sampling_log_probs, ref_log_probs: (T,) floating, or None; see
        `OPTIONAL_VECTORS`. Where the old ones are None they are the new ones, without gradient:
        every ratio is 1.
    factors: (T,) floating, or None: rho_t as the caller has computed it; l_t is multiplied by it,
        and by the factor of any correction.
    coefficients: (T,) floating, or None: c_t of the surrogate, where the loss of the whole step was
        computed before from all of its log-probs.
    rewards, group_rewards: (documents,) floating, each document's reward and the mean of its
        group's; None where no loss asks for them.
    num_documents: documents of this piece.
    group_index: (documents,) int64, each document's group as the totals number them.
    trajectory_index: (documents,) int64, its trajectory; None where each document is one by itself.
    truncated: (documents,) bool, True where a completion is known to be cut off; or None.
    excluded: (documents,) bool, True where every weight is 0, since no verifier could score the
        completion; None if there is no such document.
    counts: numbers of tokens, where they are known on the host.
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
    coefficients: Tensor | None = None
    rewards: Tensor | None = None
    group_rewards: Tensor | None = None

    def on_the_host(self) -> Self:
        """Return the same with all tensors on the CPU."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.cpu() for name, tensor in tensors.items()})

    def counted(self) -> Self:
        """Return the same with `counts`, read from the tensors before they move to a GPU."""
        trained = self.labels >= 0
        informative = trained & (self.advantages != 0)

        def per_document(mask: Tensor) -> list[int]:
            documents = self.document_index[mask]
            return torch.bincount(documents, minlength=self.num_documents).tolist()

        return replace(
            self, counts=DocumentCounts(per_document(trained), per_document(informative))
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Tokens):
    """Complete documents packed on one token axis of length T, for one forward and backward pass.

    tokens, position_ids: (T,) int64. Position ids restart at each document.
    names: the name of each document.
    document_lengths: the tokens of each document, all of them also where this is a rank's piece.
    step_places: the place of each document among those of its step, on all ranks; empty where it is
        no part of a step.
    for_reference: the same documents as the reference reads them, where it reads other prompts.
    places: (T,) int64, for each trained token the position in for_reference that predicts it.
    values, returns: (T,) float32, aligned with labels, where there is a critic; see `Document`.
    """

    tokens: Tensor
    position_ids: Tensor
    names: tuple[str, ...]
    document_lengths: tuple[int, ...]
    step_places: tuple[int, ...] = ()
    for_reference: MicroBatch | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: without_waiting(tensor, device) for name, tensor in tensors.items()}
        for_reference = None if self.for_reference is None else self.for_reference.to(device)
        return replace(self, **moved, for_reference=for_reference)


@dataclass(frozen=True)
class StepTotals:
    """The denominators of one step, counted once over all its micro-batches and ranks.

    In the equations they are D, G, N and N_g. Every delivered document and group counts, also one
    without a trained token; such a document adds nothing to num_tokens. Counts are int or 0-dim
    int64 tensors.
    num_groups: None where the data has no groups.
    tokens_per_group: (num_groups,) int64, or None.
    tokens_per_trajectory: (trajectories,) int64; None where each document is a trajectory by
        itself.
    """

    num_documents: int | Tensor
    num_tokens: int | Tensor
    num_empty_documents: int | Tensor
    num_groups: int | Tensor | None = None
    tokens_per_group: Tensor | None = None
    tokens_per_trajectory: Tensor | None = None

    @property
    def num_trajectories(self) -> int | Tensor:
        """Return D of the weights: attempts at prompts, also if one has several documents."""
        if self.tokens_per_trajectory is None:
            return self.num_documents
        return len(self.tokens_per_trajectory)

    @property
    def num_empty_trajectories(self) -> int | Tensor:
        """Return the number of trajectories without a trained token."""
        counts = self.tokens_per_trajectory
        return self.num_empty_documents if counts is None else int((counts == 0).sum())


@dataclass(frozen=True)
class Step:
    """The data of one optimizer update: its micro-batches, its totals, and the state after it.

    micro_batches: those of this rank; all else is the same on every rank.
    documents: the step's documents, for messages, and for metrics of the data.
    state_after: state of the step loader once this step is done, which is committed with the
        optimizer step; `rollouts.step_loader.loadable` makes it loadable.
    seconds: time that this process took to make the documents since the step before, by stage.
    """

    micro_batches: list[MicroBatch]
    totals: StepTotals
    documents: list[Document]
    state_after: dict
    seconds: dict[str, float] = field(default_factory=dict)


def known_vectors(*holders: Document | Tokens) -> tuple[str, ...]:
    """Return the names in OPTIONAL_VECTORS that all holders have; none without holders."""
    return tuple(
        name
        for name in OPTIONAL_VECTORS
        if holders and all(getattr(holder, name) is not None for holder in holders)
    )


def vectors_of_critic(documents: list[Document]) -> tuple[str, ...]:
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


def pack(documents: list[Document], known: tuple[str, ...] | None = None) -> MicroBatch:
    """Pack the documents into one micro-batch, in their order.

    Only here tokens become labels: position t predicts token t + 1 of its document, with that
    token's old log-prob and advantage; the last position of a document predicts nothing. Without
    documents its length is 0. Groups have the numbers that the documents give them.

    known: the optional vectors that all documents of the step have; None: those that these
        documents have.
    """
    lengths = [len(document.tokens) for document in documents]
    tokens = _concatenate([document.tokens for document in documents], torch.int64)
    loss_mask = _concatenate([document.loss_mask for document in documents], torch.bool)
    trained = loss_mask.nonzero().squeeze(1)

    def labelled(values: Tensor, elsewhere: float) -> Tensor:
        """Return (T,) with each trained token's value at the place before, which predicts it."""
        return values.new_full((len(tokens),), elsewhere).index_copy(0, trained - 1, values)

    vectors = {}
    if not any(document.on_policy for document in documents):
        vectors["old_log_probs"] = labelled(_old_log_probs(documents), 0.0)
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
        group_index=torch.tensor([document.group for document in documents], dtype=torch.int64),
        truncated=torch.tensor([bool(document.truncated) for document in documents]),
        excluded=excluded,
        names=tuple(document.name for document in documents),
        document_lengths=tuple(lengths),
        for_reference=for_reference,
        places=places,
    )


def _old_log_probs(documents: list[Document]) -> Tensor:
    """Return the old log-probs of all trained tokens, zeros where they are unknown.

    The loss then does not read them, and no metric of them is reported.
    """
    vectors = []
    for document in documents:
        if document.old_log_probs is None:
            vectors.append(torch.zeros(document.num_trained))
        else:
            vectors.append(document.old_log_probs)
    return _concatenate(vectors, torch.float32)


def cut(documents: list[Document], max_tokens: int) -> list[list[Document]]:
    """Cut the documents in their order into parts of at most max_tokens; each takes all that fit.

    Raises DataError for a document that is longer, since documents are never split.
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
    """Return the tensor on the device.

    The copy goes through page-locked memory: any other may wait for all work queued on the GPU.
    """
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])
