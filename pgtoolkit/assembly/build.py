"""Builds what a run needs from its configuration: policy, reference, critic, steps and the loop."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pgtoolkit.assembly.loss import loss_of
from pgtoolkit.assembly.machine import lacking_devices
from pgtoolkit.assembly.make_task import held_out_numbers, make_task
from pgtoolkit.assembly.opening import opening
from pgtoolkit.assembly.sources import evaluator_of, source_of
from pgtoolkit.config.counts import samples_async
from pgtoolkit.config.evaluation_sets import is_on, needs_sampler, sets_beside_training
from pgtoolkit.config.memory import refuse_overflow
from pgtoolkit.config.models import shares_prompts
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.rules.loss_terms import other_vocabulary, other_vocabulary_of_critic
from pgtoolkit.config.saved import record_of
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model import fixed_order, flash_attention
from pgtoolkit.model.architectures import MODEL_TYPES, has_experts
from pgtoolkit.model.attention import use_packed_attention
from pgtoolkit.model.kept_layers import KeepsByMemory, can_keep
from pgtoolkit.model.lora import adapted_layers
from pgtoolkit.model.misfits import cannot_serve, cannot_share, unknown_parts
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings, ModelSettings, NumberType
from pgtoolkit.model.setup import build_policy, prepare_torch
from pgtoolkit.model.spread import parallelize
from pgtoolkit.model.weight_files import vocabularies_differ
from pgtoolkit.ranks.agreement import read_once
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import AccumulationSettings, AdvantageEstimator
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.system.declared import AutoOrBool
from pgtoolkit.system.report import refusal
from pgtoolkit.training.critic import with_value_head
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import CriticSettings, Device, KernelSettings, TrainerSettings
from pgtoolkit.training.surprises import Surprises

log = logging.getLogger("pgtoolkit")


def build(
    config: Config,
    resume: bool = False,
    layout: Layout = ONE_PROCESS,
    run_dir: Path | None = None,
    evaluates: bool = True,
) -> tuple[PolicyGradientModule, StepLoader]:
    """Return the module to train, and the loader of its steps from the start of the data.

    run_dir: where servers that the run starts write their logs, and where the index of recorded
        rollouts is kept; None: logs go to the current directory, and no index is kept.
    evaluates: False makes no evaluator; training asks what it asks beside evaluations all the same.
    The caller has to close the loader's source when the run is over, whatever ends it.
    """
    begin(config.seed, config.trainer, samples_async(config))
    on_gpu = accelerator(config.trainer.device, config.kernel) == "gpu"
    if on_gpu:
        refuse_overflow(config, torch.cuda.mem_get_info()[1])
    never = held_out_numbers(config.task, sets_beside_training(config))
    task = make_task(config.task, config.seed, partial(read_once, layout), never=never)
    policy = policy_of(config, task.alphabet, layout)
    share_prompts = sharing(shares_prompts(config), policy)
    log.info(opening(config.model, config.rollout, config.sampler, policy, on_gpu, layout))
    if on_gpu and config.trainer.deterministic is True:
        refuse_any_order(policy)
    spread = partial(
        parallelize,
        layout=layout,
        parallelism=config.parallelism,
        max_tokens=config.accumulation.max_tokens,
    )
    reference = reference_of(config, policy, layout)
    if reference is not None and reference is not policy:
        share_prompts = sharing(share_prompts, reference)
        reference = spread(reference)
    critic = None
    if config.advantage.estimator == AdvantageEstimator.gae:
        critic = critic_of(config.critic, config.model, policy, layout)
        share_prompts = sharing(share_prompts, critic)
    spread_policy = spread(policy)
    if reference is policy:
        reference = spread_policy
    module = module_of(config, spread_policy, layout, reference)
    trained = [spread_policy]
    if critic is not None:
        trained.append(spread(critic))
        module.add_critic(trained[-1], config.critic)
    if on_gpu and config.model.gradient_checkpointing == "auto":
        trained = [policy for policy in trained if can_keep(policy, layout)]
        if trained:
            module.keeps_layers = KeepsByMemory(trained, config.accumulation.max_tokens, layout)
    longest_document = min(policy.max_positions, config.accumulation.max_tokens)
    source = source_of(config, task, module, longest_document, resume, run_dir, share_prompts)
    if evaluates and is_on(config):
        training_task = task if isinstance(source, SampledRollouts) else None
        module.evaluator = evaluator_of(config, training_task, module, source, run_dir or Path())
    max_steps = config.trainer.max_steps
    loader = loader_of(source, module.loss, config.accumulation, max_steps, layout, share_prompts)
    return module, loader


def module_of(
    config: Config, policy: Policy, layout: Layout, reference: Policy | None = None
) -> PolicyGradientModule:
    """Return the module that trains a policy, spread over ranks, by the configured loss."""
    computation = Computation(
        config.kernel.implementation.value,
        check_finite=False,  # the step's loss and gradient are checked instead
        num_splits=config.loss.num_splits,
        logits_memory_mb=config.kernel.logits_memory_mb,
    )
    module = PolicyGradientModule(
        policy,
        loss_of(config),
        computation,
        config.optimizer,
        config.trainer.max_steps,
        layout,
        reference,
        max_bad_steps=config.trainer.max_bad_steps,
        reference_every=config.kl.update_every,
        reference_rate=config.kl.update_rate,
    )
    module.surprises = Surprises(chosen(config, "loss"), config.rollout, config.advantage.estimator)
    module.adaptive_kl = config.kl.adaptive
    module.shape = Shape.of(config.advantage)
    module.sampling = config.rollout.sampling
    module.record = record_of(config)
    return module


def policy_of(config: Config, alphabet: str | None, layout: Layout) -> Policy:
    """Return the policy, compiled as model.compile says; null: on a GPU where its type is known.

    Raises ConfigError for a model whose configured parts it does not have.
    """
    on_gpu = accelerator(config.trainer.device, config.kernel) == "gpu"
    compiles = on_gpu if config.model.compile is None else config.model.compile
    policy = build_policy(config.model, alphabet, on_gpu, layout, compiles)
    kind = policy.model.config.model_type
    problem = unknown_parts(config.model, kind)
    if problem is None and config.sampler.name == "vllm" and needs_sampler(config):
        problem = cannot_serve(kind, has_experts(policy.model))
    if problem:
        raise ConfigError(problem)
    return policy


def sharing(share_prompts: AutoOrBool, policy: Policy) -> AutoOrBool:
    """Return whether documents share what they begin with, where a model has a part in it: as
    chosen, but false in place of auto if the model's attention is not that of attention.py, as it
    is on a GPU, or the model cannot. With true its attention becomes that one.

    Raises ConfigError in place of true.
    """
    if share_prompts is False or (share_prompts == "auto" and not policy.by_document):
        return False
    problem = cannot_share(policy.model.config.model_type)
    if policy.unscaled_positions < sys.maxsize:
        problem = refusal(
            setting="model.share_prompts=true",
            needs="rotary positions that are the same in documents of every length",
            got="longrope",
            reason="What documents of different lengths begin with has other states in each.",
            use="model.share_prompts=auto",
        )
    if problem is None:
        use_packed_attention(policy.model)
        return share_prompts
    if share_prompts is True:
        raise ConfigError(problem)
    return False


def refuse_any_order(policy: Policy) -> None:
    """Raise ConfigError for a model that trainer.deterministic=true cannot train on a GPU.

    It needs the attention of pgtoolkit's own kernels.
    """
    if policy.by_document:
        return
    dtype = str(policy.compute_dtype).removeprefix("torch.")
    raise ConfigError(
        refusal(
            setting="trainer.deterministic=true",
            needs=f"on a GPU a model of type {', '.join(MODEL_TYPES)} in bfloat16 or float16",
            got=f"{policy.model.config.model_type} in {dtype}",
            reason="For others PyTorch may add up attention's gradients in any order.",
            use="trainer.deterministic=auto",
        )
    )


def loader_of(
    source: Source,
    loss: Loss,
    accumulation: AccumulationSettings,
    max_steps: int,
    layout: Layout = ONE_PROCESS,
    share_prompts: AutoOrBool = False,
) -> StepLoader:
    """Return the loader of the steps that a run makes of a source's documents.

    share_prompts: see `rollouts.steps.is_sharing`.
    """
    closes_on_groups = loss.needs_whole_groups
    return StepLoader(source, accumulation, closes_on_groups, max_steps, layout, share_prompts)


def begin(seed: int, trainer: TrainerSettings, is_async: bool) -> None:
    """Seed the random numbers of new weights, and set torch as the settings say.

    is_async: whether this process samples during updates.
    """
    lightning.seed_everything(seed, verbose=False)
    prepare_torch(trainer.num_threads)
    is_deterministic = trainer.deterministic
    if is_deterministic == "auto":
        is_deterministic = not is_async
    fixed_order.switch(is_deterministic)
    flash_attention.switch(trainer.device != Device.cpu)


def accelerator(chosen: Device, kernel: KernelSettings) -> str:
    """Return the device to compute on, "gpu" or "cpu".

    Raises ConfigError where the configured device is missing. `pgtk check` has looked for it, but a
    sweep's job may run on another machine.
    """
    problems = lacking_devices(chosen, kernel)
    if problems:
        raise ConfigError(" ".join(problems))
    return "gpu" if torch.cuda.is_available() and chosen != "cpu" else "cpu"


def reference_of(config: Config, policy: Policy, layout: Layout = ONE_PROCESS) -> Policy | None:
    """Return the reference without gradients, not yet spread over ranks.

    This is the policy itself where the reference is the policy without its adapters, and None where
    the loss needs no reference. A reference that moves has weights in float32, as the policy has.

    policy: as the run starts, from the seed or model.path. A resumed run starts so, too, before its
        checkpoint is read: so no checkpoint needs to hold the initial weights.
    Raises ConfigError for a model that cannot be loaded, or that has another vocabulary.
    """
    if not config.kl.needs_model:
        return None
    if config.kl.reference in NO_FOLDER:
        if adapted_layers(policy.model):
            return policy  # the frozen weights under the adapters are the initial weights
        reference = replace(policy, model=copy.deepcopy(policy.model))
    else:
        assert config.kl.reference is not None
        dtype = NumberType(str(policy.compute_dtype).removeprefix("torch."))
        refused = partial(other_vocabulary, config)
        reference = _load_beside(
            "kl.reference", config.kl.reference, policy, layout, dtype, refused
        )
    model = reference.model.requires_grad_(False)
    if policy.compute_dtype != torch.float32 and config.kl.update_every is None:
        _narrow(model, policy.compute_dtype)
    return reference


def critic_of(
    settings: CriticSettings, model: ModelSettings, policy: Policy, layout: Layout
) -> Policy:
    """Return the critic, not yet spread over ranks. model: the settings of the policy's.

    policy: as the run starts. Raises ConfigError as `reference_of` does.
    """
    path = settings.path
    if path is None:
        return with_value_head(policy)
    assert isinstance(model, HuggingFaceModelSettings)
    checkpointing = model.gradient_checkpointing
    dtype = NumberType.float32  # of trained weights; the forward pass is in the policy's type

    refused = partial(other_vocabulary_of_critic, path)
    critic = _load_beside("critic.path", path, policy, layout, dtype, refused, checkpointing)
    return with_value_head(replace(critic, compute_dtype=policy.compute_dtype))


def _load_beside(
    key: str,
    path: str,
    policy: Policy,
    layout: Layout,
    dtype: NumberType,
    refused: Callable[[str, str], str],
    gradient_checkpointing: AutoOrBool = False,
) -> Policy:
    """Load a further model that reads the policy's tokens.

    key: the configuration key that has its path. dtype: of its weights.
    refused: makes the error's message for another vocabulary, from (needs, got).
    Raises ConfigError for a model that cannot be loaded, or that has another vocabulary.
    """
    settings = HuggingFaceModelSettings(
        path=path, dtype=dtype, gradient_checkpointing=gradient_checkpointing, fp32_lm_head=False
    )
    try:
        # Attention and compilation as in the policy.
        on_gpu = policy.by_document and torch.cuda.is_available()
        loaded = build_policy(settings, None, on_gpu, layout, policy.compiled)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=")) from error
    difference = vocabularies_differ(
        len(policy.head.weight), policy.tokenizer, len(loaded.head.weight), loaded.tokenizer
    )
    if difference is not None:
        raise ConfigError(refused(*difference))
    return loaded


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the matrices of linear layers in the type to which autocast would cast them.

    Norms, embeddings and the rest stay in float32, in which the policy computes them, too. So at
    the start of a run both have the same log-probs to the last bit.
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            is_tied = any(id(parameter) in embeddings for parameter in module.parameters())
            if not is_tied:
                module.to(dtype)
