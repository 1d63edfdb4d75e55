"""The Triton kernels of a layer's backward pass between its matrix products: the derivatives of an
RMS norm and of the MLP's gate.

They compute in float32, and round only what they write, as torch.compile's code does. The number of
programs follows from the sizes alone, and each program adds its rows in their order, so that sums
have the same bits in every run.

Axes: n rows, H hidden size, F width of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATE_BLOCK = 1024
"""Numbers of a row that a program of the gate reads from each half."""
_NORM_PROGRAMS = 528
"""Programs that fill a large GPU: four for each of its multiprocessors."""
_NUMBERS_PER_WARP = 512
"""Numbers of a row for which a warp of the norm has enough registers."""


def warps_of_norm(block: int) -> int:
    """Return the warps of a program of the norm for rows of this size."""
    return min(max(4, block // _NUMBERS_PER_WARP), 16)


@triton.jit
def gate_kernel(both, by_gated, width, BLOCK: tl.constexpr):
    """Write the gradient into both and the gated numbers into by_gated, with a program for each
    block of a row."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_places = both + row * 2 * width + columns
    up_places = gate_places + width
    gated_places = by_gated + row * width + columns
    gate = tl.load(gate_places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_places, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gated_places, mask=inside, other=0.0).to(tl.float32)

    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    by_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_places, by_gate.to(both.dtype.element_ty), mask=inside)
    tl.store(up_places, (gradient * silu).to(both.dtype.element_ty), mask=inside)
    tl.store(gated_places, (silu * up).to(by_gated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    weight,
    by_normed,
    by_x,
    total,
    rounded,
    by_weight,
    num_rows,
    width,
    epsilon,
    BLOCK: tl.constexpr,
):
    """Write the gradient by each row of x, and a row of by_weight for each program.

    Program i of p has the rows i, i + p, i + 2 p, and so on. rounded may be None.
    BLOCK: the width, filled up to a power of 2.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * width + columns
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(by_normed + places, mask=inside, other=0.0).to(tl.float32)
        added = tl.load(by_x + places, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
        normed = values * inverse
        weight_sum += gradient * normed
        gradient *= factor
        mean = tl.sum(gradient * normed, 0) / width
        result = inverse * (gradient - mean * normed) + added
        tl.store(total + places, result.to(total.dtype.element_ty), mask=inside)
        if rounded is not None:
            tl.store(rounded + places, result.to(rounded.dtype.element_ty), mask=inside)
    tl.store(by_weight + tl.program_id(0) * width + columns, weight_sum, mask=inside)


def gate_backward(both: Tensor, by_gated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient by both, and the gated numbers, silu(first half) * second half.

    The results take the memory of the arguments, which are contiguous.
    both: (n, 2 F). by_gated: (n, F), the gradient by the gated numbers.
    """
    rows, width = by_gated.shape
    grid = (rows * triton.cdiv(width, _GATE_BLOCK),)
    gate_kernel[grid](both, by_gated, width, BLOCK=_GATE_BLOCK)
    return both, by_gated


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    by_normed: Tensor,
    by_x: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient by x, the same in dtype, and the gradient by the weight, (H,) float32.

    x: (n, H). weight: (H,). by_normed: (n, H), the gradient by the norm of x, contiguous.
    by_x: (n, H), another gradient by x, which is added.
    """
    x = x.contiguous()
    rows, width = x.shape
    programs = min(rows, _NORM_PROGRAMS)
    block = triton.next_power_of_2(width)
    total = torch.empty_like(x)
    rounded = None if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    by_weight = torch.empty(programs, width, device=x.device)
    rms_norm_kernel[(programs,)](
        x,
        weight,
        by_normed,
        by_x.contiguous(),
        total,
        rounded,
        by_weight,
        rows,
        width,
        epsilon,
        BLOCK=block,
        num_warps=warps_of_norm(block),
    )
    return total, total if rounded is None else rounded, by_weight.sum(0)
