"""Which rows the fused head multiplies together: chunks of whole documents that fit the memory given to logits."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.losses.objective import NEEDS_WHOLE_DOCUMENTS, Objective
from pgtoolkit.losses.segments import Segments

_TILE = 128
"""Rows of a tile of the matrix products on current GPUs: a chunk that fills its last tile wastes nothing."""


@dataclass(frozen=True)
class Chunk:
    """Rows start:stop of the plan's order; segments are those of its documents, None where tokens stand alone.

    needs_gradient: False for rows whose coefficient is known to be 0: they take no part in the backward products.
    """

    start: int
    stop: int
    needs_gradient: bool
    segments: Segments | None

    def pieces(self, max_rows: int) -> list[slice]:
        """The chunk in slices that fit; more than one only for a document longer than max_rows, or no gradient."""
        return [slice(low, min(low + max_rows, self.stop)) for low in range(self.start, self.stop, max_rows)]


@dataclass(frozen=True)
class Plan:
    """rows: (N,) int64, the trained rows in the order in which the chunks take them."""

    rows: Tensor
    chunks: list[Chunk]


def rows_within(memory_mb: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of logits that fit memory_mb MiB: whole tiles where there is room for one, and at least one row."""
    rows = memory_mb * 2**20 // (vocabulary * dtype.itemsize)
    return max(1, rows if rows < _TILE else rows // _TILE * _TILE)


def make_plan(objective: Objective, max_rows: int, with_gradient: bool) -> Plan:
    """Order the trained rows into chunks of at most max_rows; only a document longer than that exceeds it.

    Reads the documents' lengths on the host: one synchronisation on a GPU.
    """
    informative = objective.informative() if with_gradient else torch.zeros_like(objective.mask)
    if NEEDS_WHOLE_DOCUMENTS[objective.loss] and with_gradient:
        return _plan_documents(objective, informative, max_rows)
    key = torch.where(objective.mask, torch.where(informative, 0, 1), 2)
    rows = torch.sort(key, stable=True).indices
    num_informative, num_trained = torch.stack([informative.sum(), objective.mask.sum()]).tolist()
    chunks = [Chunk(low, high, True, None) for low, high in _even_cuts(0, num_informative, max_rows)]
    chunks += _without_gradient(num_informative, num_trained)
    return Plan(rows[:num_trained], chunks)


def _plan_documents(objective, informative, max_rows):
    segments = objective.segments
    has_gradient = torch.zeros_like(segments.counts).index_add_(
        0, torch.where(informative, segments.index, 0), informative.long()
    )
    counts, has_gradient = torch.stack([segments.counts, has_gradient]).tolist()
    useful = [document for document, count in enumerate(has_gradient) if count > 0]
    bins = balanced_bins([counts[document] for document in useful], max_rows)
    order = [useful[item] for items in bins for item in items]
    num_informative = sum(counts[document] for document in order)

    # rank: place of each document in the plan; those without gradient come after all others, untrained rows last.
    device = segments.index.device
    order_on_device = torch.tensor(order, dtype=torch.int64, device=device)
    rank = torch.full((segments.num_documents + 1,), len(order), dtype=torch.int64, device=device)
    rank[order_on_device] = torch.arange(len(order), device=device)
    rank[segments.num_documents] = len(order) + 1
    key, rows = torch.sort(rank[segments.index], stable=True)
    sorted_counts = segments.counts[order_on_device]

    chunks, start, first = [], 0, 0
    for items in bins:
        stop, last = start + sum(counts[useful[item]] for item in items), first + len(items)
        local = Segments.of_sorted(key[start:stop] - first, sorted_counts[first:last])
        chunks.append(Chunk(start, stop, True, local))
        start, first = stop, last
    chunks += _without_gradient(num_informative, sum(counts))
    return Plan(rows[: sum(counts)], chunks)


def balanced_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Items in as few bins as a greedy fill finds, each bin of at most capacity or of one item that is longer.

    Bins come out nearly equal, longest items placed first, each into the emptiest bin: equal chunks keep the inner
    dimension of the weight gradient's product, hence its efficiency, as large as it can be.
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    alone = [[item] for item in order if lengths[item] > capacity]
    order = order[len(alone) :]
    num_bins = -(-sum(lengths[item] for item in order) // capacity)
    while order:
        heap = [(0, number) for number in range(num_bins)]
        bins = [[] for _ in range(num_bins)]
        for item in order:
            load, number = heapq.heappop(heap)
            bins[number].append(item)
            heapq.heappush(heap, (load + lengths[item], number))
        if max(load for load, _ in heap) <= capacity:
            return alone + [sorted(items) for items in bins]
        num_bins += 1
    return alone


def _even_cuts(start: int, stop: int, max_rows: int) -> list[tuple[int, int]]:
    """Cut start:stop into the fewest pieces of at most max_rows, of equal size up to a whole tile."""
    if stop <= start:
        return []
    num_pieces = -(-(stop - start) // max_rows)
    size = -(-(stop - start) // num_pieces)
    size = min(max_rows, -(-size // _TILE) * _TILE)
    return [(low, min(low + size, stop)) for low in range(start, stop, size)]


def _without_gradient(start, stop):
    return [Chunk(start, stop, False, None)] if stop > start else []
