"""Compiled code between the matrix products of a layer: norms, gates, rotary positions, and the sum
with attention's output.

Products, attention, and the code that spreads them over ranks do not change.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgtoolkit.model import recomputed
from pgtoolkit.model.architectures import Layer, activation_of, architecture_of, is_mixture
from pgtoolkit.model.rowwise import activation, gate, rms_norm, rotary, type_of_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TRANSFORMERS = "5.17, 5.23 and 5.24"
"""The versions of transformers that the tests of this file were run with."""

_LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""The names that the forward method of a known layer uses, in order."""
_LAYER_PARTS_OF_GEMMA3 = (
    "input_layernorm",
    "self_attn",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp",
    "post_feedforward_layernorm",
)


def unknown_code(model: PreTrainedModel) -> str | None:
    """Return the name of a class whose code is not the one that `switch_on` replaces; None if there
    is no such class.

    Another version of transformers may compute something else in a layer, or turn queries and keys
    in another way. Then our layer in its place would silently be another model.
    """
    parts = architecture_of(model)
    if parts.positions is not None:  # GPT-2: its activation alone is replaced
        return None
    expected = _LAYER_PARTS_OF_GEMMA3 if parts.output_norms else _LAYER_PARTS
    for layer in parts.layers_of(model):
        if inspect.unwrap(type(layer).forward).__code__.co_names != expected:
            return type(layer).__name__
        attention = type(layer.get_submodule(parts.attention))
        if "apply_rotary_pos_emb" not in inspect.unwrap(attention.forward).__code__.co_names:
            return attention.__name__
    return None


def switch_on(model: PreTrainedModel) -> None:
    """Make a transformers model use compiled code, in place.

    Its type must be known, and `unknown_code` must be None.
    """
    parts = architecture_of(model)
    for layer in parts.layers_of(model):
        if parts.positions is not None:  # GPT-2, whose norms are one kernel each already
            layer.mlp.act.forward = functools.partial(_activated, model.config.activation_function)
            continue
        attention = layer.get_submodule(parts.attention)
        methods = {attention: _with_rotary(type(attention))}
        if not is_mixture(layer):
            methods[layer.mlp] = _gated_mlp
        norms = parts.norms + parts.output_norms
        for name, module in layer.named_modules():
            if name in norms + parts.head_norms:
                methods[module] = _norm if name in norms else _head_norm
        for module, method in methods.items():
            module.forward = types.MethodType(method, module)
        if parts.output_norms:
            layer.__class__ = _with_forward(type(layer), _layer_of_gemma3)
        elif is_mixture(layer):
            layer.__class__ = _with_forward(type(layer), _layer)
        else:
            layer.__class__ = _with_sum(type(layer))
    if parts.positions is None:
        norm = getattr(model.base_model, parts.final_norm)
        norm.forward = types.MethodType(_norm, norm)


@functools.cache
def _with_sum(layer: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers whose first sum is one piece of code with the norm behind it.

    It is a class, since transformers checkpoints the forward method of a layer's class. Where
    transformers would checkpoint a layer that is whole on this rank, `recomputed.layer` does the
    same with fewer calls.
    """

    def call(self: nn.Module, hidden_states: Tensor, **options) -> Tensor:
        if recomputed.can_recompute(self, hidden_states, options):
            return recomputed.layer(self, hidden_states, **options)
        return layer.__call__(self, hidden_states, **options)

    return type(layer.__name__, (layer,), {"forward": _layer, "__call__": call})


@functools.cache
def _with_forward(layer: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    """Return the same for layers that `recomputed.layer` does not know."""
    return type(layer.__name__, (layer,), {"forward": forward})


def _layer(layer: Layer, hidden_states: Tensor, **options) -> Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    norm = layer.post_attention_layernorm
    dtype = type_of_products(hidden_states, attended, norm.weight)
    mlp_input, hidden_states = normalized(norm, dtype, hidden_states, attended)
    return hidden_states + layer.mlp(mlp_input)


def _layer_of_gemma3(layer: Layer, hidden_states: Tensor, **options) -> Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    attended = layer.post_attention_layernorm(attended)
    norm = layer.pre_feedforward_layernorm
    dtype = type_of_products(hidden_states, attended, norm.weight)
    mlp_input, hidden_states = normalized(norm, dtype, hidden_states, attended)
    return hidden_states + layer.post_feedforward_layernorm(layer.mlp(mlp_input))


def _norm(norm: Layer, x: Tensor) -> Tensor:
    """Return the norm in the type of the matrices behind it: it is cast once, and not for each of
    them."""
    return normalized(norm, type_of_products(x, norm.weight), x)[0]


def _head_norm(norm: Layer, x: Tensor) -> Tensor:
    dtype = x.dtype if _is_of_gemma3(norm) else torch.promote_types(x.dtype, norm.weight.dtype)
    return normalized(norm, dtype, x)[0]


def _is_of_gemma3(norm: Layer) -> bool:
    """Return whether a norm multiplies by 1 + weight, and gives its input's type."""
    return hasattr(norm, "eps")


def normalized(norm: Layer, dtype: torch.dtype, *added: Tensor) -> tuple[Tensor, ...]:
    """Return the norm of the sum of tensors (..., H), and the sum where there are several."""
    around_one = _is_of_gemma3(norm)
    epsilon = norm.eps if around_one else norm.variance_epsilon
    function = rms_norm(epsilon, dtype, len(added) > 1, around_one)
    results = function(*(x.flatten(end_dim=-2) for x in added), weight=norm.weight)
    return tuple(x.view(added[0].shape) for x in results)


def _gated_mlp(mlp: Layer, x: Tensor) -> Tensor:
    activation_name = activation_of(mlp.config)
    return mlp.down_proj(_activated(activation_name, mlp.gate_proj(x), mlp.up_proj(x)))


def _activated(name: str, x: Tensor, *factor: Tensor) -> Tensor:
    return activation(name)(*(part.flatten(end_dim=-2) for part in (x, *factor)))[0].view(x.shape)


def gated(name: str, gate_and_up: Tensor) -> Tensor:
    """Return (n, F): the first half of the columns of (n, 2 F) through the activation, times the
    second half."""
    return gate(name)(gate_and_up)[0]


@functools.cache
def _with_rotary(attention: type[nn.Module]) -> Callable:
    """Return the forward method of transformers with `turned` as its `apply_rotary_pos_emb`."""
    forward = inspect.unwrap(attention.forward)
    names = forward.__globals__ | {"apply_rotary_pos_emb": turned}
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def turned(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key turned by their rotary positions, in the type that attention takes.

    query, key: (B, heads, S, width). cosine, sine: (B or 1, S, width).
    """
    size, _, length, width = query.shape
    heads = [x.transpose(1, 2).reshape(size * length, -1, width) for x in (query, key)]
    turns = [x.expand(size, length, width).reshape(size * length, width) for x in (cosine, sine)]
    results = rotary(type_of_products(query, cosine))(*heads, *turns)
    turned_query, turned_key = (x.view(size, length, -1, width).transpose(1, 2) for x in results)
    return turned_query, turned_key
