"""Attention that is computed once for a layer whose backward pass makes queries, keys and values
again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks


class KeptAttention:
    """The outputs of attention's kernels, and what their backward passes need beside them, but
    without queries, keys and values, which are larger.

    A first pass, without a graph of autograd, fills it. A second pass calls the same kernels in the
    same order with the same numbers. It gets the outputs of the first, and can be differentiated.
    """

    def __init__(self):
        self._calls: deque[_Call] = deque()
        self._is_full = False

    def fill(self) -> None:
        """End the first pass."""
        self._is_full = True

    def __call__(self, kernel: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the output of the kernel for query, key and value."""
        if self._is_full:
            return _SecondPass.apply(self._calls.popleft(), *inputs)
        call = _Call(kernel, *inputs)
        self._calls.append(call)
        return call.out.detach()


class _Call:
    """A call of a kernel in the first pass. out: with its graph of autograd, which begins at
    `edges`, one for each input."""

    def __init__(self, kernel: Callable[..., Tensor], *inputs: Tensor):
        # The graph holds this list and not this object: else it would hold itself.
        made_again: list[Tensor] = []
        places = [x.untyped_storage().data_ptr() for x in inputs]

        def pack(x: Tensor) -> Tensor | tuple:
            place = x.untyped_storage().data_ptr()
            if place not in places:
                return x
            return places.index(place), x.shape, x.stride(), x.storage_offset()

        def unpack(packed: Tensor | tuple) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            number, *layout = packed
            return made_again[number].as_strided(*layout)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            # A leaf of the graph would be held by it, but not the result of an operation.
            started = _Start.apply(torch.empty(0, requires_grad=True), *inputs)
            self.edges = [get_gradient_edge(x) for x in started]
            self.out = kernel(*started)
        self._made_again = made_again

    def gradients(self, inputs: tuple[Tensor, ...], by_out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients by the inputs, which were made again, given that by the output."""
        self._made_again[:] = inputs
        try:
            return torch.autograd.grad(self.out, self.edges, by_out)
        finally:
            self._made_again.clear()


class _Start(torch.autograd.Function):
    """The tensors themselves, as results of an operation. leaf: makes autograd record it."""

    @staticmethod
    def forward(ctx, leaf: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)


class _SecondPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *inputs: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call.out.detach()

    @staticmethod
    def backward(ctx, by_out: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.gradients(ctx.saved_tensors, by_out)
