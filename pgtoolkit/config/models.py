"""Facts about the configured model that are known without loading it: its shape, vocabulary and
number of weights."""

from __future__ import annotations

from pgtoolkit.config.rules.table import SHARING
from pgtoolkit.config.schema import Config
from pgtoolkit.model.architectures import MODEL_TYPES, TYPES_IN_ONE_PIECE
from pgtoolkit.model.misfits import cannot_share
from pgtoolkit.model.settings import HuggingFaceModelSettings, ModelSettings, TinyModelSettings
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.declared import AutoOrBool
from pgtoolkit.system.model_folder import local_folder, model_settings
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import Report, is_whole
from pgtoolkit.tasks.settings import GeneratedTaskSettings, PromptsTaskSettings, TaskSettings

_KEYS_OF_SHAPE = {
    "type": ("model_type",),
    "attention heads": ("num_attention_heads", "n_head"),
    "key-value heads": ("num_key_value_heads",),
    "layers": ("num_hidden_layers", "n_layer"),
    "tied": ("tie_word_embeddings",),
}
"""Part of a model's shape -> its keys in config.json."""

_TIED_BY_DEFAULT = ("gemma3_text", "gpt2")

_TINY_VOCABULARY_OF_TEXTS = 97
"""Entries of the tiny model's vocabulary for texts of reasoning-gym."""


def has_tokenizer(model: ModelSettings) -> bool:
    """Return whether the tokens of a model are known here."""
    if isinstance(model, HuggingFaceModelSettings):
        return local_folder(model.path) is not None
    return True


def measures_prompts(config: Config) -> bool:
    """Return whether the tokens of the longest document are known once its prompts are read, which
    is before a run starts. What it needs is said then."""
    return (
        config.rollout.name == "policy"
        and isinstance(config.task, PromptsTaskSettings)
        and config.task.max_prompt_length is None
        and has_tokenizer(config.model)
    )


def shape(model: ModelSettings) -> dict[str, object]:
    """Return the type, attention heads, key-value heads, layers and whether embedding and head are
    tied, as far as the configuration or a local config.json says."""
    if isinstance(model, TinyModelSettings):
        return {"type": "gpt2", "attention heads": model.num_heads, "layers": model.num_layers}
    assert isinstance(model, HuggingFaceModelSettings)  # there is no third class
    settings = model_settings(model.path)
    if not settings:
        return {}
    # transformers ties them where config.json does not say
    settings.setdefault("tie_word_embeddings", settings.get("model_type") in _TIED_BY_DEFAULT)
    return {
        part: settings[key]
        for part, keys in _KEYS_OF_SHAPE.items()
        for key in keys
        if settings.get(key) is not None
    }


def has_window(model: HuggingFaceModelSettings) -> bool:
    """Return whether a local config.json gives some layer a sliding window."""
    settings = model_settings(model.path)
    # of 4096 tokens, if not said
    by_default = settings.get("model_type") in ("mistral", "gemma3_text")
    if settings.get("use_sliding_window", by_default) is not True:
        return False
    return settings.get("sliding_window", by_default) not in (None, False)


def vocabulary_size(model: ModelSettings, task: TaskSettings) -> int | None:
    """Return the entries of the model's vocabulary; None where only loading it tells."""
    if isinstance(model, TinyModelSettings):
        if isinstance(task, GeneratedTaskSettings):
            return len(task.alphabet) + 1
        # A file of prompts has its own characters.
        return _TINY_VOCABULARY_OF_TEXTS if task.name == "reasoning_gym" else None
    assert isinstance(model, HuggingFaceModelSettings)
    size = model_settings(model.path).get("vocab_size")
    return size if is_whole(size) and size >= 1 else None


def compilation(model: ModelSettings, on_gpu: bool) -> str:
    """Return whether a run compiles parts of its model, with the reason."""
    if model.compile is not None:
        return f"{'yes' if model.compile else 'no'}, as configured"
    if not on_gpu:
        return "no, since only a GPU gains by it"
    kind = shape(model).get("type")
    if kind is None:
        return f"if the model is of type {', '.join(MODEL_TYPES)}, which loading it tells"
    if kind not in MODEL_TYPES:
        return f"no, since the parts of a model of type {kind} are not known"
    return "yes, since it makes steps on a GPU faster"


def why_not_by_memory(config: Config) -> str | None:
    """Return why `model.gradient_checkpointing=auto` is false for a run, as far as config.json and
    the configuration tell; None where its layers keep what a GPU has memory for."""
    model = config.model
    parallelism = config.parallelism
    kind = shape(model).get("type")
    if config.trainer.device == "cpu":
        return "trainer.device=cpu"
    if kind not in MODEL_TYPES or kind == "qwen3_moe":
        return f"the model is of type {kind}"
    if model.dtype == "float32":
        return "model.dtype=float32"
    if parallelism.shard or world_size(parallelism) > parallelism.data_parallel:
        return "the model is spread over ranks"
    return None


def in_one_piece(config: Config) -> bool:
    """Return whether a GPU computes the trained model's layers by `model.recomputed`, as far as
    config.json and the configuration tell."""
    model = config.model
    is_known = shape(model).get("type") in TYPES_IN_ONE_PIECE
    is_plain = model.compile is not False and model.lora_rank is None
    return is_known and is_plain and why_not_by_memory(config) is None


def trains_experts(config: Config) -> bool:
    """Return whether experts of a mixture are trained, or their adapters, as far as config.json
    tells."""
    kinds = []
    if config.model.lora_rank is None or experts_with_adapters(config.model):
        kinds.append(shape(config.model).get("type"))
    if config.advantage.estimator == "gae" and config.critic.path is not None:
        kinds.append(model_settings(config.critic.path).get("model_type"))
    return "qwen3_moe" in kinds


def experts_with_adapters(model: ModelSettings) -> list[str]:
    """Return the names of the experts' matrices that get adapters of LoRA in a mixture."""
    if not isinstance(model, HuggingFaceModelSettings) or model.lora_rank is None:
        return []
    ends = {target.rpartition(".")[2] for target in model.lora_targets}
    return [name for name in ("gate_up_proj", "down_proj") if name in ends]


def computes_again(config: Config) -> bool:
    """Return whether a run computes its layers again in the backward pass, at least in its first
    step, as `model.gradient_checkpointing` says; auto: where memory decides later."""
    chosen = config.model.gradient_checkpointing
    return why_not_by_memory(config) is None if chosen == "auto" else chosen


def shares_prompts(config: Config) -> AutoOrBool:
    """Return `model.share_prompts`; false in place of auto where true would be refused."""
    if config.model.share_prompts != "auto":
        return config.model.share_prompts
    report = Report()
    for rule in SHARING:
        rule(with_values(config, {"model.share_prompts": True}), report)
    return False if report.problems or cannot_share(shape(config.model).get("type")) else "auto"


def tiny_sizes(model: TinyModelSettings, task: TaskSettings) -> Sizes:
    """Return the sizes of the tiny model."""
    settings = {
        "model_type": "gpt2",
        "vocab_size": vocabulary_size(model, task) or 128,
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
    }
    return Sizes(settings)


def sizes(model: ModelSettings) -> Sizes | None:
    """Return the sizes of a model; None for the tiny one, for another type, and where config.json
    does not say enough."""
    return sizes_of(getattr(model, "path", None))


def sizes_of(folder: str | None) -> Sizes | None:
    """Return the sizes of the model in a folder; None as in `sizes`."""
    settings = model_settings(folder)
    if settings.get("model_type") not in MODEL_TYPES:
        return None
    try:
        return Sizes(settings)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


class Sizes:
    """The sizes of a model of MODEL_TYPES, from its config.json.

    layers, width, vocabulary: as named. head: the width of an attention head. inner: that inside an
    MLP, or inside all experts of a token. layer: weights of a layer. query: numbers of a token's
    query. linear: inputs and outputs of a layer's matrices but experts, summed. experts: the same
    of the matrices of all experts, by name. cached: numbers of a token that a layer keeps as key
    and value. table: weights of the embedding. tables: 2 if the head has its own matrix, else 1.
    weights: of the model, without biases. matrices: of these the ones in matrices of layers.
    """

    def __init__(self, settings: JsonObject):
        if settings["model_type"] == "gpt2":
            names = ("n_layer", "n_embd", "n_head", "n_inner")
            matrices_of_mlp = 2
        else:
            names = (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "intermediate_size",
            )
            matrices_of_mlp = 3
        self.layers, self.width, heads = (settings[name] for name in names[:3])
        self.inner = settings.get(names[3]) or 4 * self.width
        self.vocabulary = settings["vocab_size"]
        self.head = settings.get("head_dim") or self.width // heads
        key_value_heads = settings.get("num_key_value_heads") or heads
        query = (self.width, heads * self.head)
        key = (self.width, key_value_heads * self.head)
        matrices = [query, query, key, key]  # the output's matrix is as large as the query's
        experts = 0
        self.experts: dict[str, int] = {}
        if settings["model_type"] == "qwen3_moe":
            num_experts = settings.get("num_experts") or settings["num_local_experts"]
            inner = settings["moe_intermediate_size"]
            self.inner = settings["num_experts_per_tok"] * inner
            experts = num_experts * self.width * (3 * inner + 1)  # 1 for the router
            self.experts["gate_up_proj"] = num_experts * (self.width + 2 * inner)
            self.experts["down_proj"] = num_experts * (self.width + inner)
        else:
            matrices += matrices_of_mlp * [(self.width, self.inner)]
        of_layer = sum(rows * columns for rows, columns in matrices) + experts
        self.matrices = self.layers * of_layer
        self.layer = of_layer + 2 * self.width
        self.query = heads * self.head
        self.linear = sum(rows + columns for rows, columns in matrices)
        self.cached = 2 * key_value_heads * self.head
        self.table = self.vocabulary * self.width
        are_tied = settings["model_type"] in _TIED_BY_DEFAULT
        self.tables = 1 if settings.get("tie_word_embeddings", are_tied) else 2
        self.weights = self.layers * self.layer + self.tables * self.table
