"""Numbers of each trained token that the model in training computes for the documents of a batch:
old log-probs, those of the reference, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pgtoolkit.batch import MicroBatch, pack_sampled
from pgtoolkit.document import Document, SampledDocument, cut, cut_evenly
from pgtoolkit.losses.kl import KL
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    LastStep,
    OldLogProbs,
    PolicyRolloutSettings,
    Uninformative,
)
from pgtoolkit.rollouts.stages import Stopwatch
from pgtoolkit.rollouts.steps import divide_among_ranks, is_sharing
from pgtoolkit.sampling.proof import check_batch
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.system.declared import AutoOrBool

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of a document's trained tokens, as fields of `Document`."""

    old_log_probs: Tensor | None
    sampling_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    on_policy: bool = False
    anchor_version: int | None = None


@dataclass(eq=False)
class ForwardPasses:
    """Forward passes over the documents of a batch, without gradient, on all ranks together.

    Data-parallel ranks share the documents, and all make as many passes: the ranks that a model is
    spread over compute each pass together.
    is_ahead: whether batches are sampled some steps before training on them begins.
    reads_early: whether old log-probs are read before a batch's first update.
    has_kl_reward: whether rewards have a penalty, which reads the reference's log-probs.
    share_prompts: see `steps.is_sharing`.
    """

    rollout: PolicyRolloutSettings
    accumulation: AccumulationSettings
    trained: TrainedPolicy
    layout: Layout
    stopwatch: Stopwatch
    is_ahead: bool
    reads_early: bool
    has_kl_reward: bool
    share_prompts: AutoOrBool = False

    def log_probs(
        self,
        documents: Sequence[SampledDocument],
        recompute: bool = True,
        tolerance: float | None = None,
    ) -> list[LogProbs]:
        """Return the log-probs of each document of a batch, by the present policy.

        recompute: False takes the sampler's log-probs as the old ones.
        tolerance: the largest difference that is allowed between these and the trainer's. At least
            some documents go through a forward pass then; SamplerLost if they differ by more.

        The documents of the batch's first update go through no pass here, if it is known which
        these are: the update's own forward pass gives their old log-probs.
        """
        sharing = is_sharing(self.share_prompts, documents)
        num_first = self._num_in_first_update(documents)
        num_on_policy = 0 if not recompute or self._needs_old_log_probs_before() else num_first
        first_computed = num_on_policy if recompute else len(documents)
        log_probs = [self._on_policy(document) for document in documents[:num_on_policy]]
        log_probs += [LogProbs(_sampled(document)) for document in documents[num_on_policy:]]
        shares = self._shares(len(documents))
        to_compute = [[place for place in share if place >= first_computed] for share in shares]
        parts = self._parts(documents, to_compute, num_first, sharing)
        versions = {documents[place].model_version for place in shares[0]}
        is_current = versions == {self.trained.num_updates}
        if not any(parts) and tolerance is not None and is_current:
            parts = [[self._some([documents[place] for place in share])] for share in shares]
        if any(parts):
            part = parts[self.layout.rank_in("data_parallel")]
            of_this_rank = self._computed_and_checked(part, sharing, tolerance)
            if any(to_compute):
                of_ranks = self._gathered(of_this_rank)
                for places, of_rank in zip(to_compute, of_ranks, strict=True):
                    for place, of_document in zip(places, of_rank, strict=True):
                        log_probs[place] = of_document
        return log_probs

    def with_kl_reward(self, documents: list[Document], penalty: KL) -> list[Document]:
        """Return the documents with the reference's log-probs, and the sum that the penalty adds to
        their rewards."""
        known = [document.ref_log_probs for document in documents]
        ref_log_probs = [vector for vector in known if vector is not None]
        if len(ref_log_probs) < len(documents) or self._reference_may_have_moved(documents):
            ref_log_probs = self.measured(documents, self.trained.ref_log_probs)
        return [
            replace(
                document,
                ref_log_probs=reference,
                kl_reward=_kl_reward(document, reference, penalty),
            )
            for document, reference in zip(documents, ref_log_probs, strict=True)
        ]

    def measured(
        self, documents: list[Document], measure: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Return an (N,) vector for each document: a number for each of its trained tokens.

        measure: computes (T,) numbers of a micro-batch; called by every rank.
        """
        rank = self.layout.rank_in("data_parallel")
        size = self.layout.size("data_parallel")
        max_tokens = self.accumulation.max_tokens
        sharing = is_sharing(self.share_prompts, documents)
        if sharing:
            places = divide_among_ranks(documents, size, sharing)
        else:
            places = [[*range(first, len(documents), size)] for first in range(size)]
        parts = cut_evenly(
            [[documents[place] for place in of_rank] for of_rank in places], max_tokens, sharing
        )[rank]
        vectors: list[Tensor] = []
        with failing_together(self.layout), self.stopwatch.timed("old_log_probs"):
            for _, of_documents in _passes(parts, sharing, measure):
                vectors += of_documents
        by_place: dict[int, Tensor] = {}
        for of_rank, of_documents in zip(places, self._gathered(vectors), strict=True):
            by_place |= zip(of_rank, of_documents, strict=True)
        return [by_place[place] for place in range(len(documents))]

    def _shares(self, count: int) -> list[list[int]]:
        """Return the places of each data-parallel rank's documents: its groups of all `count`."""
        size = self.layout.size("data_parallel")
        shares: list[list[int]] = [[] for _ in range(size)]
        for place in range(count):
            shares[place // self.rollout.group_size % size].append(place)
        return shares

    def _computed_and_checked(
        self,
        parts: list[list[SampledDocument]],
        sharing: bool,
        tolerance: float | None,
    ) -> list[LogProbs]:
        """Return the trainer's log-probs of the documents of this rank's parts."""
        with failing_together(self.layout):
            with self.stopwatch.timed("old_log_probs"):
                computed = self._computed(parts, sharing)
            if tolerance is not None:
                documents = [document for part in parts for document in part]
                self._check_sampled(documents, computed, tolerance)
        return computed

    def _check_sampled(
        self, documents: list[SampledDocument], computed: list[LogProbs], tolerance: float
    ) -> None:
        """Raise SamplerLost where the sampler's log-probs of documents are not the trainer's.

        The two are over the same tokens where those that sampling has kept are known.
        """
        are_alike: list[LogProbs] = []
        others: list[LogProbs] = []
        for document, log_probs in zip(documents, computed, strict=True):
            knows_kept = document.sampling_kept_ids is not None and not document.kept_set_overflows
            is_alike = knows_kept or not self.rollout.sampling.is_truncated
            (are_alike if is_alike else others).append(log_probs)
        # top_k may keep any share of the probability.
        share = 0.0 if self.rollout.top_k is not None else self.rollout.top_p or 1.0
        for of_documents, kept_share in ((are_alike, 1.0), (others, share)):
            if of_documents:
                sampled = torch.cat([_known(of_one.sampling_log_probs) for of_one in of_documents])
                trainer = torch.cat([_known(of_one.old_log_probs) for of_one in of_documents])
                check_batch(sampled, trainer, tolerance, kept_share)

    def _computed(self, parts: list[list[SampledDocument]], sharing: bool) -> list[LogProbs]:
        """Return the documents' log-probs from the forward pass that training uses.

        The first ratio is then 1. The sampler's log-probs are kept beside them. Rewards with a KL
        penalty get the reference's from the same micro-batches: sums of floats depend on how they
        are cut, and the distance of a model from itself is to be exactly 0.
        """
        result = []
        for part, numbers in _passes(parts, sharing, self._log_probs):
            for document, columns in zip(part, numbers, strict=True):
                old, *reference = columns.unbind(1)
                ref_log_probs = reference[0] if reference else None
                result.append(LogProbs(old, _sampled(document), ref_log_probs))
        return result

    def _log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return (T, 1) log-probs of the present policy, or (T, 2) with those of the reference."""
        columns = [self.trained.log_probs(micro_batch)]
        if self.has_kl_reward:
            columns.append(self.trained.ref_log_probs(micro_batch))
        return torch.stack(columns, dim=1)

    def _reference_may_have_moved(self, documents: list[Document]) -> bool:
        """Return whether the reference may be another one than when the documents' old log-probs
        were computed, which was before training on them began."""
        every = self.trained.reference_every
        is_late = self.is_ahead and self.rollout.old_log_probs == OldLogProbs.training
        versions = [document.model_version for document in documents]
        if every is None or not is_late:
            return False
        if self.rollout.passes > 1 or None in versions:  # moves then wait for a batch's end
            return True
        oldest = min(version for version in versions if version is not None)
        return self.trained.num_updates // every > oldest // every

    def _on_policy(self, document: SampledDocument) -> LogProbs:
        """Return the log-probs of a document whose old ones its update's forward pass gives."""
        version = self.trained.num_updates
        return LogProbs(None, _sampled(document), on_policy=True, anchor_version=version)

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
        return self.reads_early or is_late or is_carried or drops or rollout.passes > 1

    def _num_in_first_update(self, documents: Sequence[SampledDocument]) -> int:
        """Return how many documents, from the first on, are those of the batch's first update; 0
        where that is not known yet.

        Its forward pass can give their old log-probs. A pass before it computes them in the same
        micro-batches, so that both give the same numbers.
        """
        docs_per_step = self.accumulation.docs_per_step
        if docs_per_step >= self._batch_size:
            return len(documents)
        if self.rollout.max_sampling_rounds > 1 or self.layout.size("data_parallel") > 1:
            return 0
        around = documents[max(0, docs_per_step - 1) : docs_per_step + 1]
        ends_there = len({document.group for document in around}) == 2
        return docs_per_step if ends_there else 0

    def _parts(
        self,
        documents: Sequence[SampledDocument],
        places_of_ranks: list[list[int]],
        num_first: int,
        sharing: bool,
    ) -> list[list[list[SampledDocument]]]:
        """Return for each rank the micro-batches of its documents.

        num_first: of all documents, those of the first update, which share no micro-batch with
            others.
        """
        parts: list[list[list[SampledDocument]]] = [[] for _ in places_of_ranks]
        for is_first in (True, False):
            of_ranks = [
                [documents[place] for place in places if (place < num_first) is is_first]
                for places in places_of_ranks
            ]
            for of_rank, more in zip(
                parts, cut_evenly(of_ranks, self.accumulation.max_tokens, sharing), strict=True
            ):
                of_rank += more
        return parts

    @property
    def _batch_size(self) -> int:
        return self.rollout.prompts_per_batch * self.rollout.group_size

    def _some(self, documents: list[SampledDocument]) -> list[SampledDocument]:
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
    parts: Sequence[Sequence[SampledDocument]],
    sharing: bool,
    measure: Callable[[MicroBatch], Tensor],
) -> Iterator[tuple[Sequence[SampledDocument], list[Tensor]]]:
    """Yield each part with the numbers that `measure` gives the trained tokens of its documents:
    (N,) each, or (N, columns) where it returns (T, columns).

    sharing: whether the documents of a part share what they begin with.
    """
    for part in parts:
        micro_batch = pack_sampled(part, sharing)
        values = measure(micro_batch).cpu()[micro_batch.labels >= 0]
        by_document = values.split([document.num_trained for document in part])
        yield part, [vector.clone() for vector in by_document]


def sum_of_kl(documents: Sequence[Document], penalty: KL) -> float:
    """Return the sum over documents of the mean of the penalty's term over their trained tokens,
    without its coefficient.

    documents: with the reference's log-probs.
    """
    term = replace(penalty, coefficient=1.0)
    means = []
    for document in documents:
        terms = _terms(document, _known(document.ref_log_probs), term)
        means.append(math.fsum(terms) / max(1, len(terms)))
    return math.fsum(means)


def _kl_reward(document: Document, ref_log_probs: Tensor, penalty: KL) -> float | None:
    """Return what the penalty adds to a document's reward; None without a reward."""
    if document.reward is None:
        return None
    return -math.fsum(_terms(document, ref_log_probs, penalty))


def _terms(document: Document, ref_log_probs: Tensor, penalty: KL) -> list[float]:
    old_log_probs = _known(document.old_log_probs)
    return penalty.of_samples(old_log_probs.double(), ref_log_probs.double()).tolist()


def _sampled(document: SampledDocument) -> Tensor:
    """Return the sampler's log-probs: a document's old ones, until others take their place."""
    if document.sampling_log_probs is None and isinstance(document, Document):
        return _known(document.old_log_probs)
    return _known(document.sampling_log_probs)


def _known(log_probs: Tensor | None) -> Tensor:
    assert log_probs is not None
    return log_probs
