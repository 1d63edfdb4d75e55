"""Sums over documents that come out the same on every run and device."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.losses.exchange import all_sum


class Segments:
    """The trained positions of each document.

    document_index: (T,) int64; mask: (T,) bool. Positions outside the mask belong to no document whatever their
    index says, so padding may carry any number. Documents need not be contiguous.
    group: ranks that hold other tokens of the same documents, under the same numbers; sums go over all of them.

    Sums gather each document's tokens in order and reduce them one segment at a time: no float atomics, hence
    bitwise reproducible on a GPU. `sum` and `broadcast` are each other's transpose, which is their backward: over a
    group, gradients of what belongs to a document are complete on each rank.
    """

    def __init__(self, document_index: Tensor, mask: Tensor, num_documents: int, group: ProcessGroup | None = None):
        self.num_documents = num_documents
        self.group = group
        self._counts = None
        # Slot `num_documents` collects the untrained positions and is dropped from every result.
        self.index = torch.where(mask, document_index, num_documents)
        self._all_trained = False
        counts = torch.zeros(num_documents + 1, dtype=torch.int64, device=mask.device)
        self._lengths = counts.index_add_(0, self.index, torch.ones_like(self.index))

    @classmethod
    def of_sorted(
        cls, index: Tensor, lengths: Tensor, counts: Tensor | None = None, group: ProcessGroup | None = None
    ) -> Segments:
        """Documents that lie one after the other, all of it trained: index (T,) ascending from 0, lengths (D,).

        counts: (D,) lengths over all ranks of the group, if there is one.
        """
        segments = cls.__new__(cls)
        segments.num_documents, segments.index, segments._lengths, segments.order = len(lengths), index, lengths, None
        segments._counts, segments.group = counts, group
        segments._all_trained = True
        return segments

    @classmethod
    def of_index(cls, index: Tensor, lengths: Tensor) -> Segments:
        """From the index and lengths that `__init__` would make: (T,) and (D + 1,), the last slot for no document."""
        segments = cls.__new__(cls)
        segments.num_documents, segments.index, segments._lengths = len(lengths) - 1, index, lengths
        segments._counts, segments.group, segments._all_trained = None, None, False
        return segments

    @cached_property
    def order(self) -> Tensor | None:
        """(T,) positions by document, those of no document last; None where they lie in that order."""
        # int32: half the passes of the sort. Made when a sum is first asked for.
        return torch.sort(self.index.int(), stable=True).indices

    @property
    def counts(self) -> Tensor:
        """(D,) int64: trained tokens of each document, N_d. With a group, an exchange unless a sum came before."""
        if self._counts is None:
            self._counts = all_sum(self.local_counts, self.group)
        return self._counts

    @property
    def local_counts(self) -> Tensor:
        """(D,) int64: those of them on this rank."""
        return self._lengths[: self.num_documents]

    def sum(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): sum over each document's trained tokens. Values elsewhere are not looked at."""
        return _Sum.apply(values, self)

    def broadcast(self, values: Tensor) -> Tensor:
        """(D,) -> (T,): each document's value at its trained tokens, 0 elsewhere."""
        return _Broadcast.apply(values, self)

    def mean(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): mean over each document's trained tokens, 0 for a document without any."""
        sums = self.sum(values)  # first: the counts may travel with it
        return sums / self.counts.clamp(min=1)

    def _total(self, values: Tensor) -> Tensor:
        sums = self._reduce(values)
        if self.group is None or self._counts is not None:
            return all_sum(sums, self.group)
        both = all_sum(torch.stack([sums.double(), self.local_counts.double()]), self.group)
        self._counts = both[1].long()
        return both[0].to(sums.dtype)

    def _reduce(self, values: Tensor) -> Tensor:
        if self.order is not None:
            values = values[self.order]
        sums = torch.segment_reduce(values.contiguous(), "sum", lengths=self._lengths, unsafe=True)
        return sums[: self.num_documents]

    def _spread(self, values: Tensor) -> Tensor:
        if not self._all_trained:
            values = torch.cat([values, values.new_zeros(1)])
        return values[self.index]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, segments):
        ctx.segments = segments
        return segments._total(values)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.segments._spread(gradient), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, segments):
        ctx.segments = segments
        return segments._spread(values)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.segments._total(gradient), None
