"""LoRA: a model's matrices W are frozen, and the product of two small matrices is trained beside
each.

A layer computes W x + (alpha / rank) B (A x) (arXiv 2106.09685). B begins as 0, so that training
begins at the model itself. peft puts the layers in place. Its dropout stays 0, since old and new
log-probs of one policy would differ with it.

Each expert of a mixture has an A and a B of its own. peft holds those of a layer in two matrices,
and would add all their products to the weights in every forward pass. `mixture.experts` takes the
products beside the weights instead.

Axes: E experts, r rank.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.errors import ConfigError
from pgtoolkit.model.architectures import Layer, has_experts, is_known, matrices_of_experts
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.ranks.collectives import whole
from pgtoolkit.system.report import text

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

log = logging.getLogger("pgtoolkit")

_NAME = "default"
"""The name that peft gives the only adapter of a model."""

_ADAPTERS = "pgtoolkit_adapters"
"""The attribute of the experts of a layer that holds peft's layers of their matrices."""


def add_adapters(model: PreTrainedModel, settings: HuggingFaceModelSettings) -> str:
    """Freeze a transformers causal LM and give it adapters in float32, in place.

    The adapters are drawn from torch's random state. Returns a digest of the frozen weights, which
    is stored with adapters to recognise the weights by. Raises ConfigError for targets that name
    neither a linear layer nor matrices of experts.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    assert settings.lora_rank is not None
    digest = _digest(model)
    layers, matrices = _targets(model, settings, (nn.Linear, Conv1D))
    lora_config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=cast(
            "int", settings.lora_alpha
        ),  # peft divides by the rank, and takes any number
        target_modules=list(layers),
        target_parameters=matrices or None,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(lora_config, model, _NAME)
    for layer in adapted_layers(model).values():
        for part in (layer.lora_A, layer.lora_B):
            part.float()  # peft makes them of the frozen weights' type
        # autocast casts inputs, without a float32 copy of each of them
        layer.cast_input_dtype_enabled = False
        if _is_of_experts(layer):
            experts = layer.get_base_layer()
            vars(layer)["forward"] = experts.forward
            vars(experts).setdefault(_ADAPTERS, {})[layer.parameter_name] = layer
    trained = sum(parameter.numel() for parameter in adapter_weights(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        f"LoRA: adapters at {len(layers) + len(matrices)} layers; {trained:,} of {total:,} weights "
        "are trained"
    )
    return digest


def adapted_layers(model: nn.Module) -> dict[str, Layer]:
    """Return peft's layers in a model by name; that of one inside of another comes after it."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def rank_of(model: nn.Module) -> int | None:
    """Return the rank of a model's adapters, None without any."""
    return next((layer.r[_NAME] for layer in adapted_layers(model).values()), None)


def adapters_of_experts(experts: nn.Module) -> dict[str, Layer]:
    """Return peft's layers of a layer's experts, by the names of the matrices that they adapt."""
    return vars(experts).get(_ADAPTERS, {})


def trains_experts(model: nn.Module) -> bool:
    """Return whether matrices that the experts of a layer have as one tensor are trained, or have
    adapters."""
    weights = matrices_of_experts(model).values()
    has_adapters = any(map(_is_of_experts, adapted_layers(model).values()))
    return has_adapters or any(weight.requires_grad for weight in weights)


def factors(layer: Layer, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, float]:
    """Return A, B and the number that B A is multiplied by, from one of peft's layers.

    A: (r, in), and (E, r, in) of experts. B: (out, r), and (E, out, r).
    dtype: of A and B, which are then whole where ranks have parts of them; None: as they are.
    """
    a, b = (getattr(layer, part)[_NAME].weight for part in ("lora_A", "lora_B"))
    if dtype is not None:
        a, b = whole(a, dtype), whole(b, dtype)
    if _is_of_experts(layer):
        # peft's matrices are (E r, in) and (out, r E).
        a = a.view(layer.num_experts, -1, a.shape[1])
        b = b.view(len(b), -1, layer.num_experts).permute(2, 0, 1)
    return a, b, layer.scaling[_NAME]


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters themselves, by their names in a folder that peft and
    transformers load."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)[_NAME].weight
        for name, layer in adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


@torch.no_grad()
def merged_weights(model: nn.Module, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model without adapters that computes the same, by that model's names.

    named: the weights of this model. Matrices with an adapter become new tensors, in the number
        type of the frozen ones.
    """
    layers = {
        f"{_without_peft(name)}.{_name_of_weight(layer)}": layer
        for name, layer in adapted_layers(model).items()
    }
    weights = {}
    for name, tensor in named.items():
        if not name.endswith((f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight")):
            plain = _without_peft(name)
            weights[plain] = _merged(layers[plain]) if plain in layers else tensor
    return weights


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add the adapters to the model's weights, and take peft's layers out, in place."""
    for name, layer in reversed(adapted_layers(model).items()):
        _weight(layer).copy_(_merged(layer))
        vars(layer.base_layer).pop(_ADAPTERS, None)
        model.set_submodule(name, layer.base_layer)
    del model.peft_config


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes by its frozen weights alone."""
    layers = adapted_layers(model).values()
    for layer in layers:
        # layer.enable_adapters(False) would switch requires_grad off for a while, and FSDP2 reads
        # that only once.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def settings(model: PreTrainedModel, path: str) -> LoraConfig:
    """Return the content of adapter_config.json.

    path: model.path; a folder is named by its absolute path, which is valid anywhere.
    """
    config = cast("LoraConfig", copy.copy(model.peft_config[_NAME]))
    folder = os.path.expanduser(path)
    config.base_model_name_or_path = os.path.abspath(folder) if os.path.isdir(folder) else path
    config.target_modules = sorted(config.target_modules or ())
    if config.target_parameters:
        config.target_parameters = sorted(config.target_parameters)
    config.inference_mode = True
    return config


def _is_of_experts(layer: Layer) -> bool:
    return hasattr(layer, "parameter_name")


def _name_of_weight(layer: Layer) -> str:
    return layer.parameter_name if _is_of_experts(layer) else "weight"


def _weight(layer: Layer) -> Tensor:
    """Return the frozen weight that one of peft's layers adapts."""
    return getattr(layer.get_base_layer(), _name_of_weight(layer))


def _without_peft(name: str) -> str:
    """Return the name that a module or weight has in the model without adapters."""
    return name.replace(".base_layer", "")


def _merged(layer: Layer) -> Tensor:
    """Return a layer's frozen weight with its adapter added, in the weight's number type."""
    weight = _weight(layer)
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b, factor = factors(layer, wide)
    change = (b @ a) * factor
    change = change.T if layer.fan_in_fan_out else change
    if isinstance(weight, DTensor):
        change = distribute_tensor(
            change, weight.device_mesh, weight.placements, src_data_rank=None
        )
    return (weight.to(wide) + change).to(weight.dtype)


def _targets(
    model: PreTrainedModel, settings: HuggingFaceModelSettings, kinds: tuple[type[nn.Module], ...]
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the layers to be adapted by name, and the names of matrices of experts to be adapted:
    all linear layers but the head, or what ends in one of the targets.

    kinds: the classes of linear layers.
    """
    head = model.get_output_embeddings()
    linear: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head
    }
    targets = settings.lora_targets
    if targets == ["all-linear"]:
        return linear, []
    # In models of other types transformers computes the experts, without adapters beside them.
    matrices = list(matrices_of_experts(model)) if is_known(model) else []
    for target in targets:
        if not any(_ends_in(name, [target]) for name in (*linear, *matrices)):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in (*linear, *matrices)}))
            others = " is"
            if has_experts(model):
                others = " and routers are" if matrices else ", routers and experts are"
            raise ConfigError(
                f"model.lora_targets={text(targets)} needs names of the model's linear layers, or "
                f"ends of them (got {target}). It has {known}; its head{others} not adapted. Use "
                "model.lora_targets=[all-linear], in Python ['all-linear']."
            )
    layers = {name: module for name, module in linear.items() if _ends_in(name, targets)}
    return layers, [name for name in matrices if _ends_in(name, targets)]


def _ends_in(name: str, targets: list[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _digest(model: nn.Module) -> str:
    """Return a digest of the weights, the same in every dtype: they are rounded to bfloat16."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        total = weight.to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64).item()
        digest.update(f"{name} {list(weight.shape)} {total}\n".encode())
    return digest.hexdigest()
