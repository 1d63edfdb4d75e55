"""The rules on how the work is spread over processes: sizes against each other, the model and the world."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.models import MODEL_TYPES, shape, vocabulary_size
from pgtoolkit.config.schema import Config, ParallelismConfig
from pgtoolkit.ranks.environment import AXES, joined, world_size
from pgtoolkit.system.report import Report, is_whole, text


def parallelism(c: Config, report: Report) -> None:
    _world(c.parallelism, report)
    _keys(c, report)
    fits(c.parallelism, shape(c.model), vocabulary_size(c.model, c.task), report)


def _world(p: ParallelismConfig, report: Report) -> None:
    rank, product = joined(), world_size(p)
    if rank is not None and rank.world_size != product:
        factors = " x ".join(f"{name}={getattr(p, name)}" for name in AXES)
        needs = f"the product of the parallel sizes, {product} = {factors}"
        use = f"as many processes, or without a launcher such as torchrun pgtk starts {product} itself"
        reason = "Every process has one place in the layout."
        report.refuse(f"WORLD_SIZE={rank.world_size}", needs, rank.world_size, reason, use)


def _keys(c: Config, report: Report) -> None:
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
    if p.pipeline_parallel == 1:
        return
    needs, got = "parallelism.pipeline_parallel=1", p.pipeline_parallel
    if c.metrics.level != "none":
        reason = "Stages without the loss have no advantage extrema to give."
        report.refuse(f"metrics={c.metrics.level}", needs, got, reason, f"metrics=none or {needs}")
    for name, whole in (("sequence_data_parallel", 1), ("sequence_parallel", False)):
        if (value := getattr(p, name)) != whole:
            reason, use = "Stages hand over whole micro-batches.", f"parallelism.{name}={text(whole)}"
            report.refuse(f"parallelism.{name}={text(value)}", needs, got, reason, use)


def fits(p: ParallelismConfig, known: dict[str, Any], vocabulary: int | None, report: Report) -> None:
    """Whether a model can be spread so: as far as it is known by `check`, and as it is loaded by `model/spread.py`.

    p: parallelism. known: type, attention heads, key-value heads, layers, tied; what is not known is missing or None.
    """
    tensor, stages = p.tensor_parallel, p.pipeline_parallel
    spread = [f"{name}={getattr(p, name)}" for name in AXES if name != "data_parallel" and getattr(p, name) > 1]
    spread += ["shard=true"] if p.shard else []
    if spread and known.get("type") not in (None, *MODEL_TYPES):
        needs, reason = f"a model of type {', '.join(MODEL_TYPES)}", "Only models of these types can be spread."
        report.refuse(f"parallelism.{spread[0]}", needs, known["type"], reason, "parallelism=ddp")
    setting = f"parallelism.tensor_parallel={tensor}"
    heads = {what: known.get(what) for what in ("attention heads", "key-value heads")}
    heads = {what: number for what, number in heads.items() if is_whole(number) and number >= 1}
    if uneven := [what for what, number in heads.items() if number % tensor]:
        fitting = max(size for size in range(1, tensor) if not any(number % size for number in heads.values()))
        needs = f"a divisor of the model's {heads[uneven[0]]} {uneven[0]}"
        use = f"parallelism.tensor_parallel={fitting}"
        report.refuse(setting, needs, tensor, "Attention heads are dealt out whole.", use)
    if vocabulary is not None and -(-vocabulary // tensor) * (tensor - 1) >= vocabulary:
        reason, use = "One rank would hold none of the vocabulary.", "parallelism.tensor_parallel=1"
        report.refuse(setting, f"fewer shards of {vocabulary} tokens", tensor, reason, use)
    setting, layers = f"parallelism.pipeline_parallel={stages}", known.get("layers")
    if known.get("tied") and stages > 1:
        needs, got = "a model whose embedding and LM head are two matrices", "one for both"
        report.refuse(setting, needs, got, "They lie on different stages.", "parallelism=fsdp")
    if is_whole(layers) and 1 <= layers < stages:
        reason, use = "A stage holds whole layers, at least one.", f"parallelism.pipeline_parallel={layers}"
        report.refuse(setting, f"at most the model's {layers} layers", stages, reason, use)
