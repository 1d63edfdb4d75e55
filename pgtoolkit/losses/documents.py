"""Sums over documents, bitwise reproducible, and the totals of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.exchange import LinearMap, all_sum


@dataclass(eq=False)
class DocumentSums:
    """Sums over the trained tokens of each document, D documents in all.

    index: (T,) int64, the document of each token, or D where a token is not trained.
    lengths: (D + 1,) int64, the number of tokens of each index; (D,) if all are trained.
    group: ranks that hold other tokens of the same documents, under the same numbers; sums go over
        all of them.
    known_counts: (D,) int64, trained tokens over all ranks of the group; None until they are known.
    is_sorted: True if the documents lie one after the other and every token is trained.

    Sums gather each document's tokens in order and reduce them one document at a time: no float
    atomics, hence bitwise reproducible on a GPU. `sum` and `broadcast` are each other's transpose,
    so each is the other's backward; over a group, the gradient by a document's number is complete
    on each rank.
    """

    index: Tensor
    lengths: Tensor
    num_documents: int
    group: ProcessGroup | None = None
    known_counts: Tensor | None = None
    is_sorted: bool = False

    @classmethod
    def of_tokens(
        cls,
        document_index: Tensor,
        mask: Tensor,
        num_documents: int,
        group: ProcessGroup | None = None,
    ) -> DocumentSums:
        """Return the sums of these tokens.

        document_index: (T,) int64, which may hold any number where mask, (T,) bool, is False.
        """
        index = torch.where(mask, document_index, num_documents)
        lengths = torch.zeros(num_documents + 1, dtype=torch.int64, device=mask.device)
        return cls(
            index, lengths.index_add_(0, index, torch.ones_like(index)), num_documents, group
        )

    @cached_property
    def token_order(self) -> Tensor | None:
        """(T,) positions ordered by document, untrained ones last; None where they already lie
        so."""
        # A small type, since the sort makes a pass for each byte.
        small = torch.int16 if self.num_documents < 2**15 else torch.int32
        return None if self.is_sorted else torch.sort(self.index.to(small), stable=True).indices

    @property
    def counts(self) -> Tensor:
        """(D,) int64: trained tokens of each document, N_d. With a group a collective, unless a sum
        came before."""
        if self.known_counts is None:
            self.known_counts = all_sum(self.counts_here, self.group)
        return self.known_counts

    @property
    def counts_here(self) -> Tensor:
        """(D,) int64: trained tokens of each document on this rank."""
        return self.lengths[: self.num_documents]

    def sum(self, values: Tensor) -> Tensor:
        """Return (D,) sums of (T,) values over each document's trained tokens. Other values are not
        read."""
        return LinearMap.apply(values, self._sum, self._broadcast)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return (T,): each document's value, of (D,), at its trained tokens, and 0 elsewhere."""
        return LinearMap.apply(values, self._broadcast, self._sum)

    def mean(self, values: Tensor) -> Tensor:
        """Return (D,) means of (T,) values over each document's trained tokens, 0 for a document
        without any."""
        sums = self.sum(values)  # before the counts, which may travel with it
        return sums / self.counts.clamp(min=1)

    def _sum(self, values: Tensor) -> Tensor:
        if self.token_order is not None:
            values = values[self.token_order]
        sums = torch.segment_reduce(values.contiguous(), "sum", lengths=self.lengths, unsafe=True)
        sums = sums[: self.num_documents]
        if self.group is None or self.known_counts is not None:
            return all_sum(sums, self.group)
        both = all_sum(torch.stack([sums.double(), self.counts_here.double()]), self.group)
        self.known_counts = both[1].long()
        return both[0].to(sums.dtype)

    def _broadcast(self, values: Tensor) -> Tensor:
        if not self.is_sorted:
            values = torch.cat([values, values.new_zeros(1)])
        return values[self.index]


def whole_step_totals(
    documents: DocumentSums,
    group_index: Tensor | None,
    trajectory_index: Tensor | None,
    data_group: ProcessGroup | None = None,
) -> tuple[StepTotals, Tensor | None, Tensor | None]:
    """Return (totals of these documents as a whole step, group_index, trajectory_index).

    The indices are (documents,), renumbered from 0. data_group: ranks with other documents of the
    step; a group or a trajectory must have the same number on all of them.
    """
    counts = documents.counts
    numbers = torch.stack(
        [torch.full_like(counts.sum(), len(counts)), counts.sum(), (counts == 0).sum()]
    )
    num_documents, num_tokens, num_empty = all_sum(numbers, data_group)
    if data_group is None:
        num_documents = documents.num_documents
    groups, tokens_per_group = _renumbered(group_index, counts, data_group)
    trajectories, tokens_per_trajectory = _renumbered(trajectory_index, counts, data_group)
    num_groups = None if tokens_per_group is None else len(tokens_per_group)
    totals = StepTotals(
        num_documents, num_tokens, num_empty, num_groups, tokens_per_group, tokens_per_trajectory
    )
    return totals, groups, trajectories


def _renumbered(
    index: Tensor | None, counts: Tensor, group: ProcessGroup | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return (index numbered from 0 over all ranks, trained tokens of each number); (None, None)
    without an index."""
    if index is None:
        return None, None
    numbers = index.unique()
    if group is not None:
        of_all: list[list[int]] = [[]] * group.size()
        dist.all_gather_object(of_all, numbers.tolist(), group)
        numbers = numbers.new_tensor(sorted(set().union(*of_all)))
    index = torch.searchsorted(numbers, index)
    return index, all_sum(torch.zeros_like(numbers).index_add_(0, index, counts), group)
