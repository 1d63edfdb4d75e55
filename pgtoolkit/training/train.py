"""Runs one experiment in its run directory: from the configuration to the last checkpoint and the summary."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config import AggregationMode, Config, KernelImplementation, PolicyRolloutConfig
from pgtoolkit.errors import ConfigError, Interrupted, StorageError
from pgtoolkit.rollouts.policy import PolicyRollouts
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.steps import Source, StepLoader
from pgtoolkit.rollouts.tasks import make_task
from pgtoolkit.rollouts.writer import RolloutWriter
from pgtoolkit.tracking.commands import resume_command, sync_command
from pgtoolkit.tracking.mlflow_store import MlflowTracker
from pgtoolkit.tracking.plots import plot_curves
from pgtoolkit.tracking.progress import summary
from pgtoolkit.tracking.provenance import collect
from pgtoolkit.tracking.run_directory import RunDirectory, read_status
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.model import build_policy
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.recorder import Recorder

log = logging.getLogger("pgtoolkit")


def train(
    composed: DictConfig, run_dir: Path, resume: bool = False, overrides: list[str] = (), sweep: str | None = None
) -> None:
    """Train as the validated configuration says; `resume` continues from the newest checkpoint in run_dir.

    overrides: what was typed, for the record. sweep: the name of the sweep that the run belongs to; a resumed run
    keeps the one it was started with. Raises a PgtoolkitError that carries the exit status; status.json in
    the run directory tells the same.
    """
    config: Config = OmegaConf.to_object(composed)
    resolved = OmegaConf.to_container(composed, resolve=True)
    with RunDirectory(run_dir) as run, _logging_to(run.path / "run.log"):
        checkpoint = load_newest(run.path / "checkpoints") if resume else None
        if resume and checkpoint is None:
            log.info("no checkpoint was written yet: starting again from the first step")
        recorder = Recorder(run, config.trainer, checkpoint)
        if recorder.step > config.trainer.max_steps:
            raise ConfigError(
                f"trainer.max_steps={config.trainer.max_steps} needs at least the steps already made (got "
                f"{recorder.step} of them). A checkpoint is continued, not cut. Use trainer.max_steps={recorder.step}."
            )
        run.write_config(resolved, list(overrides), recorder.step)
        run.write_provenance(collect(sys.argv))
        run.drop_metrics_after(recorder.step)
        if len(run.read_metrics()) < recorder.step:
            log.warning(f"{run.metrics_path} lacks steps before the checkpoint's: summary and curves begin later")
        run.set_status("running", recorder.step, sweep=sweep)
        outcome, reason, tracker = "failed", None, None
        try:
            module, loader = build(config, resume)
            if checkpoint is not None:
                loader.load_state_dict(checkpoint["data"])
            tracker = _start_tracker(config, run)
            if recorder.step < config.trainer.max_steps:
                _fit(module, loader, config, recorder)
            outcome, reason = ("interrupted", recorder.interrupted_by) if recorder.interrupted_by else ("done", None)
        except (KeyboardInterrupt, SystemExit):  # Lightning turns the one into the other
            outcome, reason = "interrupted", "a second SIGINT"
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            _finish(run, tracker, outcome, recorder.step, reason)
    if outcome == "interrupted":
        raise Interrupted(
            f"stopped by {reason} after step {recorder.step}; saved up to step {recorder.saved_step}. "
            f"Continue with: {resume_command(run.path)}"
        )


def build(config: Config, resume: bool = False) -> tuple[PolicyGradientModule, StepLoader]:
    """The module, and the steps it trains on from the start of the data; nothing is trained yet."""
    lightning.seed_everything(config.seed, verbose=False)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    task = make_task(config.task, config.seed)
    policy = build_policy(config.model, task.alphabet, _accelerator(config) == "gpu")
    module = PolicyGradientModule(config, policy)
    room = min(policy.max_positions, config.accumulation.max_tokens)
    close_on_groups = config.aggregation.mode == AggregationMode.prompt_mean
    source = _source(config, task, module, room, resume)
    return module, StepLoader(source, config.accumulation, close_on_groups, config.trainer.max_steps, room)


def _source(config: Config, task, module: PolicyGradientModule, room: int, resume: bool) -> Source:
    estimator, rollout = config.advantage.estimator.value, config.rollout
    if isinstance(rollout, PolicyRolloutConfig):
        writer = RolloutWriter(rollout.save_path, resume) if rollout.save_path else None
        tokenizer, max_tokens = module.policy.tokenizer, config.accumulation.max_tokens
        return PolicyRollouts(rollout, estimator, task, tokenizer, module, max_tokens, room, writer)
    needs_groups = config.aggregation.mode == AggregationMode.prompt_mean
    return RecordedRollouts(rollout, estimator, module.policy.vocabulary_size, config.seed, needs_groups, room)


def _fit(module: PolicyGradientModule, loader: StepLoader, config: Config, recorder: Recorder) -> None:
    trainer = lightning.Trainer(
        accelerator=_accelerator(config),
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def _accelerator(config: Config) -> str:
    has_gpu, device = torch.cuda.is_available(), config.trainer.device
    if device == "cuda" and not has_gpu:
        raise ConfigError(
            "trainer.device=cuda needs a GPU that torch can use (got none). "
            "Its driver or torch's CUDA build is missing. Use trainer.device=auto."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.kernel.implementation == KernelImplementation.triton and not (has_gpu or interpreted):
        raise ConfigError(
            "kernel=triton needs a GPU (got none). Triton compiles for GPUs; TRITON_INTERPRET=1 runs its kernels "
            "slowly on a CPU. Use kernel=torch."
        )
    return "gpu" if has_gpu and device != "cpu" else "cpu"


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
    terminal, file = logging.StreamHandler(sys.stdout), logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [terminal, file], False
    log.setLevel(logging.INFO)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask; causality keeps them out of sight.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch about Lightning, on every fit
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.*")  # its new name is missing in 5.0
    warnings.filterwarnings("ignore", message=".*num_workers.*")  # the step loader has no workers to give
    try:
        yield
    finally:
        log.handlers, log.propagate = [], True
        file.close()
