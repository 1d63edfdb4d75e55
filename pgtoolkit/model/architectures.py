"""Names of the parts of a transformer, for the architectures that can be spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Types of models, as config.json names them, that pgtoolkit spreads over ranks and samples from by
CUDA graphs."""

Layer = Any
"""A layer of a transformer, or one of its parts. No type has their attributes, since `Architecture`
says what they are called."""


@dataclass(frozen=True)
class Architecture:
    """Names of modules in the base model (layers, embedding, positions, final_norm) and in each
    layer (the others).

    column: matrices whose outputs can be divided among ranks. row: those whose inputs can.
    fused: matrices that hold query, key and value side by side.
    head_norms: norms of one head, the same for all heads.
    """

    layers: str
    embedding: str
    final_norm: str
    attention: str
    norms: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    positions: str | None = None
    fused: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()

    def layers_of(self, model: PreTrainedModel) -> Layer:
        return getattr(model.base_model, self.layers)


_LLAMA_LIKE = Architecture(
    layers="layers",
    embedding="embed_tokens",
    final_norm="norm",
    attention="self_attn",
    norms=("input_layernorm", "post_attention_layernorm"),
    column=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ),
    row=("self_attn.o_proj", "mlp.down_proj"),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
_GPT2 = Architecture(
    layers="h",
    embedding="wte",
    final_norm="ln_f",
    attention="attn",
    norms=("ln_1", "ln_2"),
    column=("mlp.c_fc",),
    row=("attn.c_proj", "mlp.c_proj"),
    positions="wpe",
    fused=("attn.c_attn",),
)
_ARCHITECTURES = {kind: _GPT2 if kind == "gpt2" else _LLAMA_LIKE for kind in MODEL_TYPES}


def is_known(model: PreTrainedModel) -> bool:
    """Return whether the parts of a transformers model are known, and its attention is nothing but
    the softmax of scaled products."""
    return model.config.model_type in _ARCHITECTURES


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Return the names of the parts of a transformers model of a known type."""
    return _ARCHITECTURES[model.config.model_type]
