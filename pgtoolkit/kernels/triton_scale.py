"""The Triton kernels that multiply by numbers on the device: each row by its number, or a tensor.

`triton_passes` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_rows_kernel(source, factors, target, rows, num_columns, BLOCK: tl.constexpr):
    """Set target[rows[i]] = factors[i] * source[i], with a program for each row."""
    i = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + i)
    to = tl.load(rows + i)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(
            source + i * num_columns + columns, mask=columns < num_columns, other=0.0
        ).to(tl.float32)
        tl.store(
            target + to * num_columns + columns,
            (factor * values).to(target.dtype.element_ty),
            mask=columns < num_columns,
        )


@triton.jit
def scale_kernel(values, factor, num_values, BLOCK: tl.constexpr):
    """Multiply values by a factor on the device, with any number of programs.

    Where the factor is 1, nothing is read or written.
    """
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        for block in range(tl.program_id(0), tl.cdiv(num_values, BLOCK), tl.num_programs(0)):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = index < num_values
            scaled = tl.load(values + index, mask=inside).to(tl.float32) * by
            tl.store(values + index, scaled.to(values.dtype.element_ty), mask=inside)
