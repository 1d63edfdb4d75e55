"""From the configuration to what is trained, its reference, the steps it is trained on, and the loop that does it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from pgtoolkit.config.compilation import compilation, refuse_unknown
from pgtoolkit.config.evaluation import is_on
from pgtoolkit.config.memory import refuse_overflow
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.model.build import build_policy
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.agreement import read_once
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.policy import PolicyRollouts
from pgtoolkit.rollouts.steps import Source, StepLoader
from pgtoolkit.system.report import Report
from pgtoolkit.tasks.tasks import make_task
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.machine import devices
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.reference import reference_of
from pgtoolkit.training.sources import evaluator_of, source_of

log = logging.getLogger("pgtoolkit")


def build(
    config: Config, resume: bool = False, layout: Layout = ONE_PROCESS, run_dir: Path | None = None
) -> tuple[PolicyGradientModule, StepLoader]:
    """The module, and the steps it trains on from the start of the data; nothing is trained yet.

    run_dir: where servers that are started write their logs, and the index of recorded rollouts is kept; None: servers
    write in the current directory, and no index is kept.
    Whoever calls this closes the steps when the run is over, whatever ends it.
    """
    begin(config)
    if accelerator(config) == "gpu":
        refuse_overflow(config, torch.cuda.mem_get_info()[1])
    task = make_task(config.task, config.seed, partial(read_once, layout))
    policy = policy_of(config, task.alphabet, layout, config)
    reference = reference_of(config, policy, layout)
    if reference is not None and reference is not policy:
        reference = parallelize(reference, layout, config)
    spread = parallelize(policy, layout, config)
    module = PolicyGradientModule(config, spread, layout, spread if reference is policy else reference)
    room = min(policy.max_positions, config.accumulation.max_tokens)
    source = source_of(config, task, module, room, resume, run_dir)
    if is_on(config):
        trained = task if isinstance(source, PolicyRollouts) else None
        module.evaluator = evaluator_of(config, trained, module, source, run_dir or Path())
    return module, loader_of(source, config, layout)


def policy_of(config: Config, alphabet: str | None, layout: Layout, run: Config | None) -> Policy:
    """The policy, as it computes in a run of the configuration `run`; None: in none."""
    on_gpu = accelerator(config) == "gpu"
    compiles, reason = compilation(run, on_gpu) if run else (config.model.compile is True, "since nothing is trained")
    policy = build_policy(config.model, alphabet, on_gpu, layout, compiles)
    report = Report()
    refuse_unknown(config.model, policy.model.config.model_type, report)
    if report.problems:
        raise ConfigError(report.problems[0])
    if config.model.compile == "auto" and config.model.name == "huggingface":
        log.info(f"model.compile=auto: {'on' if compiles else 'off'}, {reason}")
    return policy


def loader_of(source: Source, config: Config, layout: Layout = ONE_PROCESS) -> StepLoader:
    """The steps that a run of this configuration makes of the documents of a source."""
    closes_on_groups = AGGREGATIONS[config.aggregation.mode].needs_groups
    return StepLoader(source, config.accumulation, closes_on_groups, config.trainer.max_steps, layout)


def begin(config: Config) -> None:
    """The random numbers of new weights, and the settings of torch that all of it starts with."""
    lightning.seed_everything(config.seed, verbose=False)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    # cuDNN's attention plans its execution anew for each shape, and each micro-batch has a shape of its own: a quarter
    # of a GPU's time in a small model's step. The other kernels of PyTorch need no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)


def fit(module: PolicyGradientModule, loader: StepLoader, config: Config, recorder: lightning.Callback) -> None:
    """Train until the last step or until the recorder stops it."""
    kind = accelerator(config)
    several = module.layout.world_size > 1
    trainer = lightning.Trainer(
        accelerator=kind,
        devices=[torch.cuda.current_device()] if several and kind == "gpu" else 1,
        # To Lightning each rank trains alone; it must not take part in a launcher's or SLURM's world on its own.
        plugins=[lightning.pytorch.plugins.environments.LightningEnvironment()] if several else None,
        max_epochs=1,
        logger=False,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def accelerator(config: Config) -> str:
    """What to compute on, "gpu" or "cpu"; ConfigError where it is asked for and missing."""
    report = Report()
    devices(config, report)  # not only where it was typed: a sweep's job may run on another machine
    if report.problems:
        raise ConfigError(" ".join(report.problems))
    return "gpu" if torch.cuda.is_available() and config.trainer.device != "cpu" else "cpu"
