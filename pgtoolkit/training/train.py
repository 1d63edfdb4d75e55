"""Runs one experiment in its run directory: from the configuration to the last checkpoint and the summary."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, Interrupted, StorageError
from pgtoolkit.ranks.agreement import failing_together, gather, losing_ranks
from pgtoolkit.ranks.layout import AXES, ONE_PROCESS, Layout
from pgtoolkit.runs.directory import RunDirectory, read_status
from pgtoolkit.runs.files import read_provenance, storage
from pgtoolkit.runs.provenance import collect
from pgtoolkit.system.plain_files import open_to_append
from pgtoolkit.tracking.curves import plot_curves
from pgtoolkit.tracking.mlflow_run import MlflowTracker
from pgtoolkit.tracking.next_commands import resume_command, sync_command
from pgtoolkit.tracking.progress import Terminal, summary
from pgtoolkit.tracking.signals import StopSignal
from pgtoolkit.training.build import build, fit
from pgtoolkit.training.checkpoint import load_newest, read_checkpoint
from pgtoolkit.training.data import record_data
from pgtoolkit.training.recorder import Recorder
from pgtoolkit.training.state import restore_data

log = logging.getLogger("pgtoolkit")


def train(
    composed: DictConfig,
    run_dir: Path,
    resume: bool = False,
    overrides: list[str] = (),
    sweep: str | None = None,
    layout: Layout = ONE_PROCESS,
) -> None:
    """Train as the validated configuration says; `resume` continues from the newest checkpoint in run_dir.

    overrides: what was typed, for the record. sweep: the name of the sweep that the run belongs to; a resumed run
    keeps the one it was started with. layout: of all processes, each of which calls this; rank 0 alone writes.
    Raises a PgtoolkitError that carries the exit status; status.json in the run directory tells the same.
    """
    config: Config = OmegaConf.to_object(composed)
    if layout.rank > 0:
        _follow(config, Path(run_dir), resume, layout)
        return
    resolved = OmegaConf.to_container(composed, resolve=True)
    with contextlib.ExitStack() as opened:
        with losing_ranks(layout, config.parallelism.timeout_seconds), failing_together(layout):
            run = opened.enter_context(RunDirectory(run_dir, new=not resume))
            opened.enter_context(_logging_to(run.path / "run.log"))
            checkpoint, recorder = _prepare(config, run, resume, resolved, list(overrides))
        run.set_status("running", recorder.step, sweep=sweep)
        if layout.world_size > 1:
            sizes = ", ".join(f"{axis}={layout.size(axis)}" for axis in AXES if layout.size(axis) > 1)
            log.info(f"{layout.world_size} processes: {sizes}")
        outcome, reason, tracker = "failed", None, None
        try:
            with losing_ranks(layout, config.parallelism.timeout_seconds):
                gather(checkpoint and checkpoint["path"], layout.world_group)
                module, loader = build(config, resume, layout)
                if checkpoint is not None:
                    restore_data(loader, checkpoint)
                tracker = _start_tracker(config, run)
                if recorder.step < config.trainer.max_steps:
                    fit(module, loader, config, recorder)
                recorder.check_trained()
            outcome, reason = ("interrupted", recorder.interrupted_by) if recorder.interrupted_by else ("done", None)
        except (KeyboardInterrupt, SystemExit) as stop:  # Lightning turns the one into the other
            first = str(stop) if isinstance(stop, StopSignal) else "SIGINT"
            outcome, reason = "interrupted", "a second SIGINT" if recorder.interrupted_by else first
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            with _undisturbed(layout):
                _finish(run, tracker, outcome, recorder.step, reason)
    if outcome == "interrupted":
        raise _interrupted(recorder, reason, run.path)


def _prepare(
    config: Config, run: RunDirectory, resume: bool, resolved: dict, overrides: list[str]
) -> tuple[dict | None, Recorder]:
    """Write down what begins, or goes on: the checkpoint to continue from, if any, and the recorder."""
    checkpoint = load_newest(run.path / "checkpoints") if resume else None
    if resume and checkpoint is None:
        log.info("no checkpoint was written yet: starting again from the first step")
    recorder = Recorder(run, run.path, config.trainer, checkpoint)
    if recorder.step > config.trainer.max_steps:
        raise ConfigError(
            f"trainer.max_steps={config.trainer.max_steps} needs at least the steps already made (got "
            f"{recorder.step} of them). A checkpoint is continued, not cut. Use trainer.max_steps={recorder.step}."
        )
    for read in (read_status, read_provenance):  # what is damaged is said before anything is changed
        read(run.path)
    run.read_metrics()
    record_data(run.path, config, None if checkpoint is None else recorder.step)
    run.write_config(resolved, overrides, recorder.step)
    run.write_provenance(collect(sys.argv))
    run.drop_metrics_after(recorder.step)
    if len(run.read_metrics()) < recorder.step:
        log.warning(f"{run.metrics_path} lacks steps before the checkpoint's: summary and curves begin later")
    return checkpoint, recorder


@contextlib.contextmanager
def _undisturbed(layout: Layout):
    """A launcher such as torchrun ends every process by SIGTERM when one has failed; the books are closed first."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if layout.world_size > 1 else None
    try:
        yield
    finally:
        if layout.world_size > 1:
            signal.signal(signal.SIGTERM, before)


def _follow(config: Config, run_dir: Path, resume: bool, layout: Layout) -> None:
    """The part of a rank other than 0: the same steps, from the same checkpoint, without a word."""
    log.handlers, log.propagate = [logging.NullHandler()], False
    quieten()
    with losing_ranks(layout, config.parallelism.timeout_seconds):
        with failing_together(layout):
            pass  # what rank 0 may find in its way
        path = gather(None, layout.world_group)[0]
        checkpoint = None if path is None else read_checkpoint(path, check=False)
        recorder = Recorder(None, run_dir, config.trainer, checkpoint)
        module, loader = build(config, resume, layout)
        if checkpoint is not None:
            restore_data(loader, checkpoint)
        try:
            if recorder.step < config.trainer.max_steps:
                fit(module, loader, config, recorder)
            recorder.check_trained()
        except (KeyboardInterrupt, SystemExit):
            raise _interrupted(recorder, "a second SIGINT", run_dir) from None
    if recorder.interrupted_by:
        raise _interrupted(recorder, recorder.interrupted_by, run_dir)


def _interrupted(recorder: Recorder, reason: str, run_dir: Path) -> Interrupted:
    return Interrupted(
        f"stopped by {reason} after step {recorder.step}; saved up to step {recorder.saved_step}. "
        f"Continue with: {resume_command(run_dir)}"
    )


def _start_tracker(config: Config, run: RunDirectory) -> MlflowTracker | None:
    if config.tracking.name == "none":
        return None
    tracker = MlflowTracker(config.tracking.uri, config.tracking.experiment, config.tracking.system_metrics)
    tracker.start(
        run.path,
        "Training has not started. Start the server or mend tracking.uri, or use tracking=none to keep the metrics in "
        "the run directory only.",
    )
    run.set_status("running", read_status(run.path)["step"], mlflow=tracker.info)
    return tracker


def _finish(run: RunDirectory, tracker: MlflowTracker | None, outcome: str, step: int, reason: str | None) -> None:
    """Close the books; what fails here is said, and hides neither the outcome nor the error that led to it."""
    rows = []
    try:
        run.set_status(outcome, step, reason)
        if rows := run.read_metrics():
            plot_curves(rows, run.path / "curves.png", run.path.name)
    except (StorageError, OSError) as error:
        log.warning(f"status or curves of the run are missing: {error}")
    if tracker is not None and (missing := tracker.finish(outcome)):
        log.warning(f"MLflow lacks {', '.join(missing)} of this run. Deliver them with: {sync_command(run.path)}")
    if outcome == "done":
        log.info(summary(rows, run.path, tracker.info if tracker else None))


@contextlib.contextmanager
def _logging_to(path: Path):
    """Plain lines on the terminal, the same with their time in `path`; Lightning and torch only when they warn."""
    with storage(path):
        opened = open_to_append(path)
    terminal, file = Terminal(sys.stdout), logging.StreamHandler(opened)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [terminal, file], False
    log.setLevel(logging.INFO)
    quieten()
    try:
        yield
    finally:
        log.handlers, log.propagate = [], True
        opened.close()


def quieten() -> None:
    """Lightning, transformers and torch speak only of what the user can mend."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask; causality keeps them out of sight.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch about Lightning, on every fit
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*")  # its new name is missing in 5.0
    warnings.filterwarnings("ignore", message=".*num_workers.*")  # the step loader has no workers to give
