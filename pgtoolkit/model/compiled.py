"""The body's operations between matrix products as compiled code: norms, activations and gates, rotary positions.

Each is a function of rows, compiled by torch.compile once for any number of rows, and shared by all layers, and all
models, of equal sizes and number types. Products, attention and what spreads them over ranks stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.architectures import architecture_of

log = logging.getLogger("pgtoolkit")

_ROWS = 2048
"""Rows that code is compiled for, whichever come first, so that a resumed run computes the same."""

_seconds = [0.0]
"""What compiling took since it was last told."""


def switch_on(model: nn.Module) -> None:
    """Make a transformers model of a known type compute so, in place; copies of it do so, too."""
    parts = architecture_of(model)
    _replace(getattr(model.base_model, parts.final_norm), _norm)
    for layer in parts.layers_of(model):
        named = dict(layer.named_modules())
        for name in parts.norms:
            _replace(named[name], _norm)
        for name in set(parts.head_norms) & set(named):
            _replace(named[name], _head_norm)
        if parts.positions is None:
            _replace(named[parts.attention], _with_rotary(type(named[parts.attention])))
            _replace(layer.mlp, _gated_mlp)
        else:
            layer.mlp.act.forward = functools.partial(_activated, model.config.activation_function)


def _replace(module: nn.Module, forward: Callable) -> None:
    if not isinstance(module, nn.LayerNorm):  # which is one kernel already
        module.forward = types.MethodType(forward, module)


def tell() -> None:
    """Log what compiling took since this was called last, if anything was compiled."""
    if _seconds[0]:
        log.info(f"compiling the body took {_seconds[0]:.1f} s; what was compiled is kept for later runs")
        _seconds[0] = 0.0


class Rowwise:
    """A function of tensors (n, ...), each row of whose results depends on the same row of each tensor, and on weights.

    The results do not depend on whether a gradient is wanted. The backward pass computes the function again from its
    inputs, of which alone it keeps something, in one piece of code with the derivative.
    """

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]):
        self._function = function
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *rows: Tensor, weights: tuple[Tensor, ...] = ()) -> Tensor | tuple[Tensor, ...]:
        """What the function gives of rows and weights; weights: (...), of which it sees (n, ...)."""
        if (count := len(rows[0])) == 1:  # for which other code would be compiled
            found = self(*(torch.cat([x, x]) for x in rows), weights=weights)
            return found[:1] if isinstance(found, Tensor) else tuple(x[:1] for x in found)
        # Thereby the gradient of a weight is a sum of PyTorch's own, whatever code was compiled for how many rows.
        inputs = *rows, *(x.expand(count, *x.shape) for x in weights)
        with torch.autocast(rows[0].device.type, enabled=False):
            return _Call.apply(self, *inputs)

    def forward(self, inputs: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        return self._run(self._function, (), inputs)

    def backward(self, inputs: list[Tensor], gradients: list[Tensor], needed: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """From the gradients of the results those of the inputs that need one."""

        def derivative(*given: Tensor) -> tuple[Tensor, ...]:
            given, gradients = given[: len(needed)], given[len(needed) :]

            def of_needed(*chosen: Tensor) -> tuple[Tensor, ...]:
                rest = list(chosen)
                found = self._function(*(rest.pop(0) if wanted else x for x, wanted in zip(given, needed, strict=True)))
                return (found,) if isinstance(found, Tensor) else found

            chosen = [x for x, wanted in zip(given, needed, strict=True) if wanted]
            return torch.func.vjp(of_needed, *chosen)[1](gradients)

        return self._run(derivative, needed, [*inputs, *gradients])

    def _run(self, function: Callable, which: tuple, inputs: list[Tensor]):
        """The function by its compiled code, which the first call with inputs of this kind makes."""
        key = (which, *((x.device, x.dtype, x.shape[1:], x.stride(0) == 0) for x in inputs))
        if key not in self._compiled:
            start = time.perf_counter()
            try:
                self._compiled[key] = _compile(function, [_rows_like(x) for x in inputs])
            except torch._dynamo.exc.TorchDynamoException as error:
                raise ConfigError(
                    "model.compile=auto or true needs a machine on which torch.compile works (got "
                    f"{first_line(error)}). Norms, gates and rotary positions are compiled. Use model.compile=false."
                ) from error
            _seconds[0] += time.perf_counter() - start
        return self._compiled[key](*map(_with_any_rows, inputs))


def _compile(function: Callable, like: list[Tensor]) -> Callable:
    def call(*inputs: Tensor):
        return function(*inputs)

    # A code object of its own: torch.compile would take what it compiles for other sizes for the same function.
    call = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    # Kernels are chosen by rule, not by a stopwatch: a resumed run computes the same.
    how = {"deterministic": True, "compile_threads": 1}
    compiled = torch.compile(call, fullgraph=True, dynamic=False, options=how)  # but for `_with_any_rows`
    with torch.no_grad():
        compiled(*like)
    return compiled


def _rows_like(x: Tensor) -> Tensor:
    shape = (_ROWS, *x.shape[1:])
    return _with_any_rows(x.new_zeros(x.shape[1:]).expand(shape) if x.stride(0) == 0 else x.new_zeros(shape))


def _with_any_rows(x: Tensor) -> Tensor:
    """Not only where code is compiled: a call that needs other code all the same, such as one with more than 2^31
    numbers, has it compiled for any number of rows as well."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rowwise: Rowwise, *inputs: Tensor):
        inputs = [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs]
        ctx.rowwise, ctx.needed = rowwise, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*inputs)
        return rowwise.forward(inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        found = ctx.rowwise.backward(list(ctx.saved_tensors), [x.contiguous() for x in gradients], ctx.needed)
        rest = iter(found)
        return None, *(next(rest) if wanted else None for wanted in ctx.needed)


def _compute_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would make of it in a product; None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    """As the module; under autocast in the type that the matrices behind it take, once and not for each of them."""
    return _normalized(module, hidden, _compute_dtype(hidden) or torch.promote_types(hidden.dtype, module.weight.dtype))


def _head_norm(module: nn.Module, heads: Tensor) -> Tensor:
    return _normalized(module, heads, torch.promote_types(heads.dtype, module.weight.dtype))


def _normalized(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    found = _rms_norm(module.variance_epsilon, dtype)(x.reshape(-1, x.shape[-1]), weights=(module.weight,))
    return found.view(x.shape)


@functools.cache
def _rms_norm(epsilon: float, dtype: torch.dtype) -> Rowwise:
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return (weight * wide.to(x.dtype)).to(dtype)

    return Rowwise(rms_norm)


def _gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    inner = _gate(mlp.config.hidden_act)(*(part.flatten(end_dim=-2) for part in (gate, up)))
    return mlp.down_proj(inner.view(up.shape))


@functools.cache
def _gate(name: str) -> Rowwise:
    from transformers.activations import ACT2FN

    activation = ACT2FN[name]
    return Rowwise(lambda gate, up: activation(gate) * up)


def _activated(name: str, x: Tensor) -> Tensor:
    return _activation(name)(x.flatten(end_dim=-2)).view(x.shape)


@functools.cache
def _activation(name: str) -> Rowwise:
    from transformers.activations import ACT2FN

    return Rowwise(ACT2FN[name])


@functools.cache
def _with_rotary(attention: type[nn.Module]) -> Callable:
    """The forward method of transformers, in which `apply_rotary_pos_emb` is that of this file."""
    forward = inspect.unwrap(attention.forward)
    if "apply_rotary_pos_emb" not in forward.__code__.co_names:
        raise RuntimeError(f"{attention.__name__} of this version of transformers turns its queries in another way")
    names = forward.__globals__ | {"apply_rotary_pos_emb": _turned}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _turned(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key, (B, heads, S, width), in the type that attention takes; cosine, sine: (B or 1, S, width)."""
    size, _, length, width = query.shape
    dtype = _compute_dtype(query) or torch.promote_types(query.dtype, cosine.dtype)
    heads = [x.transpose(1, 2).reshape(size * length, -1, width) for x in (query, key)]
    turns = [x.expand(size, length, width).reshape(size * length, width) for x in (cosine, sine)]
    found = _rotary(dtype)(*heads, *turns)
    return tuple(x.view(size, length, -1, width).transpose(1, 2) for x in found)


@functools.cache
def _rotary(dtype: torch.dtype) -> Rowwise:
    def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]).to(dtype)

    def rotary(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        return turned(query, cosine, sine), turned(key, cosine, sine)

    return Rowwise(rotary)
