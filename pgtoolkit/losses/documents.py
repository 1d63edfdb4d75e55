"""Sums over documents that come out the same on every run and device, and the totals of a step."""

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
    group: ranks that hold other tokens of the same documents, under the same numbers; sums go over all of them.
    known_counts: (D,) int64, trained tokens over all ranks of the group, where they are known.
    is_sorted: whether the documents lie one after the other, every token of them trained.

    Sums gather each document's tokens in order and reduce them one document at a time: no float atomics, hence
    bitwise reproducible on a GPU. `sum` and `broadcast` are each other's transpose, which is their backward: over a
    group, gradients of what belongs to a document are complete on each rank.
    """

    index: Tensor
    lengths: Tensor
    num_documents: int
    group: ProcessGroup | None = None
    known_counts: Tensor | None = None
    is_sorted: bool = False

    @classmethod
    def of_tokens(
        cls, document_index: Tensor, mask: Tensor, num_documents: int, group: ProcessGroup | None = None
    ) -> DocumentSums:
        """document_index: (T,) int64, which may hold any number where mask, (T,) bool, is False."""
        index = torch.where(mask, document_index, num_documents)
        lengths = torch.zeros(num_documents + 1, dtype=torch.int64, device=mask.device)
        return cls(index, lengths.index_add_(0, index, torch.ones_like(index)), num_documents, group)

    @cached_property
    def token_order(self) -> Tensor | None:
        """(T,) positions by document, untrained ones last; None where they lie in that order."""
        # In a small type, since the sort's passes are one for each byte. Made when a sum is first asked for.
        small = torch.int16 if self.num_documents < 2**15 else torch.int32
        return None if self.is_sorted else torch.sort(self.index.to(small), stable=True).indices

    @property
    def counts(self) -> Tensor:
        """(D,) int64: trained tokens of each document, N_d. With a group, an exchange unless a sum came before."""
        if self.known_counts is None:
            self.known_counts = all_sum(self.counts_here, self.group)
        return self.known_counts

    @property
    def counts_here(self) -> Tensor:
        """(D,) int64: those of them on this rank."""
        return self.lengths[: self.num_documents]

    def sum(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): sum over each document's trained tokens. Values elsewhere are not looked at."""
        return LinearMap.apply(values, self._sum, self._broadcast)

    def broadcast(self, values: Tensor) -> Tensor:
        """(D,) -> (T,): each document's value at its trained tokens, 0 elsewhere."""
        return LinearMap.apply(values, self._broadcast, self._sum)

    def mean(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): mean over each document's trained tokens, 0 for a document without any."""
        sums = self.sum(values)  # first: the counts may travel with it
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
    """The totals of these documents as a whole step, their groups and trajectories renumbered from 0, (documents,).

    data_group: ranks with other documents of the step, which have the same numbers for the same of either.
    """
    counts = documents.counts
    numbers = torch.stack([torch.full_like(counts.sum(), len(counts)), counts.sum(), (counts == 0).sum()])
    num_documents, num_tokens, num_empty = all_sum(numbers, data_group)
    if data_group is None:
        num_documents = documents.num_documents
    groups, tokens_per_group = _renumbered(group_index, counts, data_group)
    trajectories, tokens_per_trajectory = _renumbered(trajectory_index, counts, data_group)
    num_groups = None if tokens_per_group is None else len(tokens_per_group)
    totals = StepTotals(num_documents, num_tokens, num_empty, num_groups, tokens_per_group, tokens_per_trajectory)
    return totals, groups, trajectories


def _renumbered(
    index: Tensor | None, counts: Tensor, group: ProcessGroup | None
) -> tuple[Tensor | None, Tensor | None]:
    """(what each document belongs to, numbered from 0 over all ranks; the trained tokens of each of these)."""
    if index is None:
        return None, None
    numbers = index.unique()
    if group is not None:
        of_all: list[list[int]] = [[]] * group.size()
        dist.all_gather_object(of_all, numbers.tolist(), group)
        numbers = numbers.new_tensor(sorted(set().union(*of_all)))
    index = torch.searchsorted(numbers, index)
    return index, all_sum(torch.zeros_like(numbers).index_add_(0, index, counts), group)
