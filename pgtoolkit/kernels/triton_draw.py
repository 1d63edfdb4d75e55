"""The Triton kernels that draw a token from each row of logits.

They read the logits once, and the drawn block a second time. Or they make the logits of hidden
states, and those of the drawn block a second time, and store none of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pgtoolkit.kernels.triton_two_pass import LOWEST

# The weight of the likeliest token. A sum over a million tokens is below 2^63.
LARGEST: tl.constexpr = tl.constexpr(2.0**43)
_BLOCK = 8192

# Tiles of the product with the LM head: rows, columns, and numbers of a row that are multiplied at
# once, with _STAGES of the latter in a processor's memory. A tile's columns are several blocks.
_TILE = (128, 256, 64)
_STAGES = 4
_HEAD_BLOCK = 64


@triton.jit
def blocks_kernel(
    logits,
    maxima,
    sums,
    row_stride,
    num_columns,
    inverse_temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the largest logit of each block, and its sum of exp(logit - largest).

    There is a program for each row and block, enough of them that a GPU's memory is the limit.
    maxima, sums: (rows, BLOCKS) float32.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row * row_stride + places, mask=places < num_columns, other=-float("inf")
    ).to(tl.float32)
    x *= inverse_temperature
    highest = tl.maximum(tl.max(x, 0), LOWEST)
    tl.store(maxima + row * BLOCKS + block, highest)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp(x - highest), 0))


@triton.jit(do_not_specialize=["num_rows"])
def head_kernel(
    hidden,
    weight,
    maxima,
    sums,
    num_rows,
    num_columns,
    width,
    inverse_temperature,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Do as `blocks_kernel` for the logits of hidden states, a tile of them after the other.

    hidden, weight: descriptors of (num_rows, width) and (num_columns, width). Tiles of the same
    columns follow each other, so that the weight is read from memory once. The loops over tiles and
    numbers are one, which loads the next tile while the sums of one are made.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    num_tiles = row_tiles * tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        first_row = tile % row_tiles * ROWS
        first_column = tile // row_tiles * COLUMNS
        x = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, width, DEPTH, num_stages=STAGES):
            part = hidden.load([first_row, start])
            x = tl.dot(part, weight.load([first_column, start]).T, x)
        columns = first_column + tl.arange(0, COLUMNS)
        x = tl.where(columns[None, :] < num_columns, x * inverse_temperature, -float("inf"))
        x = tl.reshape(x, [ROWS, COLUMNS // BLOCK, BLOCK])
        highest = tl.maximum(tl.max(x, 2), LOWEST)
        rows = first_row + tl.arange(0, ROWS)
        blocks = first_column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        places = rows[:, None] * BLOCKS + blocks[None, :]
        exists = (rows < num_rows)[:, None] & (blocks * BLOCK < num_columns)[None, :]
        tl.store(maxima + places, highest, mask=exists)
        tl.store(sums + places, tl.sum(tl.exp(x - highest[:, :, None]), 2), mask=exists)


@triton.jit
def draw_kernel(
    logits,
    hidden,
    weight,
    maxima,
    sums,
    uniform,
    tokens,
    log_probs,
    offsets,
    positions,
    following,
    row_stride,
    num_columns,
    width,
    inverse_temperature,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw a token from each row with a program, by the maxima and sums of its blocks.

    logits: (rows, num_columns); or None, and they are made of hidden (rows, width) and weight
        (num_columns, width), contiguous, DEPTH numbers at once.

    A row has at most BLOCKS blocks, a power of 2. The uniform number picks a block by the sums, and
    its remainder picks a token of the block. Weights are integers, whose sums are exact, so that
    nothing of weight 0 is picked.
    offsets, positions, following: as for `draw_next`, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row
    if offsets is not None:
        position = tl.load(positions + row)
        at = tl.load(offsets + row) + position
    columns = tl.arange(0, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    exists = blocks * BLOCK < num_columns
    maxima = tl.load(maxima + row * BLOCKS + blocks, mask=exists, other=LOWEST)
    sums = tl.load(sums + row * BLOCKS + blocks, mask=exists, other=0.0)

    largest = tl.max(maxima, 0)
    weights = sums * tl.exp(maxima - largest)
    counted = (weights * LARGEST).to(tl.int64)
    row_total = tl.sum(counted, 0)
    target = tl.load(uniform + at) * row_total.to(tl.float64)
    reached = tl.minimum(target.to(tl.int64), row_total - 1)
    chosen = tl.sum((tl.cumsum(counted, 0) <= reached).to(tl.int32), 0)
    before = tl.sum(tl.where(blocks < chosen, counted, 0), 0).to(tl.float64)
    share = (target - before) / tl.sum(tl.where(blocks == chosen, counted, 0), 0).to(tl.float64)

    # Relative to the block's maximum, whose token weighs LARGEST, so that the sum cannot be 0.
    highest = tl.sum(tl.where(blocks == chosen, maxima, 0.0), 0)
    places = chosen * BLOCK + columns
    inside_row = places < num_columns
    if logits is not None:
        x = tl.load(logits + row * row_stride + places, mask=inside_row, other=0.0).to(tl.float32)
    else:
        x = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, width, DEPTH):
            depths = start + tl.arange(0, DEPTH)
            of_row = tl.load(hidden + row * width + depths, mask=depths < width, other=0.0)
            of_block = tl.load(
                weight + places.to(tl.int64)[:, None] * width + depths[None, :],
                mask=inside_row[:, None] & (depths < width)[None, :],
                other=0.0,
            )
            x += tl.sum(of_row.to(tl.float32)[None, :] * of_block.to(tl.float32), 1)
    x = tl.where(inside_row, x * inverse_temperature, -float("inf"))
    counted = (tl.exp(x - highest) * LARGEST).to(tl.int64)
    block_total = tl.sum(counted, 0)
    reached = tl.minimum((share * block_total.to(tl.float64)).to(tl.int64), block_total - 1)
    inside = tl.sum((tl.cumsum(counted, 0) <= reached).to(tl.int32), 0)
    token = tl.minimum(chosen * BLOCK + inside, num_columns - 1)
    logit = tl.sum(tl.where(places == token, x, 0.0), 0)
    tl.store(tokens + at, token.to(tl.int64))
    if offsets is not None:
        tl.store(following + row, token.to(tl.int64))
        tl.store(positions + row, position + 1)
    tl.store(log_probs + at, logit - largest - tl.log(tl.sum(weights, 0)))


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a token from each row by softmax(logits / temperature), and return it with its log-prob.

    They are (B,) int64 and (B,) float32.
    logits: (B, V) of any float type, with rows that are contiguous.
    uniform: (B,) float64 from [0, 1). The token is the first whose cumulative probability is
        greater, but for float32's rounding of a block's sum. A token of probability 0 is never
        drawn. Where logits are not finite, the log-prob is not.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(logits), device=logits.device)
    _launch(logits, uniform.contiguous(), temperature, tokens, log_probs, None, None, None)
    return tokens, log_probs


def draw_next(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    tokens: Tensor,
    log_probs: Tensor,
    offsets: Tensor,
    positions: Tensor,
    following: Tensor,
) -> None:
    """Do as `draw_tokens` for rows with places of their own in uniform, tokens and log_probs.

    offsets, positions: (B,) int64, whose sum is the row's place in uniform, tokens and log_probs,
        which are contiguous and of any shape. positions are increased by 1.
    following: (B,) int64, set to the tokens.
    """
    _launch(logits, uniform, temperature, tokens, log_probs, offsets, positions, following)


def can_make_logits(weight: Tensor) -> bool:
    """Return whether `draw_next_of_hidden` takes this weight of an LM head on its GPU."""
    memory = torch.cuda.get_device_properties(weight.device).shared_memory_per_block_optin
    rows, columns, depth = _TILE
    needed = _STAGES * (rows + columns) * depth * weight.element_size()
    # The GPU reads rows whose beginnings lie 16 bytes apart, or a multiple of that.
    return weight.element_size() == 2 and weight.shape[1] % 8 == 0 and needed < memory


def draw_next_of_hidden(
    hidden: Tensor, weight: Tensor, uniform: Tensor, temperature: float, *places: Tensor
) -> None:
    """Do as `draw_next` for the logits hidden @ weight.T in float32, which are stored nowhere.

    hidden: (B, H). weight: (V, H), both of one half-precision type and contiguous.
    places: tokens, log_probs, offsets, positions and following.
    """
    rows, width = hidden.shape
    num_columns = len(weight)
    blocks, maxima, sums = _block_sums(rows, num_columns, _HEAD_BLOCK, hidden.device)
    tile_rows, tile_columns, depth = _TILE
    num_tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(num_columns, tile_columns)
    head_kernel[(min(num_tiles, _processors(hidden.device)),)](
        TensorDescriptor.from_tensor(hidden, [tile_rows, depth]),
        TensorDescriptor.from_tensor(weight, [tile_columns, depth]),
        maxima,
        sums,
        rows,
        num_columns,
        width,
        1 / temperature,
        *_TILE,
        _STAGES,
        BLOCK=_HEAD_BLOCK,
        BLOCKS=blocks,
        num_warps=8,
    )
    draw_kernel[(rows,)](
        None,
        hidden,
        weight,
        maxima,
        sums,
        uniform,
        *places,
        0,
        num_columns,
        width,
        1 / temperature,
        DEPTH=128,
        BLOCK=_HEAD_BLOCK,
        BLOCKS=blocks,
        num_warps=8,
    )


def _processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    if device.type != "cuda":  # in the interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(logits: Tensor, uniform: Tensor, temperature: float, *written: Tensor | None) -> None:
    rows, num_columns = logits.shape
    blocks, maxima, sums = _block_sums(rows, num_columns, _BLOCK, logits.device)
    sizes = {"BLOCK": _BLOCK, "BLOCKS": blocks, "num_warps": 16}
    stride = logits.stride(0)
    blocks_kernel[(rows, triton.cdiv(num_columns, _BLOCK))](
        logits, maxima, sums, stride, num_columns, 1 / temperature, **sizes
    )
    draw_kernel[(rows,)](
        logits,
        None,
        None,
        maxima,
        sums,
        uniform,
        *written,
        stride,
        num_columns,
        0,
        1 / temperature,
        DEPTH=1,
        **sizes,
    )


def _block_sums(
    rows: int, num_columns: int, block: int, device: torch.device
) -> tuple[int, Tensor, Tensor]:
    """Return the number of blocks of a row, filled up to a power of 2, and memory for their maxima
    and sums, (rows, blocks) float32 each."""
    blocks = triton.next_power_of_2(triton.cdiv(num_columns, block))
    maxima, sums = torch.empty(2, rows, blocks, device=device)
    return blocks, maxima, sums
