"""Makes a whole model of a folder with LoRA's adapters, as TRL and peft save them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.mixture import save_published
from pgtoolkit.model.settings import HuggingFaceModelSettings, NumberType
from pgtoolkit.model.setup import build_policy
from pgtoolkit.system.model_folder import ADAPTER_SETTINGS, load_tokenizer, settings_in
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import listed, refusal, shell_path, text
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."

_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_rslora",
}
"""Keys of adapter_config.json that are read here, or that say which layers have adapters, which the
names of the tensors say, or how they were initialised. Any other one that is set is a variant."""

_USUAL_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the model unchanged. Others change its weights first."""


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_SETTINGS).is_file()


@torch.no_grad()
def write_merged(use: str, adapter: Path, folder: Path) -> None:
    """Write the model with the adapters added to its weights, in float32, to `folder`.

    The tokenizer is the adapters' own where they have one. use: the command, for messages.
    Raises ConfigError for adapters that are no plain LoRA of linear layers, and for a model that
    cannot be loaded.
    """
    settings = _settings(use, adapter)
    base = str(settings["base_model_name_or_path"])
    in_float32 = HuggingFaceModelSettings(path=base, dtype=NumberType.float32, fp32_lm_head=False)
    try:
        policy = build_policy(in_float32, None, on_gpu=False)
    except ConfigError as error:
        problem = str(error).rpartition(" Use ")[0].replace("model.path", "base_model_name_or_path")
        file = shell_path(adapter / ADAPTER_SETTINGS)
        use = f"Use an editor to write the folder of that model into {file}."
        raise ConfigError(f"{problem} {use}") from error
    model: PreTrainedModel = policy.model
    for name, (a, b) in _pairs(use, adapter).items():
        _add(use, model, name, _scale(a.shape[0], settings) * (b @ a))
    save_published(model, folder)
    tokenizer = _tokenizer(adapter, base)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_card(adapter, settings, tokenizer), encoding="utf-8")


def _card(adapter: Path, settings: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return README.md of the whole model: what was merged, and the chat template beside it."""
    base = str(settings["base_model_name_or_path"])
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if not Path(base).is_absolute():
        lines.append(f"base_model: {base}")
    template = "None: the tokenizer has none."
    if tokenizer.chat_template:
        template = (
            f"That of the tokenizer here:\n\n````jinja\n{tokenizer.get_chat_template()}\n````"
        )
    lines += [
        *("---", f"# {legible(adapter.resolve().name)}", ""),
        f"LoRA's adapters (r = {settings.get('r')}, alpha = {settings['lora_alpha']:g}) of "
        f"{legible(base)}, added by pgtoolkit to its weights, in float32. How they were trained "
        "is not known here.",
        *("", "## Chat template", "", template, ""),
    ]
    return redact("\n".join(lines))


def _settings(use: str, adapter: Path) -> dict:
    """Return adapter_config.json; raises ConfigError where it is no plain LoRA."""
    try:
        settings = settings_in(adapter / ADAPTER_SETTINGS)
    except (OSError, ValueError) as error:
        raise _refused(use, f"an {ADAPTER_SETTINGS} that is whole", first_line(error)) from error
    variants = [key for key, value in settings.items() if value and key not in _WITHOUT_EFFECT]
    if settings.get("bias") == "none":
        variants.remove("bias")
    if settings.get("peft_type") != "LORA":
        variants.insert(0, "peft_type")
    if settings.get("init_lora_weights") not in _USUAL_STARTS:
        variants.append("init_lora_weights")
    if variants:
        got = listed([f"{key}={text(settings.get(key))}" for key in variants], 3)
        raise _refused(use, "adapters of plain LoRA", got)
    if not settings.get("base_model_name_or_path"):
        raise _refused(use, f"base_model_name_or_path in {ADAPTER_SETTINGS}", "none")
    alpha = settings.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or alpha <= 0:
        raise _refused(use, f"a lora_alpha > 0 in {ADAPTER_SETTINGS}", text(alpha))
    return settings


def _pairs(use: str, adapter: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) of each adapted layer, by the layer's name."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(adapter / WEIGHTS)
    except Exception as error:  # safetensors has errors of its own
        raise _refused(use, f"{WEIGHTS}, whole", first_line(error)) from error
    pairs = {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        other = key.replace(".lora_A.weight", ".lora_B.weight")
        if key.startswith(_PREFIX) and other in tensors:
            pairs[name] = (tensors.pop(key).float(), tensors.pop(other).float())
    if tensors or not pairs:
        raise _refused(
            use, "matrices A and B of linear layers", listed(sorted(tensors), 3) or "none"
        )
    return pairs


def _scale(rank: int, settings: dict) -> float:
    return settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _add(use: str, model: PreTrainedModel, name: str, change: Tensor) -> None:
    """Add the change of a linear layer to its weight, in place."""
    from transformers.pytorch_utils import Conv1D

    try:
        layer = model.get_submodule(name)
    except AttributeError as error:
        raise _refused(use, "adapters of layers that the model has", name) from error
    if isinstance(layer, Conv1D):
        change = change.T
    if not isinstance(layer, nn.Linear | Conv1D) or layer.weight.shape != change.shape:
        got = f"{name} of shape {list(change.shape)}"
        raise _refused(use, "adapters of the shapes of the model's linear layers", got)
    if layer.weight is model.get_input_embeddings().weight:
        raise _refused(use, "a head that is not tied to the embeddings", f"an adapter of {name}")
    layer.weight.add_(change)


def _tokenizer(adapter: Path, base: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the adapters' folder, or else that of their model."""
    has_own = (adapter / "tokenizer_config.json").is_file()
    return load_tokenizer(str(adapter) if has_own else base)


def _refused(use: str, needs: str, got: str) -> ConfigError:
    reason = "Another merge would be another model."
    mended = "the folder in which peft merges it: model.merge_and_unload().save_pretrained(FOLDER)"
    return ConfigError(refusal(use, needs, got, reason, mended))
