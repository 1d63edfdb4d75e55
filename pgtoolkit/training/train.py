"""Runs one experiment in its run directory: from the configuration to the last checkpoint and the
summary."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
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
from pgtoolkit.rollouts.policy_rollouts import PolicyRollouts
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
    """Train as the validated configuration says; `resume` continues from the newest checkpoint in
    run_dir.

    overrides: what was typed, for the record. sweep: the name of the sweep that the run belongs to;
        a resumed run
    keeps the one it was started with. layout: of all processes, each of which calls this; rank 0
        alone writes and logs.
    Raises a PgtoolkitError that carries the exit status; status.json in the run directory tells the
    same.
    """
    run = checkpoint = None  # the run directory and what tracks it are rank 0's
    trackers: list[Tracker] = []
    outcome, reason = "failed", None
    with contextlib.ExitStack() as opened:
        with losing_ranks(layout, config.parallelism.timeout_seconds):
            with failing_together(layout):
                if layout.rank == 0:
                    run = opened.enter_context(RunDirectory(run_dir, new=not resume))
                    opened.enter_context(_logging_to(run.path / "run.log"))
                    checkpoint = _prepare(config, run, resume, list(overrides))
                else:
                    log.handlers, log.propagate = [logging.NullHandler()], False
                    quieten()
            path = gather_objects(checkpoint and checkpoint["path"], layout.world_group)[0]
            if layout.rank > 0 and path is not None:
                checkpoint = read_checkpoint(path, check=False)
        folder = Path(run_dir) if run is None else run.path
        recorder = Recorder(run, folder, config.trainer, checkpoint)
        try:
            if run is not None:
                run.set_status("running", recorder.step, sweep=sweep)
            if layout.world_size > 1:
                sizes = ", ".join(
                    f"{axis}={layout.size(axis)}" for axis in AXES if layout.size(axis) > 1
                )
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
                    if count := getattr(config.rollout, "keep_completions", 0):
                        assert isinstance(loader.source, PolicyRollouts)
                        prompt, tokenizer = loader.source.prompt, module.policy.tokenizer
                        recorder.completions = KeptCompletions(
                            run.path, count, prompt, tokenizer, recorder.step
                        )
                    _start_trackers(config, run, trackers)
                    for tracker in trackers:
                        is_mlflow = isinstance(tracker, MlflowTracker)
                        where = (
                            mlflow_entries(tracker.info)
                            if is_mlflow
                            else [entry(tracker.title, tracker.where)]
                        )
                        log.info("\n".join(where))
                if recorder.step < config.trainer.max_steps or module.evaluator is not None:
                    fit(module, loader, config, recorder)
                recorder.check_trained()
            stopped = recorder.interrupted_by
            outcome, reason = ("interrupted", stopped) if stopped else ("done", recorder.reached)
            if outcome == "done" and reason is None and recorder.step < config.trainer.max_steps:
                reason = _why_the_data_ended(config.rollout)
                reason = (
                    f"the data ended after step {recorder.step} of "
                    f"{config.trainer.max_steps}: {reason}"
                )
        except (KeyboardInterrupt, SystemExit) as stop:  # Lightning turns the one into the other
            first = str(stop) if isinstance(stop, StopSignal) else "SIGINT"
            outcome, reason = "interrupted", "a second SIGINT" if recorder.interrupted_by else first
        except SamplerLost as error:
            reason, told = (
                f"SamplerLost: {error}",
                type(error)(f"{error} Continue with: {resume_command(folder)}"),
            )
            told.on_all_ranks = error.on_all_ranks
            raise told from error
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if run is not None:
                # once one has failed, a launcher such as torchrun ends all by SIGTERM
                several = layout.world_size > 1
                handler = signal.signal(signal.SIGTERM, signal.SIG_IGN) if several else None
                _finish(run, recorder, trackers, outcome, reason)
                if several:
                    signal.signal(signal.SIGTERM, handler)
        if outcome == "interrupted":
            raise Interrupted(
                f"stopped as asked ({reason}) after step {recorder.step}; saved up to step "
                f"{recorder.saved_step}. Continue with: {resume_command(folder)}"
            )


def _prepare(config: Config, run: RunDirectory, resume: bool, overrides: list[str]) -> dict | None:
    """Write down what starts, or is continued, and from which data; returns the checkpoint to
    continue from, if any."""
    log.info(entry("run", shell_path(run.path)))
    checkpoint = None
    if resume:
        refuse_lost_checkpoint(run.path, f"pgtk resume {shell_path(run.path)}")
        checkpoint = load_newest(run.path / "checkpoints")
    if resume and checkpoint is None:
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
    # damaged files are reported before anything is changed
    for read in (read_status, read_provenance):
        read(run.path)
    if checkpoint is not None:
        check_rows(run.path, checkpoint["path"])
    rows, kept = rows_until(run.metrics_path, step)
    record_data(run.path, config, None if checkpoint is None else step)
    drift = run.write_config(plain_config(config), overrides, step)
    modules, evaluation_modules = _named_modules(config)
    run.write_provenance(collect(sys.argv, step, modules, evaluation_modules))
    for note in keep_copies(run.path / "code", modules | evaluation_modules):
        log.warning(f"note: {note}")
    if checkpoint is not None and (note := _schedule_note(config, drift, checkpoint)):
        log.warning(f"note: {note}")
    run.drop_metrics_after(step, kept)
    drop_completions_after(run.path, step)
    if rows < step:
        log.warning(
            f"{run.metrics_path} lacks steps before the checkpoint's: summary and curves begin "
            "later"
        )
    return checkpoint


def _named_modules(config: Config) -> tuple[set[str], set[str]]:
    """Return the modules that a configuration names: those that steps depend on, and those of
    evaluations."""
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for key, path in named_functions(config).items():
        named[changes_learning(key, config)].add(path.rpartition(".")[0])
    return named[True], named[False]


def _why_the_data_ended(rollout: RolloutConfig) -> str:
    if isinstance(rollout, PolicyRolloutConfig):
        return (
            f"every prompt is solved, by rollout.retire_at={rollout.retire_at}, and none is "
            "left to ask"
        )
    assert isinstance(rollout, RecordedRolloutConfig)
    return f"rollout.epochs={rollout.epochs} is how often it is read"


def _schedule_note(config: Config, drift: dict[str, list], checkpoint: dict) -> str | None:
    """Return what a resume with another trainer.max_steps makes of a learning rate that decays
    until then."""
    if "trainer.max_steps" not in drift or config.optimizer.schedule == Schedule.constant:
        return None
    before, now = drift["trainer.max_steps"]
    updates = checkpoint["num_updates"]
    old_rate, new_rate = (
        learning_rate(config.optimizer, updates, steps) for steps in (before, now)
    )
    return (
        f"optimizer.schedule={config.optimizer.schedule.value} decays to 0 at trainer.max_steps, "
        f"which is {now} now and was {before}: the next update has the learning rate "
        f"{new_rate:.3g} in place of {old_rate:.3g}. pgtk compare does not count this run as a "
        f"seed of one that had trainer.max_steps={now} from the start."
    )


def _refuse_another(config: Config, run_dir: Path, checkpoint: dict) -> None:
    """ConfigError where config.yaml was changed so that the checkpoint is of another run."""
    movable = {*read_data(run_dir)}  # files that may lie elsewhere now: their contents are compared
    problems = [
        problem for _, problem in cannot_change(json.loads(checkpoint["config"]), config, movable)
    ]
    if problems:
        file, step = shell_path(run_dir / "config.yaml"), checkpoint["step"]
        way_out = (
            f"{file} has changed since the checkpoint of step {step}: put the value back to "
            "continue this run."
        )
        raise ConfigError("\n".join([*problems, way_out]))


def _start_trackers(config: Config, run: RunDirectory, started: list[Tracker]) -> None:
    """Start the trackers that are configured, and add each to `started`: if one fails, those before
    it are closed."""
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
        without = "use tracking=none to keep metrics in the run directory only."
        tracker.start(run.path, f"Training has not started. {advice}, or {without}")
        started.append(tracker)
        if isinstance(tracker, MlflowTracker):
            run.set_status("running", read_status(run.path)["step"], mlflow=tracker.info)


def _finish(
    run: RunDirectory, recorder: Recorder, trackers: list[Tracker], outcome: str, reason: str | None
) -> None:
    """Write the final status, curves and summary; what fails here is logged and never hides the
    run's own error."""
    recorded: Columns = {"step": np.empty(0)}
    try:
        run.set_status(outcome, recorder.step, reason)
        if recorder.completions is not None:
            recorder.completions.write()
        recorded = read_metrics(run.metrics_path)
        if len(recorded["step"]):
            plot_curves(recorded, run.path / "curves.png", legible(run.path.name))
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
            records.append((tracker.title, tracker.where))
            if missing:
                log.warning(f"{tracker.title} lacks {missing} of this run, since it took too long.")
    if outcome == "done":
        log.info(summary(recorded, run.path, mlflow, records))


@contextlib.contextmanager
def _logging_to(path: Path):
    """Plain lines on the terminal, the same with their time in `path`; Lightning and torch only
    when they warn."""
    with storage(path):
        opened = path.open("a+", encoding="utf-8")
    terminal = Terminal()
    terminal.setFormatter(LegibleFormatter())
    file = logging.StreamHandler(opened)
    file.setFormatter(LegibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [terminal, file], False
    log.setLevel(logging.INFO)
    quieten()
    try:
        yield
    except PgtoolkitError as error:  # which the terminal is told by what has called this
        file.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None))
        raise
    finally:
        log.handlers, log.propagate = [], True
        opened.close()


def quieten() -> None:
    """Lightning, transformers and torch speak only of what the user can mend."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask; causality keeps them out of
    # sight.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # its bars, and those of downloads, would fill a file
        transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch about Lightning, on every fit
    # its new name is missing in 5.0
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*")
    # matplotlib of a run's name in a title
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")
    # the step loader has no workers to give
    warnings.filterwarnings("ignore", message=".*num_workers.*")
