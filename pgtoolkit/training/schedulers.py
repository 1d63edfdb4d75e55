"""Steps the learning-rate schedulers of a module, which Lightning leaves to a module that optimizes
by itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch

from pgtoolkit.losses.checks import is_whole
from pgtoolkit.training.frameworks import LRSchedulerConfig, callbacks, lightning


def check_optimizers(
    module: str,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
) -> None:
    """Raise ValueError for optimizers with which a step is not one update.

    module: the name of its class. optimizers: those of its Trainer. parameters: its own.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"{module} needs one optimizer (got {len(optimizers)}). A step is one update of all "
            "parameters. Use one with groups of parameters: "
            "torch.optim.AdamW([{'params': FIRST, 'lr': 1e-4}, {'params': SECOND, 'lr': 1e-3}])."
        )
    optimizer = optimizers[0]
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{module} needs an optimizer that takes one gradient (got "
            f"{type(optimizer).__name__}). It would compute the loss several times in an update. "
            "Use another, such as torch.optim.AdamW."
        )
    trained = {id(parameter) for parameter in parameters}
    if not any(id(each) in trained for group in optimizer.param_groups for each in group["params"]):
        raise ValueError(
            f"{module} needs an optimizer of its parameters (got one of others, or none). Nothing "
            "would be trained. Use a method configure_optimizers that returns, for example, "
            "torch.optim.AdamW(self.parameters())."
        )


def check_schedulers(module: str, configs: Sequence[LRSchedulerConfig]) -> None:
    """Raise ValueError for schedulers that the module cannot step.

    Lightning reads `monitor` only for a module that it optimizes, and checks no interval here.
    """
    for config in configs:
        name = type(config.scheduler).__name__
        if isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                f"{module} needs schedulers of updates or epochs from configure_optimizers (got "
                f"{name}). Lightning drops its monitor. Use self.plateau = {name}(...) in "
                "configure_optimizers without returning it, and in on_train_epoch_end "
                "self.plateau.step(self.trainer.callback_metrics['loss'])."
            )
        if config.interval not in ("step", "epoch"):
            raise ValueError(
                f"{module} needs interval='step' or 'epoch' of a scheduler (got "
                f"{config.interval!r} of {name}). It would never be stepped. Use one of the two."
            )
        if not is_whole(config.frequency) or config.frequency < 1:
            raise ValueError(
                f"{module} needs a whole number of at least 1 as frequency of a scheduler (got "
                f"{config.frequency!r} of {name}). Use frequency=1 for each update or epoch."
            )


def check_callback(module: lightning.LightningModule, callback: lightning.Callback) -> None:
    """Raise ValueError for a callback that sets learning rates and would do it wrongly."""
    name = type(module).__name__
    if isinstance(callback, callbacks.LearningRateFinder):
        raise ValueError(
            f"{name} needs a Trainer without LearningRateFinder (got one). It reads a loss that "
            "training_step does not return. Use runs of a few steps with several rates."
        )
    is_averaging = isinstance(callback, callbacks.StochasticWeightAveraging)
    if is_averaging and callback.pl_module_contains_batch_norm(module):
        raise ValueError(
            f"{name} has BatchNorm, and so needs a Trainer without StochasticWeightAveraging (got "
            "one). Its last epoch would train the averaged weights. Use WeightAveraging of "
            "lightning.pytorch.callbacks."
        )


def schedulers_of_hand(
    module: lightning.LightningModule,
) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    """Return the schedulers among a module's attributes that its Trainer does not know, by name."""
    known = {id(config.scheduler) for config in module.trainer.lr_scheduler_configs}
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and id(value) not in known
    }


class SchedulerSteps:
    """Steps the schedulers of a Trainer, at the places where Lightning would."""

    def __init__(self) -> None:
        self._left_at: dict[object, int] = {}

    def begin(self) -> None:
        """Forget where the schedulers stood, as a training begins."""
        self._left_at = {}

    def _check_untouched(self, module: lightning.LightningModule) -> None:
        """Raise ValueError for a scheduler that has been stepped elsewhere since the last step.

        Lightning's advice for a module that optimizes by itself is to step them there.
        """
        for scheduler, place in _places(module).items():
            if self._left_at.get(scheduler, place) != place:
                name = type(scheduler).__name__
                raise ValueError(
                    f"{type(module).__name__} steps the schedulers of configure_optimizers itself, "
                    f"after updates or epochs (got {name} stepped elsewhere). Its rates would come "
                    f"too early. Leave out the call of your own, or do not return {name} from "
                    "configure_optimizers."
                )

    def step(self, module: lightning.LightningModule, counts: dict[str, int]) -> None:
        """Step those whose frequency divides the count of their interval.

        counts: of the intervals that have just ended: how many updates of the epoch have been made,
            as "step", and how many epochs, as "epoch", in this order.
        """
        self._check_untouched(module)
        for interval, count in counts.items():
            for config in module.trainer.lr_scheduler_configs:
                if config.interval == interval and count % config.frequency == 0:
                    module.lr_scheduler_step(config.scheduler, None)
        self._left_at = _places(module)


def _places(module: lightning.LightningModule) -> dict[object, int]:
    """Return how often each scheduler has been stepped, of those that count it."""
    schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
    return {each: each.last_epoch for each in schedulers if hasattr(each, "last_epoch")}
