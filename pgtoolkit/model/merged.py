"""Merged products: those of a layer with a common input become one. Query, key and value are one
product, gate and up another.

Weights that are multiplied together lie side by side in memory, and each is still a parameter of
its module. So a merged product needs no second copy of them, and code that reads or writes a single
weight works as before.

Axes: B rows, S tokens of each, H hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.model import compiled
from pgtoolkit.model.architectures import (
    Layer,
    activation_of,
    architecture_of,
    is_known,
    is_mixture,
    rotary_settings,
)
from pgtoolkit.model.decoding import Cache, attention
from pgtoolkit.model.rowwise import type_of_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


def can_merge(model: PreTrainedModel) -> bool:
    """Return whether a layer has products that can be merged; those of GPT-2 are merged already."""
    return is_known(model) and architecture_of(model).positions is None


def _groups(layer: Layer) -> tuple[tuple[str, ...], ...]:
    """Return the names of the matrices of a layer that are multiplied together; experts are one
    tensor already."""
    return _GROUPS[:1] if is_mixture(layer) else _GROUPS


@torch.no_grad()
def make_room(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Give the weights that are multiplied together new memory side by side, in place, which is
    then to be filled.

    Returns the names of these weights. The memory is given back once each of them has been
    replaced.
    """
    names = set()
    prefix = f"{model.base_model_prefix}.{architecture_of(model).layers}"
    for number, layer in enumerate(architecture_of(model).layers_of(model)):
        for group in _groups(layer):
            modules = [layer.get_submodule(name) for name in group]
            for kind in ("weight", "bias"):
                parameters = [getattr(module, kind) for module in modules]
                if parameters[0] is None:
                    continue
                rows = [module.out_features for module in modules]
                shape = (sum(rows), modules[0].in_features) if kind == "weight" else (sum(rows),)
                memory = torch.empty(shape, dtype=dtype, device=model.device)
                for parameter, part in zip(parameters, memory.split(rows), strict=True):
                    parameter.data = part
                names |= {f"{prefix}.{number}.{name}.{kind}" for name in group}
    return names


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Return a view of all rows of matrices, or vectors, that `make_room` has put side by side.

    Raises ValueError where they do not lie side by side.
    """
    for before, after in pairwise(parts):
        end = before.data_ptr() + before.nbytes
        if (
            end != after.data_ptr()
            or before.shape[1:] != after.shape[1:]
            or not before.is_contiguous()
        ):
            raise ValueError("the weights do not lie side by side")
    rows = sum(len(part) for part in parts)
    return parts[0].detach().as_strided((rows, *parts[0].shape[1:]), parts[0].stride())


class MergedBody:
    """The body of a compiled model of a known type for decoding, by merged products.

    `make_room` must have put the model's weights in place. It computes what the model does, with
    fewer kernels, except that a product of another width may add up in another order. Each sum is
    one kernel with the norm behind it, and on a GPU a token's query and key are turned where
    attention reads them.
    """

    def __init__(self, model: PreTrainedModel):
        self._body: Layer = model.base_model
        self._parts = architecture_of(model)
        self._layers = []
        for layer in self._parts.layers_of(model):
            merged = []
            for group in _groups(layer):
                modules = [layer.get_submodule(name) for name in group]
                bias = (
                    None
                    if modules[0].bias is None
                    else side_by_side([module.bias for module in modules])
                )
                merged.append((side_by_side([module.weight for module in modules]), bias))
            if is_mixture(layer):
                merged.append(None)
            self._layers.append((layer, *merged))

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the (B, S, H) hidden states of tokens (B, S), at the positions of the cache, which
        keeps their keys and values.

        Tokens of prompts lie from position 0 on.
        """
        hidden = self._body.get_submodule(self._parts.embedding)(tokens)
        shape = hidden.shape
        if cache.turns is None:
            cache.turns = self._turns(hidden, cache.room)
        hidden = hidden.flatten(end_dim=1)
        added = ()
        norm_of_mlp = self._parts.norms[1]
        for layer, query_key_value, gate_and_up in self._layers:
            attention_input, hidden = _sum_and_norm(layer.input_layernorm, hidden, *added)
            projected = functional.linear(attention_input, *query_key_value)
            attended = _attended(layer.self_attn, projected.view(*shape[:2], -1), cache)
            attended = self._with_output_norm(layer, 0, attended)
            mlp_input, hidden = _sum_and_norm(getattr(layer, norm_of_mlp), hidden, attended)
            out = _mlp(layer.mlp, mlp_input, gate_and_up)
            added = (self._with_output_norm(layer, 1, out),)
        norm = self._body.get_submodule(self._parts.final_norm)
        return _sum_and_norm(norm, hidden, *added)[0].view(shape)

    def _with_output_norm(self, layer: Layer, place: int, out: Tensor) -> Tensor:
        """Return the output of attention (0) or MLP (1) that is added to hidden states."""
        norms = self._parts.output_norms
        return layer.get_submodule(norms[place])(out) if norms else out

    def _turns(self, hidden: Tensor, room: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each layer the cosines and sines of all positions, (room, width) each."""
        every = torch.arange(room, device=hidden.device)[None]
        rotary = self._body.rotary_emb
        attentions = [layer.self_attn for layer, *_ in self._layers]
        # Where kinds of layers have their own rotary positions, each attention names its kind.
        by_kind = len(rotary_settings(self._body.config)) > 1
        kinds = [(module.layer_type,) if by_kind else () for module in attentions]
        turns = {kind: rotary(hidden, every, *kind) for kind in set(kinds)}
        return [(turns[kind][0][0], turns[kind][1][0]) for kind in kinds]


def _mlp(mlp: Layer, x: Tensor, gate_and_up: tuple[Tensor, Tensor | None] | None) -> Tensor:
    """Return the (n, H) output of an MLP, or where gate_and_up is None of a mixture's experts."""
    if gate_and_up is None:
        return mlp(x[None])[0]
    both = functional.linear(x, *gate_and_up)
    return mlp.down_proj(compiled.gated(activation_of(mlp.config), both))


def _sum_and_norm(norm: Layer, hidden: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum; (n, H) each."""
    dtype = type_of_products(hidden, norm.weight)
    results = compiled.normalized(norm, dtype, hidden, *added)
    return results[0], results[1] if added else hidden


def _attended(module: Layer, projected: Tensor, cache: Cache) -> Tensor:
    """Return the (B S, H) output of an attention module.

    projected: (B, S, (heads + 2 key-value heads) width), query, key and value side by side.
    """
    heads = module.config.num_attention_heads
    key_heads = module.config.num_key_value_heads
    shape = (*projected.shape[:2], heads + 2 * key_heads, module.head_dim)
    by_head = projected.view(shape).transpose(1, 2)
    query, key, value = by_head.split((heads, key_heads, key_heads), 1)
    if hasattr(module, "q_norm"):
        query = module.q_norm(query)
        key = module.k_norm(key)
    # The attention modules of these types hand the window to transformers in this way.
    is_mistral = module.config.model_type == "mistral"
    window = module.config.sliding_window if is_mistral else getattr(module, "sliding_window", None)
    options = {
        "decoder_cache": cache,
        "scaling": module.scaling,
        "sliding_window": window,
    }
    out, _ = attention(module, query, key, value, None, **options)
    return module.o_proj(out.flatten(end_dim=1).flatten(start_dim=1))
