"""From the configuration to what is trained, its reference, the steps it is trained on, and the loop that does it."""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pgtoolkit.config.evaluation import HeldOut, held_out_sets, is_on
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.rules.step import needs_model
from pgtoolkit.config.schema import (
    AggregationMode,
    Config,
    HuggingFaceModelConfig,
    NumberType,
    PolicyRolloutConfig,
    TooLong,
)
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.build import build_policy
from pgtoolkit.model.lora import adapted_layers
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.agreement import failing_together
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.evaluation import Evaluator, PromptSet, as_evaluated, asked_by_both
from pgtoolkit.rollouts.policy import PolicyRollouts
from pgtoolkit.rollouts.steps import Source, StepLoader
from pgtoolkit.rollouts.writer import RolloutWriter
from pgtoolkit.sampling.samplers import Sampler, TransformersSampler
from pgtoolkit.sampling.sampling_settings import ignored_settings
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.system.report import Report
from pgtoolkit.tasks.chat import chat_of
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.tasks import Task, TaskConfig, make_task
from pgtoolkit.training.data import recorded_rollouts
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.machine import devices
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.state import seed_rank, write_settings

log = logging.getLogger("pgtoolkit")


def build(
    config: Config, resume: bool = False, layout: Layout = ONE_PROCESS, run_dir: Path = Path()
) -> tuple[PolicyGradientModule, StepLoader]:
    """The module, and the steps it trains on from the start of the data; nothing is trained yet.

    run_dir: where servers that are started write their logs.
    Whoever calls this closes the steps when the run is over, whatever ends it.
    """
    begin(config)
    task = make_task(config.task, config.seed)
    policy = build_policy(config.model, task.alphabet, accelerator(config) == "gpu")
    reference = reference_of(config, policy)  # first: the policy is spread in place
    if reference is not None and reference is not policy:
        reference = parallelize(reference, layout, config)
    spread = parallelize(policy, layout, config)
    module = PolicyGradientModule(config, spread, layout, spread if reference is policy else reference)
    room = min(policy.max_positions, config.accumulation.max_tokens)
    source = _source(config, task, module, room, resume, run_dir)
    if is_on(config):
        trained = task if isinstance(source, PolicyRollouts) else None
        module.evaluator = evaluator_of(config, trained, module, source, run_dir)
    seed_rank(config.seed, layout.rank)
    return module, StepLoader(source, config.accumulation, closes_on_groups(config), config.trainer.max_steps, layout)


def closes_on_groups(config: Config) -> bool:
    """Whether a step ends only where a group ends."""
    return config.aggregation.mode == AggregationMode.prompt_mean


def begin(config: Config) -> None:
    """The random numbers and the settings of torch that all of it starts with."""
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


def _source(config: Config, task, module: PolicyGradientModule, room: int, resume: bool, run_dir: Path) -> Source:
    rollout = config.rollout
    if isinstance(rollout, PolicyRolloutConfig):
        writes = rollout.save_path and module.layout.rank == 0
        writer = RolloutWriter(rollout.save_path, resume) if writes else None
        with failing_together(module.layout):
            tokenized = _tokenized(config, config.task, task, module, room)
        sampler = _sampler(config, module, tokenized, room, run_dir)
        if ignored := ignored_settings(module.policy, rollout):
            values = ", ".join(f"{name}={value}" for name, value in ignored.items())
            log.warning(
                f"note: {config.model.path}/generation_config.json suggests {values}, which is ignored: completions "
                "are sampled as rollout.temperature and rollout.top_p say, and nothing else."
            )
        return PolicyRollouts(config, tokenized, sampler, module, module.layout, writer)
    return recorded_rollouts(config, module.loss, module.policy.vocabulary_size, room)


def evaluator_of(
    config: Config, trained: Task | None, module: PolicyGradientModule, source: Source | None, run_dir: Path
) -> Evaluator:
    """What evaluates the policy of a module. trained: the prompts that it is trained on, if it is. source: likewise.

    Raises ConfigError or DataError for sets whose prompts cannot be read, or have no room.
    """
    how, room = as_evaluated(config), module.policy.max_positions
    if config.sampler.name == "vllm":
        room = min(room, config.accumulation.max_tokens)
    with failing_together(module.layout):
        sets = [_prompt_set(how, one, module, room) for one in held_out_sets(config)]
        for one, task in sets:
            if trained is not None and (count := asked_by_both(trained, task, one.count)):
                log.warning(
                    f"note: {count} of the {one.count} prompts of evaluation set {one.name} are also prompts of "
                    "training: what is measured on those is not held out."
                )
    if isinstance(source, PolicyRollouts) and isinstance(source.sampler, ServerSampler):
        sampler = source.sampler.sampling_otherwise(how.rollout, source.state_dict)
    else:
        sampler = _sampler(how, module, sets[0][0].task, room, run_dir)
    each = config.evaluation.completions_per_prompt
    return Evaluator([one for one, _ in sets], sampler, module, each, module.layout, run_dir)


def _prompt_set(config: Config, one: HeldOut, module: PolicyGradientModule, room: int) -> tuple[PromptSet, Task]:
    place = f"evaluation.sets.{one.name}" if config.evaluation.sets else "task"
    try:
        task = make_task(one.task, one.seed)
        tokenized = _tokenized(config, one.task, task, module, room)
    except (ConfigError, DataError) as error:
        said = str(error).replace("task.", f"{place}.").replace("rollout.max_comp", "evaluation.max_comp")
        raise type(error)(f"evaluation set {one.name}: {said}") from error
    return PromptSet(one.name, tokenized, min(one.prompts, task.num_prompts or one.prompts), one.seed), task


def _tokenized(
    config: Config, chosen: TaskConfig, task: Task, module: PolicyGradientModule, room: int
) -> TokenizedTask:
    """A task as the policy's tokenizer sees it, its prompts measured against the room for a document."""
    tokenizer = module.policy.tokenizer
    ends = end_tokens(module.model.generation_config, tokenizer)
    chat = chat_of(chosen, tokenizer)
    tokenized = TokenizedTask(task, tokenizer, ends, chat, config.rollout.stop, module.policy.vocabulary_size)
    skip, longest_prompt = getattr(chosen, "too_long", None) == TooLong.skip, getattr(chosen, "max_prompt_length", None)
    tokenized.check_lengths(room, config.rollout.max_completion_length, skip, longest_prompt)
    for note in chat.notes(ends) if chat is not None else ():
        log.warning(f"note: {note}")
    return tokenized


def _sampler(config: Config, module: PolicyGradientModule, task: TokenizedTask, room: int, run_dir: Path) -> Sampler:
    if config.sampler.name == "transformers":
        return TransformersSampler(module.policy, config)
    with failing_together(module.layout):
        prompts = task.encode([task.prompt(number) for number in range(16)])
    settings = functools.partial(write_settings, module, merged=True)
    return ServerSampler(Vllm(), config, module, module.layout, prompts, room, settings, run_dir)


def reference_of(config: Config, policy: Policy) -> Policy | None:
    """The reference, frozen and whole; None where none is needed; the policy itself where its adapters are left out.

    policy: as a run starts with it, from the seed or model.path: a resumed run, too, before its checkpoint is read. So
    the initial weights need no place in a checkpoint. Raises ConfigError for one that cannot be loaded, or whose tokens
    are others.
    """
    if not needs_model(config):
        return None
    path = config.kl.reference
    if path == "initial" and adapted_layers(policy.model):
        return policy  # the frozen weights under the adapters are those that the run starts from
    loaded = replace(policy, model=copy.deepcopy(policy.model)) if path in NO_FOLDER else _loaded(path, policy)
    model = loaded.model.requires_grad_(False)
    if policy.compute_dtype != torch.float32:
        _narrow(model, policy.compute_dtype)
    return loaded


def _loaded(path: str, policy: Policy) -> Policy:
    dtype = NumberType.float32 if policy.compute_dtype == torch.float32 else NumberType.bfloat16
    off = {"random_weights": False, "gradient_checkpointing": False, "fp32_lm_head": False}
    no_lora = {"lora_rank": None, "lora_alpha": 1.0, "lora_targets": []}
    chosen = HuggingFaceModelConfig(name="huggingface", path=path, dtype=dtype, **off, **no_lora)
    try:
        with torch.random.fork_rng(devices=[]):  # the same prompts and samples as of a run without it
            loaded = build_policy(chosen, None, on_gpu=policy.by_document)  # as the policy was built
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", "kl.reference=")) from error
    sizes, tokens = [len(one.head.weight) for one in (policy, loaded)], policy.tokenizer.get_vocab()
    if loaded.tokenizer.get_vocab() != tokens or sizes[0] != sizes[1]:
        own = len(set(tokens.items()) & set(loaded.tokenizer.get_vocab().items()))
        raise ConfigError(
            f"kl.reference={path} needs the vocabulary of the policy, {sizes[0]} rows of the head and "
            f"{len(tokens)} tokens (got {sizes[1]} rows, and {own} of these tokens under the same number). Its "
            "log-probs would be those of other tokens. Use a model of the same family, or kl.reference=initial."
        )
    return loaded


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep what autocast would cast at each call in that type already: the matrices of linear layers.

    The rest, such as norms and embeddings, computes in float32 in the policy as well: at the start of a run both then
    have the same log-probs to the last bit.
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not embeddings & {id(p) for p in module.parameters()}:
            module.to(dtype)
