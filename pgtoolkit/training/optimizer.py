"""AdamW over sharded parameters, and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pgtoolkit.ranks.collectives import local
from pgtoolkit.training.settings import OptimizerSettings, Schedule


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's part of each sharded parameter as a plain tensor.

    The update is elementwise, so the result is the same. Plain tensors are updated many at a time,
    DTensors only one by one. The optimizer's state stays sharded like the parameters.
    """

    def _init_group(self, group: dict[str, object], *tensor_lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = map(local, tensors)
        return has_complex


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters of a model.

    Those with fewer than two dimensions (norms, biases) have no weight decay.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return LocalAdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=parameters[0].is_cuda,  # one kernel instead of a dozen
    )


class LearningRate(torch.optim.lr_scheduler.LRScheduler):
    """The learning rate of each update, in PyTorch's form, which callbacks look for.

    PyTorch's own schedulers multiply a base, which changes the last bits.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, max_steps: int
    ):
        self._settings = settings
        self._max_steps = max_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        rate = learning_rate(self._settings, self.last_epoch, self._max_steps)
        return [rate for _ in self.optimizer.param_groups]

    def set(self, num_updates: int) -> float:
        """Set the rate of update number `num_updates` (from 0), and return it."""
        self.last_epoch = num_updates
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates
        return float(rates[0])


def learning_rate(settings: OptimizerSettings, num_updates: int, max_steps: int) -> float:
    """Return the learning rate of update number `num_updates` (from 0).

    It rises linearly during the warm-up. Then it stays, or decays to the least one at `max_steps`,
    the number of updates that the weights get in the run.
    """
    if num_updates < settings.warmup_steps:
        return settings.learning_rate * (num_updates + 1) / settings.warmup_steps
    updates_after_warmup = num_updates - settings.warmup_steps
    progress = min(1.0, updates_after_warmup / max(1, max_steps - settings.warmup_steps))
    least = settings.min_learning_rate
    if settings.schedule == Schedule.linear:
        return least + (settings.learning_rate - least) * (1.0 - progress)
    if settings.schedule == Schedule.cosine:
        above = (settings.learning_rate - least) * 0.5
        return least + above * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate
