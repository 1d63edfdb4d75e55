"""What is known of the configured model without loading it: which types can be spread, its shape,
its vocabulary."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.schema_run import HuggingFaceModelConfig, ModelConfig, TinyModelConfig
from pgtoolkit.config.schema_tasks import GeneratedTaskConfig, TaskConfig
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import is_whole

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Types of models, as config.json names them, that pgtoolkit spreads over ranks and samples from by
CUDA graphs."""


def shape(model: ModelConfig) -> dict[str, Any]:
    """Type, attention heads, key-value heads, layers and whether embedding and head are tied, as
    far as the configuration or a local config.json says."""
    if isinstance(model, TinyModelConfig):
        return {"type": "gpt2", "attention heads": model.num_heads, "layers": model.num_layers}
    assert isinstance(model, HuggingFaceModelConfig)  # there is no third class
    if not (settings := model_settings(model.path)):
        return {}
    # what transformers takes
    settings.setdefault("tie_word_embeddings", settings.get("model_type") == "gpt2")
    names = {
        "type": ("model_type",),
        "attention heads": ("num_attention_heads", "n_head"),
        "key-value heads": ("num_key_value_heads",),
        "layers": ("num_hidden_layers", "n_layer"),
        "tied": ("tie_word_embeddings",),
    }
    return {
        what: settings[key]
        for what, keys in names.items()
        for key in keys
        if settings.get(key) is not None
    }


def vocabulary_size(model: ModelConfig, task: TaskConfig) -> int | None:
    """Entries of the model's vocabulary, where that is known without loading it."""
    if isinstance(model, TinyModelConfig):
        if isinstance(task, GeneratedTaskConfig):
            return len(task.alphabet) + 1
        # a file of prompts has its own characters
        return 97 if task.name == "reasoning_gym" else None
    assert isinstance(model, HuggingFaceModelConfig)
    size = model_settings(model.path).get("vocab_size")
    return size if is_whole(size) and size >= 1 else None


def tiny_sizes(model: TinyModelConfig, task: TaskConfig) -> Sizes:
    shape = {"n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_heads}
    return Sizes({"model_type": "gpt2", "vocab_size": vocabulary_size(model, task) or 128, **shape})


def sizes(model: ModelConfig) -> Sizes | None:
    """None where the model is tiny or of another type, or its config.json does not say enough."""
    return sizes_of(getattr(model, "path", None))


def sizes_of(folder: str | None) -> Sizes | None:
    """Return the sizes of the model in a folder; None as `sizes` does."""
    known = model_settings(folder)
    try:
        return Sizes(known) if known.get("model_type") in MODEL_TYPES else None
    except (KeyError, TypeError, ZeroDivisionError):
        return None


class Sizes:
    """Of a model of MODEL_TYPES, by its config.json.

    layer: weights of one. linear: inputs and outputs of its matrices, summed. cached: keys and
        values of a token.
    table: weights of the embedding; tables: 2 with a head of its own. weights: of the model, but
        for biases.
    """

    def __init__(self, known: dict[str, Any]):
        gpt2 = known["model_type"] == "gpt2"
        names = (
            ("n_layer", "n_embd", "n_head")
            if gpt2
            else ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        self.layers, self.width, heads = (known[name] for name in names)
        self.vocabulary, head = known["vocab_size"], known.get("head_dim") or self.width // heads
        self.inner = known.get("n_inner" if gpt2 else "intermediate_size") or 4 * self.width
        groups = known.get("num_key_value_heads") or heads
        matrices = 2 * [(self.width, heads * head), (self.width, groups * head)]
        matrices += (2 if gpt2 else 3) * [(self.width, self.inner)]
        self.layer = sum(a * b for a, b in matrices) + 2 * self.width
        self.linear, self.cached = sum(a + b for a, b in matrices), 2 * groups * head
        self.table, self.tables = (
            self.vocabulary * self.width,
            1 if known.get("tie_word_embeddings", gpt2) else 2,
        )
        self.weights = self.layers * self.layer + self.tables * self.table
