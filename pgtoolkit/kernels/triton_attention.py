"""The Triton kernels for attention of new tokens over the cached keys and values of their rows."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pgtoolkit.kernels.triton_two_pass import LOWEST

_BLOCK_BYTES = 8192
"""Bytes of the keys that a program multiplies at once."""
_WARPS = 4
_FEWEST_QUERIES = 5
"""From this size of a group on, tl.dot is faster in float32, though it multiplies 16 queries."""
_PROGRAMS = 512
"""Programs that fill a large GPU: about four for each of its multiprocessors."""
_FEWEST_PLACES = 256
"""Places of a row's room that are worth a program."""


@triton.jit(do_not_specialize=["room", "window"])
def attention_kernel(
    query,
    key,
    value,
    keys,
    values,
    positions,
    prompt_rows,
    prompt_lengths,
    cosines,
    sines,
    out,
    log_sums,
    query_stride,
    key_stride,
    value_stride,
    room,
    window,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Attend with a program for each row, key-value head and part of the places that a query sees.

    There are HEADS key-value heads and PARTS parts. GROUP queries share a head of WIDTH numbers;
    QUERIES and COLUMNS are these sizes, filled up to powers of 2, and to the sizes that tl.dot
    needs if it is to multiply (DOT). NUMBER is the type of sums. The first part also has the new
    key and value, and writes them into the cache, where no program reads them.
    prompt_rows, prompt_lengths: (rows,), or None: the places before a row's prompt length are read
        from another row with the same keys and values there. Programs of rows that share a prompt
        run at the same time, so that all but one of them find it in the GPU's own cache.
    cosines, sines: (room, WIDTH), or None: query and key are first turned by those of their
        position, and rounded.
    out: (rows, HEADS, PARTS, GROUP, WIDTH).
    log_sums: with several parts, (rows, HEADS, PARTS, GROUP), to base 2.
    """
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = program // HEADS
    head = program % HEADS
    queries = tl.arange(0, QUERIES)
    columns = tl.arange(0, COLUMNS)
    places = tl.arange(0, BLOCK)
    wide = columns < WIDTH
    of_group = (queries < GROUP)[:, None] & wide[None, :]
    inside = queries[:, None] * WIDTH + columns[None, :]
    position = tl.load(positions + row).to(tl.int32)
    query += row * query_stride + head * GROUP * WIDTH
    q = tl.load(query + inside, mask=of_group, other=0.0)
    key += row * key_stride + head * WIDTH
    # A turn mixes each column with this one, of the other half of the head.
    opposite = tl.where(columns < WIDTH // 2, columns + WIDTH // 2, columns - WIDTH // 2)
    if cosines is not None:
        cosine = tl.load(cosines + position * WIDTH + columns, mask=wide, other=0.0).to(NUMBER)
        sine = tl.load(sines + position * WIDTH + columns, mask=wide, other=0.0).to(NUMBER)
        sine = tl.where(columns < WIDTH // 2, -sine, sine)
        across = tl.load(
            query + queries[:, None] * WIDTH + opposite[None, :], mask=of_group, other=0.0
        )
        turned = q.to(NUMBER) * cosine[None, :] + across.to(NUMBER) * sine[None, :]
        q = turned.to(q.dtype)
    if prompt_rows is not None:
        prompt_length = tl.load(prompt_lengths + row).to(tl.int32)
        to_prompt = (tl.load(prompt_rows + row) - row) * HEADS * room * WIDTH
    keys += program * room * WIDTH
    values += program * room * WIDTH

    highest = tl.full([QUERIES], LOWEST, NUMBER)
    sums = tl.zeros([QUERIES], NUMBER)
    weighted = tl.zeros([QUERIES, COLUMNS], NUMBER)
    if part == 0:
        k = tl.load(key + columns, mask=wide, other=0.0)
        if cosines is not None:
            other_half = tl.load(key + opposite, mask=wide, other=0.0)
            k = (k.to(NUMBER) * cosine + other_half.to(NUMBER) * sine).to(k.dtype)
        v = tl.load(value + row * value_stride + head * WIDTH + columns, mask=wide, other=0.0)
        tl.store(keys + position * WIDTH + columns, k, mask=wide)
        tl.store(values + position * WIDTH + columns, v, mask=wide)
        highest = tl.sum(q.to(NUMBER) * k.to(NUMBER)[None, :], 1) * scale
        sums += 1.0
        weighted += v.to(NUMBER)[None, :]

    first = tl.maximum(position + 1 - window, 0)
    share = tl.cdiv(tl.cdiv(position - first, BLOCK), PARTS) * BLOCK
    begin = first + part * share
    end = tl.minimum(begin + share, position)
    for start in tl.range(begin, end, BLOCK, num_stages=3):
        at = start + places
        seen = at < end
        block = at[:, None] * WIDTH + columns[None, :]
        if prompt_rows is not None:
            block = block + tl.where(at < prompt_length, to_prompt, 0)[:, None]
        there = seen[:, None] & wide[None, :]
        k = tl.load(keys + block, mask=there, other=0.0)
        if DOT:
            x = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=NUMBER)
        else:
            x = tl.sum(q[:, None, :] * k[None, :, :], 2)
        x = tl.where(seen[None, :], x * scale, LOWEST)
        before = highest
        highest = tl.maximum(highest, tl.max(x, 1))
        kept = tl.exp2(before - highest)
        weights = tl.exp2(x - highest[:, None])
        v = tl.load(values + block, mask=there, other=0.0)
        weighted *= kept[:, None]
        if DOT:
            weighted += tl.dot(weights.to(v.dtype), v, input_precision="ieee", out_dtype=NUMBER)
        else:
            weighted += tl.sum(weights[:, :, None] * v[None, :, :], 1)
        sums = sums * kept + tl.sum(weights, 1)

    sums = tl.where(sums == 0, 1.0, sums)  # a part may have no places
    program = program * PARTS + part
    tl.store(out + program * GROUP * WIDTH + inside, weighted / sums[:, None], mask=of_group)
    if PARTS > 1:
        tl.store(
            log_sums + program * GROUP + queries, highest + tl.log2(sums), mask=queries < GROUP
        )


@triton.jit
def combine_kernel(
    parts,
    log_sums,
    out,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the parts of `attention_kernel` by their shares, a program for each row and query."""
    query = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    places = (query // GROUP * PARTS + tl.arange(0, PARTS)) * GROUP + query % GROUP
    log_sum = tl.load(log_sums + places)
    shares = tl.exp2(log_sum - tl.max(log_sum, 0))
    wide = columns < WIDTH
    x = tl.load(parts + places[:, None] * WIDTH + columns[None, :], mask=wide[None, :], other=0.0)
    tl.store(
        out + query * WIDTH + columns, tl.sum(x * shares[:, None], 0) / tl.sum(shares, 0), mask=wide
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
    turns: tuple[Tensor, Tensor] | None = None,
    prompts: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return (B, heads, width), the softmax attention of a new token of each row.

    Its key and value are written into the cache at its position.
    query: (B, heads, 1, width).
    key, value: (B, key-value heads, 1, width).
    keys, values: the cache, (B, key-value heads, room, width), contiguous, of which a row's places
        before its position are read, once.
    positions: (B,) int64.
    window: the number of keys that a query sees at most, with the new one; None for all.
    turns: cosines and sines of all positions, (room, width) each, by which query and key are still
        to be turned.
    prompts: the row that each row's prompt may be read from, and the length of its prompt, (B,)
        int64 each. The keys and values of the prompt must be the same in both rows.

    All tensors have one float type: products are of its precision, sums of float32's, or float64's.
    Where rows and heads are too few to fill a GPU, several programs share the places of each (Dao
    et al. 2023, "Flash-Decoding"), so that the rounding depends on the number of rows.
    """
    query, key, value = (_heads_side_by_side(x) for x in (query, key, value))
    cosines, sines = turns or (None, None)
    prompt_rows, prompt_lengths = prompts or (None, None)
    rows, groups, room, width = keys.shape
    heads = query.shape[1]
    programs = rows * groups
    group = heads // groups
    dot = query.element_size() == 2 or group >= _FEWEST_QUERIES
    queries, columns = (max(16 * dot, triton.next_power_of_2(n)) for n in (group, width))
    max_parts = max(1, min(_PROGRAMS // programs, room // _FEWEST_PLACES))
    parts = 1 << (max_parts.bit_length() - 1)  # a power of 2
    number = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    of_parts = out
    log_sums = None
    if parts > 1:
        of_parts = torch.empty(programs, parts, group, width, dtype=number, device=query.device)
        log_sums = torch.empty(of_parts.shape[:-1], dtype=number, device=query.device)
    shape = {"GROUP": group, "WIDTH": width, "COLUMNS": columns, "PARTS": parts}
    attention_kernel[(programs, parts)](
        query,
        key,
        value,
        keys,
        values,
        positions,
        prompt_rows,
        prompt_lengths,
        cosines,
        sines,
        of_parts,
        log_sums,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        room,
        room if window is None else window,
        scaling / math.log(2),
        HEADS=groups,
        QUERIES=queries,
        BLOCK=min(128, max(16, _BLOCK_BYTES // (columns * query.element_size()))),
        DOT=dot,
        NUMBER=tl.float64 if number == torch.float64 else tl.float32,
        num_warps=_WARPS,
        **shape,
    )
    if parts > 1:
        combine_kernel[(rows * heads,)](of_parts, log_sums, out, num_warps=2, **shape)
    return out


def _heads_side_by_side(x: Tensor) -> Tensor:
    """Return (B, heads, 1, width) with the heads of a row contiguous; rows may lie apart."""
    return x if x.stride()[1::2] == (x.shape[3], 1) else x.contiguous()
