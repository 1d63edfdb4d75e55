"""The Triton kernels of a layer that a token of each row passes while completions are sampled.

With few rows a product has fewer tiles than a GPU has multiprocessors. So a long sum is made in
parts, which the norm behind it adds up, in their order. The MLP's gate is part of its product. The
sizes follow from the weights alone: a row has the same bits whatever rows are beside it.

Axes: B rows, K numbers of a row that are multiplied and added up, N columns of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """What a program computes of a product.

    rows, columns: of the result. depth: numbers of a row that are multiplied at once, of which
    `stages` are in a processor's memory. warps: of the program. share: the most numbers of a row
    that a program adds up.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    share: int = 2**30


_GATED = Tile(rows=128, columns=64, depth=64, stages=4, warps=8)
"""Its columns are those of the gate, and as many of what the gate is multiplied by."""
_LONG = Tile(rows=128, columns=64, depth=64, stages=4, warps=4, share=1216)
_SHORT = Tile(rows=64, columns=32, depth=64, stages=4, warps=4)
"""For sums of at most a share of `_LONG`, which have no parts, and so more tiles."""
_BEFORE_NORM = Tile(rows=64, columns=32, depth=64, stages=4, warps=4)
_NORM_WARPS = 4


@triton.jit
def gated_kernel(
    x,
    weight,
    squares,
    out,
    num_rows,
    num_columns,
    width,
    num_squares,
    epsilon,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """Write silu(x @ gate.T) * (x @ up.T), (num_rows, num_columns), with a program for each tile.

    x, weight: descriptors of (num_rows, width) and (2 num_columns, width), gate above up.
    squares: of `before_norm_kernel`, (num_squares, num_rows), by which a row of products is
        normed; or None. SQUARES: their number, filled up to a power of 2.
    Both products are rounded to the type of out, as they are where they are stored. Tiles of the
    same columns follow each other, so that the weight is read from memory once.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    first_column = tl.program_id(0) // row_tiles * COLUMNS
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    rows = first_row + tl.arange(0, ROWS)
    for start in tl.range(0, width, DEPTH, num_stages=STAGES):
        part = x.load([first_row, start])
        gate = tl.dot(part, weight.load([first_column, start]).T, gate)
        up = tl.dot(part, weight.load([num_columns + first_column, start]).T, up)
    if squares is not None:
        numbers = tl.arange(0, SQUARES)
        of_rows = tl.load(
            squares + numbers[:, None] * num_rows + rows[None, :],
            mask=(numbers < num_squares)[:, None] & (rows < num_rows)[None, :],
            other=0.0,
        )
        inverse = tl.rsqrt(tl.sum(of_rows, 0) / width + epsilon)
        gate *= inverse[:, None]
        up *= inverse[:, None]
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    columns = first_column + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + places, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def parts_kernel(
    x,
    weight,
    parts,
    num_rows,
    num_columns,
    width,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the parts of x @ weight.T, (parts, num_rows, num_columns), with a program for each tile
    and part.

    x, weight: descriptors of (num_rows, width) and (num_columns, width).
    share: the numbers of a row that a part adds up, a multiple of DEPTH.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    first_column = tl.program_id(0) // row_tiles * COLUMNS
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, width)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        total = tl.dot(x.load([first_row, start]), weight.load([first_column, start]).T, total)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    row_of_part = tl.program_id(1).to(tl.int64) * num_rows + rows
    places = row_of_part[:, None] * num_columns + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(parts + places, total, mask=inside)


@triton.jit
def before_norm_kernel(
    x,
    weight,
    hidden,
    factor,
    total,
    weighted,
    squares,
    num_rows,
    num_columns,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write hidden + x @ weight.T, the same times the factor of each column, and the sums of the
    squares of each tile's rows, with a program for each tile.

    x, weight: descriptors of (num_rows, width) and (num_columns, width).
    squares: (tiles of columns, num_rows) float32.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    column_tile = tl.program_id(0) // row_tiles
    first_column = column_tile * COLUMNS
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, width, DEPTH, num_stages=STAGES):
        product = tl.dot(x.load([first_row, start]), weight.load([first_column, start]).T, product)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    added = product.to(total.dtype.element_ty).to(tl.float32)
    sums = tl.load(hidden + places, mask=inside, other=0.0).to(tl.float32) + added
    factors = tl.load(factor + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    tl.store(total + places, sums.to(total.dtype.element_ty), mask=inside)
    of_norm = sums * factors[None, :]
    tl.store(weighted + places, of_norm.to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + column_tile * num_rows + rows, tl.sum(sums * sums, 1), mask=rows < num_rows)


@triton.jit
def sum_and_norm_kernel(
    hidden,
    parts,
    weight,
    total,
    normed,
    num_rows,
    width,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's sum and the sum's RMS norm with a program for each row.

    The sum of the parts is rounded before it is added, as a product is where it is stored.
    BLOCK: the width, filled up to a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(hidden + places, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        added += tl.load(parts + part * num_rows * width + places, mask=inside, other=0.0)
    x += added.to(total.dtype.element_ty).to(tl.float32)
    tl.store(total + places, x.to(total.dtype.element_ty), mask=inside)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    tl.store(normed + places, (x * inverse * factor).to(normed.dtype.element_ty), mask=inside)


def gated_product(
    x: Tensor, weight: Tensor, squares: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T), (B, N).

    x: (B, K). weight: (2 N, K), gate above up. Both are contiguous, of one half-precision type, and
    K is a multiple of 8.
    squares: where x is still to be normed with epsilon, the sums of squares that come with it from
        `product_before_norm`.
    """
    rows, width = x.shape
    columns = len(weight) // 2
    tile = _GATED
    out = x.new_empty(rows, columns)
    gated_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        *_descriptors(x, weight, tile),
        squares,
        out,
        rows,
        columns,
        width,
        0 if squares is None else len(squares),
        epsilon,
        *tile[:4],
        SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        num_warps=tile.warps,
    )
    return out


def product_before_norm(
    x: Tensor, weight: Tensor, hidden: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden + x @ weight.T, that sum times the norm's factor, (B, N) each, and sums of
    squares of the first, (tiles, B) float32.

    An RMS norm divides a row by a number, which may as well be done behind the next product. So
    the norm needs no kernel. The factor's product may not leave the range of the type, which
    bfloat16's rows do not.
    x: (B, K). weight: (N, K). As for `gated_product`. hidden: (B, N). factor: (N,).
    """
    rows, width = x.shape
    columns = len(weight)
    tile = _BEFORE_NORM
    column_tiles = triton.cdiv(columns, tile.columns)
    total = torch.empty_like(hidden)
    weighted = torch.empty_like(hidden)
    squares = torch.empty(column_tiles, rows, device=x.device)
    before_norm_kernel[(triton.cdiv(rows, tile.rows) * column_tiles,)](
        *_descriptors(x, weight, tile),
        hidden,
        factor,
        total,
        weighted,
        squares,
        rows,
        columns,
        width,
        *tile[:4],
        num_warps=tile.warps,
    )
    return total, weighted, squares


def product_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Return (parts, B, N) float32, whose sum over the parts is x @ weight.T.

    x: (B, K). weight: (N, K). As for `gated_product`.
    """
    rows, width = x.shape
    columns = len(weight)
    tile = _LONG if width > _LONG.share else _SHORT
    share = min(tile.share, triton.cdiv(width, tile.depth) * tile.depth)
    parts = torch.empty(triton.cdiv(width, share), rows, columns, device=x.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    parts_kernel[(tiles, len(parts))](
        *_descriptors(x, weight, tile),
        parts,
        rows,
        columns,
        width,
        share,
        *tile[:4],
        num_warps=tile.warps,
    )
    return parts


def sum_and_norm(
    hidden: Tensor, parts: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of hidden + the sum of the parts, and that sum, (B, K) each.

    hidden: (B, K), contiguous. parts: (parts, B, K) float32. weight: (K,).
    """
    rows, width = hidden.shape
    total = torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    sum_and_norm_kernel[(rows,)](
        hidden,
        parts,
        weight,
        total,
        normed,
        rows,
        width,
        epsilon,
        PARTS=len(parts),
        BLOCK=triton.next_power_of_2(width),
        num_warps=_NORM_WARPS,
    )
    return normed, total


def _descriptors(x: Tensor, weight: Tensor, tile: Tile) -> tuple[TensorDescriptor, ...]:
    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
    )
