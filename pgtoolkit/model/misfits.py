"""Reasons why a model cannot be spread over processes, compiled, or use FlashAttention 4, as far as
its shape tells."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping

from pgtoolkit.model.architectures import MODEL_TYPES
from pgtoolkit.model.settings import ModelSettings
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.system.report import is_whole, refusal

FLASH_ATTENTION = "flash-attn-4"
"""The package of FlashAttention 4, an extra of pgtk."""

_HOPPER = 9
_LAST_BLACKWELL = 11
"""The major numbers of compute capability for which it has backward passes in a fixed order."""


def misfits(
    sizes: Mapping[str, int],
    shard: bool,
    known: Mapping[str, object],
    vocabulary: int | None,
) -> list[str]:
    """Return the problems with spreading a model over these sizes.

    sizes: of AXES. shard: whether FSDP2 divides it. known: type, attention heads, key-value heads,
    layers and tied, as far as `check` knows them or as the model is loaded; others are missing or
    None. vocabulary: its entries, None if they are not known.
    """
    problems = [
        _misfit_of_type(sizes, shard, known.get("type")),
        _misfit_of_mixture(sizes["tensor_parallel"], known.get("type")),
        _misfit_of_heads(sizes["tensor_parallel"], known),
        _misfit_of_vocabulary(sizes["tensor_parallel"], vocabulary),
        *_misfits_of_stages(sizes["pipeline_parallel"], known),
    ]
    return [problem for problem in problems if problem is not None]


def _misfit_of_type(sizes: Mapping[str, int], shard: bool, kind: object) -> str | None:
    axes = [name for name in AXES if name != "data_parallel" and sizes[name] > 1]
    spread = [f"{name}={sizes[name]}" for name in axes]
    if shard:
        spread.append("shard=true")
    if not spread or kind in (None, *MODEL_TYPES):
        return None
    return refusal(
        setting=f"parallelism.{spread[0]}",
        needs=f"a model of type {', '.join(MODEL_TYPES)}",
        got=kind,
        reason="Only models of these types can be spread.",
        use="parallelism=ddp, in Python data_parallel alone",
    )


def _misfit_of_mixture(tensor: int, kind: object) -> str | None:
    if tensor == 1 or kind != "qwen3_moe":
        return None
    return refusal(
        setting=f"parallelism.tensor_parallel={tensor}",
        needs="a model without a mixture of experts",
        got=kind,
        reason="Its experts are divided by fsdp alone.",
        use="parallelism=fsdp, in Python data_parallel with shard=True",
    )


def _misfit_of_heads(tensor: int, known: Mapping[str, object]) -> str | None:
    counts = {kind: known.get(kind) for kind in ("attention heads", "key-value heads")}
    heads = {kind: count for kind, count in counts.items() if is_whole(count) and count >= 1}
    uneven = [kind for kind, count in heads.items() if count % tensor]
    if not uneven:
        return None
    divisors = [
        size for size in range(1, tensor) if all(count % size == 0 for count in heads.values())
    ]
    return refusal(
        setting=f"parallelism.tensor_parallel={tensor}",
        needs=f"a divisor of the model's {heads[uneven[0]]} {uneven[0]}",
        got=tensor,
        reason="A rank gets whole attention heads.",
        use=f"parallelism.tensor_parallel={max(divisors)}",
    )


def _misfit_of_vocabulary(tensor: int, vocabulary: int | None) -> str | None:
    if vocabulary is None or -(-vocabulary // tensor) * (tensor - 1) < vocabulary:
        return None
    return refusal(
        setting=f"parallelism.tensor_parallel={tensor}",
        needs=f"fewer shards of {vocabulary} tokens",
        got=tensor,
        reason="One rank would hold none of the vocabulary.",
        use="parallelism.tensor_parallel=1",
    )


def _misfits_of_stages(stages: int, known: Mapping[str, object]) -> Iterator[str]:
    setting = f"parallelism.pipeline_parallel={stages}"
    layers = known.get("layers")
    if known.get("tied") and stages > 1:
        yield refusal(
            setting=setting,
            needs="a model whose embedding and LM head are two matrices",
            got="one for both",
            reason="They lie on different stages.",
            use="parallelism=fsdp, in Python data_parallel with shard=True",
        )
    if is_whole(layers) and 1 <= layers < stages:
        yield refusal(
            setting=setting,
            needs=f"at most the model's {layers} layers",
            got=stages,
            reason="A stage holds whole layers, at least one.",
            use=f"parallelism.pipeline_parallel={layers}",
        )


def cannot_share(kind: object) -> str | None:
    """Return the problem with a model of this type whose documents are to share what they begin
    with; None if there is none, or its type is not known yet."""
    if kind in (None, *MODEL_TYPES):
        return None
    return refusal(
        setting="model.share_prompts=true",
        needs=f"a model of type {', '.join(MODEL_TYPES)}",
        got=kind,
        reason="Attention of other models may be more than a softmax of scaled products.",
        use="model.share_prompts=auto",
    )


def cannot_serve(kind: object, has_experts: bool) -> str | None:
    """Return the problem with a model of this type that vLLM is to sample from; has_experts:
    whether it is a mixture of experts."""
    if not has_experts or kind in MODEL_TYPES:
        return None
    return refusal(
        setting="sampler=vllm",
        needs="a model without a mixture of experts, or one of type qwen3_moe",
        got=kind,
        reason="vLLM reads each expert under a name of its own, which is known of this type alone.",
        use="sampler=transformers",
    )


def cannot_update_by_muon(trains_experts: bool) -> str | None:
    """Return the problem with weights that Muon is to update; trains_experts: whether there are
    experts among them, or their adapters."""
    if not trains_experts:
        return None
    return refusal(
        setting="optimizer=muon",
        needs="matrices to train",
        got="experts",
        reason="The experts of a layer are one tensor, and so are their adapters: an orthogonal "
        "update of it is none of each expert's matrix.",
        use="optimizer=adamw, in Python name='adamw'",
    )


def unknown_parts(model: ModelSettings, kind: object) -> str | None:
    """Return the problem with a model that is to be compiled and whose parts are not known.

    kind: its type; None if that is not known yet.
    """
    if model.compile is not True or kind in (None, *MODEL_TYPES):
        return None
    return refusal(
        setting="model.compile=true",
        needs=f"a model of type {', '.join(MODEL_TYPES)}",
        got=kind,
        reason="The parts of other models are not known.",
        use="model.compile=false",
    )


def flash_attention_version() -> str | None:
    """Return the version of FlashAttention 4 that is installed; None without it."""
    try:
        return importlib.metadata.version(FLASH_ATTENTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def beyond_flash_attention(
    capability: tuple[int, int], head_width: int | None, has_window: bool
) -> str | None:
    """Return why FlashAttention 4 does not serve on a GPU for a layer; None where it does.

    capability: the GPU's. head_width: None if it is not known.
    has_window: whether a token sees at most a number of tokens. The package has kernels for that,
        which were not measured.
    """
    major, minor = capability
    if not _HOPPER <= major <= _LAST_BLACKWELL:
        return f"it needs a GPU of compute capability 9.0 to 11.9 (got {major}.{minor})"
    if has_window:
        return "it is not used in layers with a sliding window"
    if head_width is not None and major > _HOPPER and 128 < head_width != 256:
        return f"on this GPU it has no heads of {head_width}"
    return None
