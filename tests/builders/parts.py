"""The parts of a short run of the tiny model, each made by its own settings: no configuration."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import Gspo
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import AccumulationSettings, PolicyRolloutSettings
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.tasks.tasks import ReverseTask, Task
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import OptimizerSettings

TASK = ReverseTaskSettings(num_digits=3)
LOSS = Loss(Gspo(), aggregation_of("constant", 4), metrics="basic")
OPTIMIZER = OptimizerSettings(learning_rate=1e-3)
ROLLOUT = PolicyRolloutSettings(prompts_per_batch=4, group_size=4, max_completion_length=4)
ACCUMULATION = AccumulationSettings(docs_per_step=8, max_tokens=24)
MAX_STEPS = 6
"""What SHORT in runs.py says, with the defaults of a configuration: a part made of these has the
numbers that it has in a short run."""


def short_policy(alphabet: str | None = TASK.alphabet, seed: int = 0) -> Policy:
    """Return the tiny model of a short run, as it starts from a seed.

    alphabet: see `build_policy`.
    """
    torch.manual_seed(seed)
    return build_policy(TinyModelSettings(hidden_size=32), alphabet, on_gpu=False)


def frozen_copy(policy: Policy) -> Policy:
    """Return the policy as it is now, as the reference of a penalty."""
    return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))


def short_module(
    loss: Loss = LOSS,
    kernel: str = "auto",
    *,
    policy: Policy | None = None,
    reference: Policy | None = None,
    optimizer: OptimizerSettings = OPTIMIZER,
    max_steps: int = MAX_STEPS,
    dtype: torch.dtype | None = torch.float64,
) -> PolicyGradientModule:
    """Return a module with its optimizer, without Lightning's trainer.

    policy: None for that of a short run. dtype: of the weights; None keeps that which they have.
    """
    computation = Computation(kernel, check_finite=False)
    module = PolicyGradientModule(
        policy or short_policy(), loss, computation, optimizer, max_steps, reference=reference
    )
    if dtype is not None:
        module.to(dtype)
    (made,), _ = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: made
    module.manual_backward = lambda loss: loss.backward()
    return module


def short_loader(
    module: PolicyGradientModule,
    rollout: PolicyRolloutSettings = ROLLOUT,
    accumulation: AccumulationSettings = ACCUMULATION,
    *,
    task: Task | None = None,
    estimator: Estimator | None = None,
    static_cache: bool | None = None,
    folder: Path | None = None,
) -> StepLoader:
    """Return the steps of completions that the module's policy samples.

    task: None for that of a short run. estimator: None for dr_grpo.
    folder: where batches are recorded, which rollout.save_path names.
    """
    policy = module.policy
    tokenized = TokenizedTask(
        task or ReverseTask(TASK, seed=0),
        policy.tokenizer,
        end_tokens(policy.model.generation_config, policy.tokenizer),
        stop=rollout.stop,
        vocabulary=policy.vocabulary_size,
        longest=rollout.max_completion_length,
        max_steps=module.max_steps,
    )
    sampler = TransformersSampler(
        policy,
        rollout.sampling,
        TransformersSamplerSettings(static_cache=static_cache),
        is_async=rollout.max_staleness is not None,
    )
    rollouts = SampledRollouts(
        tokenized,
        sampler,
        module,
        rollout,
        estimator or Estimator("dr_grpo"),
        accumulation,
        folder=folder,
        correction=module.loss.correction,
    )
    whole_groups = module.loss.needs_whole_groups
    return StepLoader(rollouts, accumulation, whole_groups, module.max_steps)
