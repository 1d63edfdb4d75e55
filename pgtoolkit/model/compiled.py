"""What a layer computes between its products as compiled code: norms, gates, rotary positions, attention's sum.

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
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.architectures import Layer, architecture_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("pgtoolkit")

_ROWS = 2048
"""Rows that code is compiled for, whichever come first, so that a resumed run computes the same."""

_seconds = [0.0]
"""What compiling took since it was last told."""


def switch_on(model: PreTrainedModel) -> None:
    """Make a transformers model of a known type compute so, in place; copies of it do so, too."""
    parts = architecture_of(model)
    for layer in parts.layers_of(model):
        if parts.positions is not None:  # GPT-2, whose norms are one kernel each already
            layer.mlp.act.forward = functools.partial(_activated, model.config.activation_function)
            continue
        attention = layer.get_submodule(parts.attention)
        methods = {layer.mlp: _gated_mlp, attention: _with_rotary(type(attention))}
        for name, module in layer.named_modules():
            if name in parts.norms + parts.head_norms:
                methods[module] = _norm if name in parts.norms else _head_norm
        for module, method in methods.items():
            module.forward = types.MethodType(method, module)
        layer.__class__ = _with_sum(type(layer))
    if parts.positions is None:
        norm = getattr(model.base_model, parts.final_norm)
        norm.forward = types.MethodType(_norm, norm)


def tell() -> None:
    """Log what compiling took since this was called last, if anything was compiled."""
    if _seconds[0]:
        log.info(f"compiling the body took {_seconds[0]:.1f} s; what was compiled is kept for later runs")
        _seconds[0] = 0.0


class Rowwise:
    """A function of tensors (n, ...), each row of whose results depends on that row of each tensor, and on a weight.

    The results do not depend on whether a gradient is wanted. The backward pass computes the function again from its
    inputs, of which alone it keeps something, in one piece of code with the derivative.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the function gives of the rows and, last, of the weight (...), of which it sees (n, ...)."""
        if len(rows[0]) == 1:  # for which other code would be compiled
            return tuple(x[:1] for x in self(*(torch.cat([x, x]) for x in rows), weight=weight))
        if weight is not None:  # its gradient is then a sum of PyTorch's own, whatever was compiled for how many rows
            rows = *rows, weight.expand(len(rows[0]), *weight.shape)
        with torch.autocast(rows[0].device.type, enabled=False):
            return _Call.apply(self, *rows)

    def run(self, function: Callable, inputs: list[Tensor], needed: tuple[bool, ...] = ()) -> tuple[Tensor, ...]:
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
                    f"{first_line(error)}). Norms, gates and rotary positions are compiled. Use model.compile=false."
                ) from error
            _seconds[0] += time.perf_counter() - start
        return self._compiled[key](*map(_of_any_number, inputs))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rowwise: Rowwise, *inputs: Tensor) -> tuple[Tensor, ...]:
        detached = [x.detach() if x.stride(0) == 0 else x.detach().contiguous() for x in inputs]
        ctx.rowwise, ctx.needed = rowwise, ctx.needs_input_grad[1:]
        ctx.save_for_backward(*detached)
        return rowwise.run(rowwise.function, detached)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        function, needed = ctx.rowwise.function, ctx.needed

        def derivative(*given: Tensor) -> tuple[Tensor, ...]:
            inputs = given[: len(needed)]

            def of_needed(*chosen: Tensor) -> tuple[Tensor, ...]:
                rest = list(chosen)
                return function(*(rest.pop(0) if wanted else x for x, wanted in zip(inputs, needed, strict=True)))

            chosen = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
            return torch.func.vjp(of_needed, *chosen)[1](given[len(needed) :])

        # Compiled here and not ahead: checkpointing's hooks, which torch.func does not take, are at work in forward.
        inputs = [*ctx.saved_tensors, *(x.contiguous() for x in gradients)]
        found = iter(ctx.rowwise.run(derivative, inputs, needed))
        return None, *(next(found) if wanted else None for wanted in needed)


def _compile(function: Callable, like: list[Tensor]) -> Callable:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)

    # A code object of its own: torch.compile would take what it compiles for other sizes for the same function.
    call = types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
    # Kernels are chosen by rule, not by a stopwatch: a resumed run computes the same.
    how = {"deterministic": True, "compile_threads": 1}
    compiled = torch.compile(call, fullgraph=True, dynamic=False, options=how)
    with torch.no_grad():
        compiled(*like)
    return compiled


def _rows_like(x: Tensor) -> Tensor:
    row, size = x.new_zeros(x.shape[1:]), (_ROWS, *x.shape[1:])
    return _of_any_number(row.expand(size) if x.stride(0) == 0 else row.expand(size).contiguous())


def _of_any_number(rows: Tensor) -> Tensor:
    """All other sizes are fixed. Also at later calls, of which one with 2^31 numbers has other code compiled."""
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


@functools.cache
def _with_sum(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer whose first sum is one piece of code with the norm behind it.

    A class, since transformers checkpoints what the forward method of a layer's class computes.
    """
    parts = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
    if inspect.unwrap(layer.forward).__code__.co_names != parts:
        raise RuntimeError(f"{layer.__name__} of this version of transformers adds up in another way")
    return type(layer.__name__, (layer,), {"forward": _layer})


def _layer(layer: Layer, hidden_states: Tensor, **options) -> Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    norm = layer.post_attention_layernorm
    dtype = _type_of_products(hidden_states, attended, norm.weight)
    normalized, hidden_states = _normalized(norm, dtype, hidden_states, attended)
    return hidden_states + layer.mlp(normalized)


def _norm(norm: Layer, x: Tensor) -> Tensor:
    """In the type that the matrices behind it take, once and not for each of them."""
    return _normalized(norm, _type_of_products(x, norm.weight), x)[0]


def _head_norm(norm: Layer, x: Tensor) -> Tensor:
    return _normalized(norm, torch.promote_types(x.dtype, norm.weight.dtype), x)[0]


def _normalized(norm: Layer, dtype: torch.dtype, *added: Tensor) -> tuple[Tensor, ...]:
    """The norm of the sum of tensors (..., H), and the sum where there are several."""
    found = _rms_norm(norm.variance_epsilon, dtype)(*(x.flatten(end_dim=-2) for x in added), weight=norm.weight)
    return tuple(x.view(added[0].shape) for x in found)


@functools.cache
def _rms_norm(epsilon: float, dtype: torch.dtype) -> Rowwise:
    def rms_norm(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        *added, weight = more
        x = sum(added, x)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        normalized = (weight * wide.to(x.dtype)).to(dtype)
        return (normalized, x) if added else (normalized,)

    return Rowwise(rms_norm)


def _gated_mlp(mlp: Layer, x: Tensor) -> Tensor:
    return mlp.down_proj(_activated(mlp.config.hidden_act, mlp.gate_proj(x), mlp.up_proj(x)))


def _activated(name: str, x: Tensor, *factor: Tensor) -> Tensor:
    return _activation(name)(*(part.flatten(end_dim=-2) for part in (x, *factor)))[0].view(x.shape)


@functools.cache
def _activation(name: str) -> Rowwise:
    from transformers.activations import ACT2FN

    activation = ACT2FN[name]
    return Rowwise(lambda x, *factor: (activation(x) * factor[0] if factor else activation(x),))


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
    heads = [x.transpose(1, 2).reshape(size * length, -1, width) for x in (query, key)]
    turns = [x.expand(size, length, width).reshape(size * length, width) for x in (cosine, sine)]
    found = _rotary(_type_of_products(query, cosine))(*heads, *turns)
    turned_query, turned_key = (x.view(size, length, -1, width).transpose(1, 2) for x in found)
    return turned_query, turned_key


@functools.cache
def _rotary(dtype: torch.dtype) -> Rowwise:
    def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]).to(dtype)

    return Rowwise(lambda query, key, *turns: (turned(query, *turns), turned(key, *turns)))


def _type_of_products(*inputs: Tensor) -> torch.dtype:
    """What a matrix product takes: autocast's type, or without it that which they come to."""
    kind = inputs[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return functools.reduce(torch.promote_types, (x.dtype for x in inputs))
