"""Sequence-data parallelism: each rank holds a contiguous piece of the packed token axis, documents cut or not.

Only attention looks across the cut. Its keys and values are gathered over the ranks, and a rank's queries see those of
their own document up to themselves; the backward pass adds up what the ranks found for each key and value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from pgtoolkit.batch import MicroBatch
from pgtoolkit.parallelism import collectives
from pgtoolkit.parallelism.layout import Layout

NAME = "pgtoolkit_sequence_data"
"""What transformers calls `attention`, once `register` was called."""


def register() -> None:
    """Make `attention` known to transformers; it needs no mask from there, and for an unknown name makes none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def local_tokens(micro_batch: MicroBatch, layout: Layout) -> MicroBatch:
    """This rank's piece of the packed axis; documents, their numbers and group_index stay those of the whole.

    The axis is padded at its end, so that all pieces have the same length, which tensor_parallel divides. Padding
    belongs to the last document, is not trained, and comes after all that could attend to it.
    """
    size, multiple = layout.size("sequence_data_parallel"), layout.size("tensor_parallel")
    if size == 1:
        return micro_batch
    length = -(-len(micro_batch.tokens) // (size * multiple)) * multiple
    start = layout.rank_in("sequence_data_parallel") * length
    fill = {"labels": -1, "document_index": max(0, micro_batch.num_documents - 1)}
    names = ("tokens", "position_ids", "labels", "document_index", "old_log_probs", "advantages")
    return replace(micro_batch, **{n: _piece(getattr(micro_batch, n), start, length, fill.get(n, 0)) for n in names})


def _piece(values: Tensor, start: int, length: int, fill: int) -> Tensor:
    own = values[start : start + length]
    return torch.cat([own, own.new_full((length - len(own),), fill)])


@dataclass(frozen=True)
class Pieces:
    """How a rank's queries see the keys of all ranks.

    documents: (T,) the document of each key. query_ends, key_ends: (pieces + 1,) int32, from 0, where the piece of
        each document with queries here ends: on the axis of the queries, and on the keys from first_key to last_key.
    """

    group: ProcessGroup
    documents: Tensor
    first_key: int
    last_key: int
    query_ends: Tensor
    key_ends: Tensor

    @staticmethod
    def of(document_index: Tensor, group: ProcessGroup) -> Pieces:
        """document_index: (T_local,) of this rank, the same length on all; the numbers are common to all."""
        documents = collectives.gather(document_index, group, 0, False)
        length, rank = len(document_index), group.rank()
        lengths = torch.unique_consecutive(documents, return_counts=True)[1]
        ends = lengths.cumsum(0).cpu()  # the one wait for the GPU
        start, stop = rank * length, (rank + 1) * length
        first_key = int(torch.cat([ends.new_zeros(1), ends[ends <= start]])[-1])
        inside = torch.cat([ends[(ends > start) & (ends < stop)], ends.new_tensor([stop])]).int()
        before = inside.new_zeros(1)
        return Pieces(
            group,
            documents,
            first_key,
            stop,
            torch.cat([before, inside - start]).to(document_index.device),
            torch.cat([before, inside - first_key]).to(document_index.device),
        )

    def mask(self, window: int | None) -> Tensor:
        """(T_local, T) bool: which keys each query sees."""
        keys = torch.arange(len(self.documents), device=self.documents.device)
        queries = keys.chunk(self.group.size())[self.group.rank()]
        mask = (self.documents[queries, None] == self.documents) & (keys <= queries[:, None])
        return mask if window is None else mask & (keys > queries[:, None] - window)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pieces: Pieces | None = None,
    **_unused,
) -> tuple[Tensor, None]:
    """(1, T_local, heads, width) from query (1, heads, T_local, width), key and value (1, key-value heads, ...)."""
    if torch.is_autocast_enabled(query.device.type):
        # As scaled_dot_product_attention would, but before anything is sent: rotary positions have left float32.
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    both = torch.cat([key, value], 1)[0].transpose(0, 1)  # one collective for the two
    both = collectives.gather(both, pieces.group, 0, True)
    key, value = both.chunk(2, 1)  # (T, key-value heads, width)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and sliding_window is None:
        return _by_document(query[0].transpose(0, 1), key, value, scaling, pieces)[None], None
    key, value = (x.transpose(0, 1)[None] for x in (key, value))
    mask = pieces.mask(sliding_window)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2), None


def _by_document(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, pieces: Pieces) -> Tensor:
    """(T_local, heads, width), at the cost of each document's own length; causal from the end of its keys."""
    from torch.nn.attention.varlen import varlen_attn

    key, value = (x[pieces.first_key : pieces.last_key].contiguous() for x in (key, value))
    longest = max(len(query), len(key))
    return varlen_attn(
        query.contiguous(),
        key,
        value,
        pieces.query_ends,
        pieces.key_ends,
        len(query),
        longest,
        scale=scaling,
        window_size=(-1, 0),
    )
