"""Functions of rows as compiled code: norms, gates, rotary positions.

Each is compiled by torch.compile once for any number of rows, and shared by all layers and models
of equal sizes and number types.

Axes: n rows, H hidden size, F width of the MLP.
"""

from __future__ import annotations

import functools
import logging
import re
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch._functorch.config
from torch import Tensor

from pgtoolkit.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch._inductor.output_code import OutputCode

log = logging.getLogger("pgtoolkit")

_ROWS = 2048
"""Rows that code is compiled for, whatever inputs come first, so that a resumed run computes the
same."""

_MAX_NUMBERS = 2**31
"""An input of this many numbers or more needs other code, with wider offsets."""

_seconds = [0.0]
"""Seconds that compiling took since the last message about it."""


def tell() -> None:
    """Log the time that compiling took since the last call, if anything was compiled."""
    if _seconds[0]:
        log.info(
            f"compiling the body took {_seconds[0]:.1f} s; what was compiled is kept for later runs"
        )
        _seconds[0] = 0.0


class Rowwise:
    """A function of tensors (n, ...) and a weight, as compiled code. Each row of its results
    depends on the same row of each tensor, and on the weight.

    The results do not depend on whether a gradient is wanted. The backward pass keeps nothing but
    the inputs, and computes the function again in one piece of code with the derivative.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        self._compiled: dict[tuple, _Code] = {}

    def __call__(self, *rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the function's results for the rows and, as its last argument, the weight.

        The weight (...) is expanded to (n, ...).
        """
        if len(rows[0]) == 1:  # two equal rows, since other code would be compiled for one
            return tuple(x[:1] for x in self(*(torch.cat([x, x]) for x in rows), weight=weight))
        # The gradient of an expanded weight is a sum by PyTorch, and does not depend on the code
        # that was compiled.
        if weight is not None:
            rows = (*rows, weight.expand(len(rows[0]), *weight.shape))
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(rows[0].device.type):
            return self.values(*rows)  # while completions are sampled, token by token
        with torch.autocast(rows[0].device.type, enabled=False):
            return _Call.apply(self, *rows)

    def values(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the function's results for two rows or more, without a graph of autograd; a weight
        is passed as rows."""
        return self.run(
            self.function,
            [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs],
        )

    def derivative(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], needed: tuple[bool, ...]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of those inputs that need one, in their order.

        gradients: of all results. needed: for each input whether its gradient is needed.
        """
        function = self.function

        def derivative(*inputs_and_gradients: Tensor) -> tuple[Tensor, ...]:
            inputs = inputs_and_gradients[: len(needed)]

            def of_needed(*chosen: Tensor) -> tuple[Tensor, ...]:
                rest = list(chosen)
                return function(
                    *(
                        rest.pop(0) if wanted else x
                        for x, wanted in zip(inputs, needed, strict=True)
                    )
                )

            chosen = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
            return torch.func.vjp(of_needed, *chosen)[1](inputs_and_gradients[len(needed) :])

        inputs = [x if x.stride(0) == 0 else x.contiguous() for x in inputs]
        return self.run(derivative, [*inputs, *(x.contiguous() for x in gradients)], needed)

    def run(
        self, function: Callable, inputs: list[Tensor], needed: tuple[bool, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Call the function, or its derivative by those inputs that are needed, as compiled code.

        The first call with inputs of this kind compiles it.
        """
        key = (needed, *((x.device, x.dtype, x.shape[1:], x.stride(0) == 0) for x in inputs))
        if key not in self._compiled:
            from torch._dynamo.exc import TorchDynamoException  # here, since it takes seconds

            start = time.perf_counter()
            try:
                self._compiled[key] = _compile(function, [_rows_like(x) for x in inputs])
            except TorchDynamoException as error:
                raise ConfigError(
                    "model.compile needs a machine on which torch.compile works (got "
                    f"{first_line(error)}). Norms, gates and rotary positions are compiled. Use "
                    "model.compile=false."
                ) from error
            _seconds[0] += time.perf_counter() - start
        return self._compiled[key](*inputs)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rowwise: Rowwise, *inputs: Tensor) -> tuple[Tensor, ...]:
        detached = [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs]
        ctx.rowwise = rowwise
        ctx.needed = ctx.needs_input_grad[1:]
        ctx.save_for_backward(*detached)
        return rowwise.run(rowwise.function, detached)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The derivative is compiled here and not in forward, where hooks of checkpointing are
        # active, which torch.func does not allow.
        results = iter(ctx.rowwise.derivative(ctx.saved_tensors, gradients, ctx.needed))
        return None, *(next(results) if wanted else None for wanted in ctx.needed)


@dataclass(frozen=True)
class _Code:
    """Compiled code for tensors with any number of rows.

    checked: the function of torch.compile, whose checks take the host ten times as long as
        launching the code.
    direct: the same code without checks, called with the number of rows and the tensors in this
        order, for inputs of a kind that has been checked; None where its arguments are not known.
    """

    checked: Callable
    direct: Callable | None
    order: tuple[int, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.direct is None or any(x.numel() >= _MAX_NUMBERS for x in inputs):
            return self.checked(*map(_of_any_number, inputs))
        return tuple(self.direct([len(inputs[0]), *(inputs[place] for place in self.order)]))


def _compile(function: Callable, like: list[Tensor]) -> _Code:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)

    codes: list[OutputCode] = []
    order: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def keep(graph: torch.fx.GraphModule, inputs: list, **options) -> OutputCode:
            codes.append(compile_fx_inner(graph, inputs, **options))
            return codes[-1]

        # The names of placeholders are made of that of call's parameter, `inputs`.
        for node in graph.graph.find_nodes(op="placeholder"):
            order.extend(int(place) for place in re.findall(r"^l_inputs_(\d+)_$", node.name))
        # Kernels are chosen by rule and not by timing, so that a resumed run computes the same.
        settings = {"deterministic": True, "compile_threads": 1}
        return compile_fx(graph, inputs, inner_compile=keep, config_patches=settings)

    # Each function gets a code object of its own, since torch.compile tells functions apart by it.
    call = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    checked = torch.compile(call, fullgraph=True, dynamic=False, backend=backend)
    # AOTAutograd's cache would return code without calling `keep`. Inductor's cache, behind it, is
    # on.
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        checked(*like)
        if len(codes) != 1 or sorted(order) != [*range(len(like))]:
            return _Code(checked, None)
        code = _Code(checked, getattr(codes[0], "current_callable", None), tuple(order))
        return code if _computes_the_same(code, like) else _Code(checked, None)


def _computes_the_same(code: _Code, like: list[Tensor]) -> bool:
    """Return whether a direct call returns the same as a checked one.

    All inputs differ, so that inputs in another order would be noticed.
    """
    rows = [
        torch.linspace(-1, 1 + i, x[:1].numel(), device=x.device).view_as(x[:1])
        for i, x in enumerate(like)
    ]
    inputs = [_with_rows(row.to(x.dtype), x, 5) for row, x in zip(rows, like, strict=True)]
    expected = code.checked(*map(_of_any_number, inputs))
    results = code(*inputs)
    return len(results) == len(expected) and all(map(torch.equal, results, expected))


def _rows_like(x: Tensor) -> Tensor:
    return _of_any_number(_with_rows(x.new_zeros(1, *x.shape[1:]), x, _ROWS))


def _with_rows(row: Tensor, x: Tensor, count: int) -> Tensor:
    """Return `count` equal rows, laid out in memory as those of x are."""
    rows = row.expand(count, *x.shape[1:])
    return rows if x.stride(0) == 0 else rows.contiguous()


def _of_any_number(rows: Tensor) -> Tensor:
    """Mark the number of rows as the only size that may vary, and return the rows.

    Later calls do so, too: one with 2^31 numbers has other code compiled.
    """
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


@functools.cache
def rms_norm(epsilon: float, dtype: torch.dtype, with_sum: bool, around_one: bool) -> Rowwise:
    """Return a function of one or several tensors (n, H) and the weight: the norm of their sum in
    `dtype`, and with_sum also the sum.

    around_one: whether 1 + weight is the factor, which is then applied before rounding.
    """

    def norm(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        *added, weight = more
        for other in added:
            x = x + other
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        if around_one:
            out = (wide * (1.0 + weight.float())).to(x.dtype).to(dtype)
        else:
            out = (weight * wide.to(x.dtype)).to(dtype)
        return (out, x) if with_sum else (out,)

    return Rowwise(norm)


@functools.cache
def activation(name: str) -> Rowwise:
    """Return a function of (n, F): its activation, times a second tensor where there is one."""
    from transformers.activations import ACT2FN

    function = ACT2FN[name]
    return Rowwise(lambda x, *factor: (function(x) * factor[0] if factor else function(x),))


@functools.cache
def gate(name: str) -> Rowwise:
    """Return a function of (n, 2 F): the activation of its first half times its second half."""
    from transformers.activations import ACT2FN

    function = ACT2FN[name]

    def gated(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.chunk(2, -1)
        return (function(first) * second,)

    return Rowwise(gated)


@functools.cache
def rotary(dtype: torch.dtype) -> Rowwise:
    """Return a function of query and key (n, heads, width), cosines and sines (n, width): query and
    key turned, in `dtype`."""

    def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]).to(dtype)

    return Rowwise(lambda query, key, *turns: (turn(query, *turns), turn(key, *turns)))


@functools.cache
def turned_heads(queries: int, keys: int, epsilon: float | None, dtype: torch.dtype) -> Rowwise:
    """Return a function that gives query, key and value, (n, heads, width) each, as attention takes
    them in `dtype`.

    Its arguments are all heads side by side, (n, queries + 2 keys, width), cosines and sines
    (n, width), and where each head of queries and keys has a norm by epsilon, the weights of both
    norms, (n, width).
    queries, keys: numbers of heads.
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
        query_weight, key_weight = weights or (None, None)
        return (
            turned(query, cosine, sine, query_weight),
            turned(key, cosine, sine, key_weight),
            value.to(dtype).contiguous(),
        )

    return Rowwise(heads)


def type_of_products(*inputs: Tensor) -> torch.dtype:
    """Return the type that a matrix product of these inputs computes in: autocast's, or without it
    the one that they are promoted to."""
    device_type = inputs[0].device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return functools.reduce(torch.promote_types, (x.dtype for x in inputs))
