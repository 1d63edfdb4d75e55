"""Divides the rows of the fused head into chunks of whole documents whose logits fit the memory."""

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

_TILE, _STEP = 128, 32
"""Rows of a tile of the matrix products on current GPUs, and the step in which the rows of a chunk
are counted."""


@dataclass(frozen=True)
class Chunk:
    """Rows start:stop of `Plan.rows`.

    needs_gradient: False for rows whose coefficient is known to be 0, which take no part in the
        backward products.
    documents: of the rows; None where the family's scope is the token, or no gradient is needed.
    """

    start: int
    stop: int
    needs_gradient: bool
    documents: DocumentSums | None

    def pieces(self, max_rows: int) -> list[slice]:
        """Return the chunk in slices of at most max_rows rows, all but the first of them full.

        There are several only for a document longer than max_rows, or where no gradient is needed.
        """
        return [
            slice(max(high - max_rows, self.start), high)
            for high in range(self.stop, self.start, -max_rows)
        ][::-1]


@dataclass(frozen=True)
class Plan:
    """The chunks. rows: (N,) int64, the trained rows in the order of the chunks."""

    rows: Tensor
    chunks: list[Chunk]


def default_logits_memory_mb(device: torch.device) -> int:
    """Return the default MiB for the logits of a chunk: a GPU's memory over 64, and at least 512.

    Larger chunks add less often to the weight's gradient; an 80 GB card gives the 1200 MiB that the
    journal in docs/reports/performance.md found to be enough.
    """
    least = 512
    if device.type != "cuda":
        return least
    return max(least, torch.cuda.get_device_properties(device).total_memory // 2**20 // 64)


def rows_within(memory_mb: float, vocabulary: int, dtype: torch.dtype) -> int:
    """Return how many rows of logits fit memory_mb MiB: a multiple of 32 from 128 rows on, and at
    least one row."""
    rows = int(memory_mb * 2**20) // (vocabulary * dtype.itemsize)
    return max(1, rows if rows < _TILE else rows // _STEP * _STEP)


def make_plan(
    objective: Objective,
    max_rows: int,
    with_gradient: bool,
    check_finite: bool,
    known: DocumentCounts | None = None,
) -> Plan:
    """Order the trained rows into chunks of at most max_rows; only a document longer than that
    exceeds it.

    Reads the documents' lengths on the host, the only synchronisation on a GPU, unless they are
    known and nothing needs to be checked. Where documents are spread over ranks and the family
    needs them whole, one exchange of lengths lets all ranks make the same chunks of the same
    documents, for the smallest of their max_rows. Raises DataError, if check_finite, for old
    log-probs or advantages that are not finite.
    """
    documents, mask = objective.documents, objective.mask
    by_document = with_gradient and objective.by_document
    if documents.group is not None or check_finite:
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
            here = documents.index.new_zeros(documents.num_documents + 1)
            here = here.index_add_(0, documents.index, informative.long())[:-1]
            room = torch.full_like(num_bad, max_rows)
            table = gather_stacked(
                torch.cat([num_bad, room, documents.counts_here, here]), documents.group
            ).T.tolist()
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
    return Plan(rows[:num_trained], _without_gradient(start) + chunks)


def _plan_documents(
    documents: DocumentSums, lengths: list[list[int]], has_gradient: list[list[int]], max_rows: int
) -> Plan:
    """Divide the documents into bins. lengths, has_gradient: of each document, a number for each
    rank of the group."""
    useful = [document for document, numbers in enumerate(has_gradient) if any(numbers)]
    if documents.group is None:
        counts = [length for (length,) in lengths]
        bins = balanced_bins([counts[document] for document in useful], max_rows)
    else:
        counts = [held[documents.group.rank()] for held in lengths]
        bins = common_bins([tuple(lengths[document]) for document in useful], max_rows)
    order = [useful[item] for items in bins for item in items]
    start = sum(counts) - sum(counts[document] for document in order)

    # The place of each document in the plan: those without gradient before all others, untrained
    #   rows last.
    places = [-1] * documents.num_documents + [len(order)]
    for place, document in enumerate(order):
        places[document] = place
    device = documents.index.device
    by_document = without_waiting(torch.tensor(places, dtype=torch.int32), device)
    key, rows = torch.sort(by_document[documents.index], stable=True)
    local = without_waiting(torch.tensor([counts[document] for document in order]), device)
    overall = local
    if documents.group is not None:
        overall = without_waiting(
            torch.tensor([sum(lengths[document]) for document in order]), device
        )

    chunks, first = _without_gradient(start), 0
    for items in bins:
        stop, last = start + sum(counts[useful[item]] for item in items), first + len(items)
        own = (
            key[start:stop] - first,
            local[first:last],
            len(items),
            documents.group,
            overall[first:last],
        )
        chunks.append(Chunk(start, stop, True, DocumentSums(*own, is_sorted=True)))
        start, first = stop, last
    return Plan(rows[: sum(counts)], chunks)


def balanced_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Divide items among few bins by a greedy fill. A bin has at most `capacity`, or one item that
    is longer.

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
    """Divide items among few bins, in which no rank holds more than `capacity` unless the bin has a
    single item.

    lengths[item][rank]: how much of the item the rank holds. Returns the same on every rank. For
    one rank `balanced_bins` returns the same, and is quicker.
    """
    order = sorted(range(len(lengths)), key=lambda item: -max(lengths[item]))
    alone = [[item] for item in order if max(lengths[item]) > capacity]
    order = order[len(alone) :]
    num_ranks = len(lengths[0]) if lengths else 0
    held = [sum(lengths[item][rank] for item in order) for rank in range(num_ranks)]
    num_bins = max((-(-total // capacity) for total in held), default=0)
    while order:
        loads, bins = [[0] * num_ranks for _ in range(num_bins)], [[] for _ in range(num_bins)]
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
    """Cut start:stop into the fewest pieces of at most max_rows: full ones, and a last one with the
    rest.

    The pieces are equal where those are whole tiles, or where the rest would be small: each piece
    costs a pass over the weight's gradient, and products of fewer rows than fit (1664 of 1760 on an
    H200) are no faster.
    """
    total = stop - start
    if total <= 0:
        return []
    num_pieces = -(-total // max_rows)
    size, left = max_rows, total - (num_pieces - 1) * max_rows
    if total % (num_pieces * _TILE) == 0 or left < max_rows // 4:
        size = min(max_rows, -(-total // (num_pieces * _STEP)) * _STEP)
    return [(low, min(low + size, stop)) for low in range(start, stop, size)]


def _without_gradient(stop):
    return [Chunk(0, stop, False, None)] if stop else []
