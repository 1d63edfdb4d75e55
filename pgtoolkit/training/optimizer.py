"""AdamW over sharded parameters, and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from pgtoolkit.config.schema_run import OptimizerConfig, Schedule
from pgtoolkit.ranks.collectives import local


class LocalAdamW(torch.optim.AdamW):
    """AdamW that takes of each sharded parameter this rank's part, as a plain tensor.

    The update is elementwise, so that it comes to the same; but it takes many plain tensors at
    once, and DTensors only one by one. The state keeps the parameters' kind.
    """

    def _init_group(self, group, *lists):
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW; parameters with fewer than two dimensions (norms, biases) are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # one kernel instead of a dozen
    betas, fused = (config.beta1, config.beta2), parameters[0].is_cuda
    return LocalAdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)


def learning_rate(config: OptimizerConfig, num_updates: int, max_steps: int) -> float:
    """The rate of update number `num_updates` (from 0): linear warm-up, then constant, or decay to
    0 at max_steps."""
    if num_updates < config.warmup_steps:
        return config.learning_rate * (num_updates + 1) / config.warmup_steps
    progress = min(
        1.0, (num_updates - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    )
    if config.schedule == Schedule.linear:
        return config.learning_rate * (1.0 - progress)
    if config.schedule == Schedule.cosine:
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate
