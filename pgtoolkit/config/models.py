"""What is known of the configured model without loading it: which types can be spread, its shape, its vocabulary."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.schema import ModelConfig, TaskConfig, TinyModelConfig
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import is_whole

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Types of models, as config.json names them, that pgtoolkit spreads over ranks and samples from by CUDA graphs."""


def shape(model: ModelConfig) -> dict[str, Any]:
    """Type, attention heads, key-value heads, layers and whether embedding and head are tied, as far as the
    configuration or a local config.json says."""
    if isinstance(model, TinyModelConfig):
        return {"type": "gpt2", "attention heads": model.num_heads, "layers": model.num_layers}
    if not (settings := model_settings(model.path)):
        return {}
    settings.setdefault("tie_word_embeddings", settings.get("model_type") == "gpt2")  # what transformers takes
    names = {
        "type": ("model_type",),
        "attention heads": ("num_attention_heads", "n_head"),
        "key-value heads": ("num_key_value_heads",),
        "layers": ("num_hidden_layers", "n_layer"),
        "tied": ("tie_word_embeddings",),
    }
    return {what: settings[key] for what, keys in names.items() for key in keys if settings.get(key) is not None}


def vocabulary_size(model: ModelConfig, task: TaskConfig) -> int | None:
    """Entries of the model's vocabulary, where that is known without loading it."""
    if isinstance(model, TinyModelConfig):
        return {"reverse": 12, "reasoning_gym": 97}.get(task.name)  # a file of prompts has its own characters
    size = model_settings(model.path).get("vocab_size")
    return size if is_whole(size) and size >= 1 else None
