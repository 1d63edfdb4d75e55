"""The rules on LoRA: what its keys need of the model, of the processes and of one another."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.rules.run import installed
from pgtoolkit.system.report import Report, text


def lora(c: Any, usual: dict[str, Any], report: Report) -> None:
    """usual: the defaults of the keys that only mean something beside model.lora_rank."""
    model = c.model
    if model.name != "huggingface":
        return
    if model.lora_rank is None:
        for key, default in usual.items():
            if (value := getattr(model, key)) != default:
                setting, use = f"model.{key}={text(value)}", f"model.lora_rank=16 or model.{key}={text(default)}"
                report.refuse(setting, "model.lora_rank", "null", "Without adapters it would be ignored.", use)
        return
    setting = f"model.lora_rank={model.lora_rank}"
    installed(report, setting, "peft", "lora")
    if model.random_weights:
        reason = "Nearly all weights would stay random, and a checkpoint holds the adapters alone."
        use = "model.lora_rank=null or model.random_weights=false"
        report.refuse(setting, "a model that was trained", "model.random_weights=true", reason, use)
    for axis in ("tensor_parallel", "pipeline_parallel"):
        if (size := getattr(c.parallelism, axis)) > 1:
            got, reason = f"parallelism.{axis}={size}", "Adapters stand beside whole matrices, and are stored together."
            use = f"parallelism=ddp or parallelism=fsdp, with parallelism.{axis}=1"
            report.refuse(setting, f"parallelism.{axis}=1", got, reason, use)
    targets = model.lora_targets
    if nested := [one for one in targets if not isinstance(one, str)]:
        _refuse_targets(targets, "names", nested[0], "They say which layers get adapters.", report)
    elif not targets or "" in targets or len(set(targets)) < len(targets):
        needs, reason = "names, each of them once", "They say which layers get adapters."
        _refuse_targets(targets, needs, targets or "none", reason, report)
    elif "all-linear" in targets and len(targets) > 1:
        reason = "All linear layers but the head get adapters then; the other names would be ignored."
        _refuse_targets(targets, "all-linear by itself or names alone", "both", reason, report)


def _refuse_targets(targets: list[str], needs: str, got: Any, reason: str, report: Report) -> None:
    report.refuse(f"model.lora_targets={text(targets)}", needs, got, reason, "model.lora_targets=[all-linear]")
