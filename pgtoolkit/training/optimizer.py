"""AdamW without decay on norms and biases, and the learning rate over steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from pgtoolkit.config import OptimizerConfig, Schedule


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW; parameters with fewer than two dimensions (norms, biases) are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=False
    )


def make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int):
    """Linear warm-up over `warmup_steps`, then constant, or linear or cosine decay that reaches 0 after max_steps."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
        if config.schedule == Schedule.linear:
            return max(0.0, 1.0 - progress)
        if config.schedule == Schedule.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
