"""Where the parts of a transformer are, for the architectures that can be spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pgtoolkit.errors import ConfigError


@dataclass(frozen=True)
class Architecture:
    """Names inside of the base model (layers, embeddings, final norm) and inside of each layer (the rest).

    column, row: the matrices whose outputs, and whose inputs, can be divided among ranks. fused: those that hold
    query, key and value side by side. head_norms: norms of one head, the same for all heads.
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

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        return getattr(model.base_model, self.layers)


_LLAMA_LIKE = Architecture(
    layers="layers",
    embedding="embed_tokens",
    final_norm="norm",
    attention="self_attn",
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
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
_ARCHITECTURES = {"gpt2": _GPT2} | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_LIKE)


def is_known(model: nn.Module) -> bool:
    """Whether the parts of a transformers model are known, and its attention is softmax of scaled products alone."""
    return model.config.model_type in _ARCHITECTURES


def architecture_of(model: nn.Module, key: str) -> Architecture:
    """Where the parts of a transformers model are; ConfigError, naming the setting `key` that needs it, if unknown."""
    if not is_known(model):
        raise ConfigError(
            f"{key} needs a model of type {', '.join(sorted(_ARCHITECTURES))} (got {model.config.model_type}). Where "
            "the matrices and layers are is known for these. Use parallelism=ddp."
        )
    return _ARCHITECTURES[model.config.model_type]
