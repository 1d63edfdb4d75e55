"""A fixed order for backward passes of PyTorch that on a GPU would add up in another order each
time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import deterministic as _deterministic

deterministic: Any = _deterministic  # a module with a property, which its type does not have

_on = False
_before: list[tuple[bool, bool, bool]] = []
"""PyTorch's settings as they were when a backward pass in a fixed order began."""


def switch(on: bool) -> None:
    """Switch `in_fixed_order` on or off for the models of this process."""
    global _on
    _on = on


def is_on() -> bool:
    """Return whether `in_fixed_order` is switched on."""
    return _on


def in_fixed_order(out: Tensor, operation: str = "") -> Tensor:
    """Make the backward pass of `out`, of attention or an embedding, add up in the same order each
    time; return `out`.

    Flash attention adds the gradients that a query gets from blocks of 128 keys by atomic sums.
    PyTorch 2.11 does so, too, with those of an embedding of few rows and more than 3072 tokens
    (https://github.com/pytorch/pytorch/pull/172454). PyTorch's strict mode has a fixed order for
    both. It is on for these operations alone, since others raise in it, such as a floating-point
    cumsum in a user's loss.

    operation: part of the name of the operation's node, if other nodes may have made `out` of its
        result.
    """
    node = out.grad_fn if _on else None
    while node is not None and operation not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.register_prehook(_begin)
        node.register_hook(_end)
    return out


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], whose backward pass adds up the gradients of a row `in_fixed_order`, in
    float32 at least.

    x: (rows, ...). index: (n,) int64, which may name a row several times.
    """
    return in_fixed_order(_Rows.apply(x, index))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = wide.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_add_(0, index, wide)
        return total.to(gradient.dtype), None


def switch_on(model: nn.Module) -> None:
    """Make the embeddings of a model compute `in_fixed_order`."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_embedding_in_fixed_order)


def _embedding_in_fixed_order(
    _module: nn.Module, _inputs: tuple[Tensor, ...], out: Tensor
) -> Tensor:
    return in_fixed_order(out, "EmbeddingBackward")


def _begin(_gradients: tuple[Tensor, ...]) -> None:
    strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    _before.append((strict, only_warns, deterministic.fill_uninitialized_memory))
    torch.use_deterministic_algorithms(True)
    # Filling memory takes time, and finds nothing but mistakes in kernels.
    deterministic.fill_uninitialized_memory = False


def _end(_inputs: tuple[Tensor, ...], _outputs: tuple[Tensor, ...]) -> None:
    strict, only_warns, fills_memory = _before.pop()
    deterministic.fill_uninitialized_memory = fills_memory
    torch.use_deterministic_algorithms(strict, warn_only=only_warns)
