"""Causal attention over documents packed on one token axis, at the cost of each document's own
length.

Sequence-data parallelism divides that axis: each rank holds a contiguous piece, documents cut or
not. Only attention
looks across the cut: its keys and values are gathered over the ranks, and a rank's queries see
    those of their own
document up to themselves. Backward adds up the ranks' gradients of each key and value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from pgtoolkit.batch import MicroBatch, known_vectors, without_waiting
from pgtoolkit.model.architectures import is_known
from pgtoolkit.model.fixed_order import in_fixed_order
from pgtoolkit.ranks import collectives
from pgtoolkit.ranks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pgtoolkit_packed"
"""What transformers calls `attention`, once a model was switched to it."""


@dataclass(frozen=True)
class Documents:
    """Which keys the queries see: those of their own document, up to themselves, counted from the
    end of both.

    queries, keys: of each document, how many lie here, in order. group: the ranks that hold a piece
        of the token axis
    each, where it is divided; the keys are then those from first_key to last_key of the whole axis.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    device: torch.device
    group: ProcessGroup | None = None
    first_key: int = 0
    last_key: int | None = None

    @staticmethod
    def whole(lengths: Sequence[int], num_positions: int, device: torch.device) -> Documents:
        """Whole documents of these lengths; what is left over of the axis is padding, by itself."""
        rest = num_positions - sum(lengths)
        lengths = [*lengths, rest] if rest else list(lengths)
        return Documents(lengths, lengths, device)

    @functools.cached_property
    def ends(self) -> list[Tensor]:
        """Of queries and keys the running sums from 0, (documents + 1,) int32 each."""
        sums = [
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            for counts in (self.queries, self.keys)
        ]
        return [without_waiting(running, self.device) for running in sums]


def has_kernel(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether PyTorch has this attention as one kernel."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or device.type != "cuda" or head_width % 8 or head_width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def switch_on(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Make a transformers model use `attention`, if it runs as one kernel.

    dtype: what attention is computed in. Afterwards the model's forward needs the keyword
        `documents`.
    """
    if not is_known(model):
        return
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if has_kernel(device, dtype, width):
        use_packed_attention(model)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a transformers model use `attention`; for a name of ours transformers makes no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)


def attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options
) -> tuple[Tensor, None]:
    """(1, T, heads, width) from query (1, heads, T, width), key and value (1, key-value heads, T,
    width).

    transformers calls this in each layer. options: `documents`, and its own `scaling` and
        `sliding_window`.
    """
    documents: Documents = options["documents"]
    if torch.is_autocast_enabled(kind := query.device.type):
        # As scaled_dot_product_attention would cast them: rotary positions have left float32.
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    # Not x[0], in whose backward pass the gradient would be copied, and then copied back into the
    # order of tokens.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if documents.group is not None:
        # one collective for the two
        both = collectives.join(torch.cat([key, value], 1), documents.group, 0, True)
        key, value = both[documents.first_key : documents.last_key].chunk(2, 1)
    return by_document(
        query, key, value, documents, options.get("scaling"), options.get("sliding_window")
    )[None], None


def by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(queries, heads, width) from query (queries, heads, width), key and value (keys, key-value
    heads, width).

    window: how many keys a query sees at most, itself among them; None: all of its document up to
        itself.
    """
    if has_kernel(query.device, query.dtype, query.shape[2]):
        from torch.nn.attention.varlen import varlen_attn

        how: dict[str, Any] = {
            "scale": scaling,
            "window_size": (-1 if window is None else window - 1, 0),
        }
        # PyTorch before 2.12 takes fewer key-value heads unasked.
        if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
            how["enable_gqa"] = True
        query_ends, key_ends = documents.ends
        longest_query, longest_key = max(documents.queries), max(documents.keys)
        out = varlen_attn(
            query, key, value, query_ends, key_ends, longest_query, longest_key, **how
        )
        assert isinstance(out, Tensor)
        return in_fixed_order(out)
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    queries, keys = query.split(documents.queries), key.split(documents.keys)
    parts = zip(queries, keys, value.split(documents.keys), strict=True)
    return torch.cat([_one_document(q, k, v, scaling, window) for q, k, v in parts])


def _one_document(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    keys = torch.arange(len(key), device=key.device)
    queries = keys[len(key) - len(query) :, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    rows = (x.transpose(0, 1) for x in (query, key, value))
    return functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scaling).transpose(
        0, 1
    )


def local_tokens(micro_batch: MicroBatch, layout: Layout) -> MicroBatch:
    """This rank's piece of the packed axis; documents, their numbers and group_index stay those of
    the whole.

    The axis is padded at its end, so that all pieces have the same length, which tensor_parallel
    divides. Padding belongs to the last document, is not trained, and comes after all that could
    attend to it.
    """
    size, multiple = layout.size("sequence_data_parallel"), layout.size("tensor_parallel")
    if size == 1:
        return micro_batch
    length = -(-len(micro_batch.tokens) // (size * multiple)) * multiple
    start = layout.rank_in("sequence_data_parallel") * length
    fill = {"labels": -1, "document_index": max(0, micro_batch.num_documents - 1)}
    names = ("tokens", "position_ids", "labels", "document_index", "advantages")
    names += known_vectors(micro_batch)
    return replace(
        micro_batch,
        **{n: _piece(getattr(micro_batch, n), start, length, fill.get(n, 0)) for n in names},
    )


def _piece(values: Tensor, start: int, length: int, fill: int) -> Tensor:
    piece = values[start : start + length]
    return torch.cat([piece, piece.new_full((length - len(piece),), fill)])


def documents_here(
    lengths: Sequence[int], num_here: int, group: ProcessGroup, device: torch.device
) -> Documents:
    """Those with queries here, and their keys up to the end of this rank's piece, wherever they
    lie.

    lengths: of the whole documents; num_here: positions of each rank. What is left over is padding.
    """
    ends = [0, *accumulate(lengths)]
    start, stop = group.rank() * num_here, (group.rank() + 1) * num_here
    if ends[-1] < num_here * group.size():
        ends.append(num_here * group.size())
    here = [(max(a, start), min(b, stop), a) for a, b in pairwise(ends) if a < stop and b > start]
    queries, keys = [b - a for a, b, _ in here], [b - first for _, b, first in here]
    return Documents(queries, keys, device, group, here[0][2], stop)
