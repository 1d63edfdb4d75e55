"""Sums over documents that come out the same on every run and device."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Segments:
    """The trained positions of each document.

    document_index: (T,) int64; mask: (T,) bool. Positions outside the mask belong to no document whatever their
    index says, so padding may carry any number. Documents need not be contiguous.

    Sums gather each document's tokens in order and reduce them one segment at a time: no float atomics, hence
    bitwise reproducible on a GPU. `sum` and `broadcast` are each other's transpose, which is their backward.
    """

    def __init__(self, document_index: Tensor, mask: Tensor, num_documents: int):
        self.num_documents = num_documents
        # Slot `num_documents` collects the untrained positions and is dropped from every result.
        self.index = torch.where(mask, document_index, num_documents)
        self._all_trained = False
        counts = torch.zeros(num_documents + 1, dtype=torch.int64, device=mask.device)
        self._lengths = counts.index_add_(0, self.index, torch.ones_like(self.index))

    @classmethod
    def of_sorted(cls, index: Tensor, counts: Tensor) -> Segments:
        """Documents that lie one after the other, all of it trained: index (T,) ascending from 0, counts (D,)."""
        segments = cls.__new__(cls)
        segments.num_documents, segments.index, segments._lengths, segments.order = len(counts), index, counts, None
        segments._all_trained = True
        return segments

    @cached_property
    def order(self) -> Tensor | None:
        """(T,) positions by document, those of no document last; None where they lie in that order."""
        # int32: half the passes of the sort. Made when a sum is first asked for.
        return torch.sort(self.index.int(), stable=True).indices

    @property
    def counts(self) -> Tensor:
        """(D,) int64: trained tokens of each document, N_d."""
        return self._lengths[: self.num_documents]

    def sum(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): sum over each document's trained tokens. Values elsewhere are not looked at."""
        return _Sum.apply(values, self)

    def broadcast(self, values: Tensor) -> Tensor:
        """(D,) -> (T,): each document's value at its trained tokens, 0 elsewhere."""
        return _Broadcast.apply(values, self)

    def mean(self, values: Tensor) -> Tensor:
        """(T,) -> (D,): mean over each document's trained tokens, 0 for a document without any."""
        return self.sum(values) / self.counts.clamp(min=1)

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
        return segments._reduce(values)

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
        return ctx.segments._reduce(gradient), None
