"""From the configuration to what is trained, its reference, the steps it is trained on, and the
loop that does it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pgtoolkit.config.compilation import compilation
from pgtoolkit.config.counts import samples_async
from pgtoolkit.config.evaluation_sets import is_on
from pgtoolkit.config.memory import refuse_overflow
from pgtoolkit.config.models import MODEL_TYPES
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.rules.run import unknown_parts
from pgtoolkit.config.rules.step import other_vocabulary
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import AdvantageEstimator
from pgtoolkit.config.schema_run import HuggingFaceModelConfig, NumberType
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.model import fixed_order
from pgtoolkit.model.lora import adapted_layers
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import build_policy, prepare_torch
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.agreement import read_once
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.policy_rollouts import PolicyRollouts
from pgtoolkit.rollouts.steps import Source, StepLoader
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.training.critic import with_value_head
from pgtoolkit.training.frameworks import LightningEnvironment, lightning
from pgtoolkit.training.machine import lacking_devices
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.opening import opening
from pgtoolkit.training.sources import evaluator_of, source_of

log = logging.getLogger("pgtoolkit")


def build(
    config: Config, resume: bool = False, layout: Layout = ONE_PROCESS, run_dir: Path | None = None
) -> tuple[PolicyGradientModule, StepLoader]:
    """The module, and the steps it trains on from the start of the data; nothing is trained yet.

    run_dir: where servers that are started write their logs, and the index of recorded rollouts is
        kept; None: servers
    write in the current directory, and no index is kept.
    Whoever calls this closes the steps when the run is over, whatever ends it.
    """
    begin(config)
    on_gpu = accelerator(config) == "gpu"
    if on_gpu:
        refuse_overflow(config, torch.cuda.mem_get_info()[1])
    task = make_task(config.task, config.seed, partial(read_once, layout))
    policy = policy_of(config, task.alphabet, layout, config)
    log.info(opening(config, policy, on_gpu, layout))
    if on_gpu and config.trainer.deterministic is True:
        refuse_any_order(policy)
    reference = reference_of(config, policy, layout)
    if reference is not None and reference is not policy:
        reference = parallelize(reference, layout, config)
    critic = critic_of(config, policy, layout)
    spread = parallelize(policy, layout, config)
    module = PolicyGradientModule(
        config, spread, layout, spread if reference is policy else reference
    )
    if critic is not None:
        module.add_critic(parallelize(critic, layout, config))
    room = min(policy.max_positions, config.accumulation.max_tokens)
    source = source_of(config, task, module, room, resume, run_dir)
    if is_on(config):
        trained = task if isinstance(source, PolicyRollouts) else None
        module.evaluator = evaluator_of(config, trained, module, source, run_dir or Path())
    return module, loader_of(source, config, layout)


def policy_of(config: Config, alphabet: str | None, layout: Layout, run: Config | None) -> Policy:
    """The policy, as it computes in a run of the configuration `run`; None: in none."""
    on_gpu = accelerator(config) == "gpu"
    compiles, reason = (
        compilation(run, on_gpu)
        if run
        else (config.model.compile is True, "since nothing is trained")
    )
    policy = build_policy(config.model, alphabet, on_gpu, layout, compiles)
    if problem := unknown_parts(config.model, policy.model.config.model_type):
        raise ConfigError(problem)
    if (
        config.model.compile == "auto"
        and config.model.name == "huggingface"
        and policy.compiled == compiles
    ):
        log.info(f"model.compile=auto: {'on' if compiles else 'off'}, {reason}")
    return policy


def refuse_any_order(policy: Policy) -> None:
    """A model whose attention on a GPU is not ours, where trainer.deterministic=true was asked
    for."""
    if not policy.by_document:
        raise ConfigError(
            refusal(
                setting="trainer.deterministic=true",
                needs=f"on a GPU a model of type {', '.join(MODEL_TYPES)} in bfloat16 or float16",
                got=f"{policy.model.config.model_type} in "
                f"{str(policy.compute_dtype).removeprefix('torch.')}",
                reason="PyTorch may add up attention's gradients in any order in others.",
                use="trainer.deterministic=auto",
            )
        )


def loader_of(source: Source, config: Config, layout: Layout = ONE_PROCESS) -> StepLoader:
    """The steps that a run of this configuration makes of the documents of a source."""
    closes_on_groups = AGGREGATIONS[config.aggregation.mode].needs_groups
    return StepLoader(
        source, config.accumulation, closes_on_groups, config.trainer.max_steps, layout
    )


def begin(config: Config) -> None:
    """The random numbers of new weights, and the settings of torch that all of it starts with."""
    lightning.seed_everything(config.seed, verbose=False)
    prepare_torch(config.trainer.num_threads)
    repeats = config.trainer.deterministic
    fixed_order.switch(not samples_async(config) if repeats == "auto" else repeats)


def fit(
    module: PolicyGradientModule, loader: StepLoader, config: Config, recorder: lightning.Callback
) -> None:
    """Train until the last step or until the recorder stops it."""
    kind = accelerator(config)
    several = module.layout.world_size > 1
    trainer = lightning.Trainer(
        accelerator=kind,
        devices=[torch.cuda.current_device()] if several and kind == "gpu" else 1,
        # To Lightning each rank trains alone; it must not take part in a launcher's or SLURM's
        # world on its own.
        plugins=[LightningEnvironment()] if several else None,
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
    # not only where it was typed: a sweep's job may run on another machine
    if problems := lacking_devices(config):
        raise ConfigError(" ".join(problems))
    return "gpu" if torch.cuda.is_available() and config.trainer.device != "cpu" else "cpu"


def reference_of(config: Config, policy: Policy, layout: Layout = ONE_PROCESS) -> Policy | None:
    """Return the reference, without gradient and whole, or the policy itself where its adapters are
    left out.

    None where none is needed. One that moves has weights in float32, as the policy has.

    policy: as a run starts with it, from the seed or model.path: a resumed run, too, before its
        checkpoint is read. So
    the initial weights need no place in a checkpoint. Raises ConfigError for one that cannot be
    loaded, or whose tokens are others.
    """
    if not config.kl.needs_model:
        return None
    own = config.kl.reference in NO_FOLDER
    if own and adapted_layers(policy.model):
        return policy  # the frozen weights under the adapters are those that the run starts from
    if own:
        loaded = replace(policy, model=copy.deepcopy(policy.model))
    else:
        assert config.kl.reference is not None
        dtype = NumberType(str(policy.compute_dtype).removeprefix("torch."))
        loaded = _loaded(
            "kl.reference",
            config.kl.reference,
            policy,
            layout,
            dtype,
            partial(other_vocabulary, config),
        )
    model = loaded.model.requires_grad_(False)
    if policy.compute_dtype != torch.float32 and config.kl.update_every is None:
        _narrow(model, policy.compute_dtype)
    return loaded


def critic_of(config: Config, policy: Policy, layout: Layout) -> Policy | None:
    """Return the critic whole, as a run starts with it; None where none is needed.

    policy: as the run starts with it. Raises ConfigError as `reference_of` does.
    """
    if config.advantage.estimator != AdvantageEstimator.gae:
        return None
    path = config.critic.path
    if path is None:
        return with_value_head(policy)
    assert isinstance(config.model, HuggingFaceModelConfig)
    checkpointing = config.model.gradient_checkpointing
    dtype = NumberType.float32  # which is that of trained weights; it computes in the policy's

    def refused(needs: str, got: str) -> str:
        return refusal(
            setting=f"critic.path={path}",
            needs=needs,
            got=got,
            reason="It reads the policy's tokens.",
            use="a model of the same family, or critic.path=null",
        )

    loaded = _loaded("critic.path", path, policy, layout, dtype, refused, checkpointing)
    return with_value_head(replace(loaded, compute_dtype=policy.compute_dtype))


def _loaded(
    key: str,
    path: str,
    policy: Policy,
    layout: Layout,
    dtype: NumberType,
    refused: Callable[[str, str], str],
    gradient_checkpointing: bool = False,
) -> Policy:
    """Return another model with the policy's tokens.

    key: that names it. dtype: of its weights. refused: (needs, got) -> what is said of one whose
        tokens are others.
    """
    off = {"random_weights": False, "fp32_lm_head": False, "compile": False}
    no_lora = {"lora_rank": None, "lora_alpha": 1.0, "lora_targets": []}
    chosen = HuggingFaceModelConfig(
        name="huggingface",
        path=path,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        **off,
        **no_lora,
    )
    try:
        # as the policy was built
        loaded = build_policy(chosen, None, policy.by_document, layout, policy.compiled)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=")) from error
    sizes, tokens = [len(one.head.weight) for one in (policy, loaded)], policy.tokenizer.get_vocab()
    if loaded.tokenizer.get_vocab() != tokens or sizes[0] != sizes[1]:
        own = len(set(tokens.items()) & set(loaded.tokenizer.get_vocab().items()))
        needs = (
            f"the vocabulary of the policy, {sizes[0]} rows of the head and {len(tokens)} tokens"
        )
        got = f"{sizes[1]} rows, and {own} of these tokens under the same number"
        raise ConfigError(refused(needs, got))
    return loaded


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep what autocast would cast at each call in that type already: the matrices of linear
    layers.

    The rest, such as norms and embeddings, computes in float32 in the policy as well: at the start
    of a run both then have the same log-probs to the last bit.
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not embeddings & {
            id(p) for p in module.parameters()
        }:
            module.to(dtype)
