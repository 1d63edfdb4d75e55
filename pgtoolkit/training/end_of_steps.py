"""Ends a training whose data give no further step, or nothing to train on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pgtoolkit.batch import Step
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.training.frameworks import lightning

log = logging.getLogger("pgtoolkit")


class EndOfSteps(lightning.Callback):
    """Ends the training after an epoch without a step, and refuses data that train nothing.

    A Trainer whose only limit is max_steps would begin one empty epoch after the other, without
    end. This is a callback, since a module of the user's own may have an `on_train_epoch_end`.
    """

    def __init__(self) -> None:
        self._steps = 0  # of the epoch
        self._trained_tokens = 0  # of all steps of this Trainer

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        _check_overfitting(trainer)
        self._steps = 0
        self._trained_tokens = 0

    def on_train_epoch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._steps = 0

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: object,
        batch: Step,
        batch_idx: int,
    ) -> None:
        self._steps += 1
        self._trained_tokens += int(batch.totals.num_tokens)

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if self._steps:
            self._check_tokens()
        elif not trainer.should_stop:
            _end(trainer)

    def _check_tokens(self) -> None:
        """Raise DataError if no step so far has a trained token."""
        if self._trained_tokens == 0:
            raise DataError(
                f"trainer.fit needs data with trained tokens (got {self._steps} steps in which "
                "every loss_mask is False). No update was made. Use loss_mask=True where the "
                "policy wrote, as in Document(loss_mask=torch.tensor([False, True]), ...)."
            )


def _check_overfitting(trainer: lightning.Trainer) -> None:
    """Raise ValueError for overfit_batches with data that do not begin anew with each epoch."""
    data = trainer.train_dataloader
    batches = trainer.overfit_batches  # pyright: ignore[reportAttributeAccessIssue]  (set by Lightning's connector)
    if batches and isinstance(data, StepLoader | Iterator):
        name = type(data).__name__
        raise ValueError(
            f"lightning.Trainer(overfit_batches={batches}) needs data that begin "
            f"anew with each epoch (got a {name}). Each epoch would train on further steps. Use a "
            "DataLoader of documents with collate_fn=lambda batch: make_step(batch, max_tokens), "
            "or no overfit_batches."
        )


def _end(trainer: lightning.Trainer) -> None:
    """End the training after an epoch without a step. Raises DataError where there was none before,
    and where the Trainer would go on all the same."""
    made = trainer.global_step
    if made == 0:
        raise DataError(
            "trainer.fit needs data with a step (got none in an epoch, and no update before). "
            "Nothing would be trained. Use a DataLoader, which begins anew with each fit, or a new "
            "StepLoader where this one has made its max_steps."
        )
    if made < (trainer.min_steps or 0):
        raise DataError(
            f"lightning.Trainer(min_steps={trainer.min_steps}) needs data of as many steps (got "
            f"{made}). One empty epoch would follow the other. Use min_steps={made}, or a "
            "DataLoader, which begins anew with each epoch."
        )
    trainer.should_stop = True
    asked = trainer.max_steps
    if asked > made:
        log.warning(
            f"the data of trainer.fit have no step left after {made} updates, before "
            f"lightning.Trainer(max_steps={asked}): training ends. Use the same number in "
            "StepLoader(..., max_steps=...), or a DataLoader, which begins anew with each epoch."
        )
