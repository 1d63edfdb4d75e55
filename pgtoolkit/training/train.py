"""Runs one experiment in its run directory, up to the last checkpoint and the summary."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.rules.executed import named_functions
from pgtoolkit.config.saved import cannot_change
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import (
    PolicyRolloutConfig,
    RecordedRolloutConfig,
    RolloutConfig,
)
from pgtoolkit.config.schema_run import Schedule
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, SamplerLost, StorageError
from pgtoolkit.ranks.agreement import failing_together, gather_objects, losing_ranks
from pgtoolkit.ranks.layout import AXES, ONE_PROCESS, Layout
from pgtoolkit.rollouts.kept_completions import KeptCompletions
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.completion_files import drop_completions_after
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.modules import keep_copies
from pgtoolkit.runs.provenance import collect
from pgtoolkit.runs.records import read_data, read_provenance, read_status, storage
from pgtoolkit.runs.series import Columns, read_metrics, rows_until
from pgtoolkit.system.legible import legible
from pgtoolkit.system.report import shell_path
from pgtoolkit.system.terminal import LegibleFormatter, Terminal
from pgtoolkit.tracking.curves import plot_curves
from pgtoolkit.tracking.logger_records import LoggerRecord, TensorBoardRecord, WandbRecord
from pgtoolkit.tracking.mlflow_run import MlflowTracker
from pgtoolkit.tracking.next_commands import resume_command, sync_command
from pgtoolkit.tracking.progress import entry, mlflow_entries, summary
from pgtoolkit.tracking.signals import StopSignal
from pgtoolkit.training.build import build, fit
from pgtoolkit.training.checkpoint import (
    load_newest,
    read_checkpoint,
    reading_checkpoint,
    refuse_lost_checkpoint,
)
from pgtoolkit.training.data import record_data
from pgtoolkit.training.frameworks import transformers
from pgtoolkit.training.optimizer import learning_rate
from pgtoolkit.training.recorder import Recorder

log = logging.getLogger("pgtoolkit")

Tracker = MlflowTracker | LoggerRecord


def train(
    config: Config,
    run_dir: Path,
    resume: bool = False,
    overrides: Sequence[str] = (),
    sweep: str | None = None,
    layout: Layout = ONE_PROCESS,
) -> None:
    """Train as the validated configuration says.

    resume: continue from the newest checkpoint in run_dir.
    overrides: what was typed, for the record.
    sweep: the name of the sweep that the run belongs to. A resumed run keeps its first one.
    layout: of all processes. Each of them calls this function, but only rank 0 writes and logs.
    Raises a PgtoolkitError, which carries the exit status. status.json of the run says the same.
    """
    trackers: list[Tracker] = []
    outcome = "failed"
    reason = None
    with contextlib.ExitStack() as opened:
        run, checkpoint = _open_run(config, run_dir, resume, overrides, layout, opened)
        folder = Path(run_dir) if run is None else run.path
        recorder = Recorder(run, folder, config.trainer, checkpoint)
        try:
            if run is not None:
                run.set_status("running", recorder.step, sweep=sweep)
            _train_steps(config, run, recorder, trackers, checkpoint, layout, folder, resume)
            outcome, reason = _outcome(config, recorder)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Lightning raises SystemExit for a KeyboardInterrupt.
            outcome = "interrupted"
            if recorder.interrupted_by:
                reason = "a second SIGINT"
            else:
                reason = str(stop) if isinstance(stop, StopSignal) else "SIGINT"
        except SamplerLost as error:
            reason = f"SamplerLost: {error}"
            with_command = type(error)(f"{error} Continue with: {resume_command(folder)}")
            with_command.on_all_ranks = error.on_all_ranks
            raise with_command from error
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if run is not None:
                with _ignoring_sigterm(layout):
                    _finish(run, recorder, trackers, outcome, reason)
        if outcome == "interrupted":
            raise Interrupted(
                f"stopped as asked ({reason}) after step {recorder.step}; saved up to step "
                f"{recorder.saved_step}. Continue with: {resume_command(folder)}"
            )


def _open_run(
    config: Config,
    run_dir: Path,
    resume: bool,
    overrides: Sequence[str],
    layout: Layout,
    opened: contextlib.ExitStack,
) -> tuple[RunDirectory | None, dict | None]:
    """Return the run directory, which only rank 0 has, and the checkpoint to continue from.

    opened: closes the directory and its log.
    """
    run = None
    checkpoint = None
    with losing_ranks(layout, config.parallelism.timeout_seconds):
        with failing_together(layout):
            if layout.rank == 0:
                run = opened.enter_context(RunDirectory(run_dir, new=not resume))
                opened.enter_context(_logging_to(run.path / "run.log"))
                checkpoint = _prepare(config, run, resume, list(overrides))
            else:
                log.handlers = [logging.NullHandler()]
                log.propagate = False
                quieten()
        checkpoint_path: Path | None = None if checkpoint is None else checkpoint["path"]
        path = gather_objects(checkpoint_path, layout.world_group)[0]  # rank 0's
        if layout.rank > 0 and path is not None:
            checkpoint = read_checkpoint(path, check=False)
    return run, checkpoint


def _train_steps(
    config: Config,
    run: RunDirectory | None,
    recorder: Recorder,
    trackers: list[Tracker],
    checkpoint: dict | None,
    layout: Layout,
    folder: Path,
    resume: bool,
) -> None:
    """Build what the run needs, and train until its end or until it is stopped.

    trackers: gets those that are started.
    """
    if layout.world_size > 1:
        sizes = ", ".join(f"{axis}={layout.size(axis)}" for axis in AXES if layout.size(axis) > 1)
        log.info(f"{layout.world_size} processes: {sizes}")
    with (
        contextlib.ExitStack() as started,
        losing_ranks(layout, config.parallelism.timeout_seconds),
    ):
        started.callback(recorder.progress.end)
        module, loader = build(config, resume, layout, folder)
        started.callback(loader.source.close)
        if module.evaluator is not None:
            started.callback(module.evaluator.close)
        if checkpoint is not None:
            with reading_checkpoint(checkpoint["path"]):
                loader.load_state_dict(checkpoint["data"])
        if run is not None:
            num_kept = getattr(config.rollout, "keep_completions", 0)
            if num_kept:
                assert isinstance(loader.source, SampledRollouts)
                recorder.completions = KeptCompletions(
                    run.path, num_kept, loader.source.prompt, module.policy.tokenizer, recorder.step
                )
            _start_trackers(config, run, trackers)
            for tracker in trackers:
                if isinstance(tracker, MlflowTracker):
                    lines = mlflow_entries(tracker.info)
                else:
                    lines = [entry(tracker.title, tracker.shown_by)]
                log.info("\n".join(lines))
        if recorder.step < config.trainer.max_steps or module.evaluator is not None:
            fit(module, loader, config, recorder)
        recorder.check_trained()


def _outcome(config: Config, recorder: Recorder) -> tuple[str, str | None]:
    """Return the status of a run that raised no error, and the reason for its end, if any."""
    if recorder.interrupted_by:
        return "interrupted", recorder.interrupted_by
    max_steps = config.trainer.max_steps
    if recorder.reached is None and recorder.step < max_steps:
        reason = _why_the_data_ended(config.rollout)
        return "done", f"the data ended after step {recorder.step} of {max_steps}: {reason}"
    return "done", recorder.reached


@contextlib.contextmanager
def _ignoring_sigterm(layout: Layout) -> Iterator[None]:
    """Ignore SIGTERM in the block, if there are several ranks.

    A launcher such as torchrun sends it to all of them as soon as one has failed.
    """
    if layout.world_size == 1:
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _prepare(config: Config, run: RunDirectory, resume: bool, overrides: list[str]) -> dict | None:
    """Record the start of a run, or its continuation, with its configuration, code and data.

    Returns the checkpoint to continue from, if there is one. Raises ConfigError or StorageError
    before anything is changed.
    """
    log.info(entry("run", shell_path(run.path)))
    checkpoint = None
    if resume:
        refuse_lost_checkpoint(run.path, f"pgtk resume {shell_path(run.path)}")
        checkpoint = load_newest(run.path / "checkpoints")
        if checkpoint is None:
            log.info("no checkpoint was written yet: starting again from the first step")
    step = 0 if checkpoint is None else checkpoint["step"]
    if step > 0:
        log.info(entry("continues", f"after step {step}"))
    if step > config.trainer.max_steps:
        raise ConfigError(
            f"trainer.max_steps={config.trainer.max_steps} needs at least the steps already made "
            f"(got {step} of them). A checkpoint is continued, not cut. Use "
            f"trainer.max_steps={step}."
        )
    if checkpoint is not None:
        _refuse_another(config, run.path, checkpoint)
    # Reading these reports damaged files before anything is changed.
    read_status(run.path)
    read_provenance(run.path)
    if checkpoint is not None:
        check_rows(run.path, checkpoint["path"])
    num_rows, kept_bytes = rows_until(run.metrics_path, step)
    record_data(run.path, config, None if checkpoint is None else step)
    drift = run.write_config(plain_config(config), overrides, step)
    modules, evaluation_modules = _named_modules(config)
    run.write_provenance(collect(sys.argv, step, modules, evaluation_modules))
    notes = keep_copies(run.path / "code", modules | evaluation_modules)
    if checkpoint is not None:
        schedule_note = _schedule_note(config, drift, checkpoint)
        if schedule_note:
            notes = [*notes, schedule_note]
    for note in notes:
        log.warning(f"note: {note}")
    run.drop_metrics_after(step, kept_bytes)
    drop_completions_after(run.path, step)
    if num_rows < step:
        log.warning(
            f"{run.metrics_path} lacks rows of steps before the checkpoint: summary and curves "
            "begin later."
        )
    return checkpoint


def _named_modules(config: Config) -> tuple[set[str], set[str]]:
    """Return the modules that a configuration names: of training, and of evaluations only."""
    training_modules = set()
    evaluation_modules = set()
    for key, path in named_functions(config).items():
        modules = training_modules if changes_learning(key, config) else evaluation_modules
        modules.add(path.rpartition(".")[0])
    return training_modules, evaluation_modules


def _why_the_data_ended(rollout: RolloutConfig) -> str:
    if isinstance(rollout, PolicyRolloutConfig):
        return f"every prompt is solved, by rollout.retire_at={rollout.retire_at}, and none is left"
    assert isinstance(rollout, RecordedRolloutConfig)
    return f"rollout.epochs={rollout.epochs} is how often it is read"


def _schedule_note(config: Config, drift: dict[str, list], checkpoint: dict) -> str | None:
    """Return a note on a decaying learning rate that a resume's trainer.max_steps changes.

    drift: the changed keys, as {key: [old, new]}. None where nothing is to be noted.
    """
    if "trainer.max_steps" not in drift or config.optimizer.schedule == Schedule.constant:
        return None
    old_steps, new_steps = drift["trainer.max_steps"]
    updates = checkpoint["num_updates"]
    old_rate = learning_rate(config.optimizer, updates, old_steps)
    new_rate = learning_rate(config.optimizer, updates, new_steps)
    return (
        f"optimizer.schedule={config.optimizer.schedule.value} decays to 0 at trainer.max_steps, "
        f"which is {new_steps} now and was {old_steps}: the next update has the learning rate "
        f"{new_rate:.3g} instead of {old_rate:.3g}. pgtk compare does not count this run as a "
        f"seed of one that had trainer.max_steps={new_steps} from the start."
    )


def _refuse_another(config: Config, run_dir: Path, checkpoint: dict) -> None:
    """Raise ConfigError where config.yaml now describes another run than the checkpoint's."""
    # Files of data may have moved: their contents are compared instead.
    movable = {*read_data(run_dir)}
    saved = json.loads(checkpoint["config"])
    problems = [problem for _, problem in cannot_change(saved, config, movable)]
    if problems:
        way_out = (
            f"{shell_path(run_dir / 'config.yaml')} has changed since the checkpoint of step "
            f"{checkpoint['step']}: put the value back to continue this run."
        )
        raise ConfigError("\n".join([*problems, way_out]))


def _start_trackers(config: Config, run: RunDirectory, started: list[Tracker]) -> None:
    """Start the configured trackers, and add each to `started`.

    So those that were started can be closed if a later one fails.
    """
    settings = config.tracking
    for name in (settings.name, *settings.also):
        if name == "mlflow":
            assert settings.experiment is not None
            tracker = MlflowTracker(settings.uri, settings.experiment, settings.system_metrics)
            advice = "Start the server or mend tracking.uri"
        elif name == "wandb":
            assert settings.experiment is not None
            tracker = WandbRecord(settings.experiment, settings.system_metrics)
            advice = "Use WANDB_MODE=offline"
        elif name == "tensorboard":
            tracker = TensorBoardRecord()
            advice = "Mend that"
        else:
            return
        advice += ", or use tracking=none to keep metrics in the run directory only."
        tracker.start(run.path, f"Training has not started. {advice}")
        started.append(tracker)
        if isinstance(tracker, MlflowTracker):
            run.set_status("running", read_status(run.path)["step"], mlflow=tracker.info)


def _finish(
    run: RunDirectory, recorder: Recorder, trackers: list[Tracker], outcome: str, reason: str | None
) -> None:
    """Write the final status, curves and summary.

    A failure here is logged, and never hides the error that ended the run.
    """
    metrics: Columns = {"step": np.empty(0)}
    try:
        run.set_status(outcome, recorder.step, reason)
        if recorder.completions is not None:
            recorder.completions.write()
        metrics = read_metrics(run.metrics_path)
        if len(metrics["step"]):
            plot_curves(metrics, run.path / "curves.png", legible(run.path.name))
    except (StorageError, OSError) as error:
        log.warning(f"status, completions or curves of the run are missing: {error}")
    mlflow = None
    records = []
    for tracker in trackers:
        missing = ", ".join(tracker.finish(outcome))
        if isinstance(tracker, MlflowTracker):
            mlflow = tracker.info
            if missing:
                command = sync_command(run.path, tracker.uri)
                log.warning(f"MLflow lacks {missing} of this run. Deliver them with: {command}")
        else:
            records.append((tracker.title, tracker.shown_by))
            if missing:
                log.warning(f"{tracker.title} lacks {missing} of this run, since it took too long.")
    if outcome == "done":
        log.info(summary(metrics, run.path, mlflow, records))


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Log plain lines to the terminal, and the same lines with their time to `path`.

    Inside the block Lightning and transformers print warnings only.
    """
    with storage(path):
        file = path.open("a+", encoding="utf-8")
    terminal_handler = Terminal()
    terminal_handler.setFormatter(LegibleFormatter())
    file_handler = logging.StreamHandler(file)
    file_handler.setFormatter(LegibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [terminal_handler, file_handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    quieten()
    try:
        yield
    except PgtoolkitError as error:
        # To the file only: the caller prints it on the terminal.
        record = log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None)
        file_handler.handle(record)
        raise
    finally:
        log.handlers = []
        log.propagate = True
        file.close()


def quieten() -> None:
    """Silence messages of Lightning, transformers and torch that the user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask. Causality hides them.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # progress bars would fill a file
        transformers.utils.logging.disable_progress_bar()
    unavoidable = (
        ".*LeafSpec.*",  # of torch about Lightning, at every fit
        ".*gradient_checkpointing_enable.*",  # its new name is missing in transformers 5.0
        "Glyph .* missing from font",  # of matplotlib, about a run's name in a title
        ".*num_workers.*",  # of Lightning: the step loader has no workers
    )
    for message in unavoidable:
        warnings.filterwarnings("ignore", message=message)
