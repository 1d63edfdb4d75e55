"""Sequence-data parallelism: each rank holds a contiguous piece of the packed token axis, documents cut or not.

Only attention looks across the cut. Its keys and values are gathered over the ranks, and a rank's queries see those of
their own document up to themselves; the backward pass adds up what the ranks found for each key and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model.attention import Documents, as_computed, by_document
from pgtoolkit.ranks import collectives
from pgtoolkit.ranks.layout import Layout

NAME = "pgtoolkit_sequence_data"
"""What transformers calls `attention`, once it was registered."""


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

    documents: those with queries here, with their keys from first_key to last_key of the whole axis.
    """

    group: ProcessGroup
    first_key: int
    last_key: int
    documents: Documents

    @staticmethod
    def of(lengths: Sequence[int], num_here: int, group: ProcessGroup, device: torch.device) -> Pieces:
        """lengths: of the whole documents; num_here: positions of each rank. What is left over is padding."""
        ends = [0, *accumulate(lengths)]
        start, stop = group.rank() * num_here, (group.rank() + 1) * num_here
        if ends[-1] < num_here * group.size():
            ends.append(num_here * group.size())
        here = [(max(a, start), min(b, stop), a) for a, b in pairwise(ends) if a < stop and b > start]
        queries, keys = [b - a for a, b, _ in here], [b - first for _, b, first in here]
        return Pieces(group, here[0][2], stop, Documents.of(queries, keys, device))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    pieces: Pieces,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_unused,
) -> tuple[Tensor, None]:
    """(1, T_local, heads, width) from query (1, heads, T_local, width), key and value (1, key-value heads, ...)."""
    query, key, value = as_computed(query, key, value)  # before anything is sent
    both = torch.cat([key, value], 1)[0].transpose(0, 1)  # one collective for the two
    both = collectives.gather(both, pieces.group, 0, True)[pieces.first_key : pieces.last_key]
    key, value = both.chunk(2, 1)  # (keys, key-value heads, width)
    return by_document(query[0].transpose(0, 1), key, value, pieces.documents, scaling, sliding_window)[None], None
