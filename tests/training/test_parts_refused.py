"""Parts of a run that are made in Python and do not fit each other are refused, each in a sentence
that says what to type."""

import copy
import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.documents import document_of

from pgtoolkit import corrections
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.families import Gspo, Reinforce
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import OptimizerSettings

STAGES = "pipeline_parallel"


@pytest.fixture(scope="module")
def policy() -> Policy:
    settings = TinyModelSettings(num_layers=1, hidden_size=8, num_heads=1)
    return build_policy(settings, alphabet="0123456789", on_gpu=False)


def module_of(policy: Policy, **changes: Any) -> PolicyGradientModule:
    """Return a module; changes: arguments of its loss, of its computation or of itself."""

    def taken(*names: str) -> dict:
        return {name: changes.pop(name) for name in names if name in changes}

    loss: dict[str, Any] = {"family": Reinforce(), "metrics": "basic"}
    loss |= taken("family", "metrics", "kl", "correction")
    computation: dict[str, Any] = {"check_finite": False} | taken("impl", "num_splits", "logits_memory_mb")
    return PolicyGradientModule(
        policy,
        Loss(aggregation=aggregation_of("token_mean"), **loss),
        Computation(**computation),
        OptimizerSettings(learning_rate=1e-3),
        max_steps=2,
        **changes,
    )


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


def test_a_reference_that_is_the_policy_itself_cannot_move(policy):
    with pytest.raises(ValueError, match=r"got the policy itself.*Use reference=") as refused:
        module_of(policy, reference=policy, reference_every=2)
    typed = str(refused.value).partition("Use reference=")[2].partition(", made before")[0]
    names = {"policy": policy, "copy": copy, "dataclasses": dataclasses}
    module_of(policy, reference=eval(typed, names), reference_every=2)


def test_a_pipeline_has_neither_metrics_nor_a_reference(policy):
    sizes: Any = SimpleNamespace(size=lambda axis: 2 if axis == AXES.index(STAGES) else 1)
    stages = Layout(mesh=sizes, world_size=2)
    with pytest.raises(ValueError, match=r"^metrics='basic' needs .* Use Loss\(..., metrics='none"):
        module_of(policy, layout=stages)
    with pytest.raises(ValueError, match=r"^reference needs a layout with pipeline_parallel=1"):
        module_of(policy, metrics="none", layout=stages, reference=policy)


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


def test_documents_share_a_prompt_only_where_the_model_keeps_them_apart(policy):
    """The tiny model's attention is that of transformers, which does not know what is shared."""
    module = module_of(policy)
    module.log_probs(make_step(documents(), 16).micro_batches[0])
    with pytest.raises(ConfigError, match=r"share_prompts needs .*gpt2.* Use share_prompts=False"):
        module.log_probs(make_step(documents(), 16, share_prompts=True).micro_batches[0])
