"""The callback that makes a run durable: metrics after each step, checkpoints, an orderly stop."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from types import FrameType

from pgtoolkit.batch import Step
from pgtoolkit.document import Document
from pgtoolkit.errors import DataError, NumericalError, SamplerLost, first_line
from pgtoolkit.ranks.agreement import largest
from pgtoolkit.rollouts.kept_completions import KeptCompletions
from pgtoolkit.rollouts.step_loader import loadable
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import list_checkpoints
from pgtoolkit.system.child import parent_has_ended
from pgtoolkit.tasks.retries import stop_asked
from pgtoolkit.tracking.progress import Progress
from pgtoolkit.tracking.signals import answer_stop_signals, raise_swallowed
from pgtoolkit.training.accumulation import StepOutput
from pgtoolkit.training.checkpoint import can_be_copied, save_behind, save_checkpoint
from pgtoolkit.training.evaluation import Evaluations
from pgtoolkit.training.fit import RunCallback
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import TrainerSettings
from pgtoolkit.training.state import restore, snapshot, write_settings

log = logging.getLogger("pgtoolkit")

_LAUNCHER_LOST = 1000
"""Among numbers of signals, the end of the process that started this one, which sends SIGTERM."""


class Recorder(RunCallback):
    """Writes each step to the run directory, once its update is made.

    Every rank has a recorder. They stop after the same step and save together, but only rank 0
    writes to the run directory.

    run: the run directory; None on ranks other than 0.
    checkpoint: the state to continue from; None for a fresh run.
    completions: an attribute of rank 0's recorder, where completions are kept.
    early_notes: an attribute of rank 0's recorder: what is logged after a tenth of the steps, and
        two batches at least.
    interrupted_by: the first of STOP_SIGNALS, to any rank, lets the step finish, saves it and is
        named here. A second SIGINT acts at once, but for a checkpoint that a thread is writing. A
        process that `pgtk` has started, and ranks of another launcher, stop in the same way when
        the process that started them has ended.
    first_step: the step that this start continues from.
    can_continue: whether an error between two steps has ended the run, which may be resumed.
    saved_step: the step of the newest checkpoint that is whole.
    reached: why the run ended before its last step: a sentence that the goal of trainer.stop_at was
        reached, or that a callback of the user's stopped it.
    """

    def __init__(
        self,
        run: RunDirectory | None,
        folder: Path,
        settings: TrainerSettings,
        checkpoint: dict | None,
    ):
        self._run = run
        self._folder = folder / "checkpoints"
        self._settings = settings
        self._checkpoint = checkpoint
        self.progress = Progress(settings.max_steps)
        self.step = 0 if checkpoint is None else checkpoint["step"]
        self.first_step = self.step
        self.saved_step = self.step
        self.interrupted_by: str | None = None
        self.reached: str | None = None
        self.completions: KeptCompletions | None = None
        self.early_notes: Callable[[], Iterable[str]] | None = None
        self._num_updates = 0 if checkpoint is None else checkpoint["num_updates"]
        self._had_loss = False
        self._signal = 0
        self._is_in_step = False
        self.can_continue = False
        stop_asked.clear()
        self._parent = os.getppid()
        # The state of the data after the last step, until a checkpoint has it.
        self._unsaved: dict | None = None
        # The step of a checkpoint that a thread writes, and its end.
        self._writing: tuple[int, Future[Path]] | None = None
        self._is_due = False  # whether a checkpoint is to be written before the next step
        self._evaluations: Evaluations | None = None
        self._kept: list[Path] = [] if run is None else list_checkpoints(self._folder)

    def on_train_start(self, trainer: lightning.Trainer, module: PolicyGradientModule) -> None:
        if self._checkpoint is not None:
            restore(module, self._checkpoint)  # not earlier, since only now the optimizer exists
            if self.reporting is not None:
                self.reporting.restore(self._checkpoint.get("callbacks", {}))
            self._checkpoint = None
            # So that callbacks see the numbers of a run that was never stopped.
            loop = trainer.fit_loop
            updates = loop.epoch_loop.manual_optimization.optim_step_progress.total
            updates.completed = module.num_updates
            loop.epoch_loop._batches_that_stepped = self.step
            loop.epoch_progress.current.processed = self.batches.number  # pyright: ignore[reportAttributeAccessIssue]  (its tracker has it)
            loop.epoch_progress.current.completed = self.batches.number
        # Lightning restores the handlers of its caller at the end.
        answer_stop_signals(self._stop_after_this_step)
        raise_swallowed()
        if self._run is not None:
            self.progress.begin(self.step)
        if module.evaluator is not None:
            self._evaluations = Evaluations(self._run, module, self._settings)
            # Before the first step, or where a run was stopped between a step and its evaluation.
            if self._evaluations.is_due(self.step):
                self._evaluations.make(self.step)
            self.reached = self._evaluations.reached(self.step)
            trainer.should_stop |= self.reached is not None

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        module: PolicyGradientModule,
        batch: Step,
        batch_idx: int,
    ) -> None:
        self._is_in_step = True

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: PolicyGradientModule,
        outputs: StepOutput,
        batch: Step,
        batch_idx: int,
    ) -> None:
        self._note_written()
        metrics = outputs["metrics"]
        self.step = batch.state_after["num_steps"]
        self._is_in_step = False
        if self._run is not None:
            self._run.append_metrics(self.step, metrics)
            self.progress.show(self.step, metrics)
        if self.completions is not None and (batch.of_pass is None or batch.of_pass.is_first):
            self.completions.add(self.step, batch.documents)
        if self._num_updates == 0:
            self._follow_first_update(module, metrics, batch.documents)
        self._unsaved = batch.state_after
        stop_signal = self._asked_to_stop(module)
        will_be_resumed = stop_signal and self.step < self._settings.max_steps
        is_due = self._evaluations is not None and self._evaluations.is_due(self.step)
        if self._evaluations is not None and is_due and not will_be_resumed:
            # Before the checkpoint: so each checkpoint has its evaluation, and the best one is
            # kept.
            self._evaluations.make(self.step)
            self.reached = self._evaluations.reached(self.step)
            stop_signal = self._asked_to_stop(module)
        is_best = self._evaluations is not None and self._evaluations.best_step == self.step
        self._is_due = is_best or self.step % self._settings.checkpoint_every == 0
        if self._is_due and not self.batches.ends_batch:
            self._save(module, goes_on=True)
        if stop_signal:
            self.interrupted_by = _name_of(stop_signal)
        if stop_signal or self.reached:
            trainer.should_stop = True
        if self.reporting is not None:  # the user's callbacks may stop one rank alone
            trainer.should_stop = bool(largest(int(trainer.should_stop), module.layout))

    def on_train_epoch_start(
        self, trainer: lightning.Trainer, module: PolicyGradientModule
    ) -> None:
        """Write the checkpoint that is due since the last step of the batch before: not earlier, so
        that it has what callbacks make of the end of an epoch. Then log the early notes."""
        if self._is_due:
            self._save(module, goes_on=True)
        is_early = self.batches.number < 2 or 10 * self.step < self._settings.max_steps
        if self.early_notes is not None and not is_early:
            for note in self.early_notes():
                log.warning(f"note: {note}")
            self.early_notes = None

    def on_train_end(self, trainer: lightning.Trainer, module: PolicyGradientModule) -> None:
        if (
            self._evaluations is not None
            and not self.interrupted_by
            and not self._evaluations.has(self.step)
        ):
            self._evaluations.make(self.step)  # the data has ended before max_steps
        if self._unsaved is not None:
            self._save(module)
        self._wait_for_checkpoint()
        has_reason = self.interrupted_by or self.reached or self.batches.have_ended
        if trainer.should_stop and not has_reason:
            self.reached = f"a callback of your own stopped the training after step {self.step}"

    def _asked_to_stop(self, module: PolicyGradientModule) -> int:
        """Return the number of a signal to any rank; 0 if there was none."""
        # A rank of another launcher, such as torchrun, is not told when the launcher ends.
        if module.layout.world_size > 1 and os.getppid() != self._parent:
            self._signal = _LAUNCHER_LOST
        return largest(self._signal, module.layout)

    def on_exception(
        self,
        trainer: lightning.Trainer,
        module: PolicyGradientModule,
        exception: BaseException,
    ) -> None:
        """Save the steps made so far where the next documents, or an evaluation, failed.

        All ranks learn of that between the same two steps, so they can save together.
        """
        is_shared = module.layout.world_size == 1 or getattr(exception, "agreed", False)
        if self._is_in_step or not is_shared or not isinstance(exception, SamplerLost | DataError):
            return
        self.can_continue = True
        if self._unsaved is not None:
            self._save(module)

    def check_trained(self) -> None:
        """Raise an error if the run has ended without a single update."""
        if self._num_updates > 0 or self.interrupted_by:
            return
        if self._had_loss:
            error_class = NumericalError
            reason = "The loss of each was not finite"
        else:
            error_class = DataError
            reason = "Their documents have no trained token"
        error = error_class(
            f"nothing was trained: none of the {self.step} steps made an update. {reason}."
        )
        error.on_all_ranks = True
        raise error

    def _follow_first_update(
        self, module: PolicyGradientModule, metrics: dict[str, float], documents: list[Document]
    ) -> None:
        """Note whether a step up to the first update had a loss, and whether log-probs match."""
        self._num_updates = module.num_updates
        self._had_loss |= "loss" in metrics
        if "new_logprobs" in metrics and module.surprises is not None:
            module.surprises.of_first_update(documents, metrics)

    def _save(self, module: PolicyGradientModule, goes_on: bool = False) -> None:
        """Save the steps made so far.

        goes_on: training goes on, so a thread may write a copy meanwhile.
        """
        assert self._unsaved is not None
        self._wait_for_checkpoint()  # so that there is one copy at a time
        if self.completions is not None:
            # First, so that a run that continues from this checkpoint has the completions up to it.
            self.completions.write()
        self._note_deleted()
        state, tensors = snapshot(module, loadable(self._unsaved))
        if self.reporting is not None:
            state["callbacks"] = self.reporting.states()
        settings = functools.partial(write_settings, module)
        keep = self._settings.keep_checkpoints
        best = None if self._evaluations is None else self._evaluations.best_step
        rows = None if self._run is None else self._run.checksums()
        if goes_on and module.layout.world_size == 1 and can_be_copied(tensors):
            future = save_behind(self._folder, state, tensors, settings, keep, best, rows)
            self._writing = (self.step, future)
        else:
            save_checkpoint(self._folder, state, tensors, settings, keep, module.layout, best, rows)
            self._note_saved(self.step)
        self._unsaved = None
        self._is_due = False

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, where something else has ended the run.

        An error in writing it is logged: that of the run is the one to raise.
        """
        try:
            self._wait_for_checkpoint()
        except Exception as error:
            log.warning(first_line(error))

    def _wait_for_checkpoint(self) -> None:
        if self._writing is not None:
            wait([self._writing[1]])
            self._note_written()

    def _note_written(self) -> None:
        """Note that the checkpoint of a thread is whole, or raise what it could not write."""
        if self._writing is None or not self._writing[1].done():
            return
        step, future = self._writing
        self._writing = None
        future.result()
        self._note_saved(step)

    def _note_saved(self, step: int) -> None:
        self.saved_step = step
        if self._run is not None:
            self._run.set_status("running", step, saved=step)
            self._kept = list_checkpoints(self._folder)

    def _note_deleted(self) -> None:
        """Note checkpoints that somebody else has deleted since the last one was saved."""
        if self._run is None:
            return
        left = list_checkpoints(self._folder)
        deleted = [path.name for path in self._kept if path not in left]
        if deleted:
            log.warning(
                f"note: {self._folder} lacks {', '.join(deleted)}, which somebody has deleted "
                "during the run. It goes on, and saves the next one."
            )

    def _stop_after_this_step(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            if number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            return
        self._signal = _LAUNCHER_LOST if parent_has_ended.is_set() else number
        stop_asked.set()
        # Not through the log: the signal may have come while the log writes a line, and its stream
        # must not be entered twice.
        if self._run is not None:
            text = f"{_name_of(self._signal)}: finishing this step, then saving"
            with contextlib.suppress(OSError):
                os.write(1, self.progress.above(text))


def _name_of(number: int) -> str:
    return "the end of its launcher" if number == _LAUNCHER_LOST else signal.Signals(number).name
