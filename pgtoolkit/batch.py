"""Micro-batches that documents are packed into, and steps with their totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from pgtoolkit.document import (
    OPTIONAL_VECTORS,
    TOP_VECTORS,
    Document,
    SampledDocument,
    num_shared,
    vectors_of_critic,
)
from pgtoolkit.errors import DataError


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
    sampling_top_ids, sampling_top_log_probs: (T, k) integers and floating, or None: the likeliest
        tokens of the sampler at each position and their log-probs; -1 and -inf where unused.
    sampling_kept_ids: (T, k) integers, or None: the tokens that truncated sampling has kept at each
        position, over which log-probs are taken; -1 where unused, and in all of a row for the whole
        vocabulary.
    coefficients: (T,) floating, or None: c_t of the surrogate, where the loss of the whole step was
        computed before from all of its log-probs.
    rewards, group_rewards: (documents,) floating, each document's reward and the mean of its
        group's attempts that have one; None where no loss asks for them.
    num_documents: documents of this piece.
    group_index: (documents,) int64, each document's group as the totals number them.
    trajectory_index: (documents,) int64, its trajectory; None where each document is one by itself.
    truncated: (documents,) bool, True where a completion is known to be cut off; or None.
    excluded: (documents,) bool, True where every weight is 0, since no verifier could score the
        completion, or a set of tokens that sampling has kept is not known; None if there is no such
        document.
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
    sampling_top_ids: Tensor | None = None
    sampling_top_log_probs: Tensor | None = None
    sampling_kept_ids: Tensor | None = None
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
    shared: the tokens that each document shares with the one before it, see
        `document.num_shared`; empty where none shares any. Of these the document has the last one
        alone, whose state predicts the first token of its own.
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
    shared: tuple[int, ...] = ()
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
    completions_by_sign, tokens_by_sign: (num_groups, 3) int64, a group's documents with A < 0,
        A = 0 and A > 0, and their trained tokens. A document without a trained token counts as one
        with A = 0. None where they are not counted.
    mean_factor: the mean of the correction's factors, where these are divided by it; else None. In
        a run it is in float64.
    """

    num_documents: int | Tensor
    num_tokens: int | Tensor
    num_empty_documents: int | Tensor
    num_groups: int | Tensor | None = None
    tokens_per_group: Tensor | None = None
    tokens_per_trajectory: Tensor | None = None
    completions_by_sign: Tensor | None = None
    tokens_by_sign: Tensor | None = None
    mean_factor: float | Tensor | None = None

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
class Pass:
    """The pass to which a step belongs, of several over the same batch of rollouts.

    is_first: whether it trains the documents for the first time.
    """

    is_first: bool


@dataclass(frozen=True)
class Step:
    """The data of one optimizer update: its micro-batches, its totals, and the state after it.

    micro_batches: those of this rank; all else is the same on every rank.
    documents: the step's documents, for messages, and for metrics of the data.
    state_after: state of the step loader once this step is done, which is committed with the
        optimizer step; `rollouts.step_loader.loadable` makes it loadable.
    seconds: time that this process took to make the documents since the step before, by stage.
    of_pass: None where each batch is trained once.
    ends_batch: whether its batch of rollouts has no further step, in any pass.
    """

    micro_batches: list[MicroBatch]
    totals: StepTotals
    documents: list[Document]
    state_after: dict
    seconds: dict[str, float] = field(default_factory=dict)
    of_pass: Pass | None = None
    ends_batch: bool = True


def known_vectors(*holders: Document | Tokens) -> tuple[str, ...]:
    """Return the names in OPTIONAL_VECTORS that all holders have; none without holders."""
    return tuple(
        name
        for name in OPTIONAL_VECTORS
        if holders and all(getattr(holder, name) is not None for holder in holders)
    )


def pack(
    documents: Sequence[Document], known: tuple[str, ...] | None = None, shares: bool = False
) -> MicroBatch:
    """Pack the documents into one micro-batch for the loss, with the numbers of its labels.

    known: the optional vectors that all documents of the step have; None: those that these
        documents have.
    shares: whether each document shares with the one before it.
    Raises DataError where some documents are on_policy and others not.
    """
    micro_batch = pack_sampled(documents, shares)
    predicting = (micro_batch.labels >= 0).nonzero().squeeze(1)

    def labelled(vectors: list[Tensor]) -> Tensor:
        """Return (T,) with the number of each label, 0 elsewhere."""
        values = _concatenate(vectors, torch.float32)
        return values.new_zeros(len(micro_batch.tokens)).index_copy(0, predicting, values)

    vectors = {}
    on_policy = {document.on_policy for document in documents}
    if len(on_policy) > 1:
        raise DataError(
            "the documents of a micro-batch need to be all on_policy, or none "
            f"(got both, beside {documents[0].name}). Give each its old_log_probs."
        )
    if on_policy != {True}:
        vectors["old_log_probs"] = labelled(_old_log_probs(documents))
    others = set(known_vectors(*documents) if known is None else known) - {"old_log_probs"}
    for name in ("advantages", *others, *vectors_of_critic(documents)):
        vectors[name] = labelled([getattr(document, name) for document in documents])
    if documents and all(document.sampling_top_ids is not None for document in documents):
        for name, unused in zip(TOP_VECTORS, (-1, -math.inf), strict=True):
            rows = [getattr(document, name) for document in documents]
            vectors[name] = _rows(rows, unused, len(micro_batch.tokens), predicting)
    # Data are constants of the loss, also where a document was made of tensors with a graph.
    return replace(micro_batch, **{name: vector.detach() for name, vector in vectors.items()})


def _rows(of_documents: Sequence[Tensor], unused: float, length: int, predicting: Tensor) -> Tensor:
    """Return rows of the positions of a micro-batch, as wide as those of its widest document.

    of_documents: (N, k) each, of the trained tokens. length: T. predicting: the positions of the
        labels.
    """
    width = max(rows.shape[1] for rows in of_documents)
    rows = torch.cat([_widened(rows, width, unused) for rows in of_documents])
    return rows.new_full((length, width), unused).index_copy(0, predicting, rows)


def _kept_ids(
    documents: Sequence[SampledDocument], length: int, predicting: Tensor
) -> Tensor | None:
    """Return `sampling_kept_ids` of a micro-batch; None where no document has any.

    A document without them was sampled from the whole vocabulary.
    """
    if all(document.sampling_kept_ids is None for document in documents):
        return None
    of_documents = [
        torch.full((document.num_trained, 1), -1, dtype=torch.int32)
        if document.sampling_kept_ids is None
        else document.sampling_kept_ids
        for document in documents
    ]
    return _rows(of_documents, -1, length, predicting)


def _widened(rows: Tensor, width: int, unused: float) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=unused)


def pack_sampled(documents: Sequence[SampledDocument], shares: bool = False) -> MicroBatch:
    """Pack the documents into one micro-batch, in their order, for a forward pass without a loss.

    shares: whether each document shares with the one before it.

    Only here tokens become labels: position t predicts token t + 1 of its document; the last
    position of a document predicts nothing. Advantages are 0. Without documents the length is 0.
    Groups have the numbers that the documents give them.
    """
    lengths = [len(document.tokens) for document in documents]
    shared = [0] * len(documents)
    if shares:
        shared[1:] = [num_shared(*pair) for pair in pairwise(documents)]
    firsts = [max(0, count - 1) for count in shared]
    ours = list(zip(documents, firsts, strict=True))
    tokens = _concatenate([document.tokens[first:] for document, first in ours], torch.int64)
    if len(tokens) and int(tokens.min()) < 0:
        names = [each.name for each in documents if int(each.tokens.min()) < 0]
        raise DataError(
            f"the tokens of {names[0]} need ids of 0 or more (got {int(tokens.min())}). A document "
            "has no padding. Use tokens[tokens >= 0], and its loss_mask likewise."
        )
    loss_mask = _concatenate([document.loss_mask[first:] for document, first in ours], torch.bool)
    trained = loss_mask.nonzero().squeeze(1)

    def labelled(values: Tensor, elsewhere: int) -> Tensor:
        """Return (T,) with each trained token's value at the place before, which predicts it."""
        return values.new_full((len(tokens),), elsewhere).index_copy(0, trained - 1, values)

    excluded = None
    have_no_weight = [document.is_excluded or document.kept_set_overflows for document in documents]
    if any(have_no_weight):
        excluded = torch.tensor(have_no_weight, dtype=torch.bool)
    for_reference = places = None
    if documents and documents[0].reference_tokens is not None:
        for_reference = pack_sampled(
            [document.as_the_reference_reads_it() for document in documents], shares
        )
        places = labelled((for_reference.labels >= 0).nonzero().squeeze(1), 0)
    return MicroBatch(
        tokens=tokens,
        position_ids=_concatenate(
            [torch.arange(*ends) for ends in zip(firsts, lengths, strict=True)], torch.int64
        ),
        labels=labelled(tokens[trained], -1),
        document_index=torch.repeat_interleave(
            torch.arange(len(lengths)),
            torch.tensor(lengths, dtype=torch.int64) - torch.tensor(firsts, dtype=torch.int64),
        ),
        advantages=torch.zeros(len(tokens)),
        num_documents=len(documents),
        group_index=torch.tensor([document.group for document in documents], dtype=torch.int64),
        truncated=torch.tensor(
            [bool(document.truncated) for document in documents], dtype=torch.bool
        ),
        excluded=excluded,
        sampling_kept_ids=_kept_ids(documents, len(tokens), trained - 1),
        names=tuple(document.name for document in documents),
        document_lengths=tuple(lengths),
        shared=tuple(shared) if any(shared) else (),
        for_reference=for_reference,
        places=places,
    )


def _old_log_probs(documents: Sequence[Document]) -> list[Tensor]:
    """Return the old log-probs of each document, zeros where they are unknown.

    The loss then does not read them, and no metric of them is reported.
    """
    vectors = []
    for document in documents:
        if document.old_log_probs is None:
            vectors.append(torch.zeros(document.num_trained))
        else:
            vectors.append(document.old_log_probs)
    return vectors


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device.

    The copy goes through page-locked memory: any other may wait for all work queued on the GPU.
    """
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])
