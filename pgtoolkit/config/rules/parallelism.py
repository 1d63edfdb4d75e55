"""The rules on how the work is spread over processes: sizes against each other, the model and the world."""

from __future__ import annotations

import math
from typing import Any

from pgtoolkit.config.plan import vocabulary_size
from pgtoolkit.ranks.environment import joined
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import Report, is_whole, text

SIZES = ("pipeline_parallel", "data_parallel", "sequence_data_parallel", "tensor_parallel")
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def parallelism(c: Any, report: Report) -> None:
    p = c.parallelism
    sizes = {name: getattr(p, name) for name in SIZES}
    _world(sizes, report)
    _keys(c, report)
    _rollouts(c, report)
    _model(c, report)


def _world(sizes: dict[str, int], report: Report) -> None:
    rank, product = joined(), math.prod(sizes.values())
    if rank is not None and rank.world_size != product:
        setting = f"WORLD_SIZE={rank.world_size}"
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items())
        reason = "Every process has one place in the layout."
        use = f"as many processes, or without a launcher such as torchrun pgtk starts {product} itself"
        report.refuse(
            setting, f"the product of the parallel sizes, {product} = {factors}", rank.world_size, reason, use
        )


def _keys(c: Any, report: Report) -> None:
    p = c.parallelism
    if p.sequence_parallel and p.tensor_parallel == 1:
        reason = "The activations are sharded over the same ranks as the matrices."
        use = "parallelism.tensor_parallel=2, or parallelism.sequence_parallel=false"
        setting, needs = "parallelism.sequence_parallel=true", "parallelism.tensor_parallel > 1"
        report.refuse(setting, needs, p.tensor_parallel, reason, use)
    if p.shard and p.data_parallel * p.sequence_data_parallel == 1:
        reason = "The weights are divided over the ranks that see different tokens."
        setting, needs = "parallelism.shard=true", "parallelism.data_parallel > 1"
        use = "parallelism.data_parallel=2, or parallelism.shard=false"
        report.refuse(setting, needs, p.data_parallel, reason, use)
    if c.metrics.level != "none" and p.pipeline_parallel > 1:
        setting, needs = f"metrics={c.metrics.level}", "parallelism.pipeline_parallel=1"
        reason = "Stages without the loss have no advantage extrema to give."
        report.refuse(setting, needs, p.pipeline_parallel, reason, "metrics=none or parallelism.pipeline_parallel=1")
    if p.pipeline_parallel > 1:
        _stages(p, report)


def _stages(p: Any, report: Report) -> None:
    for name, whole in (("sequence_data_parallel", 1), ("sequence_parallel", False)):
        if (value := getattr(p, name)) != whole:
            setting, needs = f"parallelism.{name}={text(value)}", "parallelism.pipeline_parallel=1"
            reason, use = "Stages hand over whole micro-batches.", f"parallelism.{name}={text(whole)}"
            report.refuse(setting, needs, p.pipeline_parallel, reason, use)


def _rollouts(c: Any, report: Report) -> None:
    p = c.parallelism
    whole = {name: 1 for name in SIZES if name != "data_parallel"} | {"shard": False}
    if c.rollout.name == "policy" and (spread := [name for name in whole if getattr(p, name) != whole[name]]):
        reason = "Completions are sampled by a whole model, and no rank would hold one."
        setting = f"parallelism.{spread[0]}={text(getattr(p, spread[0]))}"
        mend = " ".join(f"parallelism.{name}={text(whole[name])}" for name in spread)
        use = f"rollout=recorded rollout.path=PATH, or {mend}"
        report.refuse(setting, "rollout=recorded", "rollout=policy", reason, use)


def _model(c: Any, report: Report) -> None:
    p, known = c.parallelism, _known(c)
    spread = [f"{name}={text(getattr(p, name))}" for name in SIZES if name != "data_parallel" and getattr(p, name) > 1]
    spread += ["shard=true"] if p.shard else []
    if spread and known.get("type", FAMILIES[0]) not in FAMILIES:
        needs, reason = (
            f"a model of type {', '.join(FAMILIES)}",
            "Where the matrices and layers are is known for these.",
        )
        report.refuse(f"parallelism.{spread[0]}", needs, known["type"], reason, "parallelism=ddp")
    for what in ("attention heads", "key-value heads"):
        number, size = known.get(what), p.tensor_parallel
        if is_whole(number) and number >= 1 and number % size:
            needs = f"a divisor of the model's {number} {what}"
            use = f"parallelism.tensor_parallel={math.gcd(number, size)}"
            setting, reason = f"parallelism.tensor_parallel={size}", "Attention heads are dealt out whole."
            report.refuse(setting, needs, size, reason, use)
            break
    vocabulary = vocabulary_size(c.model, c.task)
    if is_whole(vocabulary) and -(-vocabulary // p.tensor_parallel) * (p.tensor_parallel - 1) >= vocabulary:
        setting, needs = f"parallelism.tensor_parallel={p.tensor_parallel}", f"fewer shards of {vocabulary} tokens"
        reason, use = "One rank would hold none of the vocabulary.", "parallelism.tensor_parallel=1"
        report.refuse(setting, needs, p.tensor_parallel, reason, use)
    if known.get("tied") and p.pipeline_parallel > 1:
        setting, reason = f"parallelism.pipeline_parallel={p.pipeline_parallel}", "They lie on different stages."
        needs, got = "a model whose embedding and LM head are two matrices", "tie_word_embeddings=true"
        report.refuse(setting, needs, got, reason, "parallelism=fsdp")
    layers = known.get("layers")
    if is_whole(layers) and 1 <= layers < p.pipeline_parallel:
        setting, needs = f"parallelism.pipeline_parallel={p.pipeline_parallel}", f"at most the model's {layers} layers"
        reason, use = "A stage holds whole layers, at least one.", f"parallelism.pipeline_parallel={layers}"
        report.refuse(setting, needs, p.pipeline_parallel, reason, use)


def _known(c: Any) -> dict[str, Any]:
    """What of the model's shape is known without loading it: from the configuration, or from a local config.json."""
    if c.model.name == "tiny":
        return {"type": "gpt2", "attention heads": c.model.num_heads, "layers": c.model.num_layers}
    if not (settings := model_settings(c.model.path)):
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
