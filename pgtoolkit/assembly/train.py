"""Runs one experiment in its run directory, up to the last checkpoint and the summary."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pgtoolkit.assembly.build import accelerator, build
from pgtoolkit.assembly.continuing import going_on_command, resume_command, sync_command
from pgtoolkit.assembly.open_run import open_run
from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.assembly.summary import run_summary
from pgtoolkit.assembly.without_effect import without_effect
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.plan import equation
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import (
    ConfigError,
    DataError,
    Interrupted,
    PgtoolkitError,
    SamplerLost,
    StorageError,
    VerifierLost,
    as_storage_error,
    first_line,
)
from pgtoolkit.ranks.agreement import losing_ranks
from pgtoolkit.ranks.layout import AXES, ONE_PROCESS, Layout
from pgtoolkit.rollouts.kept_completions import KeptCompletions
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import (
    PolicyRolloutSettings,
    RecordedRolloutSettings,
    RolloutSettings,
)
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import leaves, read_resolved, read_status
from pgtoolkit.runs.series import Columns, read_metrics
from pgtoolkit.system.pictures import saying_why_not_drawn
from pgtoolkit.system.safe_text import legible
from pgtoolkit.tasks.retries import stop_asked
from pgtoolkit.tracking.curves import plot_curves
from pgtoolkit.tracking.logger_records import TensorBoardRecord, WandbRecord
from pgtoolkit.tracking.mlflow_run import MlflowRecord
from pgtoolkit.tracking.record import Record
from pgtoolkit.tracking.settings import TrackingSettings
from pgtoolkit.tracking.signals import StopSignal
from pgtoolkit.tracking.store_address import experiment_of
from pgtoolkit.training.callbacks import own_parts
from pgtoolkit.training.checkpoint import reading_checkpoint
from pgtoolkit.training.fit import run_steps
from pgtoolkit.training.recorder import Recorder

log = logging.getLogger("pgtoolkit")


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
    records: list[Record] = []
    outcome = "failed"
    reason = None
    has_restored = False
    with contextlib.ExitStack() as opened:
        run, checkpoint = open_run(config, run_dir, resume, overrides, layout, opened)
        folder = Path(run_dir) if run is None else run.path
        recorder = Recorder(run, folder, config.trainer, checkpoint)
        try:
            if run is not None:
                # A damaged checkpoint after this step does not count: it is written anew.
                run.set_status("running", recorder.step, sweep=sweep, saved=recorder.step)
            _train_steps(config, run, recorder, records, checkpoint, layout, folder, resume)
            outcome, reason = _outcome(config.trainer.max_steps, config.rollout, recorder)
        except (KeyboardInterrupt, SystemExit) as stop:
            # Lightning raises SystemExit for a KeyboardInterrupt.
            outcome = "interrupted"
            if recorder.interrupted_by:
                reason = "a second SIGINT"
            else:
                reason = str(stop) if isinstance(stop, StopSignal) else "SIGINT"
        except (SamplerLost, StorageError, OSError) as raised:
            error = as_storage_error(raised) if isinstance(raised, OSError) else raised
            reason = f"{type(error).__name__}: {error}"
            sentence = str(error).removesuffix(".")
            with_command = type(error)(f"{sentence}. Continue with: {resume_command(folder)}")
            with_command.on_all_ranks = error.on_all_ranks
            raise with_command from raised
        except VerifierLost as error:
            reason = f"VerifierLost: {error}"
            # Where this start made a step, or was asked to stop, a queue may start the run again.
            may_go_on = recorder.step > recorder.first_step or stop_asked.is_set()
            outcome = "interrupted" if may_go_on else "failed"
            kind = Interrupted if may_go_on else type(error)
            raise _with_command(error, kind, recorder, folder) from error
        except DataError as error:
            reason = f"{type(error).__name__}: {error}"
            if not recorder.can_continue or recorder.saved_step == 0:
                raise
            raise _with_command(error, type(error), recorder, folder) from error
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            # An error of PyTorch's allocator, or of CUDA itself.
            if isinstance(error, RuntimeError) and "out of memory" in first_line(error):
                max_tokens = config.accumulation.max_tokens
                raise _out_of_memory(error, max_tokens, recorder, folder) from error
            raise
        finally:
            if run is not None:
                with _ignoring_sigterm(layout):
                    if outcome != "done" and recorder.step == recorder.first_step:
                        has_restored = _restore(run, records)
                    if not has_restored:
                        _finish(run, recorder, records, outcome, reason)
        if outcome == "interrupted":
            raise Interrupted(
                f"stopped as asked ({reason}) after step {recorder.step}; saved up to step "
                f"{recorder.saved_step}. Continue with: {resume_command(folder)}"
            )


def _with_command(
    error: PgtoolkitError, kind: type[PgtoolkitError], recorder: Recorder, folder: Path
) -> PgtoolkitError:
    """Return the error as one of this kind, with the command that continues the run."""
    with_command = kind(
        f"{error}\nSaved up to step {recorder.saved_step}. Continue with: {resume_command(folder)}"
    )
    with_command.on_all_ranks = error.on_all_ranks
    return with_command


def _out_of_memory(
    error: RuntimeError, max_tokens: int, recorder: Recorder, folder: Path
) -> ConfigError:
    """Return the refusal of a run that needs more memory than its GPU has left.

    max_tokens: those of a micro-batch, of which half are proposed.
    """
    fewer = max(1, max_tokens // 2)
    message = (
        f"after step {recorder.step} the GPU has no memory left: "
        f"{first_line(error).removesuffix('.')}. Other processes may hold some of it; nvidia-smi "
        f"lists them. Use accumulation.max_tokens={fewer}, which documents have to fit; where "
        "sampling needs it, fewer completions at a time (sampler.max_sequences); or "
        "parallelism=fsdp."
    )
    if recorder.saved_step > 0:
        message += (
            f"\nSaved up to step {recorder.saved_step}. Continue with: "
            f"{going_on_command(folder, {'accumulation.max_tokens': fewer})}"
        )
    return ConfigError(message)


def _train_steps(
    config: Config,
    run: RunDirectory | None,
    recorder: Recorder,
    records: list[Record],
    checkpoint: dict | None,
    layout: Layout,
    folder: Path,
    resume: bool,
) -> None:
    """Build what the run needs, and train until its end or until it is stopped.

    records: gets those that are started.
    """
    if layout.world_size > 1:
        sizes = ", ".join(f"{axis}={layout.size(axis)}" for axis in AXES if layout.size(axis) > 1)
        log.info(f"{layout.world_size} processes: {sizes}")
    with (
        contextlib.ExitStack() as started,
        losing_ranks(layout, config.parallelism.timeout_seconds),
    ):
        started.callback(recorder.progress.end)
        started.callback(recorder.wait_for_checkpoint)
        module, loader = build(config, resume, layout, folder)
        started.callback(loader.source.close)
        if module.evaluator is not None:
            started.callback(module.evaluator.close)
        if checkpoint is not None:
            with reading_checkpoint(checkpoint["path"]):
                loader.load_state_dict(checkpoint["data"])
        if run is not None:
            if recorder.step == 0:
                recorder.early_notes = partial(_notes_of_silent_options, run.path)
            num_kept = getattr(config.rollout, "keep_completions", 0)
            if num_kept:
                assert isinstance(loader.source, SampledRollouts)
                recorder.completions = KeptCompletions(
                    run.path, num_kept, loader.source.prompt, module.policy.tokenizer, recorder.step
                )
            _start_records(config.tracking, run, records, equation(config))
            for record in records:
                log.info("\n".join(record.entries()))
        if recorder.step < config.trainer.max_steps or module.evaluator is not None:
            run_steps(
                module,
                loader,
                own_parts(config.callbacks.own),
                dict(leaves(plain_config(config))),
                recorder,
                on_cpu=accelerator(config.trainer.device, config.kernel) == "cpu",
            )
        recorder.check_trained()


def _notes_of_silent_options(run_dir: Path) -> Iterator[str]:
    """Yield a note for each option that changed nothing so far."""
    columns = read_metrics(run_dir / "metrics.jsonl")
    for sentence in without_effect(read_resolved(run_dir), columns):
        key, _, never = sentence.partition(": ")
        yield f"{key} has changed no number so far: {never}."


def _outcome(
    max_steps: int, rollout: RolloutSettings, recorder: Recorder
) -> tuple[str, str | None]:
    """Return the status of a run that raised no error, and the reason for its end, if any."""
    if recorder.interrupted_by:
        return "interrupted", recorder.interrupted_by
    if recorder.reached is None and recorder.step < max_steps:
        reason = _why_the_data_ended(rollout)
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


def _why_the_data_ended(rollout: RolloutSettings) -> str:
    if isinstance(rollout, PolicyRolloutSettings):
        return f"every prompt is solved, by rollout.retire_at={rollout.retire_at}, and none is left"
    assert isinstance(rollout, RecordedRolloutSettings)
    return f"rollout.epochs={rollout.epochs} is how often it is read"


def _start_records(
    settings: TrackingSettings, run: RunDirectory, started: list[Record], equation: list[str]
) -> None:
    """Start the records in the configured trackers, and add each to `started`.

    equation: the lines that define the loss.

    So those that were started can be closed if a later one fails.
    """
    for name in (settings.name, *settings.also):
        if name == "none":
            return
        record = _record_in(name, settings)
        record.start(
            run.path,
            description_of(run.path, equation),
            f"Training has not started. {record.remedy}, or use tracking=none to keep metrics in "
            "the run directory only.",
        )
        started.append(record)
        run.set_status("running", read_status(run.path)["step"], mlflow=record.info)


def _record_in(tracker: str, settings: TrackingSettings) -> Record:
    if tracker == "tensorboard":
        return TensorBoardRecord()
    experiment = experiment_of(tracker, settings.experiment)
    if tracker == "wandb":
        return WandbRecord(experiment, settings.system_metrics)
    return MlflowRecord(settings.uri, experiment, settings.system_metrics)


def _restore(run: RunDirectory, records: list[Record]) -> bool:
    """Give a finished run that could make no further step its record back; return whether it is
    one."""
    try:
        has_restored = run.restore_finished()
    except OSError as error:
        log.warning(f"{run.path}: the record of the finished run is not restored: {error}")
        return False
    if has_restored:
        for record in records:
            record.finish("done")
        log.warning(f"note: {run.path} made no step, and stays the finished run that it was")
    return has_restored


def _finish(
    run: RunDirectory, recorder: Recorder, records: list[Record], outcome: str, reason: str | None
) -> None:
    """Write the final status, curves and summary.

    A failure here is logged, and never hides the error that ended the run.
    """
    metrics: Columns = {"step": np.empty(0)}
    try:
        try:
            run.set_status(outcome, recorder.step, reason)
            if recorder.completions is not None:
                recorder.completions.write()
            metrics = read_metrics(run.metrics_path)
        except Exception as error:  # of the disk, or of the library that writes completions
            log.warning(f"status or completions of the run are missing: {error}")
        if len(metrics["step"]):
            curves = run.path / "curves.png"
            with saying_why_not_drawn(curves, log.warning):
                plot_curves(metrics, curves, legible(run.path.name))
    finally:
        # Also where a signal stops the drawing, trackers get how the run has ended.
        missing_parts = [record.finish(outcome) for record in records]
    for record, missing in zip(records, missing_parts, strict=True):
        if missing:
            uri = record.info.get("uri")
            advice = (
                f"Deliver them with: {sync_command(run.path, uri)}"
                if uri
                else "A resumed run delivers them."
            )
            log.warning(f"{record.title} lacks {', '.join(missing)} of this run. {advice}")
    if outcome == "done":
        log.info(run_summary(metrics, run.path, records))
