"""The first lines of a run: which model on which device, and what samples for it."""

from __future__ import annotations

import torch

from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings, ModelSettings
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.settings import RecordedRolloutSettings, RolloutSettings
from pgtoolkit.sampling.settings import (
    SamplerSettings,
    TransformersSamplerSettings,
    VllmSamplerSettings,
)
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural
from pgtoolkit.tracking.progress import entry


def opening(
    model: ModelSettings,
    rollout: RolloutSettings,
    sampler: SamplerSettings,
    policy: Policy,
    on_gpu: bool,
    layout: Layout,
) -> str:
    """Return the lines on model, device and sampler.

    policy: before it is spread over ranks, so that all its weights are counted.
    """
    lines = [entry("model", _model(model, policy)), entry("device", _device(on_gpu, layout))]
    if isinstance(rollout, RecordedRolloutSettings):
        lines.append(entry("rollouts", f"recorded in {rollout.path}"))
    else:
        lines.append(entry("sampler", _sampler(sampler)))
    return redact("\n".join(lines))


def _model(model: ModelSettings, policy: Policy) -> str:
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    size = f"{weights:,} weights" if weights < 1e6 else f"{weights / 1e6:,.4g} million weights"
    if isinstance(model, HuggingFaceModelSettings):
        words = [model.path, size, str(policy.compute_dtype).removeprefix("torch.")]
        if model.random_weights:
            words.append("drawn from the seed")
        if model.lora_rank is not None:
            words.append(f"adapters of rank {model.lora_rank}")
    else:
        words = [model.name, size, "drawn from the seed"]
    if policy.compiled:
        words.append("compiled")
    return ", ".join(words)


def _device(on_gpu: bool, layout: Layout) -> str:
    processes = layout.world_size
    if not on_gpu:
        device = f"cpu, {plural(torch.get_num_threads(), 'thread')}"
        return device if processes == 1 else f"{device} in each of {processes} processes"
    name = torch.cuda.get_device_name()
    return name if processes == 1 else f"{processes} x {name}"


def _sampler(sampler: SamplerSettings) -> str:
    if isinstance(sampler, VllmSamplerSettings):
        if sampler.urls:
            return f"vllm at {', '.join(sampler.urls)}"
        return "vllm, on servers that this run starts"
    assert isinstance(sampler, TransformersSamplerSettings)  # there is no third class
    copies = sampler.copies
    if not copies:
        place = "in this process"
    elif sampler.gpus is None:
        place = f"on the CPU in processes with copies of the weights: {len(copies)}"
    else:
        place = f"in processes with copies of the weights on GPU {', '.join(map(str, copies))}"
    return f"{sampler.name}, {place}"
