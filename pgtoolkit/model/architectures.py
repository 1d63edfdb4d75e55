"""Names of the parts of a transformer, for the architectures that can be spread over processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

MODEL_TYPES = ("gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Types of models, as config.json names them, that pgtoolkit spreads over ranks and samples from by
CUDA graphs."""

TYPES_IN_ONE_PIECE = ("llama", "mistral", "qwen2", "qwen3")
"""Those of which `recomputed` computes a layer."""

TYPES_IN_WORDS = f"{', '.join(MODEL_TYPES[:-1])} and {MODEL_TYPES[-1]}"

Layer = Any
"""A layer of a transformer, or one of its parts. No type has their attributes, since `Architecture`
says what they are called."""


@dataclass(frozen=True)
class Architecture:
    """Names of modules in the base model (layers, embedding, positions, final_norm) and in each
    layer (the others).

    column: matrices whose outputs can be divided among ranks. row: those whose inputs can.
    fused: matrices that hold query, key and value side by side.
    norms: of the inputs of attention and MLP. output_norms: of their outputs, in the same order.
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
    output_norms: tuple[str, ...] = ()
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
_GEMMA3 = replace(
    _LLAMA_LIKE,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_OTHERS = {"gemma3_text": _GEMMA3, "gpt2": _GPT2}
_ARCHITECTURES = {kind: _OTHERS.get(kind, _LLAMA_LIKE) for kind in MODEL_TYPES}


def is_known(model: PreTrainedModel) -> bool:
    """Return whether the parts of a transformers model are known, and its attention is nothing but
    the softmax of scaled products."""
    return model.config.model_type in _ARCHITECTURES


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Return the names of the parts of a transformers model of a known type."""
    return _ARCHITECTURES[model.config.model_type]


def is_mixture(layer: Layer) -> bool:
    """Return whether a layer has a mixture of experts in place of its MLP."""
    return hasattr(layer.mlp, "experts")


def activation_of(config: PreTrainedConfig) -> str:
    """Return the name of the activation in the MLPs of a model of a known type but GPT-2."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


def rotary_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of rotary positions as transformers has them: those of each kind of
    layers, where kinds have their own; [{}] for a model without."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in settings.values() if isinstance(each, dict)]
    return by_kind or [settings]


def has_experts(model: nn.Module) -> bool:
    """Return whether a model of any type has the experts of a layer as one tensor."""
    return bool(matrices_of_experts(model))


def matrices_of_experts(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors (E, out, in) that hold a matrix of each of a layer's E experts, by name;
    {} for a model without."""
    return {
        name: weight
        for name, weight in model.named_parameters()
        if ".experts." in name and weight.ndim == 3
    }
