"""Runs the steps of a loader by Lightning's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from pgtoolkit.batch import Step
from pgtoolkit.losses.checks import check_object
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.training import frameworks
from pgtoolkit.training.accumulation import DynamicAccumulation
from pgtoolkit.training.callbacks import OwnParts, Reporting
from pgtoolkit.training.fitting_parts import check_parts
from pgtoolkit.training.frameworks import (
    LightningEnvironment,
    Logger,
    Profiler,
    lightning,
)
from pgtoolkit.training.module import PolicyGradientModule


def fit(
    module: DynamicAccumulation,
    loader: StepLoader,
    callbacks: Sequence[lightning.Callback] = (),
    loggers: Sequence[Logger] = (),
    profiler: Profiler | None = None,
) -> None:
    """Train until the loader's last step, or until a callback sets `trainer.should_stop`.

    An epoch of the Trainer is a batch of rollouts, with all its steps, or a pass over recorded
    ones. The metrics of each step are in `trainer.callback_metrics`, and go to the loggers.
    Raises ConfigError for a callback whose work pgtoolkit does itself, such as ModelCheckpoint, for
    a schedule that ends with another step than the loader, and for rollouts and steps that do not
    fit the loss.
    """
    check_object("module", module, DynamicAccumulation, "PolicyGradientModule(policy, loss, ...)")
    if not isinstance(loader, StepLoader):
        raise ValueError(
            f"fit needs a StepLoader (got a {type(loader).__name__}). It knows where a batch of "
            "rollouts ends. Use StepLoader(rollouts, accumulation, close_on_groups=False, "
            "max_steps=...), or lightning.Trainer(max_epochs=1).fit(module, dataloader) for a "
            "DataLoader whose collate_fn is make_step."
        )
    if isinstance(module, PolicyGradientModule):
        module.refuse_another_end(loader.max_steps)
        check_parts(module, loader)
    parts = OwnParts()
    for part in (*callbacks, *loggers, *([] if profiler is None else [profiler])):
        parts.add(type(part).__name__, part)
    run_steps(module, loader, parts)


def run_steps(
    module: DynamicAccumulation,
    loader: StepLoader,
    parts: OwnParts,
    parameters: Mapping[str, object] = MappingProxyType({}),
    recorder: RunCallback | None = None,
    on_cpu: bool = False,
) -> None:
    """Do the work of `fit`.

    parameters: name -> value, for loggers. recorder: a callback that stands after the user's, so
        that it keeps what they have made of a step. on_cpu: also where there is a GPU.
    """
    module.reports_metrics = False  # `Reporting` does it
    batches = BatchesOfRollouts(loader)
    module.at_end_of_epoch = lambda: batches.ends_batch
    callbacks: list[lightning.Callback] = [_EndOfData(batches)]
    reporting = None
    if parts:
        reporting = Reporting(parts, parameters)
        callbacks += [reporting, *parts.callbacks]
        # The run has silenced Lightning, but not what the user asked for.
        logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)
    if recorder is not None:
        recorder.batches = batches
        recorder.reporting = reporting
        callbacks.append(recorder)
    on_gpu = torch.cuda.is_available() and not on_cpu
    has_ranks = module.layout.world_size > 1
    loggers = parts.loggers
    if module.layout.rank > 0:
        # Some callbacks, such as LearningRateMonitor, refuse a Trainer without a logger.
        loggers = [frameworks.DummyLogger() for _ in loggers]
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[torch.cuda.current_device()] if has_ranks and on_gpu else 1,
        # To Lightning each rank trains alone. Without this plug-in it would join the processes of a
        # launcher or of SLURM.
        plugins=[LightningEnvironment()] if has_ranks else None,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=loggers or False,
        profiler=parts.profilers[0] if parts.profilers else None,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=parts.has(frameworks.callbacks.ProgressBar),
        enable_model_summary=parts.has(frameworks.callbacks.ModelSummary),
    )
    try:
        trainer.fit(module, batches)
    finally:
        module.reports_metrics = True  # to a Trainer that may come later
        module.at_end_of_epoch = None


class BatchesOfRollouts:
    """Iterates over the steps of one batch of rollouts at a time, which is an epoch to Lightning.

    It has a length for the same reason as the loader.
    """

    def __init__(self, loader: StepLoader):
        self._loader = loader
        self.have_ended = False
        self.ends_batch = False  # whether the last step was the last one of its batch

    @property
    def number(self) -> int:
        """Return the number of the epoch, which goes on where a run is resumed."""
        return self._loader.num_batches

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Step]:
        for step in self._loader:
            self.have_ended = self._loader.made_all_steps
            self.ends_batch = self.have_ended or step.ends_batch
            yield step
            if self.ends_batch:
                return
        self.have_ended = True


class RunCallback(lightning.Callback):
    """A callback of pgtoolkit's own, which stands after the user's.

    batches: what the Trainer iterates over. reporting: keeps the state of the user's callbacks;
        None where there are none. `run_steps` sets both.
    """

    batches: BatchesOfRollouts
    reporting: Reporting | None = None


class _EndOfData(lightning.Callback):
    """Ends the training after the last batch: Lightning has no limit of epochs here."""

    def __init__(self, batches: BatchesOfRollouts):
        self._batches = batches

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: DynamicAccumulation) -> None:
        trainer.should_stop |= self._batches.have_ended
