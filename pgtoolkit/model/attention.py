"""Causal attention over documents packed on one token axis, at the cost of each document's own
length.

Sequence-data parallelism divides that axis: each rank holds a contiguous piece, which may begin and
end inside a document. Only attention looks across the cuts: keys and values are gathered over the
ranks, and a rank's queries see those of their own document up to themselves. The backward pass adds
up the ranks' gradients of each key and value.

Axes: T tokens of the packed axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch, known_vectors, without_waiting
from pgtoolkit.document import ROWS
from pgtoolkit.model import fixed_order, flash_attention
from pgtoolkit.model.architectures import is_known
from pgtoolkit.model.fixed_order import in_fixed_order, rows_of
from pgtoolkit.model.kept_attention import KeptAttention
from pgtoolkit.model.plain_attention import one_document, repeated
from pgtoolkit.ranks import collectives
from pgtoolkit.ranks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pgtoolkit_packed"
"""The name of `attention` in transformers, once a model was switched to it."""

_LONG = 4096
"""Tokens of a document from which on dividing attention's heads saves more time than it adds."""

_WELL_USED = 0.8
"""Share of the processors' time from which on heads are not divided."""


@dataclass(frozen=True)
class Documents:
    """The documents that attention is confined to. A query sees the keys of its own document up to
    itself, where both are counted from their ends.

    queries, keys: numbers of queries and keys here, for each document, in order.
    group: the ranks that hold a piece of the token axis each, where it is divided; the keys are
        then those from first_key to last_key of the whole axis.
    sources: where documents share keys, the position that each key comes from, int64; None where
        each key is that of its own position.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    device: torch.device
    group: ProcessGroup | None = None
    first_key: int = 0
    last_key: int | None = None
    sources: Tensor | None = None

    @staticmethod
    def whole(lengths: Sequence[int], num_positions: int, device: torch.device) -> Documents:
        """Return documents of these lengths; padding at the end of the axis is a document by
        itself."""
        rest = num_positions - sum(lengths)
        lengths = [*lengths, rest] if rest else list(lengths)
        return Documents(lengths, lengths, device)

    @functools.cached_property
    def ends(self) -> list[Tensor]:
        """Return the running sums of queries and of keys from 0, (documents + 1,) int32 each."""
        sums = [
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            for counts in (self.queries, self.keys)
        ]
        return [without_waiting(running, self.device) for running in sums]

    @functools.cached_property
    def by_length(self) -> list[tuple[list[int], Documents]]:
        """Return the places of the long documents and of the others among all, and the documents
        there."""
        parts = []
        for is_long in (True, False):
            places = [
                place
                for place, count in enumerate(self.keys)
                if (count >= flash_attention.LONG) is is_long
            ]
            queries = [self.queries[place] for place in places]
            keys = [self.keys[place] for place in places]
            parts.append((places, Documents(queries, keys, self.device)))
        return parts


def has_kernel(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether PyTorch has this attention as one kernel."""
    half = dtype in (torch.bfloat16, torch.float16)
    if not half or device.type != "cuda" or head_width % 8 or head_width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def switch_on(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Make a transformers model use `attention`, if it runs as one kernel.

    dtype: the type that attention is computed in. Afterwards the model's forward needs the keyword
        `documents`.
    """
    if not is_known(model):
        return
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if has_kernel(device, dtype, width):
        use_packed_attention(model)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a transformers model use `attention`; for an unknown name transformers makes no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)


def attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options
) -> tuple[Tensor, None]:
    """Return attention's output (1, T, heads, width).

    query: (1, heads, T, width). key, value: (1, key-value heads, T, width). options: `documents`,
        and transformers' `scaling` and `sliding_window`.
    transformers calls this in each layer.
    """
    documents: Documents = options["documents"]
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # scaled_dot_product_attention would cast them, too: rotary positions have left float32.
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    # x[0] would do the same, but its backward pass would copy the gradient, which would then be
    # copied again into the order of tokens.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if documents.group is not None:
        # one collective for both
        both = collectives.join(torch.cat([key, value], 1), documents.group, 0, True)
        key, value = both[documents.first_key : documents.last_key].chunk(2, 1)
    return by_document(
        query, key, value, documents, options.get("scaling"), options.get("sliding_window")
    )[None], None


class _KernelOptions(TypedDict, total=False):
    scale: float | None
    window_size: tuple[int, int]
    enable_gqa: bool


def by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
    kept: KeptAttention | None = None,
) -> Tensor:
    """Return attention's output (queries, heads, width).

    query: (queries, heads, width). key, value: (keys, key-value heads, width), or (queries, ...)
        where documents share keys.
    window: number of keys that a query sees at most, its own among them; None: all of its document
        up to itself.
    kept: keeps what the kernels compute for a second pass, or has it from a first one.
    """
    if documents.sources is not None:
        key, value = (rows_of(x, documents.sources) for x in (key, value))
    if not has_kernel(query.device, query.dtype, query.shape[2]):
        queries = query.split(documents.queries)
        keys = repeated(key, query).split(documents.keys)
        values = repeated(value, query).split(documents.keys)
        kernel = functools.partial(one_document, scaling=scaling, window=window)
        return torch.cat(
            [_computed(kernel, each, kept) for each in zip(queries, keys, values, strict=True)]
        )
    of_others = functools.partial(by_torch, scaling=scaling, window=window, kept=kept)
    if max(documents.keys) < flash_attention.LONG or not flash_attention.serves(query, key, window):
        return of_others(query, key, value, documents)
    of_long = functools.partial(by_flash_attention, scaling=scaling, kept=kept)
    return by_length(query, key, value, documents, of_long, of_others)


def by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    of_long: Callable[[Tensor, Tensor, Tensor, Documents], Tensor],
    of_others: Callable[[Tensor, Tensor, Tensor, Documents], Tensor],
) -> Tensor:
    """Return attention's output (queries, heads, width), that of long documents by `of_long`.

    Some document must be long. Each function gets query, key and value of its documents alone.
    """
    if min(documents.keys) >= flash_attention.LONG:
        return of_long(query, key, value, documents)
    counts = (documents.queries, documents.keys, documents.keys)
    inputs = [x.split(sizes) for x, sizes in zip((query, key, value), counts, strict=True)]
    outputs = {}
    for (places, some), compute in zip(documents.by_length, (of_long, of_others), strict=True):
        q, k, v = (torch.cat([parts[place] for place in places]) for parts in inputs)
        outputs |= zip(places, compute(q, k, v, some).split(some.queries), strict=True)
    return torch.cat([outputs[place] for place in range(len(outputs))])


def _computed(
    kernel: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    kept: KeptAttention | None,
) -> Tensor:
    return kernel(*inputs) if kept is None else kept(kernel, *inputs)


def by_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    kept: KeptAttention | None = None,
) -> Tensor:
    """Return attention's output by the kernels of FlashAttention 4."""
    query_ends, key_ends = documents.ends
    longest_query = max(documents.queries)
    longest_key = max(documents.keys)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention.attend(
            q, k, v, query_ends, key_ends, longest_query, longest_key, scaling
        )

    return _computed(kernel, (query, key, value), kept)


def by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
    kept: KeptAttention | None = None,
) -> Tensor:
    """Return attention's output by PyTorch's kernel."""
    from torch.nn.attention.varlen import varlen_attn

    options: _KernelOptions = {
        "scale": scaling,
        "window_size": (-1 if window is None else window - 1, 0),
    }
    # PyTorch before 2.12 takes fewer key-value heads than heads without this option.
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True
    query_ends, key_ends = documents.ends
    longest_query = max(documents.queries)
    longest_key = max(documents.keys)
    inputs_of_shares = [(query, key, value)]
    is_trained = query.requires_grad or kept is not None
    if fixed_order.is_on() and is_trained and longest_key >= _LONG:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        shares = shares_of_heads(query.shape[1], len(documents.queries), processors)
        if len(shares) > 1:
            queries = query.split(shares, 1)
            keys = repeated(key, query).split(shares, 1)
            values = repeated(value, query).split(shares, 1)
            inputs_of_shares = list(zip(queries, keys, values, strict=True))

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, query_ends, key_ends, longest_query, longest_key, **options)
        assert isinstance(out, Tensor)
        return in_fixed_order(out)

    outputs = [_computed(kernel, inputs, kept) for inputs in inputs_of_shares]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


@functools.cache
def shares_of_heads(num_heads: int, num_documents: int, num_processors: int) -> list[int]:
    """Return numbers of heads to compute one after the other, where that makes a backward pass in a
    fixed order faster; else num_heads alone.

    FlashAttention's kernel of this order divides the keys of each head and document among as many
    programs as fill the processors, rounded up. Where these are a few more than the processors,
    they take two rounds: 16 heads of one document are 144 programs for 132 processors, while 12
    heads and then 4 are 132 each time.
    """
    programs_of_head = math.ceil(num_processors / (num_documents * num_heads))
    programs = num_documents * num_heads * programs_of_head
    rounds = math.ceil(programs / num_processors)
    used = programs / (rounds * num_processors)
    if used > _WELL_USED or num_processors % num_documents:
        return [num_heads]
    filling = [
        heads for heads in range(num_heads, 0, -1) if num_processors % (num_documents * heads) == 0
    ]
    shares: list[int] = []
    for heads in filling:
        shares += [heads] * ((num_heads - sum(shares)) // heads)
    return shares


def local_tokens(micro_batch: MicroBatch, layout: Layout) -> MicroBatch:
    """Return this rank's piece of a micro-batch's packed axis.

    Documents, their numbers and group_index stay those of all of it. The axis is padded at its end,
    so that all pieces have the same length, a multiple of the tensor_parallel ranks. Padding
    belongs to the last document, is not trained, and comes after all that could attend to it.
    """
    size = layout.size("sequence_data_parallel")
    multiple = layout.size("tensor_parallel")
    if size == 1:
        return micro_batch
    length = -(-len(micro_batch.tokens) // (size * multiple)) * multiple
    start = layout.rank_in("sequence_data_parallel") * length
    fill = {"labels": -1, "document_index": max(0, micro_batch.num_documents - 1)}
    names = ("tokens", "position_ids", "labels", "document_index", "advantages")
    names += known_vectors(micro_batch)
    names += tuple(
        name
        for name in ("factors", "coefficients", *ROWS)
        if getattr(micro_batch, name) is not None
    )
    return replace(
        micro_batch,
        **{
            name: _piece(getattr(micro_batch, name), start, length, fill.get(name, 0))
            for name in names
        },
    )


def _piece(values: Tensor, start: int, length: int, fill: int) -> Tensor:
    piece = values[start : start + length]
    return torch.cat([piece, piece.new_full((length - len(piece), *piece.shape[1:]), fill)])


def documents_here(
    lengths: Sequence[int], num_here: int, group: ProcessGroup, device: torch.device
) -> Documents:
    """Return the documents with queries on this rank, and their keys up to the end of its piece,
    wherever they lie.

    lengths: of the documents on all ranks. num_here: positions of each rank. Positions beyond the
        documents are padding, which is a document by itself.
    """
    ends = [0, *accumulate(lengths)]
    start = group.rank() * num_here
    stop = (group.rank() + 1) * num_here
    if ends[-1] < num_here * group.size():
        ends.append(num_here * group.size())
    here = [(begin, end) for begin, end in pairwise(ends) if begin < stop and end > start]
    queries = [min(end, stop) - max(begin, start) for begin, end in here]
    keys = [min(end, stop) - begin for begin, end in here]
    first_key = here[0][0]
    return Documents(queries, keys, device, group, first_key, stop)
