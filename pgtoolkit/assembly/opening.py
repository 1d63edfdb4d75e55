"""The first lines of a run: which model on which device, and what samples for it."""

from __future__ import annotations

import torch

from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.config.schema_samplers import VllmSamplerConfig
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural
from pgtoolkit.tracking.progress import entry


def opening(config: Config, policy: Policy, on_gpu: bool, layout: Layout) -> str:
    """Return the lines on model, device and sampler.

    policy: before it is spread over ranks, so that all its weights are counted.
    """
    lines = [entry("model", _model(config, policy)), entry("device", _device(on_gpu, layout))]
    if isinstance(config.rollout, RecordedRolloutConfig):
        lines.append(entry("rollouts", f"recorded in {config.rollout.path}"))
    else:
        lines.append(entry("sampler", _sampler(config)))
    return redact("\n".join(lines))


def _model(config: Config, policy: Policy) -> str:
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    size = f"{weights:,} weights" if weights < 1e6 else f"{weights / 1e6:,.4g} million weights"
    if not isinstance(config.model, HuggingFaceModelConfig):
        return f"{config.model.name}, {size}, drawn from the seed"
    words = [config.model.path, size, str(policy.compute_dtype).removeprefix("torch.")]
    if config.model.random_weights:
        words.append("drawn from the seed")
    if config.model.lora_rank is not None:
        words.append(f"adapters of rank {config.model.lora_rank}")
    return ", ".join(words)


def _device(on_gpu: bool, layout: Layout) -> str:
    processes = layout.world_size
    if not on_gpu:
        device = f"cpu, {plural(torch.get_num_threads(), 'thread')}"
        return device if processes == 1 else f"{device} in each of {processes} processes"
    name = torch.cuda.get_device_name()
    return name if processes == 1 else f"{processes} x {name}"


def _sampler(config: Config) -> str:
    if isinstance(config.sampler, VllmSamplerConfig):
        if config.sampler.urls:
            return f"vllm at {', '.join(config.sampler.urls)}"
        return "vllm, on servers that this run starts"
    copies = copies_of(config)
    if not copies:
        place = "in this process"
    elif config.sampler.gpus is None:
        place = f"on the CPU in processes with copies of the weights: {len(copies)}"
    else:
        place = f"in processes with copies of the weights on GPU {', '.join(map(str, copies))}"
    return f"{config.sampler.name}, {place}"
