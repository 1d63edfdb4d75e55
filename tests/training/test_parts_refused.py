"""Parts of a run that are made in Python and do not fit each other are refused, each in a sentence
that says what to type."""

import copy
import dataclasses
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.documents import document_of
from builders.parts import frozen_copy
from builders.rollout_rows import good_row, write_jsonl
from transformers import PreTrainedModel

from pgtoolkit import corrections
from pgtoolkit.completion import Prompt, Request
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.families import Gspo, Lpo, Reinforce, Tpo
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.lora import add_adapters
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings, TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    AdvantageEstimator,
    AdvantageSettings,
    PolicyRolloutSettings,
    RecordedRolloutSettings,
)
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.tasks.tasks import ReverseTask, Score
from pgtoolkit.training.critic import with_value_head
from pgtoolkit.training.fit import fit
from pgtoolkit.training.fitting_parts import check_parts
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import CriticSettings, OptimizerSettings

STAGES = "pipeline_parallel"
NOTHING: dict[str, Any] = {}
MICRO_BATCHES = {"docs_per_step": 0, "micro_batches_per_step": 2}
WEIGHTS = {"reward/first": 1.0, "reward/second": 0.5}


@pytest.fixture(scope="module")
def policy() -> Policy:
    settings = TinyModelSettings(num_layers=1, hidden_size=8, num_heads=1)
    return build_policy(settings, alphabet="0123456789=", on_gpu=False)


def module_of(policy: Policy, **changes: Any) -> PolicyGradientModule:
    """Return a module.

    changes: arguments of its loss, of its computation or of itself; its shape; reference=True for a
        copy of the policy.
    """

    def taken(*names: str) -> dict:
        return {name: changes.pop(name) for name in names if name in changes}

    loss: dict[str, Any] = {"family": Reinforce(), "metrics": "basic"}
    loss |= taken("family", "metrics", "kl", "correction", "temperature", "entropy_top_fraction")
    aggregation = aggregation_of(changes.pop("aggregation", "token_mean"))
    computation: dict[str, Any] = {"check_finite": False} | taken(
        "impl", "num_splits", "logits_memory_mb"
    )
    shape = changes.pop("shape", Shape())
    if changes.get("reference") is True:
        changes["reference"] = frozen_copy(policy)
    module = PolicyGradientModule(
        policy,
        Loss(aggregation=aggregation, **loss),
        Computation(**computation),
        OptimizerSettings(learning_rate=1e-3),
        max_steps=2,
        **changes,
    )
    module.shape = shape
    return module


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": Gspo(), "num_splits": 2},
            r"^num_splits=2 needs a family by token \(got 'gspo'\).* Use num_splits=1$",
        ),
        (
            {"correction": corrections.OffPolicyMask(), "num_splits": 2},
            r"^num_splits=2 needs another correction \(got 'off_policy_mask'\)",
        ),
        (
            {"impl": "fused_linear", "num_splits": 2},
            "^num_splits=2 has no effect with impl='fused_linear'.* Use impl='auto'$",
        ),
        (
            {"impl": "torch", "logits_memory_mb": 8},
            r"^logits_memory_mb=8 needs impl='fused_linear' \(got 'torch'\)$",
        ),
        (
            {"num_splits": 2, "logits_memory_mb": 8},
            r"^logits_memory_mb=8 needs .* \(got 'auto' and num_splits=2\)$",
        ),
        ({"impl": "reference"}, r"^computation needs an impl .* Use impl='torch'$"),
        (
            {"kl": KL("full_reverse", 0.1)},
            r"^kl=KL\('full_reverse', ...\) needs reference=, a policy .*got None",
        ),
        ({"reference_every": 2}, r"^reference_every=2 needs reference=, .*got None\)"),
        (
            {"reference_rate": 0.5},
            r"^reference_rate=0.5 needs reference_every.* Use reference_every=512",
        ),
    ],
)
def test_a_module_of_parts_that_do_not_fit_is_refused(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        module_of(policy, **changes)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_in_the_place_of_a_policy_is_refused_with_what_to_write(policy):
    bare: Any = policy.model
    module = module_of(policy)
    sampling = PolicyRolloutSettings(max_completion_length=4).sampling
    for name, make in {
        "policy": lambda: module_of(bare),
        "reference": lambda: module_of(policy, reference=bare),
        "body": lambda: module.add_critic(bare, CriticSettings(learning_rate=1e-3)),
    }.items():
        message = rf"^{name} needs a Policy, .* Use {name}=Policy\(model, tokenizer\) of"
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match=r"^policy needs a Policy"):
        TransformersSampler(bare, sampling, TransformersSamplerSettings())


def test_a_reference_that_is_the_policy_itself_cannot_move(policy):
    with pytest.raises(ValueError, match=r"got the policy itself.*Use reference=") as refused:
        module_of(policy, reference=policy, reference_every=2)
    typed = str(refused.value).partition("Use reference=")[2].partition(", made before")[0]
    names = {"policy": policy, "copy": copy, "dataclasses": dataclasses}
    module_of(policy, reference=eval(typed, names), reference_every=2)


def test_a_reference_with_the_weights_that_are_trained_is_refused(policy):
    """Its distance was 0 in every step. Of a policy with adapters it is the policy without them."""
    for reference in (policy, dataclasses.replace(policy)):
        with pytest.raises(ValueError, match=r"^reference needs weights of its own .* Use ref"):
            module_of(policy, reference=reference)
    adapted = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    assert isinstance(adapted.model, PreTrainedModel)
    lora = HuggingFaceModelSettings(path=".", lora_rank=2, lora_targets=["c_attn"])
    add_adapters(adapted.model, lora)
    module_of(adapted, reference=adapted)


def test_models_of_other_tokens_are_refused(policy):
    settings = TinyModelSettings(num_layers=1, hidden_size=8, num_heads=1)
    other = build_policy(settings, alphabet="0123456789=+", on_gpu=False)
    refused = r"^{} needs the vocabulary of the policy, 12 rows .*\({}.* of the same family$"
    with pytest.raises(ValueError, match=refused.format("reference", "got 13 rows")):
        module_of(policy, kl=KL("k3", 0.1), reference=other)
    with pytest.raises(ValueError, match=refused.format("body", "")):
        module_of(policy).add_critic(with_value_head(other), CriticSettings(learning_rate=1e-3))
    with pytest.raises(ValueError, match=r"^sampler needs the policy of the module \(got another"):
        loader_of(module_of(policy), sampled=other)


def test_a_text_that_every_completion_contains_ends_none(policy):
    with pytest.raises(ConfigError, match=r"^stop=\[''\] needs texts that are not empty"):
        loader_of(module_of(policy), rollout={"stop": [""]})


def test_a_pipeline_has_neither_metrics_nor_a_reference(policy):
    sizes: Any = SimpleNamespace(size=lambda axis: 2 if axis == AXES.index(STAGES) else 1)
    stages = Layout(mesh=sizes, world_size=2)
    with pytest.raises(ValueError, match=r"^metrics='basic' needs .* Use Loss\(..., metrics='none"):
        module_of(policy, layout=stages)
    with pytest.raises(ValueError, match=r"^reference needs a layout with pipeline_parallel=1"):
        module_of(policy, metrics="none", layout=stages, reference=policy)


def loader_of(
    module: PolicyGradientModule,
    estimator: Any = "dr_grpo",
    keep_top: int | None = None,
    rollout: dict[str, Any] = NOTHING,
    accumulation: dict[str, Any] = NOTHING,
    sampling: dict[str, Any] = NOTHING,
    close_on_groups: bool = False,
    task: type[ReverseTask] = ReverseTask,
    reference_prompt: str | None = None,
    stop: list[str] | None = None,
    is_async: bool | None = None,
    sampled: Policy | None = None,
    shares_prompts: bool = False,
    **options: Any,
) -> StepLoader:
    """Return the steps of rollouts that the module samples; options: of the rollouts."""
    policy = module.policy
    settings = PolicyRolloutSettings(max_completion_length=4, **rollout)
    sampler = TransformersSampler(
        sampled or policy,
        replace(settings.sampling, keep_top=keep_top, **sampling),
        TransformersSamplerSettings(),
        is_async=settings.max_staleness is not None if is_async is None else is_async,
    )
    end: Any = [policy.tokenizer.eos_token_id]
    prompts = TokenizedTask(
        task(ReverseTaskSettings(), seed=0),
        policy.tokenizer,
        end,
        reference_prompt=reference_prompt,
        stop=settings.stop if stop is None else stop,
    )
    steps = AccumulationSettings(max_tokens=64, **accumulation)
    rollouts = SampledRollouts(
        prompts,
        sampler,
        module,
        settings,
        Estimator(estimator) if isinstance(estimator, str) else estimator,
        steps,
        **options,
    )
    return StepLoader(rollouts, steps, close_on_groups, max_steps=2, share_prompts=shares_prompts)


GAE = AdvantageSettings(estimator=AdvantageEstimator.gae)

ROLLOUTS = [
    (
        {"estimator": "given"},
        r"^Estimator\('given'\) needs RecordedRollouts \(got SampledRollouts\)",
    ),
    (
        {"gae": AdvantageSettings(estimator=AdvantageEstimator.gae)},
        r"^SampledRollouts\(gae=...\) needs to be left out: .* Use Estimator.of\(AdvantageSettings",
    ),
    (
        {"rollout": {"group_size": 1}},
        r"^Estimator\('dr_grpo'\) needs group_size=... other than 1 \(got group_size=1\)",
    ),
    (
        {"estimator": "reinforce_plus_plus", "rollout": {"max_sampling_rounds": 2}},
        r"^PolicyRolloutSettings\(max_sampling_rounds=2\) needs .* other than 'gae' and "
        r"'reinforce_plus_plus' \(got Estimator\('reinforce_plus_plus'\)\)",
    ),
    (
        {"estimator": "reinforce_plus_plus", "rollout": {"uninformative": "drop"}},
        r"^PolicyRolloutSettings\(uninformative='drop'\) needs Estimator\(...\) other than 'gae'",
    ),
    ({"adaptive_kl": AdaptiveKL(0.1, 1000, 0.1)}, "^adaptive_kl needs penalty="),
    (
        {"penalty": KL("k3_ratio", 0.1)},
        r"^SampledRollouts\(penalty=...\) needs KL\('k1', ...\) or .*got KL\('k3_ratio', ...\)\)",
    ),
    (
        {"penalty": KL("k3", 0.1), "estimator": "none"},
        r"^SampledRollouts\(penalty=...\) needs Estimator\(...\) other than 'none' and 'gdpo'",
    ),
    (
        {"penalty": KL("k3", 0.1), "estimator": "max_rl"},
        r"^SampledRollouts\(penalty=...\) needs .*'max_rl'.*below 0 once the penalty is taken off",
    ),
    (
        {"sampling": {"temperature": 0.5}},
        r"^sampler needs temperature=1.0, as the settings .*\(got 0.5\).* "
        r"Use PolicyRolloutSettings\(..., temperature=0.5\), or the sampler with temperature=1.0$",
    ),
    ({"rollout": {"stop": ["9"]}, "sampling": {"stop": ()}}, r"^sampler needs stop=\['9'\]"),
    ({"rollout": {"stop": ["9"]}, "stop": []}, r"^TokenizedTask needs stop=\['9'\], .*got \[\]"),
    (
        {"rollout": {"top_k": 4}, "keep_top": 2},
        r"^SamplingSettings\(keep_top=2\) needs at least top_k=4, or 0 .* Use keep_top=4\.$",
    ),
    (
        {"rollout": {"max_staleness": 7, "old_log_probs": "sampling"}, "is_async": False},
        r"^PolicyRolloutSettings\(max_staleness=7\) needs a sampler of is_async=True \(got False\)",
    ),
    (
        {"rollout": {"top_k": 3, "old_log_probs": "sampling"}, "keep_top": 0},
        r"^PolicyRolloutSettings\(old_log_probs='sampling'\) needs .* Use .*\(keep_top=32",
    ),
    (
        {"rollout": {"top_p": 0.9}, "keep_top": 0, "correction": corrections.TokenMask()},
        r"^Loss\(correction=TokenMask\(\)\) needs SamplingSettings\(keep_top=...\) above 0 ",
    ),
    (
        {"rollout": {"old_log_probs": "sampling"}, "correction": corrections.TokenMask()},
        r"^Loss\(correction=TokenMask\(\)\) needs .*old_log_probs=...\) other than 'sampling' ",
    ),
    (
        {"rollout": {"passes": 2}, "accumulation": {"last_step": "carry"}},
        r"^PolicyRolloutSettings\(passes=2\) needs AccumulationSettings\(last_step=...\) other "
        r"than 'carry' \(got .*'carry'\)\)\..* Use AccumulationSettings\(last_step='short'\)\.$",
    ),
    (
        {
            "rollout": {"passes": 2, "pass_order": "shuffled"},
            "accumulation": {"last_step": "drop"},
        },
        r"^PolicyRolloutSettings\(pass_order='shuffled'\) needs .*last_step=...\) other .*'drop'",
    ),
    (
        {"rollout": {"lag": 1}, "accumulation": MICRO_BATCHES},
        r"^PolicyRolloutSettings\(lag=1\) needs .*docs_per_step=...\) other than 0 .* Use .*=64\)",
    ),
    (
        {"rollout": {"lag": 1, "max_staleness": 4, "old_log_probs": "sampling"}},
        r"^PolicyRolloutSettings\(lag=1\) needs PolicyRolloutSettings\(max_staleness=None\)",
    ),
    (
        {
            "rollout": {"max_staleness": 4, "old_log_probs": "sampling"},
            "accumulation": MICRO_BATCHES,
        },
        r"^PolicyRolloutSettings\(max_staleness=4\) needs .*docs_per_step=...\) other than 0",
    ),
    (
        {"rollout": {"max_staleness": 4}},
        r"^PolicyRolloutSettings\(max_staleness=4\) needs .*old_log_probs=...\) .*'training'",
    ),
    (
        {
            "rollout": {"max_staleness": 4, "old_log_probs": "sampling"},
            "accumulation": {"last_step": "carry"},
        },
        r"^PolicyRolloutSettings\(max_staleness=4\) needs .*last_step=...\) other than 'carry'",
    ),
    (
        {"rollout": {"max_staleness": 4, "old_log_probs": "sampling", "passes": 2}},
        r"^PolicyRolloutSettings\(max_staleness=4\) needs at least the 8 steps .* Use .*=15\.$",
    ),
    *(
        (
            {"rollout": {"uninformative": "drop"} | rollout, "accumulation": accumulation},
            rf"^PolicyRolloutSettings\(uninformative='drop'\) needs .*{needed}",
        )
        for rollout, accumulation, needed in (
            ({"lag": 1}, {}, r"\(lag=0\)"),
            ({"max_sampling_rounds": 2}, {}, r"\(max_sampling_rounds=1\)"),
            ({}, {"last_step": "drop"}, r"\(last_step=...\) other than 'drop'"),
        )
    ),
    (
        {"estimator": "max_rl", "rollout": {"overlong_buffer": 2}},
        r"^PolicyRolloutSettings\(overlong_buffer=2\) needs Estimator\(...\) other than 'max_rl'",
    ),
    (
        {"estimator": Estimator("gdpo", WEIGHTS), "rollout": {"overlong_buffer": 2}},
        r"^Estimator\('gdpo'\) needs PolicyRolloutSettings\(overlong_buffer=None\)",
    ),
    (
        {"estimator": Estimator("none", shape=Shape(clip_low=-1.0))},
        r"^Estimator\('none'\) needs AdvantageSettings\(clip_low=None\)",
    ),
    (
        {"rollout": {"retire_at": 0.9}},
        r"^PolicyRolloutSettings\(retire_at=0.9\) needs a task .*got ReverseTask",
    ),
    (
        {"penalty": KL("k3", 0.1), "adaptive_kl": AdaptiveKL(0.1, 51, 0.1)},
        r"^AdaptiveKL\(horizon=51\) needs more than 51, a fifth of the 256 documents .* Use .*=256",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ROLLOUTS)
def test_rollouts_of_parts_that_do_not_fit_are_refused(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        loader_of(module_of(policy), **changes)


@pytest.mark.parametrize(
    ("estimator", "settings", "message"),
    [
        (Estimator("gae"), {}, r"^Estimator\('gae'\) needs SampledRollouts \(got RecordedRollouts"),
        (Estimator("gdpo", WEIGHTS), {}, r"^Estimator\('gdpo'\) needs SampledRollouts"),
        (Estimator("grpo"), {"group_size": 1}, r"^Estimator\('grpo'\) needs group_size=... other"),
        (
            Estimator("grpo"),
            {"too_long": "skip"},
            r"^RecordedRolloutSettings\(too_long='skip'\) needs Estimator\('given'\) \(got .*grpo'",
        ),
    ],
)
def test_recorded_rollouts_of_parts_that_do_not_fit_are_refused(estimator, settings, message):
    with pytest.raises(ValueError, match=message):
        RecordedRollouts(RecordedRolloutSettings(path="none.jsonl", **settings), estimator, 12)


def test_recorded_rollouts_meet_the_rules_of_the_module(policy, tmp_path):
    """A coefficient follows the KL of a batch that the policy samples."""
    path = write_jsonl(tmp_path / "rows.jsonl", [good_row(length=length) for length in (4, 5)])
    accumulation = AccumulationSettings(max_tokens=64)
    module = module_of(policy, **TEACHER)
    loader = StepLoader(
        RecordedRollouts(RecordedRolloutSettings(path=str(path)), Estimator("grpo"), 12),
        accumulation,
        close_on_groups=False,
        max_steps=1,
    )
    check_parts(module, loader)
    module.adaptive_kl = AdaptiveKL(0.1, 1000, 0.1)
    with pytest.raises(
        ConfigError, match=r"^AdaptiveKL\(target=0.1\) needs SampledRollouts \(got "
    ):
        fit(module, loader)


MASK = corrections.TokenMask()
CENTERED = {"family": Reinforce(score_centering=True)}
OF_SAMPLER = {"rollout": {"old_log_probs": "sampling"}}
SCALED = Shape(scale=2.0)
TEACHER = {"kl": KL("k3", 0.1), "reference": True}


def of_groups(log_ratio, rewards, documents, groups):
    return -documents.first(rewards) * groups.softmax(documents.sum(log_ratio))


def of_token(log_ratio, advantages):
    return -advantages * log_ratio


def of_step(log_ratio, advantages, step):
    return -advantages * log_ratio / step.mean(advantages.abs())


FIT = [
    (
        {"family": Tpo()},
        {"estimator": "none"},
        r"^Loss with family 'tpo' needs .*close_on_groups=True\)",
    ),
    ({"aggregation": "prompt_mean"}, {}, "^aggregation 'prompt_mean' needs .*close_on_groups"),
    (
        {"aggregation": "prompt_mean"},
        {
            "close_on_groups": True,
            "accumulation": MICRO_BATCHES,
        },
        r"^aggregation_of\('prompt_mean'\) needs AccumulationSettings\(docs_per_step=...\) above 0",
    ),
    (
        {"entropy_top_fraction": 0.5},
        {"accumulation": MICRO_BATCHES},
        r"^Loss\(entropy_top_fraction=0.5\) needs .*\(docs_per_step=...\) above 0",
    ),
    ({}, {"rollout": {"temperature": 0.5}}, r"^Loss needs temperature=0.5, .*\(got 1.0\)"),
    (
        {},
        {"rollout": {"truncated": "mask"}},
        r"^truncated='mask' of the rollouts needs Loss\(..., masks_truncated=True\)",
    ),
    ({"correction": MASK}, {}, r"^SampledRollouts needs correction=, .* \(got None\)"),
    (
        CENTERED,
        {},
        r"^score_centering=True needs PolicyRolloutSettings\(old_log_probs='sampling'\) ",
    ),
    (CENTERED, OF_SAMPLER, r"^score_centering=True needs SamplingSettings\(keep_top=...\) above 0"),
    (
        CENTERED,
        {"rollout": {"old_log_probs": "sampling", "top_k": 3}, "keep_top": 4},
        r"^score_centering=True needs PolicyRolloutSettings\(top_k=None\)",
    ),
    (
        {"family": Lpo()},
        {"estimator": "none", "rollout": {"lag": 1}, "close_on_groups": True},
        r"^Loss\(Lpo\(\), ...\) needs PolicyRolloutSettings\(old_log_probs='proximal'\)",
    ),
    (
        {"family": Tpo()},
        {"estimator": "none", "rollout": {"group_size": 1}, "close_on_groups": True},
        r"^Loss\(Tpo\(\), ...\) needs group_size=... other than 1",
    ),
    (
        {"aggregation": "balanced", "kl": KL("k3", 0.1)},
        {"estimator": "none", "close_on_groups": True},
        r"^aggregation_of\('balanced'\) needs Estimator\(...\) other than 'none'",
    ),
    (
        {"kl": KL("k1", 0.1)},
        {"estimator": "none"},
        r"^Estimator\('none'\) needs KL\(...\) other than 'none' and 'k1' or Loss\(entropy_coeff",
    ),
    (
        {"kl": KL("k3", 0.1)},
        {},
        r"^KL\('k3', ...\) needs PolicyGradientModule\(reference=...\) \(got .*reference=None\)\)",
    ),
    (
        {},
        {"shares_prompts": True, "accumulation": MICRO_BATCHES},
        r"^StepLoader\(share_prompts=True\) needs .*docs_per_step=...\) above 0 .*='auto'\)\.$",
    ),
    ({"reference": True}, {}, "^reference= of a module needs a penalty"),
    (
        {},
        {"reference_prompt": "{prompt} ({answer})"},
        r"^TokenizedTask\(reference_prompt=...\) needs KL\(...\) other .*got Loss\(kl=None\)\)",
    ),
    (
        TEACHER | {"correction": MASK},
        {"estimator": "none", "correction": MASK},
        r"^Estimator\('none'\) needs Loss\(correction=None\) \(got .*TokenMask\(\)\)\)",
    ),
    (
        TEACHER | {"entropy_top_fraction": 0.5},
        {"estimator": "none"},
        r"^Loss\(entropy_top_fraction=0.5\) needs Loss\(entropy_top_fraction=None\)",
    ),
    (
        TEACHER,
        {"estimator": Estimator("none", shape=SCALED)},
        r"^Estimator\('none'\) needs AdvantageSettings\(reward_scale=1\)",
    ),
    *(
        (TEACHER, {"estimator": "none", "rollout": rollout}, rf"needs .*{needed}")
        for rollout, needed in (
            ({"overlong_buffer": 2}, r"\(overlong_buffer=None\) \(got .*=2\)"),
            ({"uninformative": "drop"}, r"\(...\) other than 'none' \(got Estimator\('none'\)"),
            ({"max_sampling_rounds": 2}, r"\(...\) other than 'none' \(got Estimator\('none'\)"),
        )
    ),
    (
        {"family": Tpo()},
        {"close_on_groups": True},
        r"^Loss\(Tpo\(\), ...\) needs Estimator\('none'\) \(got Estimator\('dr_grpo'\)\)",
    ),
    *(
        (
            {"family": family, "shape": of_module},
            {"estimator": Estimator(name, shape=of_estimator), "close_on_groups": True},
            r"^PolicyGradientModule needs as its shape that of the .* Use module.shape = ",
        )
        for family, name, of_module, of_estimator in (
            (Tpo(), "none", Shape(), SCALED),
            (Lpo(), "none", SCALED, Shape()),
            (Reinforce(), "dr_grpo", SCALED, Shape()),
        )
    ),
    (
        {"family": Tpo()},
        {"estimator": "none", "close_on_groups": True, "accumulation": {"docs_per_step": 12}},
        r"^StepLoader\(..., close_on_groups=True\) needs .* multiple of the group size 8 \(got 12",
    ),
    (
        {"family": FunctionLoss(of_groups)},
        {"estimator": "none", "rollout": {"group_size": 1}, "close_on_groups": True},
        r"^a loss of your own needs group_size=... other than 1",
    ),
    (
        {"family": FunctionLoss(of_step)},
        {"accumulation": MICRO_BATCHES},
        r"^Loss with family 'of_step' needs AccumulationSettings\(docs_per_step=...\) above 0",
    ),
    (
        {"family": FunctionLoss(of_token)},
        {"estimator": "none"},
        r"^Estimator\('none'\) needs KL\(...\) other than 'none' and 'k1' or Loss\(entropy_coeff",
    ),
]


@pytest.mark.parametrize(("of_module", "of_loader", "message"), FIT)
def test_steps_that_do_not_fit_the_loss_are_refused(policy, of_module, of_loader, message):
    module = module_of(policy, **of_module)
    with pytest.raises(ConfigError, match=message):
        fit(module, loader_of(module, **of_loader))


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_one_s_own_holds_parts_to_the_same_rules(policy):
    module = module_of(policy, aggregation="prompt_mean")
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with pytest.raises(ConfigError, match=r"^aggregation 'prompt_mean' needs .*close_on_groups"):
        trainer.fit(module, loader_of(module))
    assert module.num_updates == 0


@pytest.mark.parametrize(
    ("of_loss", "estimator"),
    [({"aggregation": "prompt_mean"}, "given"), ({"family": Tpo()}, "none")],
)
def test_recorded_rows_without_groups_are_refused_where_the_loss_compares_them(
    policy, tmp_path, of_loss, estimator
):
    """prompt_mean was sample_mean, and tpo trained nothing."""
    rows = [good_row(number, ..., advantage=0.5) for number in range(2)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    module = module_of(policy, **of_loss)
    for size in (None, 2):
        settings = RecordedRolloutSettings(path=str(path), group_size=size)
        rollouts = RecordedRollouts(settings, Estimator(estimator), None)
        steps = AccumulationSettings(max_tokens=64)
        loader = StepLoader(rollouts, steps, close_on_groups=True, max_steps=1)
        if size is not None:
            check_parts(module, loader)
            continue
        with pytest.raises(ConfigError, match="needs RecordedRollouts whose rows have a group_id"):
            check_parts(module, loader)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_more_steps_ends_with_the_last_one_of_the_loader(policy, caplog):
    """It went on with empty epochs, without end."""
    module = module_of(policy)
    loader = loader_of(module)
    trainer = lightning.Trainer(
        max_steps=loader.max_steps + 2, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with caplog.at_level(logging.WARNING, "pgtoolkit"):
        trainer.fit(module, loader)
    assert module.num_updates == loader.max_steps
    assert f"no step left after {loader.max_steps} updates, before" in caplog.text


def test_the_rank_in_a_refusal_is_that_of_the_adapters(policy):
    adapted = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    assert isinstance(adapted.model, PreTrainedModel)
    lora = HuggingFaceModelSettings(path=".", lora_rank=3, lora_targets=["c_attn"])
    add_adapters(adapted.model, lora)
    reference = dataclasses.replace(adapted, model=copy.deepcopy(adapted.model))
    module = module_of(adapted, kl=KL("k3", 0.1), reference=reference, reference_every=2)
    with pytest.raises(ConfigError, match=r"\(got HuggingFaceModelSettings\(lora_rank=3\)\)"):
        check_parts(module, loader_of(module))


@dataclasses.dataclass(frozen=True)
class OwnMask(corrections.TokenMask):
    """A correction of the user's own, of no name in a configuration."""


FITTING = [
    ({}, {}),
    ({"family": Tpo()}, {"estimator": "none", "close_on_groups": True}),
    (
        CENTERED,
        {"rollout": {"old_log_probs": "sampling"}, "keep_top": 4},
    ),
    ({"correction": MASK}, {"correction": MASK}),
    ({}, {"rollout": {"top_p": 0.9, "old_log_probs": "sampling"}}),
    ({"correction": OwnMask()}, {"correction": OwnMask()}),
    (TEACHER, {"estimator": "none"}),
    (TEACHER, {"penalty": KL("k3", 0.1)}),
    (
        {"reference": True},
        {"penalty": KL("k3", 0.1), "reference_prompt": "{prompt} ({answer})"},
    ),
    (
        {"family": Tpo(), "shape": SCALED},
        {"estimator": Estimator("none", shape=SCALED), "close_on_groups": True},
    ),
    ({}, {"estimator": Estimator("dr_grpo", shape=SCALED)}),
    ({}, {"rollout": {"lag": 1}}),
    ({}, {"rollout": {"max_staleness": 15, "old_log_probs": "proximal", "passes": 2}}),
    ({"family": FunctionLoss(of_groups)}, {"estimator": "none", "close_on_groups": True}),
    ({"temperature": 0.5}, {"rollout": {"temperature": 0.5}}),
]


@pytest.mark.parametrize(("of_module", "of_loader"), FITTING)
def test_steps_that_fit_the_loss_are_not_refused(policy, of_module, of_loader):
    module = module_of(policy, **of_module)
    check_parts(module, loader_of(module, **of_loader))


def test_rollouts_are_of_the_module_that_is_trained_and_of_its_steps(policy):
    module = module_of(policy)
    loader = loader_of(module)
    with pytest.raises(ConfigError, match="needs trained=, the module that fit trains"):
        fit(module_of(policy), loader)
    loader.accumulation = AccumulationSettings(max_tokens=32)
    with pytest.raises(ConfigError, match="need the same AccumulationSettings"):
        fit(module, loader)


def test_a_coefficient_that_adapts_is_that_of_a_penalty(policy):
    module = module_of(policy)
    module.adaptive_kl = AdaptiveKL(0.1, 1000, 0.1)
    with pytest.raises(ConfigError, match=r"^adaptive_kl of a module needs a penalty"):
        fit(module, loader_of(module))
    of_rewards = {"penalty": KL("k3", 0.1), "adaptive_kl": module.adaptive_kl}
    with pytest.raises(ConfigError, match=r"^KL\('k3', ...\) needs .*\(got .*reference=None\)\)"):
        check_parts(module, loader_of(module, **of_rewards))
    with_reference = module_of(policy, reference=True)
    with_reference.adaptive_kl = module.adaptive_kl
    check_parts(with_reference, loader_of(with_reference, **of_rewards))
    of_loss = module_of(policy, **TEACHER)
    of_loss.adaptive_kl = AdaptiveKL(0.1, 1000, 0.1)
    carrying = loader_of(of_loss, accumulation={"last_step": "carry"})
    refused = (
        r"^AdaptiveKL\(target=0.1\) needs AccumulationSettings\(last_step=...\) other than 'carry'"
    )
    with pytest.raises(ConfigError, match=refused):
        fit(of_loss, carrying)
    shared = {"penalty": KL("k3", 0.1), "adaptive_kl": of_loss.adaptive_kl}
    with pytest.raises(
        ConfigError, match=r"^adaptive_kl of a module with a .*got one AdaptiveKL for"
    ):
        fit(of_loss, loader_of(of_loss, **shared))
    of_loss.adaptive_kl = AdaptiveKL(0.1, 51, 0.1)
    with pytest.raises(ConfigError, match=r"^AdaptiveKL\(horizon=51\) needs more than 51, a fifth"):
        fit(of_loss, loader_of(of_loss))


def documents(ref_log_probs: float | None = None) -> list:
    """Return two completions of a prompt of three tokens, of two tokens each."""
    mask = torch.tensor([False, False, False, True, True])
    made = [
        document_of(
            torch.tensor([1, 2, 3, last, last + 1]),
            mask,
            advantages=1.0,
            old_log_probs=-2.0,
            name=f"row {last}",
        )
        for last in (4, 6)
    ]
    if ref_log_probs is None:
        return made
    return [replace(each, ref_log_probs=torch.full((2,), ref_log_probs)) for each in made]


def test_a_penalty_needs_a_reference_or_its_log_probs(policy):
    module = module_of(policy, kl=KL("k3", 0.1))
    with pytest.raises(PgtoolkitError, match=r"needs a reference, or ref_log_probs .* of row 4"):
        module.take_step(make_step(documents(), 16))
    module._check_ref_log_probs(make_step(documents(-2.0), 16))
    with pytest.raises(ConfigError, match=r"penalty=...\) needs a reference .*reference=...\)"):
        module.ref_log_probs(make_step(documents(), 16).micro_batches[0])
    with pytest.raises(ConfigError, match=r"needs a critic .* Use PolicyGradientModule.add_critic"):
        module.values(make_step(documents(), 16).micro_batches[0])


def test_log_probs_of_another_reference_are_said_to_be_unread_once(policy, caplog):
    module = module_of(policy, **TEACHER)
    with caplog.at_level(logging.WARNING, "pgtoolkit"):
        for given in (None, -2.0, -2.0):
            module._check_ref_log_probs(make_step(documents(given), 16))
        of_rewards = [replace(each, kl_reward=-0.1) for each in documents(-2.0)]
        module_of(policy, **TEACHER)._check_ref_log_probs(make_step(of_rewards, 16))
    (note,) = caplog.messages
    assert note.startswith(
        "note: ref_log_probs of row 4 are not read, since the reference computes"
    )


def test_a_critic_needs_a_head_of_one_value_and_returns(policy):
    module = module_of(policy)
    settings = CriticSettings(learning_rate=1e-3)
    with pytest.raises(
        ValueError, match=r"^body needs a head of one .*got one of 12.*with_value_h"
    ):
        module.add_critic(policy, settings)
    late = replace(settings, steps_before_policy=2)
    with pytest.raises(
        ValueError, match=r"^CriticSettings\(steps_before_policy=2\) needs fewer than"
    ):
        module.add_critic(with_value_head(policy), late)
    module.add_critic(with_value_head(policy), settings)
    with pytest.raises(
        ConfigError, match=r"^a critic and Estimator\('gae'\) need each .*Estimator\('dr_grpo'\)\)"
    ):
        fit(module, loader_of(module))
    with pytest.raises(DataError, match=r"^a critic needs values and returns .* none of row 4\)"):
        module.take_step(make_step(documents(), 16))
    check_parts(module, loader_of(module, estimator="gae"))
    other = module_of(policy)
    with pytest.raises(ConfigError, match=r"^a critic and .*got critic=None and Estimator\('gae'"):
        fit(other, loader_of(other, estimator="gae"))


def test_the_estimator_gae_has_its_settings_and_their_shape_in_one_place():
    clipped = replace(GAE, gamma=0.5, reward_scale=2.0)
    rollout = PolicyRolloutSettings(max_completion_length=4)
    assert Estimator.of(clipped, rollout) == Estimator("gae", gae=clipped)
    assert Estimator("gae", gae=clipped).shape == Shape(scale=2.0)
    assert Estimator("gae").gae == GAE
    assert Estimator("gae", shape=Shape(scale=2.0)).gae == replace(GAE, reward_scale=2.0)
    with pytest.raises(ValueError, match=r"^Estimator\('gae', gae=...\) needs shape=.*scale=2.0"):
        Estimator("gae", gae=clipped, shape=Shape(scale=3.0))
    with pytest.raises(
        ValueError, match=r"needs AdvantageSettings\(estimator='gae'\) \(got .*'grpo"
    ):
        Estimator("gae", gae=AdvantageSettings(estimator=AdvantageEstimator.grpo))
    with pytest.raises(ValueError, match=r"^Estimator\('grpo'\) needs gae=None"):
        Estimator("grpo", gae=GAE)


@pytest.mark.parametrize(
    "weights", [{}, {"reward/first": 1.0}, {"reward/first": 1.0, "reward/second": 0.0}]
)
def test_gdpo_needs_the_weights_of_two_measures(weights):
    with pytest.raises(
        ValueError, match=r"^Estimator\('gdpo'\) needs weights of two .*Use weights="
    ):
        Estimator("gdpo", weights)
    with pytest.raises(ValueError, match=r"^Estimator\('grpo'\) needs no weights"):
        Estimator("grpo", {"reward/first": 1.0})


class Measured(ReverseTask):
    """Measures what a verifier named first would give."""

    def score(self, *arguments, **options):
        score = super().score(*arguments, **options)
        return replace(score, measures={"reward/first": score.reward})


def test_a_measure_that_no_completion_has_is_told(policy, caplog):
    module = module_of(policy)
    loader = loader_of(module, Estimator("gdpo", WEIGHTS))
    with pytest.raises(
        DataError, match=r"^no completion of a batch has reward/first, reward/second"
    ):
        next(iter(loader))
    loader = loader_of(module, Estimator("gdpo", WEIGHTS), task=Measured)
    with caplog.at_level(logging.WARNING, "pgtoolkit"):
        for position in (0, 256, 512):
            loader.source.document(position)
    (note,) = [message for message in caplog.messages if "no completion" in message]
    assert note.startswith("note: no completion of a batch has reward/second, which advantage=gdpo")
    assert "They have reward/first." in note


def test_a_refusal_of_documents_says_what_to_write_in_python(policy):
    step = make_step(documents(), 16)
    corrected = module_of(policy, correction=corrections.TokenMask())
    with pytest.raises(DataError, match=r"in Python Loss\(..., correction=None\), or documents"):
        corrected.take_step(step)
    with pytest.raises(DataError, match="in Python documents with both sampling_top_ids and"):
        module_of(policy, **CENTERED).take_step(step)
    unknown = [replace(each, old_log_probs=None) for each in documents()]
    with pytest.raises(DataError, match=r"in Python Loss\(Reinforce\(\), ...\) without either"):
        module_of(policy, family=Gspo()).take_step(make_step(unknown, 16))


def test_probabilities_in_the_place_of_old_log_probs_are_refused(policy):
    first, second = documents()
    wrong = replace(second, old_log_probs=torch.tensor([0.0, 0.25]))
    module = module_of(policy)
    with pytest.raises(DataError, match=r"^old_log_probs of row 6 needs .*\(got 0.25\)\. .*\.log"):
        module.take_step(make_step([first, wrong], 16))


def test_a_function_that_makes_no_advantages_is_named_as_python_has_it():
    def halves(rewards, *, lengths, measures):
        return [[reward / 2 for reward in group][1:] for group in rewards]

    estimator = Estimator("custom", function=halves)
    with pytest.raises(DataError, match=r"^Estimator\('custom', function=halves\) needs a finite"):
        estimator.advantages([[Attempt(1.0, 2), Attempt(0.0, 3)]], refuse=lambda *_: None)


def test_steps_that_no_batch_fills_are_refused_with_what_to_write_in_python(policy):
    accumulation = {"docs_per_step": 512, "last_step": "drop"}
    rollout = {"prompts_per_batch": 2, "group_size": 4}
    module = module_of(policy)
    loader = loader_of(module, rollout=rollout, accumulation=accumulation)
    with pytest.raises(DataError, match=r"in Python docs_per_step=8, or last_step='short'\.$"):
        next(iter(loader))


def test_documents_share_a_prompt_only_where_the_model_keeps_them_apart(policy):
    """The tiny model's attention is that of transformers, which does not know what is shared."""
    module = module_of(policy)
    module.log_probs(make_step(documents(), 16).micro_batches[0])
    with pytest.raises(ConfigError, match=r"share_prompts needs .*gpt2.* Use share_prompts=False"):
        module.log_probs(make_step(documents(), 16, share_prompts=True).micro_batches[0])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 12, 4], r"^row 4 needs tokens below 12, those of the policy's model \(got 12\)"),
        ([1, 2, 3, -1], r"^the tokens of row 4 need ids of 0 or more \(got -1\)\. .* no padding"),
        ([1] * 65, r"^row 4 needs positions below 64, .* \(got 64\)\. Use shorter documents"),
    ],
)
def test_tokens_that_the_model_cannot_read_are_refused_by_their_document(policy, tokens, message):
    first, second = documents()
    mask = torch.arange(len(tokens)) >= len(tokens) - 2
    wrong = replace(first, tokens=torch.tensor(tokens), loss_mask=mask)
    with pytest.raises(DataError, match=message):
        module_of(policy).take_step(make_step([second, wrong], 128))


def test_the_longest_document_of_the_model_s_positions_is_not_refused(policy):
    mask = torch.arange(64) >= 62
    longest = replace(documents()[0], tokens=torch.full((64,), 11), loss_mask=mask)
    module_of(policy)._check_tokens(make_step([longest], 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "a"}, r"^group of row 4 needs a whole number \(got 'a'\)"),
        ({"group": 1.5}, r"^group of row 4 needs a whole number \(got 1\.5\)"),
        ({"reward": torch.tensor(1.0)}, r"^reward of row 4 needs a number .* Use reward=float\("),
    ],
)
def test_a_document_of_other_kinds_of_numbers_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(documents()[0], **changes)


def test_a_step_is_made_of_documents():
    for given in (documents()[0], [{"tokens": [1, 2]}]):
        wrong: Any = given
        with pytest.raises(ValueError, match=r"^make_step needs a list of Document \(got "):
            make_step(wrong, 16)


def test_what_fit_cannot_train_is_refused_with_what_can(policy):
    module = module_of(policy)
    for given in (torch.utils.data.DataLoader(documents()), loader_of(module).source):
        wrong: Any = given
        with pytest.raises(ValueError, match=r"^fit needs a StepLoader .*max_epochs=1\)\.fit\("):
            fit(module, wrong)
    bare: Any = policy
    with pytest.raises(ValueError, match=r"^module needs an object of DynamicAccumulation"):
        fit(bare, loader_of(module))
    with pytest.raises(ValueError, match=r"^estimator needs an object of Estimator"):
        loader_of(module, estimator=None)


class Answering(ReverseTask):
    """Returns what it is told to, in the place of a prompt or of a score."""

    def prompt(self, index):
        return self.prompts.get(index) or super().prompt(index)

    def score(self, prompt, completion, finished):
        return self.given

    prompts: Any = NOTHING
    given: Any = Score(1.0, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"given": 1.0},
            r"^Told needs a Score for each completion \(got 1\.0\).* return Score\(rew",
        ),
        ({"given": None}, r"^Told needs a Score for each completion \(got None\)"),
        ({"prompts": {0: "12="}}, r"^Told\.prompt needs to return a Prompt \(got '12='\)"),
        (
            {"prompts": {0: Prompt("", "", 0, "row 0")}},
            r"^the prompt at row 0 needs a list of at least one token \(got none\)",
        ),
        (
            {"prompts": {0: Prompt("1" * 61, "", 0, "row 0")}},
            r"^the prompt at row 0 has 61 tokens, and a completion up to 4: more than the 64 pos",
        ),
    ],
)
def test_a_task_of_one_s_own_that_returns_something_else_is_refused(policy, given, message):
    kind = type("Told", (Answering,), given)
    with pytest.raises((DataError, TypeError), match=message):
        next(iter(loader_of(module_of(policy), task=kind)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("x", True), "Score needs a number as reward"),
        ((torch.tensor(1.0), True), "Score needs a number as reward"),
        ((1.0, "yes"), "Score needs exact_match=True, False or None"),
        ((1.0, True, {"first": None}), "Score needs a number as first"),
    ],
)
def test_a_score_of_other_kinds_of_numbers_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Score(*given)


@pytest.mark.parametrize("tokens", [[12], [-1], "12=", torch.tensor([1, 2])])
def test_a_request_of_tokens_that_the_model_lacks_is_refused(policy, tokens):
    sampling = PolicyRolloutSettings(max_completion_length=4).sampling
    sampler = TransformersSampler(policy, sampling, TransformersSamplerSettings())
    with pytest.raises(
        DataError, match=r"^a request needs (tokens from 0 to 11|a list of at least)"
    ):
        sampler.complete([Request(tokens, completions=1, seed=0)])


def test_all_broken_rules_are_told_together_a_line_each(policy):
    module = module_of(policy)
    rollout = {"lag": 1, "passes": 2}
    accumulation = MICRO_BATCHES | {"last_step": "carry"}
    with pytest.raises(ValueError, match="needs") as refused:
        loader_of(module, rollout=rollout, accumulation=accumulation)
    told = str(refused.value).splitlines()
    for begins in (r"PolicyRolloutSettings(lag=1) needs", r"PolicyRolloutSettings(passes=2) needs"):
        assert any(line.startswith(begins) and "Use " in line for line in told), told
    assert len(told) == len({*told}) >= 2


def test_a_penalty_on_rewards_without_a_reference_is_refused_in_the_words_that_were_typed(policy):
    module = module_of(policy)
    with pytest.raises(ConfigError, match=r", or SampledRollouts\(penalty=None\)\.$"):
        check_parts(module, loader_of(module, penalty=KL("k3", 0.1)))


def test_a_correction_beside_a_loss_that_has_no_place_for_it_is_refused_at_once(policy):
    for family in (Tpo(), FunctionLoss(of_groups)):
        with pytest.raises(ValueError, match=r"^correction='token_mask' beside .* correction=None"):
            module_of(policy, family=family, correction=MASK)
    with pytest.raises(ValueError, match=r"^score_centering beside correction='token_mask'"):
        module_of(policy, correction=MASK, **CENTERED)


def test_rows_without_old_log_probs_are_refused_with_what_reads_none(policy, tmp_path):
    row = good_row(advantage=0.5, old_log_probs=...)
    settings = RecordedRolloutSettings(path=str(write_jsonl(tmp_path / "rows.jsonl", [row])))
    with pytest.raises(DataError, match=r"Use reads_old_log_probs=False with a loss .*Reinforce"):
        RecordedRollouts(settings, Estimator("given"), None)
    rollouts = RecordedRollouts(settings, Estimator("given"), None, reads_old_log_probs=False)
    assert rollouts.num_documents == 1


def test_a_coefficient_of_rollouts_that_the_module_does_not_know_is_refused(policy):
    module = module_of(policy, reference=True)
    options = {"penalty": KL("k3", 0.1), "adaptive_kl": AdaptiveKL(0.1, 1000, 0.1)}
    loader = loader_of(module, **options)
    with pytest.raises(ConfigError, match=r"Use module\.adaptive_kl = rollouts\.adaptive_kl\.$"):
        check_parts(module, loader)
    module.adaptive_kl = options["adaptive_kl"]
    check_parts(module, loader)
