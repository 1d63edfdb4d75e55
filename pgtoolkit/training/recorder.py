"""The callback that makes a run durable: metrics and progress after each step, checkpoints, an orderly stop."""

from __future__ import annotations

import logging
import signal

import lightning

from pgtoolkit.batch import Step
from pgtoolkit.config import TrainerConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.tracking.progress import ProgressLine
from pgtoolkit.tracking.run_directory import RunDirectory
from pgtoolkit.training.checkpoint import random_state, save_checkpoint, set_random_state

log = logging.getLogger("pgtoolkit")


class Recorder(lightning.Callback):
    """Writes what each step yields to the run directory; a step counts once its update is made.

    checkpoint: the state to continue from, or None for a fresh run.
    The first SIGINT or SIGTERM lets the step finish and saves it (`interrupted_by` is then set); a second SIGINT
    acts at once.
    """

    def __init__(self, run: RunDirectory, config: TrainerConfig, checkpoint: dict | None):
        self._run = run
        self._config = config
        self._checkpoint = checkpoint
        self._progress = ProgressLine(config.max_steps)
        self.step = self.saved_step = 0 if checkpoint is None else checkpoint["step"]
        self.interrupted_by: str | None = None
        self._unsaved: dict | None = None  # where the data stands, while that is in no checkpoint

    def on_train_start(self, trainer, module) -> None:
        # Only now does the optimizer exist, and nothing draws random numbers between here and the first step.
        if self._checkpoint is not None:
            restore(module, self._checkpoint)
            self._checkpoint = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop_after_this_step)  # Lightning puts its caller's handlers back at the end

    def on_train_batch_end(self, trainer, module, outputs: dict, batch: Step, batch_idx: int) -> None:
        self.step = batch.state_after["num_steps"]
        metrics = outputs["metrics"]
        self._run.append_metrics(self.step, metrics)
        log.info(self._progress.line(self.step, metrics))
        self._unsaved = batch.state_after
        if self.step % self._config.checkpoint_every == 0:
            self._save(module)
        if self.interrupted_by:
            trainer.should_stop = True

    def on_train_end(self, trainer, module) -> None:
        if self._unsaved is not None:
            self._save(module)

    def _save(self, module) -> None:
        folder = self._run.path / "checkpoints"
        save_checkpoint(folder, self.step, snapshot(module, self._unsaved), self._config.keep_checkpoints)
        self._unsaved, self.saved_step = None, self.step
        self._run.set_status("running", self.step)

    def _stop_after_this_step(self, number, _frame) -> None:
        self.interrupted_by = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.info(f"{self.interrupted_by}: finishing step {self.step + 1}, then saving")


def snapshot(module, data_state: dict) -> dict:
    """All that the next step depends on, in tensors and plain containers."""
    return {
        "format": 1,
        "step": data_state["num_steps"],
        "num_updates": module.num_updates,
        "num_skipped_steps": module.num_skipped_steps,
        "documents_seen": module.documents_seen,
        "model": module.model.state_dict(),
        "optimizer": module.optimizer.state_dict()["state"],
        "data": data_state,
        "random": random_state(),
    }


def restore(module, state: dict) -> None:
    """The counterpart of `snapshot`, but for the data, which the step loader restores.

    Of the optimizer only its moments are taken over: its settings are the configuration's, which a resume may change.
    """
    try:
        module.model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"the checkpoint does not fit the configured model: {reason}") from error
    module.optimizer.load_state_dict(module.optimizer.state_dict() | {"state": state["optimizer"]})
    module.num_updates = state["num_updates"]
    module.num_skipped_steps = state["num_skipped_steps"]
    module.documents_seen = state["documents_seen"]
    set_random_state(state["random"])
