"""Products of a layer with a common input as one: query, key and value are one product, gate and up
another.

The weights that are multiplied together lie side by side in memory, each still a parameter of its
own module. So a merged product needs no second copy of them, and whoever reads or writes a single
weight finds it where it was.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.model import compiled
from pgtoolkit.model.architectures import Layer, architecture_of, is_known
from pgtoolkit.model.decoding import Cache, attention
from pgtoolkit.model.rowwise import type_of_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


def can_merge(model: PreTrainedModel) -> bool:
    """Whether a layer has products that can be merged: one of GPT-2's has merged ones already."""
    return is_known(model) and architecture_of(model).positions is None


@torch.no_grad()
def make_room(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Put new memory in the place of the weights that are multiplied together, in place; it is to
    be filled.

    Returns the names of these weights. The memory is given back once each of them has been
    replaced.
    """
    names = set()
    prefix = f"{model.base_model_prefix}.{architecture_of(model).layers}"
    for number, layer in enumerate(architecture_of(model).layers_of(model)):
        for group in _GROUPS:
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
    """All rows of matrices, or vectors, that `make_room` has put side by side: a view.

    Raises ValueError where they do not lie so.
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
    """The body of a compiled model of a known type, whose weights `make_room` has put in place, for
    decoding.

    It computes what the model does, but for the order in which a product of another width adds up,
    with fewer kernels: each sum is one with the norm behind it, and on a GPU a token's query and
    key are turned where attention reads them.
    """

    def __init__(self, model: PreTrainedModel):
        self._body: Layer = model.base_model
        self._parts = architecture_of(model)
        self._layers = []
        for layer in self._parts.layers_of(model):
            merged = []
            for group in _GROUPS:
                modules = [layer.get_submodule(name) for name in group]
                bias = (
                    None
                    if modules[0].bias is None
                    else side_by_side([module.bias for module in modules])
                )
                merged.append((side_by_side([module.weight for module in modules]), bias))
            self._layers.append((layer, *merged))

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """(B, S, H) hidden states of tokens at positions, both (B, S), which `cache` keeps."""
        hidden = self._body.get_submodule(self._parts.embedding)(tokens)
        shape = hidden.shape
        turns = self._body.rotary_emb(hidden, positions)
        hidden = hidden.flatten(end_dim=1)
        added = ()
        for layer, query_key_value, gate_and_up in self._layers:
            attention_input, hidden = _sum_and_norm(layer.input_layernorm, hidden, *added)
            projected = functional.linear(attention_input, *query_key_value)
            attended = _attended(layer.self_attn, projected.view(*shape[:2], -1), turns, cache)
            mlp_input, hidden = _sum_and_norm(layer.post_attention_layernorm, hidden, attended)
            gated = compiled.gated(
                layer.mlp.config.hidden_act, functional.linear(mlp_input, *gate_and_up)
            )
            added = (layer.mlp.down_proj(gated),)
        norm = self._body.get_submodule(self._parts.final_norm)
        return _sum_and_norm(norm, hidden, *added)[0].view(shape)


def _sum_and_norm(norm: Layer, hidden: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum; (n, H) each."""
    dtype = type_of_products(hidden, norm.weight)
    found = compiled.normalized(norm, dtype, hidden, *added)
    return found[0], found[1] if added else hidden


def _attended(
    module: Layer, projected: Tensor, turns: tuple[Tensor, Tensor], cache: Cache
) -> Tensor:
    """(B S, H): the attention module's output. projected: (B, S, query, key and value side by
    side)."""
    heads, groups = module.config.num_attention_heads, module.config.num_key_value_heads
    by_head = projected.view(*projected.shape[:2], heads + 2 * groups, module.head_dim).transpose(
        1, 2
    )
    query, key, value = by_head.split((heads, groups, groups), 1)
    if hasattr(module, "q_norm"):
        query = module.q_norm(query)
        key = module.k_norm(key)
    # As the attention modules of these types hand it to transformers.
    is_mistral = module.config.model_type == "mistral"
    window = module.config.sliding_window if is_mistral else getattr(module, "sliding_window", None)
    options = {
        "decoder_cache": cache,
        "scaling": module.scaling,
        "sliding_window": window,
        "turns": turns,
    }
    out, _ = attention(module, query, key, value, None, **options)
    return module.o_proj(out.flatten(end_dim=1).flatten(start_dim=1))
