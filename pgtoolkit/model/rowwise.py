"""Functions of rows as compiled code: norms, gates, rotary positions.

Each is compiled by torch.compile once for any number of rows, and shared by all layers, and all
models, of equal sizes and number types.
"""

from __future__ import annotations

import functools
import logging
import re
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
from torch import Tensor

from pgtoolkit.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch._inductor.output_code import OutputCode

log = logging.getLogger("pgtoolkit")

_ROWS = 2048
"""Rows that code is compiled for, whichever come first, so that a resumed run computes the same."""

_MOST_NUMBERS = 2**31
"""From so many on an input needs other code, with wider numbers of places."""

_seconds = [0.0]
"""What compiling took since it was last told."""


def tell() -> None:
    """Log what compiling took since this was called last, if anything was compiled."""
    if _seconds[0]:
        log.info(
            f"compiling the body took {_seconds[0]:.1f} s; what was compiled is kept for later runs"
        )
        _seconds[0] = 0.0


class Rowwise:
    """A function of tensors (n, ...), each row of whose results depends on that row of each tensor,
    and on a weight.

    The results do not depend on whether a gradient is wanted. The backward pass computes the
    function again from its inputs, of which alone it keeps something, in one piece of code with the
    derivative.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        self._compiled: dict[tuple, _Code] = {}

    def __call__(self, *rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the function gives of the rows and, last, of the weight (...), of which it sees (n,
        ...)."""
        if len(rows[0]) == 1:  # for which other code would be compiled
            return tuple(x[:1] for x in self(*(torch.cat([x, x]) for x in rows), weight=weight))
        # its gradient is then a sum of PyTorch's own, whatever was compiled for how many rows
        if weight is not None:
            rows = *rows, weight.expand(len(rows[0]), *weight.shape)
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(rows[0].device.type):
            return self.values(*rows)  # as one by one while completions are sampled
        with torch.autocast(rows[0].device.type, enabled=False):
            return _Call.apply(self, *rows)

    def values(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The same of two rows or more, without a derivative of autograd's; a weight is given as
        rows."""
        return self.run(
            self.function,
            [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs],
        )

    def derivative(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], needed: tuple[bool, ...]
    ) -> tuple[Tensor, ...]:
        """The gradients of those inputs that are needed, in their order, from those of all
        results."""
        function = self.function

        def derivative(*given: Tensor) -> tuple[Tensor, ...]:
            inputs = given[: len(needed)]

            def of_needed(*chosen: Tensor) -> tuple[Tensor, ...]:
                rest = list(chosen)
                return function(
                    *(
                        rest.pop(0) if wanted else x
                        for x, wanted in zip(inputs, needed, strict=True)
                    )
                )

            chosen = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
            return torch.func.vjp(of_needed, *chosen)[1](given[len(needed) :])

        inputs = [x if x.stride(0) == 0 else x.contiguous() for x in inputs]
        return self.run(derivative, [*inputs, *(x.contiguous() for x in gradients)], needed)

    def run(
        self, function: Callable, inputs: list[Tensor], needed: tuple[bool, ...] = ()
    ) -> tuple[Tensor, ...]:
        """The function, or its derivative by those inputs that are needed, by compiled code.

        That is made by the first call with inputs of this kind.
        """
        key = (needed, *((x.device, x.dtype, x.shape[1:], x.stride(0) == 0) for x in inputs))
        if key not in self._compiled:
            from torch._dynamo.exc import TorchDynamoException  # not above: it takes seconds

            start = time.perf_counter()
            try:
                self._compiled[key] = _compile(function, [_rows_like(x) for x in inputs])
            except TorchDynamoException as error:
                raise ConfigError(
                    "model.compile=auto or true needs a machine on which torch.compile works (got "
                    f"{first_line(error)}). Norms, gates and rotary positions are compiled. Use "
                    "model.compile=false."
                ) from error
            _seconds[0] += time.perf_counter() - start
        return self._compiled[key](*inputs)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rowwise: Rowwise, *inputs: Tensor) -> tuple[Tensor, ...]:
        detached = [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs]
        ctx.rowwise, ctx.needed = rowwise, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*detached)
        return rowwise.run(rowwise.function, detached)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Compiled here and not ahead: checkpointing's hooks, which torch.func does not take, are at
        #   work in forward.
        found = iter(ctx.rowwise.derivative(ctx.saved_tensors, gradients, ctx.needed))
        return None, *(next(found) if wanted else None for wanted in ctx.needed)


@dataclass(frozen=True)
class _Code:
    """Compiled code of tensors with any number of rows.

    checked: by torch.compile, whose checks take the host ten times as long as launching what they
        lead to. direct: the
    same code, given the number of rows and the tensors in this order, for inputs of a kind that has
    been checked; None where it is not known how it is called.
    """

    checked: Callable
    direct: Callable | None
    order: tuple[int, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.direct is None or any(x.numel() >= _MOST_NUMBERS for x in inputs):
            return self.checked(*map(_of_any_number, inputs))
        return tuple(self.direct([len(inputs[0]), *(inputs[place] for place in self.order)]))


def _compile(function: Callable, like: list[Tensor]) -> _Code:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)

    codes, order = [], []

    def keep(graph: torch.fx.GraphModule, inputs: list, **options) -> OutputCode:
        codes.append(compile_fx_inner(graph, inputs, **options))
        return codes[-1]

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            order.extend(int(place) for place in re.findall(r"^l_inputs_(\d+)_$", node.name))
        # Kernels are chosen by rule, not by a stopwatch: a resumed run computes the same.
        how = {"deterministic": True, "compile_threads": 1}
        return compile_fx(graph, inputs, inner_compile=keep, config_patches=how)

    # A code object of its own: torch.compile would take what it compiles for other sizes for the
    #   same function.
    call = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    checked = torch.compile(call, fullgraph=True, dynamic=False, backend=backend)
    # AOTAutograd's cache would give code that `keep` does not see; Inductor's, behind it, is on.
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        checked(*like)
        if len(codes) != 1 or sorted(order) != [*range(len(like))]:
            return _Code(checked, None)
        code = _Code(checked, getattr(codes[0], "current_callable", None), tuple(order))
        return code if _computes_the_same(code, like) else _Code(checked, None)


def _computes_the_same(code: _Code, like: list[Tensor]) -> bool:
    """Whether a direct call gives what a checked one does, of inputs none of which can stand for
    another unnoticed."""
    rows = [
        torch.linspace(-1, 1 + i, x[:1].numel(), device=x.device).view_as(x[:1])
        for i, x in enumerate(like)
    ]
    inputs = [_with_rows(row.to(x.dtype), x, 5) for row, x in zip(rows, like, strict=True)]
    expected = code.checked(*map(_of_any_number, inputs))
    found = code(*inputs)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _rows_like(x: Tensor) -> Tensor:
    return _of_any_number(_with_rows(x.new_zeros(1, *x.shape[1:]), x, _ROWS))


def _with_rows(row: Tensor, x: Tensor, count: int) -> Tensor:
    """So many equal rows, which lie in memory as those of x do."""
    rows = row.expand(count, *x.shape[1:])
    return rows if x.stride(0) == 0 else rows.contiguous()


def _of_any_number(rows: Tensor) -> Tensor:
    """All other sizes are fixed. Also at later calls, of which one with 2^31 numbers has other code
    compiled."""
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


@functools.cache
def rms_norm(epsilon: float, dtype: torch.dtype, with_sum: bool) -> Rowwise:
    """Of one or several (n, H) and the weight: the norm of their sum in `dtype`, and with_sum also
    the sum."""

    def norm(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        *added, weight = more
        for other in added:
            x = x + other
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        out = (weight * wide.to(x.dtype)).to(dtype)
        return (out, x) if with_sum else (out,)

    return Rowwise(norm)


@functools.cache
def activation(name: str) -> Rowwise:
    """The activation of (n, F), times another where there are two."""
    from transformers.activations import ACT2FN

    function = ACT2FN[name]
    return Rowwise(lambda x, *factor: (function(x) * factor[0] if factor else function(x),))


@functools.cache
def gate(name: str) -> Rowwise:
    """The activation of the first half of the columns of (n, 2 F), times the second half."""
    from transformers.activations import ACT2FN

    function = ACT2FN[name]

    def gated(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.chunk(2, -1)
        return (function(first) * second,)

    return Rowwise(gated)


@functools.cache
def rotary(dtype: torch.dtype) -> Rowwise:
    """Of query and key (n, heads, width), cosines and sines (n, width): both turned, in `dtype`."""

    def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]).to(dtype)

    return Rowwise(lambda query, key, *turns: (turn(query, *turns), turn(key, *turns)))


@functools.cache
def turned_heads(queries: int, keys: int, epsilon: float | None, dtype: torch.dtype) -> Rowwise:
    """Query, key and value, (n, heads, width) each, from all of them side by side, as attention
    takes them in `dtype`.

    Of (n, queries + 2 keys, width), cosines and sines (n, width), and where each head of queries
    and keys has a norm by epsilon, the weights of both, (n, width).
    """

    def turned(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and epsilon is not None:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
            x = (weight[:, None] * wide.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))
        first, second = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]).to(dtype)

    def heads(x: Tensor, cosine: Tensor, sine: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        query, key, value = x.split((queries, keys, keys), 1)
        of_query, of_key = weights or (None, None)
        return (
            turned(query, cosine, sine, of_query),
            turned(key, cosine, sine, of_key),
            value.to(dtype).contiguous(),
        )

    return Rowwise(heads)


def type_of_products(*inputs: Tensor) -> torch.dtype:
    """What a matrix product takes: autocast's type, or without it that which they come to."""
    kind = inputs[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return functools.reduce(torch.promote_types, (x.dtype for x in inputs))
