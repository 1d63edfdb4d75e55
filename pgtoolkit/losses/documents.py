"""Sums over documents that are reproducible to the bit, and the totals of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.exchange import LinearMap, all_sum, gather_stacked


@dataclass(eq=False)
class DocumentSums:
    """Sums over the trained tokens of each document, D documents in all.

    index: (T,) int64, the document of each token, or D where a token is not trained.
    lengths: (D + 1,) int64, the number of tokens of each index; (D,) if all are trained.
    group: ranks that hold other tokens of the same documents, under the same numbers; sums are over
        all of these ranks.
    known_counts: (D,) int64, trained tokens over all ranks of the group; None until they are known.
    is_sorted: True if the documents lie one after the other and every token is trained.

    Sums gather each document's tokens in order and reduce them document by document, without float
    atomics, so that they are reproducible to the bit on a GPU. `sum` and `broadcast` are each
    other's transpose, so each is the other's backward; over a group, the gradient by a document's
    number is complete on each rank.
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
        lengths.index_add_(0, index, torch.ones_like(index))
        return cls(index, lengths, num_documents, group)

    @cached_property
    def token_order(self) -> Tensor | None:
        """Return (T,) positions by document, untrained ones last; None if they are in order."""
        if self.is_sorted:
            return None
        # A small type, since the sort makes a pass for each byte.
        small = torch.int16 if self.num_documents < 2**15 else torch.int32
        return torch.sort(self.index.to(small), stable=True).indices

    def only(self, members: Tensor) -> tuple[Tensor, DocumentSums]:
        """Return (rows, sums): the positions of the members' tokens, document by document, and the
        sums of these documents alone, numbered anew from 0.

        members: (D,) bool. Waits for a GPU.
        """
        number = torch.cat([members.cumsum(0) - 1, members.new_zeros(1, dtype=torch.int64)])
        is_member = torch.cat([members, members.new_zeros(1)])[self.index]
        rows = is_member.nonzero().squeeze(1)
        index, order = torch.sort(number[self.index[rows]], stable=True)
        chosen = DocumentSums(
            index,
            self.counts_here[members],
            int(members.sum()),
            self.group,
            self.counts[members],
            is_sorted=True,
        )
        return rows[order], chosen

    @property
    def counts(self) -> Tensor:
        """Return N_d, (D,) int64: the trained tokens of each document.

        With a group it is a collective, unless a sum came before.
        """
        if self.known_counts is None:
            self.known_counts = all_sum(self.counts_here, self.group)
        return self.known_counts

    @property
    def counts_here(self) -> Tensor:
        """Return (D,) int64: the trained tokens of each document on this rank."""
        return self.lengths[: self.num_documents]

    def sum(self, values: Tensor) -> Tensor:
        """Return (D,) sums of (T,) values over trained tokens; other values are not read."""
        return LinearMap.apply(values, self._sum, self._broadcast)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return (T,) with each document's value, of (D,), at its trained tokens; else 0."""
        return LinearMap.apply(values, self._broadcast, self._sum)

    def mean(self, values: Tensor) -> Tensor:
        """Return (D,) means of (T,) values over trained tokens; 0 for a document without any."""
        sums = self.sum(values)  # before the counts, which it may exchange as well
        return sums / self.counts.clamp(min=1)

    def before(self, values: Tensor) -> Tensor:
        """Return (T,), the sum of (T,) values over the document's trained tokens before this one.

        It is 0 where nothing is trained. With a group, the rank's tokens follow those of all lower
        ranks.
        """
        return LinearMap.apply(values, self._before, self._after)

    def _before(self, values: Tensor) -> Tensor:
        return self._running(values, of_later_tokens=False)

    def _after(self, values: Tensor) -> Tensor:
        return self._running(values, of_later_tokens=True)

    def _running(self, values: Tensor, of_later_tokens: bool) -> Tensor:
        """Return (T,), the sums over the document's earlier, or later, trained tokens."""
        # In float64: the sum of the documents before is subtracted again.
        wide = torch.where(self.index < self.num_documents, values, 0.0).double()
        order = self.token_order
        ordered = wide if order is None else wide[order]
        until_here = ordered.cumsum(0)
        until = (
            until_here
            if order is None
            else torch.empty_like(until_here).scatter(0, order, until_here)
        )
        sums = torch.segment_reduce(ordered.contiguous(), "sum", lengths=self.lengths, unsafe=True)
        sums = sums[: self.num_documents]
        ends = sums.cumsum(0)
        if of_later_tokens:
            result = self._broadcast(ends) - until
        else:
            result = until - wide - self._broadcast(ends - sums)
        if self.group is not None:
            of_ranks = gather_stacked(sums, self.group)
            rank = self.group.rank()
            others = of_ranks[rank + 1 :] if of_later_tokens else of_ranks[:rank]
            result = result + self._broadcast(others.sum(0))
        result = torch.where(self.index < self.num_documents, result, 0.0)
        return result.to(values.dtype)

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
    signs: Tensor | None = None,
) -> tuple[StepTotals, Tensor | None, Tensor | None]:
    """Return (totals of these documents as a complete step, group_index, trajectory_index).

    The indices are (documents,), renumbered from 0.
    signs: (documents,) int64, of the advantages, for totals by them; None for totals without.
    data_group: ranks with other documents of the step; a group or a trajectory must have the same
        number on all of them.
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
    by_sign = ()
    if signs is not None and groups is not None and num_groups is not None:
        by_sign = [
            all_sum(numbers, data_group)
            for numbers in counted_by_sign(groups, signs, counts, num_groups)
        ]
    totals = StepTotals(
        num_documents,
        num_tokens,
        num_empty,
        num_groups,
        tokens_per_group,
        tokens_per_trajectory,
        *by_sign,
    )
    return totals, groups, trajectories


def counted_by_sign(
    group_index: Tensor, signs: Tensor, counts: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Return (completions_by_sign, tokens_by_sign) of `StepTotals`, (num_groups, 3) each.

    group_index, signs, counts: (documents,) int64: the group, the sign of the advantage, and the
        number of trained tokens of each document.
    """
    place = 3 * group_index + signs + 1
    empty = counts.new_zeros(3 * num_groups)
    completions = empty.index_add(0, place, counts.new_ones(len(counts)))
    return completions.view(-1, 3), empty.index_add(0, place, counts).view(-1, 3)


def _renumbered(
    index: Tensor | None, counts: Tensor, group: ProcessGroup | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return (index renumbered from 0 over all ranks, trained tokens of each number), or Nones."""
    if index is None:
        return None, None
    numbers = index.unique()
    if group is not None:
        of_ranks: list[list[int]] = [[]] * group.size()
        dist.all_gather_object(of_ranks, numbers.tolist(), group)
        numbers = numbers.new_tensor(sorted(set().union(*of_ranks)))
    index = torch.searchsorted(numbers, index)
    return index, all_sum(torch.zeros_like(numbers).index_add_(0, index, counts), group)
