"""Callbacks, loggers and profilers of Lightning that are the user's own: made from the
configuration, given what they read, and refused where pgtk does their work itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pgtoolkit.batch import Step
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.system.functions import import_function
from pgtoolkit.system.report import refusal
from pgtoolkit.training.accumulation import DynamicAccumulation, StepOutput
from pgtoolkit.training.frameworks import Logger, Profiler, callbacks, lightning

_DONE_BY_PGTK: tuple[tuple[type, str, str], ...] = (
    (
        callbacks.Checkpoint,
        "A run keeps checkpoints itself, which hold what the next step depends on.",
        "trainer.checkpoint_every, trainer.keep_checkpoints and evaluation.best, or in Python a "
        "lightning.Trainer of your own in the place of fit",
    ),
    (
        callbacks.GradientAccumulationScheduler,
        "A step is a number of documents, whatever micro-batches they need.",
        "accumulation.docs_per_step",
    ),
    (
        callbacks.BatchSizeFinder,
        "A step is a number of documents, whatever micro-batches they need.",
        "accumulation.max_tokens, for which pgtk check estimates the memory",
    ),
    (
        callbacks.LearningRateFinder,
        "It trains, and sets the weights back by a checkpoint of Lightning's.",
        "a sweep over optimizer.learning_rate",
    ),
    (
        callbacks.StochasticWeightAveraging,
        "It sets the learning rate, which the optimizer's schedule does here.",
        "optimizer.schedule",
    ),
)
"""Class of a callback that is refused, the reason, and what to use in its place."""


@dataclass
class OwnParts:
    """The parts of Lightning that a user adds to a run."""

    callbacks: list[lightning.Callback] = field(default_factory=list)
    loggers: list[Logger] = field(default_factory=list)
    profilers: list[Profiler] = field(default_factory=list)

    def add(self, setting: str, part: object) -> None:
        """Add a callback, a logger or a profiler.

        setting: names it in a refusal. Raises ConfigError for anything else, and for a callback
            whose work pgtk does itself.
        """
        for kind, reason, use in _DONE_BY_PGTK:
            if isinstance(part, kind):
                got = type(part).__name__
                raise ConfigError(refusal(setting, "to be left out", got, reason, use))
        if isinstance(part, Logger):
            self.loggers.append(part)
        elif isinstance(part, Profiler) and not self.profilers:
            self.profilers.append(part)
        elif isinstance(part, lightning.Callback):
            self.callbacks.append(part)
        else:
            raise ConfigError(
                refusal(
                    setting=setting,
                    needs="a callback or a logger of Lightning, or one profiler",
                    got=f"an object of {type(part).__name__}",
                    reason="It is handed to Lightning's Trainer.",
                    use="a class that inherits from lightning.Callback",
                )
            )

    def __bool__(self) -> bool:
        return bool(self.callbacks or self.loggers or self.profilers)

    def has(self, kind: type) -> bool:
        """Return whether one of the callbacks is of a class."""
        return any(isinstance(callback, kind) for callback in self.callbacks)


def own_parts(settings: Mapping[str, Mapping[str, object]]) -> OwnParts:
    """Return the parts that `callbacks.own` describes.

    settings: name -> `path` of a class, and the arguments that it is called with.
    Raises ConfigError for a class that cannot be imported, or not be called with its arguments.
    """
    parts = OwnParts()
    for name, entry in settings.items():
        key = f"callbacks.{name}"
        arguments = {argument: value for argument, value in entry.items() if argument != "path"}
        path = str(entry["path"])
        kind = import_function(f"{key}.path", path, arguments=None)
        try:
            part = kind(**arguments)
        except Exception as error:  # of the user's class
            raise ConfigError(
                refusal(
                    setting=f"{key}.path={path}",
                    needs="arguments that its class takes",
                    got=f"{type(error).__name__}: {first_line(error)}",
                    reason="It is made before the run starts.",
                    use=f"{key}.ARGUMENT=VALUE",
                )
            ) from error
        parts.add(f"{key}.path={path}", part)
    return parts


class Reporting(lightning.Callback):
    """Gives the metrics of each step to the user's own callbacks and loggers, and keeps the state
    of these callbacks.

    It stands before them among the callbacks of a Trainer. What is given is the same on each rank.
    LightningModule.log is not used: sixty numbers would take it 49 ms a step.

    parts: what the user has added. parameters: name -> value, for loggers.
    """

    def __init__(self, parts: OwnParts, parameters: Mapping[str, object]):
        self._parts = parts
        self._parameters = parameters

    def on_train_start(self, trainer: lightning.Trainer, module: DynamicAccumulation) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(dict(self._parameters))

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: DynamicAccumulation,
        outputs: StepOutput,
        batch: Step,
        batch_idx: int,
    ) -> None:
        metrics = gather_objects(outputs["metrics"], module.layout.world_group)[0]
        tensors = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        trainer.callback_metrics.update(tensors)
        trainer.logged_metrics.update(tensors)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=batch.state_after["num_steps"])

    def states(self) -> dict[str, dict]:
        """Return the state of each callback by its key, without values that no file can hold."""
        states = {}
        for callback in self._parts.callbacks:
            values = {
                name: value for name, value in callback.state_dict().items() if _can_be_kept(value)
            }
            if values:
                states[callback.state_key] = values
        return states

    def restore(self, states: Mapping[str, dict]) -> None:
        """Give callbacks the states that `states` returned."""
        for callback in self._parts.callbacks:
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])


def _can_be_kept(value: object) -> bool:
    """Return whether a checkpoint can hold a value: a tensor, or one that is the same in JSON."""
    if isinstance(value, Tensor):
        return True
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
