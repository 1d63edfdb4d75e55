"""Numbers of each trained token that the model in training computes for the documents of a batch:
old log-probs, those of the reference, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from pgtoolkit.batch import Document, MicroBatch, cut, pack
from pgtoolkit.losses.kl import KL
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.group_rollouts import in_groups
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    LastStep,
    OldLogProbs,
    PolicyRolloutSettings,
    Uninformative,
)
from pgtoolkit.rollouts.stages import Stopwatch
from pgtoolkit.sampling.proof import check_batch
from pgtoolkit.sampling.trained_policy import TrainedPolicy

_Value = TypeVar("_Value")


@dataclass(eq=False)
class ForwardPasses:
    """Forward passes over the documents of a batch, without gradient, on all ranks together.

    Data-parallel ranks share the documents, and all make as many passes: the ranks that a model is
    spread over compute each pass together.
    is_ahead: whether batches are sampled some steps before training on them begins.
    reads_early: whether old log-probs are read before a batch's first update.
    has_kl_reward: whether rewards have a penalty, which reads the reference's log-probs.
    reference_moves: whether the reference does, during the run.
    """

    rollout: PolicyRolloutSettings
    accumulation: AccumulationSettings
    trained: TrainedPolicy
    layout: Layout
    stopwatch: Stopwatch
    is_ahead: bool
    reads_early: bool
    has_kl_reward: bool
    reference_moves: bool

    def with_old_log_probs(
        self, groups: list[list[Document]], recompute: bool = True, tolerance: float | None = None
    ) -> list[list[Document]]:
        """Return the groups with old log-probs of the present policy, beside the sampler's.

        recompute: False keeps the sampler's log-probs as the old ones.
        tolerance: the largest difference that is allowed between these and the trainer's. At least
            some documents go through a forward pass then; SamplerLost if they differ by more.

        Micro-batches that are wholly on_policy need no pass.
        """
        rank = self.layout.rank_in("data_parallel")
        size = self.layout.size("data_parallel")
        if recompute:
            groups = self._with_on_policy(groups)
        shares = [
            [document for group in groups[first::size] for document in group]
            for first in range(size)
        ]
        parts = [self._parts_to_recompute(share) if recompute else [] for share in shares]
        is_needed = any(parts)
        versions = {document.model_version for document in shares[0]}
        is_current = versions == {self.trained.num_updates}
        if not is_needed and tolerance is not None and is_current:
            parts = [[self._some(share)] for share in shares]
        if any(parts):
            documents = self._computed_and_checked(parts[rank], max(map(len, parts)), tolerance)
            if is_needed:
                # on_policy documents are the first of each share, and stay.
                unchanged = shares[rank][: len(shares[rank]) - len(documents)]
                shares = self._gathered(unchanged + documents)
                groups = _groups_of_shares(shares, len(groups), self.rollout.group_size)
        return groups

    def with_kl_reward(self, documents: list[Document], penalty: KL) -> list[Document]:
        """Return the documents with the reference's log-probs, and the sum that the penalty adds to
        their rewards."""
        if any(document.ref_log_probs is None for document in documents):
            ref_log_probs = self.measured(documents, self.trained.ref_log_probs)
            documents = [
                replace(document, ref_log_probs=reference)
                for document, reference in zip(documents, ref_log_probs, strict=True)
            ]
        return [_with_kl_reward(document, penalty) for document in documents]

    def measured(
        self, documents: list[Document], measure: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Return an (N,) vector for each document: a number for each of its trained tokens.

        measure: computes (T,) numbers of a micro-batch; called by every rank.
        """
        rank = self.layout.rank_in("data_parallel")
        size = self.layout.size("data_parallel")
        max_tokens = self.accumulation.max_tokens
        shares = [cut(documents[first::size], max_tokens) for first in range(size)]
        num_passes = max(map(len, shares))
        vectors: list[Tensor] = []
        with failing_together(self.layout), self.stopwatch.timed("old_log_probs"):
            for _, of_documents in _passes(shares[rank], num_passes, measure):
                vectors += of_documents
        of_ranks = self._gathered(vectors)
        return [of_ranks[place % size][place // size] for place in range(len(documents))]

    def _parts_to_recompute(self, share: list[Document]) -> list[list[Document]]:
        """Return the micro-batches of a rank's documents, but for those entirely on_policy."""
        parts = cut(share, self.accumulation.max_tokens)
        # on_policy documents come first, so the last one decides.
        return [part for part in parts if not part[-1].on_policy]

    def _computed_and_checked(
        self, parts: list[list[Document]], num_passes: int, tolerance: float | None
    ) -> list[Document]:
        """Return the documents of this rank's parts with the trainer's log-probs."""
        with failing_together(self.layout):
            with self.stopwatch.timed("old_log_probs"):
                documents = self._with_training_log_probs(parts, num_passes)
            if tolerance is not None and documents:
                sampled = torch.cat([_sampled(document) for document in documents])
                trainer = torch.cat([_old(document) for document in documents])
                check_batch(sampled, trainer, tolerance, self.rollout.top_p)
        return documents

    def _with_training_log_probs(
        self, parts: list[list[Document]], num_passes: int
    ) -> list[Document]:
        """Return the documents with old log-probs from the forward pass that training uses.

        The first ratio is then 1. The sampler's log-probs are kept beside them. Rewards with a KL
        penalty get the reference's from the same micro-batches: sums of floats depend on how they
        are cut, and the distance of a model from itself is to be exactly 0.
        """
        result = []
        for part, numbers in _passes(parts, num_passes, self._log_probs):
            for document, columns in zip(part, numbers, strict=True):
                old, *reference = columns.unbind(1)
                document = replace(
                    document, old_log_probs=old, sampling_log_probs=_sampled(document)
                )
                if reference:
                    document = replace(document, ref_log_probs=reference[0])
                result.append(document)
        return result

    def _log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return (T, 1) log-probs of the present policy, or (T, 2) with those of the reference."""
        columns = [self.trained.log_probs(micro_batch)]
        if self.has_kl_reward and self._reference_stays:
            columns.append(self.trained.ref_log_probs(micro_batch))
        return torch.stack(columns, dim=1)

    @property
    def _reference_stays(self) -> bool:
        """Return whether the reference is the same until training on the batch begins."""
        is_late = self.is_ahead and self.rollout.old_log_probs == OldLogProbs.training
        return not is_late or not self.reference_moves

    def _with_on_policy(self, groups: list[list[Document]]) -> list[list[Document]]:
        """Mark the documents whose old log-probs the forward pass of their update can give.

        These are documents of the batch's first update, where it is made of the same micro-batches
        as a pass before it, or where it is the batch's only update.
        """
        if self._needs_old_log_probs_before():
            return groups
        documents = [document for group in groups for document in group]
        num_first = self._num_in_first_update(documents)
        version = self.trained.num_updates
        documents[:num_first] = [
            replace(
                document,
                on_policy=True,
                old_log_probs=None,
                anchor_version=version,
                sampling_log_probs=_sampled(document),
            )
            for document in documents[:num_first]
        ]
        return in_groups(documents, self.rollout.group_size)

    def _needs_old_log_probs_before(self) -> bool:
        """Return whether old log-probs are read before the first update's forward pass, or that
        pass comes too late for them."""
        rollout = self.rollout
        accumulation = self.accumulation
        is_late = self.is_ahead and rollout.old_log_probs == OldLogProbs.training
        docs_per_step = accumulation.docs_per_step
        is_carried = (
            accumulation.last_step == LastStep.carry
            and docs_per_step > 0
            and self._batch_size % docs_per_step > 0
        )
        drops = rollout.uninformative == Uninformative.drop
        return self.reads_early or is_late or is_carried or drops

    def _num_in_first_update(self, documents: list[Document]) -> int:
        """Return how many documents, from the first on, are sure to be in whole micro-batches of
        the batch's first update."""
        docs_per_step = self.accumulation.docs_per_step
        if docs_per_step >= self._batch_size:
            return len(documents)
        if self.rollout.max_sampling_rounds > 1 or self.layout.size("data_parallel") > 1:
            return 0
        parts = cut(documents, self.accumulation.max_tokens)
        ends = accumulate(len(part) for part in parts)
        return max((end for end in ends if end <= docs_per_step), default=0)

    @property
    def _batch_size(self) -> int:
        return self.rollout.prompts_per_batch * self.rollout.group_size

    def _some(self, documents: list[Document]) -> list[Document]:
        """Return documents at equal distances, as many as fit a micro-batch.

        They are enough to check the sampler.
        """
        if not documents:
            return []
        max_tokens = self.accumulation.max_tokens
        distance = math.ceil(sum(document.num_tokens for document in documents) / max_tokens)
        return cut(documents[:: max(1, distance)], max_tokens)[0]

    def _gathered(self, values: list[_Value]) -> list[list[_Value]]:
        """Return the values of each data-parallel rank, the same on all ranks to the last bit.

        Ranks that share a model have computed the same values; those of the first one are taken.
        """
        size = self.layout.size("data_parallel")
        sharing = self.layout.size("sequence_data_parallel") * self.layout.size("tensor_parallel")
        return gather_objects(values, self.layout.world_group)[::sharing][:size]


def _passes(
    parts: Sequence[list[Document]], num_passes: int, measure: Callable[[MicroBatch], Tensor]
) -> Iterator[tuple[list[Document], list[Tensor]]]:
    """Yield each part with the numbers that `measure` gives the trained tokens of its documents:
    (N,) each, or (N, columns) where it returns (T, columns).

    num_passes: calls of `measure`, the last ones without a token where there are fewer parts.
    """
    for place in range(num_passes):
        part = parts[place] if place < len(parts) else []
        micro_batch = pack(part)
        values = measure(micro_batch).cpu()[micro_batch.labels >= 0]
        by_document = values.split([document.num_trained for document in part])
        yield part, [vector.clone() for vector in by_document]


def _with_kl_reward(document: Document, penalty: KL) -> Document:
    assert document.ref_log_probs is not None
    terms = penalty.of_samples(_old(document).double(), document.ref_log_probs.double())
    kl_reward = None if document.reward is None else -math.fsum(terms.tolist())
    return replace(document, kl_reward=kl_reward)


def _groups_of_shares(
    shares: list[list[Document]], num_groups: int, group_size: int
) -> list[list[Document]]:
    """Return the groups in their order, of which consecutive ones lie in consecutive shares."""
    groups = []
    for number in range(num_groups):
        start = number // len(shares) * group_size
        groups.append(shares[number % len(shares)][start : start + group_size])
    return groups


def _sampled(document: Document) -> Tensor:
    """Return the sampler's log-probs: the old ones, until others take their place."""
    return _old(document) if document.sampling_log_probs is None else document.sampling_log_probs


def _old(document: Document) -> Tensor:
    assert document.old_log_probs is not None
    return document.old_log_probs
