"""The callback that makes a run durable: metrics and progress after each step, checkpoints, an
orderly stop.

Every rank has one: they stop after the same step and save together, but only that of rank 0 writes
    to the run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from pathlib import Path

from pgtoolkit.batch import Document, Step
from pgtoolkit.config.schema_run import TrainerConfig
from pgtoolkit.errors import DataError, NumericalError, SamplerLost
from pgtoolkit.ranks.agreement import largest
from pgtoolkit.rollouts.data_metrics import mismatch_note
from pgtoolkit.rollouts.kept_completions import KeptCompletions
from pgtoolkit.rollouts.steps import loadable
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.system.child import parent_has_ended
from pgtoolkit.tracking.progress import Progress
from pgtoolkit.tracking.signals import answer_stop_signals, raise_swallowed
from pgtoolkit.training.checkpoint import save_checkpoint
from pgtoolkit.training.evaluation import Evaluations
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.state import restore, snapshot, write_settings

log = logging.getLogger("pgtoolkit")


_LAUNCHER_LOST = 1000
"""Stands among the numbers of signals for the end of the process that started this one, which sends
SIGTERM."""


class Recorder(lightning.Callback):
    """Writes what each step yields to the run directory; a step counts once its update is made.

    run: None on ranks other than 0. checkpoint: the state to continue from, or None for a fresh
        run.
    completions: an attribute, where some are kept; rank 0's.
    The first of STOP_SIGNALS, to any rank, lets the step finish and saves it (`interrupted_by` is
    then set); a second SIGINT acts at once. A process that `pgtk` has started, and ranks that
    another launcher has, stop in the same way when the process that started them is gone. `reached`
    says in words that the goal of trainer.stop_at was, which ends the run as well.
    """

    def __init__(
        self, run: RunDirectory | None, folder: Path, config: TrainerConfig, checkpoint: dict | None
    ):
        self._run = run
        self._folder = folder / "checkpoints"
        self._config = config
        self._checkpoint = checkpoint
        self.progress = Progress(config.max_steps)
        self.step = self.saved_step = 0 if checkpoint is None else checkpoint["step"]
        self.interrupted_by: str | None = None
        self._num_updates = 0 if checkpoint is None else checkpoint["num_updates"]
        self._not_finite = False
        self._signal = 0
        self._parent = os.getppid()
        self.completions: KeptCompletions | None = None
        self._unsaved: dict | None = None  # where the data stands, while that is in no checkpoint
        self._evaluations: Evaluations | None = None
        self.reached: str | None = None

    def on_train_start(self, trainer, module) -> None:
        # Only now does the optimizer exist.
        if self._checkpoint is not None:
            restore(module, self._checkpoint)
            self._checkpoint = None
        # Lightning puts its caller's handlers back at the end
        answer_stop_signals(self._stop_after_this_step)
        raise_swallowed()
        if self._run is not None:
            self.progress.begin(self.step)
        if module.evaluator is not None:
            self._evaluations = Evaluations(self._run, module)
            # before the first step, or where a kill or a signal came before it
            if self._evaluations.is_due(self.step):
                self._evaluations.make(self.step)
            self.reached = self._evaluations.reached(self.step)
            trainer.should_stop |= self.reached is not None

    def on_train_batch_end(
        self, trainer, module, outputs: dict, batch: Step, batch_idx: int
    ) -> None:
        self.step = batch.state_after["num_steps"]
        if self._run is not None:
            metrics = outputs["metrics"]
            self._run.append_metrics(self.step, metrics)
            self.progress.show(self.step, metrics)
        if self.completions is not None:
            self.completions.add(self.step, batch.documents)
        if self._num_updates == 0:
            self._before_the_first_update(module, outputs["metrics"], batch.documents)
        self._unsaved = batch.state_after
        stop = self._asked_to_stop(module)
        waits = stop and self.step < self._config.max_steps  # until the run is resumed
        if not waits and self._evaluations is not None and self._evaluations.is_due(self.step):
            # Before the checkpoint: one that is there has the evaluation of its step, and the best
            #   one is kept.
            self._evaluations.make(self.step)
            self.reached = self._evaluations.reached(self.step)
            stop = self._asked_to_stop(module)
        is_best = self._evaluations is not None and self._evaluations.best_step == self.step
        if is_best or self.step % self._config.checkpoint_every == 0:
            self._save(module)
        if stop:
            self.interrupted_by = _name(stop)
        if stop or self.reached:
            trainer.should_stop = True

    def on_train_end(self, trainer, module) -> None:
        if (
            self._evaluations is not None
            and not self.interrupted_by
            and not self._evaluations.has(self.step)
        ):
            self._evaluations.make(self.step)  # the data has ended before max_steps
        if self._unsaved is not None:
            self._save(module)

    def _asked_to_stop(self, module) -> int:
        """The number of a signal to any rank; 0 without one."""
        # Another launcher, such as torchrun, is no parent of ours to follow.
        if module.layout.world_size > 1 and os.getppid() != self._parent:
            self._signal = _LAUNCHER_LOST
        return largest(self._signal, module.layout)

    def on_exception(self, trainer, module, exception: BaseException) -> None:
        """A server that samples was lost, for all ranks alike, between two steps: none of those
        made is to be lost."""
        if isinstance(exception, SamplerLost) and self._unsaved is not None:
            self._save(module)

    def check_trained(self) -> None:
        """Raises an error if the run has come to its end without a single update."""
        if self._num_updates > 0 or self.interrupted_by:
            return
        reason = (
            "The loss of each was not finite"
            if self._not_finite
            else "Their documents have no trained token"
        )
        error = (NumericalError if self._not_finite else DataError)(
            f"nothing was trained: none of the {self.step} steps made an update. {reason}."
        )
        error.on_all_ranks = True
        raise error

    def _before_the_first_update(self, module, metrics: dict, documents: list[Document]) -> None:
        self._num_updates = module.num_updates
        self._not_finite |= "loss" in metrics
        if "new_logprobs" in metrics and (
            note := mismatch_note(documents, metrics["new_logprobs"], module.config.rollout)
        ):
            log.warning(f"note: {note}")

    def _save(self, module) -> None:
        assert self._unsaved is not None
        if self.completions is not None:
            # first: a run that goes on from this checkpoint has those up to it
            self.completions.write()
        state, tensors = snapshot(module, loadable(self._unsaved))
        settings, keep = functools.partial(write_settings, module), self._config.keep_checkpoints
        best = self._evaluations and self._evaluations.best_step
        rows = None if self._run is None else self._run.checksums()
        save_checkpoint(self._folder, state, tensors, settings, keep, module.layout, best, rows)
        self._unsaved, self.saved_step = None, self.step
        if self._run is not None:
            self._run.set_status("running", self.step, saved=self.step)

    def _stop_after_this_step(self, number, _frame) -> None:
        self._signal = _LAUNCHER_LOST if parent_has_ended.is_set() else number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not by the log: the signal may have come while a line of it is written, and a stream is
        #   not written to twice.
        if self._run is not None:
            with contextlib.suppress(OSError):
                os.write(
                    1,
                    self.progress.above(f"{_name(self._signal)}: finishing this step, then saving"),
                )


def _name(number: int) -> str:
    return "the end of its launcher" if number == _LAUNCHER_LOST else signal.Signals(number).name
