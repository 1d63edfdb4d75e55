"""Matrix products of half-precision operands with a float32 result.

On a GPU they need no float32 copies of the operands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_PER_BLOCK = 4096
"""Rows of an operand that are copied to float32 at once where the device has no mixed product."""
_MOST_COLUMNS_AT_ONCE = 2048
"""Columns of a product that is added to float32 totals in one call; more are divided into halves.

Of 3584 columns and more cuBLAS picks a kernel that waits longer for the totals (H100, 1984 rows,
151936 x 3584: 3.86 ms at once, 3.26 ms in halves). For halves of few columns it picks one that is
slower by far (151936 x 896: 0.99 ms at once, 1.97 ms in halves)."""


def accumulation_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype for sums over values of this dtype: float64 for float64, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Set out = a @ b, for a (M, K) and b (K, N), and return it.

    out may be float32 where a and b are half precision.
    """
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    for low in range(0, b.shape[1], _ROWS_PER_BLOCK):
        columns = slice(low, low + _ROWS_PER_BLOCK)
        out[:, columns] = a.to(out.dtype) @ b[:, columns].to(out.dtype)
    return out


def accumulate_matmul(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Add alpha (a @ b) to total in place, and return it.

    total may be float32 where a and b are half precision.
    """
    if total.dtype == a.dtype:
        return total.addmm_(a, b, alpha=alpha)
    if a.device.type == "cuda":
        num_columns = b.shape[1]
        parts = [slice(None)]
        if num_columns > _MOST_COLUMNS_AT_ONCE:
            half = num_columns // 128 * 64
            parts = [slice(0, half), slice(half, None)]
        for columns in parts:
            part = total[:, columns]
            torch.addmm(part, a, b[:, columns], out_dtype=total.dtype, alpha=alpha, out=part)
        return total
    for low in range(0, a.shape[0], _ROWS_PER_BLOCK):
        rows = slice(low, low + _ROWS_PER_BLOCK)
        total[rows].addmm_(a[rows].to(total.dtype), b.to(total.dtype), alpha=alpha)
    return total


class ParallelProduct:
    """The product a @ b on another stream, parallel to all that is launched before `result`.

    The tiles of a product rarely fill the GPU's last wave; the tiles of the next product then fill
    it. a and b may not be written before `result` is called.
    """

    def __init__(self, a: Tensor, b: Tensor):
        self._stream = None
        if not a.is_cuda:
            self._product = a @ b
            return
        self._product = a.new_empty(a.shape[0], b.shape[1])
        self._stream = _side_stream(a.device)
        self._stream.wait_stream(torch.cuda.current_stream(a.device))
        with torch.cuda.stream(self._stream):
            torch.mm(a, b, out=self._product)

    def result(self) -> Tensor:
        """Return the product; the current stream waits for it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._product.device).wait_stream(self._stream)
        return self._product


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # All calls share it, since cuBLAS keeps a workspace for each stream that it has seen.
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class LMHead:
    """An LM head, hidden @ weight.T + bias.

    The fields are arguments of `pgtoolkit.linear_policy_loss`, but for:
    reference: hidden states (T, H') and head of the reference, for a full KL.
    """

    weight: Tensor
    bias: Tensor | None = None
    weight_gradient: Tensor | None = None
    fp32_logits: bool = False
    reference: tuple[Tensor, LMHead] | None = None


class Projection:
    """Computes hidden (T, H) @ weight (V, H).T + bias for a few rows at a time, in one buffer.

    There is no gradient. A float32 weight is cast to the dtype of half-precision hidden states.
    """

    def __init__(self, hidden: Tensor, head: LMHead):
        self.hidden = hidden.detach()
        self.weight = head.weight.detach().to(hidden.dtype)
        self.dtype = accumulation_dtype(hidden) if head.fp32_logits else hidden.dtype
        self.bias = None if head.bias is None else head.bias.detach().to(self.dtype)

    def make_buffer(self, rows: int) -> None:
        self._buffer = self.hidden.new_empty(rows, len(self.weight), dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (N, V) of hidden (N, H), in the buffer's memory."""
        logits = matmul(hidden, self.weight.T, out=self._buffer[: len(hidden)])
        return logits if self.bias is None else logits.add_(self.bias)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, fp32: bool) -> Tensor:
    """Return the logits (T, V) of hidden (T, H), all at once, differentiable.

    fp32: return float32 logits of half-precision operands.
    The product takes weight in hidden's dtype; its gradient is added up in float32 and rounded to
    weight's dtype once.
    """
    wide = fp32 and hidden.dtype not in (torch.float32, torch.float64)
    if weight.dtype == hidden.dtype and not wide:
        logits = hidden @ weight.T
    else:
        logits = _MixedLinear.apply(hidden, weight, torch.float32 if wide else hidden.dtype)
    return logits if bias is None else logits + bias.to(logits.dtype)


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return matmul(
            hidden,
            weight.to(hidden.dtype).T,
            hidden.new_empty(len(hidden), len(weight), dtype=dtype),
        )

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        weight_gradient = None
        if ctx.needs_input_grad[1]:  # a frozen head needs none
            wide = torch.promote_types(hidden.dtype, torch.float32)
            total = hidden.new_zeros(weight.shape, dtype=wide)
            accumulate_matmul(total, gradient.T, hidden, 1.0)
            weight_gradient = total.to(weight.dtype)
        return gradient @ weight.to(hidden.dtype), weight_gradient, None
