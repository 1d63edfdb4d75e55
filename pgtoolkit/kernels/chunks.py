"""Divides the rows of the fused head into chunks of complete documents that fit the memory."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.batch import DocumentCounts, without_waiting
from pgtoolkit.errors import DataError
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.exchange import gather_stacked
from pgtoolkit.losses.objective import Objective

_TILE = 128
"""Rows of a tile of the matrix products on current GPUs."""

_STEP = 32
"""A chunk of more than a tile has a multiple of this number of rows."""


@dataclass(frozen=True)
class Chunk:
    """Rows start:stop of `ChunkPlan.rows`.

    needs_gradient: False for rows whose coefficient is known to be 0; the backward products leave
        them out.
    documents: those of the rows; None where the family's scope is the token, or no gradient is
        needed.
    """

    start: int
    stop: int
    needs_gradient: bool
    documents: DocumentSums | None

    def slabs(self, max_rows: int) -> list[slice]:
        """Return the chunk in slabs, slices of max_rows rows, of which the first may have fewer.

        There are several only for a document longer than max_rows, or where no gradient is needed.
        """
        return [
            slice(max(high - max_rows, self.start), high)
            for high in range(self.stop, self.start, -max_rows)
        ][::-1]


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks, with the trained rows, (N,) int64, in their order."""

    rows: Tensor
    chunks: list[Chunk]


def default_logits_memory_mb(device: torch.device) -> int:
    """Return the default MiB for the logits of a chunk: a GPU's memory over 64, and at least 512.

    Larger chunks add less often to the weight's gradient. 1200 MiB, those of an 80 GB card, were
    measured to be enough.
    """
    least = 512
    if device.type != "cuda":
        return least
    return max(least, torch.cuda.get_device_properties(device).total_memory // 2**20 // 64)


def rows_within(memory_mb: float, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the number of rows of logits that fit memory_mb MiB, at least 1.

    From 128 rows on it is a multiple of 32.
    """
    rows = int(memory_mb * 2**20) // (vocabulary * dtype.itemsize)
    return max(1, rows if rows < _TILE else rows // _STEP * _STEP)


def make_plan(
    objective: Objective,
    max_rows: int,
    with_gradient: bool,
    check_finite: bool,
    known: DocumentCounts | None = None,
) -> ChunkPlan:
    """Order the trained rows into chunks of at most max_rows; only a longer document exceeds it.

    Reads the documents' lengths on the host, the only synchronisation on a GPU, unless they are
    known and nothing needs to be checked. Where documents are spread over ranks and the family
    needs complete ones, one exchange of lengths lets all ranks make the same chunks of the same
    documents, for the smallest of their max_rows. Raises DataError, if check_finite, for old
    log-probs or advantages that are not finite.
    """
    documents = objective.documents
    mask = objective.mask
    by_document = with_gradient and objective.by_document
    if (
        documents.group is not None
        or check_finite
        or (with_gradient and objective.multiplier is not None)
    ):
        known = None
    num_trained = num_informative = 0
    if not by_document or known is None:
        informative = objective.informative() if with_gradient else torch.zeros_like(mask)
    if not by_document:
        # All rows, those that need no gradient first, and the untrained ones after all others.
        key = torch.where(mask, torch.where(informative, 1, 0), 2)
        rows = torch.sort(key.int(), stable=True).indices
    if known is not None:
        with_slope = known.informative if objective.silent_without_advantage else known.trained
        lengths = [[number] for number in known.trained]
        has_gradient = [[number] for number in with_slope]
        num_trained = sum(known.trained)
        num_informative = sum(with_slope) if with_gradient else 0
    else:
        num_bad = objective.refused().sum(0, keepdim=True)
        if by_document:
            informative_here = documents.index.new_zeros(documents.num_documents + 1)
            informative_here.index_add_(0, documents.index, informative.long())
            room = torch.full_like(num_bad, max_rows)
            row = torch.cat([num_bad, room, documents.counts_here, informative_here[:-1]])
            table = gather_stacked(row, documents.group).T.tolist()
            bad = sum(table[0])
            max_rows = min(table[1])
            lengths = table[2 : 2 + documents.num_documents]
            has_gradient = table[2 + documents.num_documents :]
        else:
            read = torch.cat([num_bad, informative.sum(0, keepdim=True), mask.sum(0, keepdim=True)])
            bad, num_informative, num_trained = read.tolist()
        if bad and check_finite:
            objective.check_finite()
            raise DataError(
                "non-finite old_log_probs or advantages at a trained position on another rank, "
                "which names it"
            )
    if by_document:
        return _plan_documents(documents, lengths, has_gradient, max_rows)
    start = num_trained - num_informative
    chunks = [Chunk(low, high, True, None) for low, high in _cuts(start, num_trained, max_rows)]
    return ChunkPlan(rows[:num_trained], _without_gradient(start) + chunks)


def _plan_documents(
    documents: DocumentSums, lengths: list[list[int]], has_gradient: list[list[int]], max_rows: int
) -> ChunkPlan:
    """Divide the documents into bins, and plan a chunk for each.

    lengths, has_gradient: for each document a number for each rank of the group: its trained rows,
        and those with a gradient.
    """
    useful = [document for document, numbers in enumerate(has_gradient) if any(numbers)]
    if documents.group is None:
        counts = [length for (length,) in lengths]
        bins = balanced_bins([counts[document] for document in useful], max_rows)
    else:
        rank = documents.group.rank()
        counts = [rank_lengths[rank] for rank_lengths in lengths]
        bins = common_bins([tuple(lengths[document]) for document in useful], max_rows)
    order = [useful[item] for items in bins for item in items]
    start = sum(counts) - sum(counts[document] for document in order)

    # The place of each document in the plan: those without gradient come before all others, and
    # untrained rows last.
    places = [-1] * documents.num_documents + [len(order)]
    for place, document in enumerate(order):
        places[document] = place
    device = documents.index.device
    place_of_document = without_waiting(torch.tensor(places, dtype=torch.int32), device)
    place_of_row, rows = torch.sort(place_of_document[documents.index], stable=True)
    local = without_waiting(torch.tensor([counts[document] for document in order]), device)
    overall = local
    if documents.group is not None:
        sums = torch.tensor([sum(lengths[document]) for document in order])
        overall = without_waiting(sums, device)

    chunks = _without_gradient(start)
    first = 0
    for items in bins:
        stop = start + sum(counts[useful[item]] for item in items)
        last = first + len(items)
        documents_of_chunk = DocumentSums(
            place_of_row[start:stop] - first,
            local[first:last],
            len(items),
            documents.group,
            overall[first:last],
            is_sorted=True,
        )
        chunks.append(Chunk(start, stop, True, documents_of_chunk))
        start = stop
        first = last
    return ChunkPlan(rows[: sum(counts)], chunks)


def balanced_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Divide items among few bins greedily; a bin holds at most `capacity`, or one longer item.

    The longest items come first, each into the emptiest bin, so that bins are nearly equal: equal
    chunks make the inner dimension of the weight gradient's product, and so its efficiency, as
    large as possible.
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


def common_bins(lengths: list[tuple[int, ...]], capacity: int) -> list[list[int]]:
    """Divide items that are spread over ranks among few bins.

    No rank holds more than `capacity` of a bin, unless the bin has a single item.
    lengths[item][rank]: the length of the item's part on the rank.
    Returns the same on every rank. For one rank `balanced_bins` returns the same, and is quicker.
    """
    order = sorted(range(len(lengths)), key=lambda item: -max(lengths[item]))
    alone = [[item] for item in order if max(lengths[item]) > capacity]
    order = order[len(alone) :]
    num_ranks = len(lengths[0]) if lengths else 0
    totals = [sum(lengths[item][rank] for item in order) for rank in range(num_ranks)]
    num_bins = max((-(-total // capacity) for total in totals), default=0)
    while order:
        loads = [[0] * num_ranks for _ in range(num_bins)]
        bins = [[] for _ in range(num_bins)]
        for item in order:
            after = [max(map(sum, zip(load, lengths[item], strict=True))) for load in loads]
            number = after.index(min(after))
            bins[number].append(item)
            loads[number] = [sum(pair) for pair in zip(loads[number], lengths[item], strict=True)]
        if max(map(max, loads)) <= capacity:
            return alone + [sorted(items) for items in bins if items]
        num_bins += 1
    return alone


def _cuts(start: int, stop: int, max_rows: int) -> list[tuple[int, int]]:
    """Cut start:stop into the fewest pieces of at most max_rows: full ones, then one with the rest.

    The pieces are equal where those are complete tiles, or where the rest would be small: each
    piece costs a pass over the weight's gradient, and products of fewer rows than fit (1664 of 1760
    on an H200) are no faster.
    """
    total = stop - start
    if total <= 0:
        return []
    num_pieces = -(-total // max_rows)
    size = max_rows
    rest = total - (num_pieces - 1) * max_rows
    if total % (num_pieces * _TILE) == 0 or rest < max_rows // 4:
        size = min(max_rows, -(-total // (num_pieces * _STEP)) * _STEP)
    return [(low, min(low + size, stop)) for low in range(start, stop, size)]


def _without_gradient(stop: int) -> list[Chunk]:
    return [Chunk(0, stop, False, None)] if stop else []
