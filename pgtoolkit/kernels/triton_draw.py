"""The Triton kernels that draw a token from each row of logits.

They read the logits once, and the drawn block a second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pgtoolkit.kernels.triton_two_pass import LOWEST

# The weight of the likeliest token. A sum over a million tokens is below 2^63.
LARGEST: tl.constexpr = tl.constexpr(2.0**43)
_BLOCK = 8192


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


@triton.jit
def draw_kernel(
    logits,
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
    inverse_temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw a token from each row with a program, by the maxima and sums of its blocks.

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
    logits += row * row_stride
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
    x = (
        tl.load(logits + places, mask=places < num_columns, other=-float("inf")).to(tl.float32)
        * inverse_temperature
    )
    counted = (tl.exp(x - highest) * LARGEST).to(tl.int64)
    block_total = tl.sum(counted, 0)
    reached = tl.minimum((share * block_total.to(tl.float64)).to(tl.int64), block_total - 1)
    inside = tl.sum((tl.cumsum(counted, 0) <= reached).to(tl.int32), 0)
    token = tl.minimum(chosen * BLOCK + inside, num_columns - 1)
    logit = tl.load(logits + token).to(tl.float32) * inverse_temperature
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


def _launch(logits: Tensor, uniform: Tensor, temperature: float, *written: Tensor | None) -> None:
    rows, num_columns = logits.shape
    count = triton.cdiv(num_columns, _BLOCK)
    blocks = triton.next_power_of_2(count)
    maxima, sums = torch.empty(2, rows, blocks, device=logits.device)
    read = (logits.stride(0), num_columns, 1 / temperature)
    sizes = {"BLOCK": _BLOCK, "BLOCKS": blocks, "num_warps": 16}
    blocks_kernel[(rows, count)](logits, maxima, sums, *read, **sizes)
    draw_kernel[(rows,)](logits, maxima, sums, uniform, *written, *read, **sizes)
