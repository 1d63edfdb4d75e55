"""Sequence-data parallelism: each rank holds a contiguous piece of the packed token axis, documents cut or not.

Only attention (attention.py) looks across the cut: its keys and values are gathered over the ranks, and a rank's
queries see those of their own document up to themselves. Backward adds up the ranks' gradients of each key and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch, known_vectors
from pgtoolkit.model.attention import Documents
from pgtoolkit.ranks.layout import Layout


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
    names += known_vectors(micro_batch)
    return replace(micro_batch, **{n: _piece(getattr(micro_batch, n), start, length, fill.get(n, 0)) for n in names})


def _piece(values: Tensor, start: int, length: int, fill: int) -> Tensor:
    own = values[start : start + length]
    return torch.cat([own, own.new_full((length - len(own),), fill)])


def documents_here(lengths: Sequence[int], num_here: int, group: ProcessGroup, device: torch.device) -> Documents:
    """Those with queries here, and their keys up to the end of this rank's piece, wherever they lie.

    lengths: of the whole documents; num_here: positions of each rank. What is left over is padding.
    """
    ends = [0, *accumulate(lengths)]
    start, stop = group.rank() * num_here, (group.rank() + 1) * num_here
    if ends[-1] < num_here * group.size():
        ends.append(num_here * group.size())
    here = [(max(a, start), min(b, stop), a) for a, b in pairwise(ends) if a < stop and b > start]
    queries, keys = [b - a for a, b, _ in here], [b - first for _, b, first in here]
    return Documents(queries, keys, device, group, here[0][2], stop)
