"""Two steps of the tiny model, made of parts without a configuration: each takes its settings.

    python examples/parts.py

docs/architecture.md has the rooms that they come from.
"""

from dataclasses import replace

from pgtoolkit.completion import Request
from pgtoolkit.families import Grpo
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    AdvantageEstimator,
    AdvantageSettings,
    PolicyRolloutSettings,
)
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import SamplingSettings, TransformersSamplerSettings
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.tasks.tasks import ReverseTask
from pgtoolkit.training.fit import fit
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import OptimizerSettings

# A sampler, and one at another temperature.
policy = build_policy(TinyModelSettings(), alphabet="0123456789=", on_gpu=False)
sampling = SamplingSettings(max_completion_length=7)
sampler = TransformersSampler(policy, sampling, TransformersSamplerSettings())
greedy = TransformersSampler(
    policy, replace(sampling, temperature=0.0), TransformersSamplerSettings()
)
request = Request(policy.tokenizer("123456=")["input_ids"], completions=4, seed=0)
completions = greedy.complete([request])

# The module in training.
loss = Loss(Grpo(), aggregation_of("token_mean"))
optimizer = OptimizerSettings(learning_rate=1e-3)
module = PolicyGradientModule(policy, loss, Computation(check_finite=False), optimizer, max_steps=2)

# Rollouts.
task = TokenizedTask(
    ReverseTask(ReverseTaskSettings(), seed=0), policy.tokenizer, [policy.tokenizer.eos_token_id]
)
settings = PolicyRolloutSettings(max_completion_length=7, prompts_per_batch=4, group_size=4)
estimator = Estimator.of(AdvantageSettings(estimator=AdvantageEstimator.grpo), settings)
accumulation = AccumulationSettings(docs_per_step=8, max_tokens=64)
rollouts = SampledRollouts(task, sampler, module, settings, estimator, accumulation, seed=0)

# Steps.
loader = StepLoader(rollouts, accumulation, close_on_groups=False, max_steps=2)
fit(module, loader)
print(f"{module.num_updates} updates by {module.documents_seen} documents")
