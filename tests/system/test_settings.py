"""Settings that are made in Python, and other parts, refuse values that they do not take, with what
to type there."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields

import pytest

from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import Grpo
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.settings import ParallelismSettings, TinyModelSettings
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    AdvantageSettings,
    EvaluationSettings,
    PolicyRolloutSettings,
)
from pgtoolkit.sampling.settings import (
    SamplingSettings,
    TransformersSamplerSettings,
    VllmSamplerSettings,
)
from pgtoolkit.tasks.prompts import scored_by_nobody
from pgtoolkit.tasks.settings import PromptsTaskSettings
from pgtoolkit.training.settings import OptimizerName, OptimizerSettings

CLASSES = sorted({*SCHEMAS.values(), SamplingSettings}, key=lambda schema: schema.__name__)
GIVEN = {
    "learning_rate": 1e-3,
    "max_completion_length": 7,
    "max_tokens": 64,
    "answer_seconds": 60,
    "path": "folder/file",
    "dataset": "chain_sum",
    "environment": "my_module.Environment",
    "estimator": "grpo",
    "mode": "token_mean",
    "kind": "k3",
    "level": "basic",
    "implementation": "torch",
    "name": "none",
}
"""A value of each key that has no default in Python."""

WRONG = {
    "int": [-1, 2.5, "3", True, math.nan],
    "float": [-1e30, "3", True, math.nan],
    "bool": ["yes", 1],
    "AutoOrBool": ["yes", 1, None],
    "str": [3, ["a"]],
    "Dictionary": ["a", [("a", 1)]],
    "list[str]": ["a", [1]],
    "list[int]": [0, ["a"]],
    "Sequence[str]": ["ab", [1]],
}
"""Values that no key of a type takes, by its annotation; of others, a name that none has."""


def required(schema: type) -> dict[str, object]:
    """Return a value of each key that has to be given."""
    return {
        field.name: GIVEN[field.name]
        for field in fields(schema)
        if field.default is MISSING and field.default_factory is MISSING
    }


@pytest.mark.parametrize("schema", CLASSES, ids=lambda schema: schema.__name__)
def test_every_key_refuses_values_of_another_type_or_range_in_python(schema):
    schema(**required(schema))
    for field in fields(schema):
        kind, _, optional = str(field.type).partition(" | ")
        wrong = WRONG.get(kind, ["xyz", 0])
        if not optional and "default_if" not in field.metadata:
            wrong = [*wrong, None]
        for value in wrong:
            named = re.escape(f"{schema.__name__}({field.name}=")
            with pytest.raises(ValueError, match=f"^{named}") as raised:
                schema(**required(schema) | {field.name: value})
            assert f"(got {value!r})" in str(raised.value)


REFUSED = [
    (
        lambda: OptimizerSettings(learning_rate=1e-3, name="adam"),
        "OptimizerSettings(name='adam') needs one of 'adamw', 'muon', 'custom' (got 'adam'). Use "
        "name='adamw', the default.",
    ),
    (
        lambda: OptimizerSettings(learning_rate=1e-3, warmup_steps=-3),
        "OptimizerSettings(warmup_steps=-3) needs a whole number from 0 to 1000000000 (got -3). "
        "Steps over which the learning rate rises linearly from 0 (>= 0). Use warmup_steps=10, the "
        "default.",
    ),
    (
        lambda: TransformersSamplerSettings(gpus=1),
        "TransformersSamplerSettings(gpus=1) needs a list of whole numbers or None (got 1).",
    ),
    (
        lambda: OptimizerSettings(learning_rate=1e-3, name="muon", beta1=0.8),
        "OptimizerSettings(beta1=0.8) needs name='adamw' (got name='muon'). Others have values of "
        "their own. Use name='adamw', or leave beta1 out.",
    ),
    (
        lambda: OptimizerSettings(learning_rate=1e-3, min_learning_rate=1e-5),
        "OptimizerSettings(min_learning_rate=1e-05) needs schedule other than 'constant' (got "
        "schedule='constant'). It has no effect otherwise. Use schedule='cosine', or leave "
        "min_learning_rate out.",
    ),
    (
        lambda: OptimizerSettings(learning_rate=1e-3, min_learning_rate=1.0, schedule="cosine"),
        "OptimizerSettings(min_learning_rate=1.0) needs at most learning_rate=0.001 (got 1.0). A "
        "schedule falls to it. Use min_learning_rate=0.001, or leave it out.",
    ),
    (
        lambda: PolicyRolloutSettings(max_completion_length=7, overlong_buffer=8),
        "PolicyRolloutSettings(overlong_buffer=8) needs at most max_completion_length=7 (got 8).",
    ),
    (
        lambda: OptimizerSettings(learning_rate=1e-3, name="custom"),
        "OptimizerSettings(name='custom') needs path other than None (got path=None). The class at "
        "that path is the optimizer. Use path='torch.optim.RMSprop'.",
    ),
    (
        lambda: AdvantageSettings(estimator="grpo", whiten=False),
        "(whiten=False) needs estimator='gae' (got estimator='grpo'). It has no effect otherwise. "
        "Use estimator='gae', or leave whiten out.",
    ),
    (
        lambda: AdvantageSettings(estimator="custom"),
        "needs path other than None (got path=None). The function at that path makes advantages "
        "of rewards. Use path='my_module.my_advantages'.",
    ),
    (
        lambda: AdvantageSettings(estimator="max_rl", reward_shift=1.0),
        "Use reward_shift=0 or estimator='dr_grpo'.",
    ),
    (
        lambda: AccumulationSettings(max_tokens=64, docs_per_step=0),
        "Use docs_per_step=64 or micro_batches_per_step=2.",
    ),
    (
        lambda: PolicyRolloutSettings(max_completion_length=7, mixed="exact_match"),
        "needs max_sampling_rounds above 1 (got max_sampling_rounds=1). It has no effect "
        "otherwise. Use max_sampling_rounds=4, or leave mixed out.",
    ),
    (
        lambda: TinyModelSettings(fp32_lm_head=True),
        "(fp32_lm_head=True) needs name='huggingface' (got name='tiny'). It has no effect "
        "otherwise. Leave fp32_lm_head out.",
    ),
    (
        lambda: VllmSamplerSettings(answer_seconds=9, tensor_parallel=2),
        "(got urls=[], gpus=None). It has no effect otherwise. Use urls=[] and gpus=[...], or",
    ),
    (
        lambda: ParallelismSettings(shard=True),
        "needs data_parallel above 1 or sequence_data_parallel above 1 (got data_parallel=1, "
        "sequence_data_parallel=1). The weights are divided over the ranks that see different "
        "tokens. Use data_parallel=2 or shard=False.",
    ),
    (
        lambda: EvaluationSettings(temperature=0, every=0),
        "EvaluationSettings(temperature=0) needs completions_per_prompt=1",
    ),
    (lambda: Loss("grpo", aggregation_of("token_mean")), "Use pgtoolkit.families.Grpo()"),
    (lambda: Loss(len, aggregation_of("token_mean")), "losses.function.FunctionLoss(my_loss)"),
    (lambda: Loss(Grpo(), len), "aggregation_of('sample_mean', reducer=my_reducer)"),
    (lambda: Loss(Grpo, aggregation_of("token_mean")), "Use family=Grpo()"),
    (lambda: Loss(Grpo(), "constant"), "aggregation.aggregation_of('constant')"),
    (
        lambda: Loss(Grpo(), aggregation_of("token_mean"), correction="token_mask"),
        "correction needs an object of Correction (got 'token_mask'). Use "
        "pgtoolkit.corrections.TokenMask()",
    ),
    (
        lambda: Loss(Grpo(), aggregation_of("token_mean"), kl="k3"),
        "kl needs a pgtoolkit.kl.KL, such as KL('k3', coefficient=0.05), or None (got 'k3')",
    ),
    (
        lambda: Loss(Grpo(), aggregation_of("token_mean"), masks_truncated="no"),
        "masks_truncated needs True or False (got 'no')",
    ),
    (lambda: Computation("tritn"), "impl='tritn' is unknown; choose one of auto, fused_linear"),
    (lambda: Computation(num_splits=0), "num_splits needs a whole number >= 1 (got 0)"),
    (lambda: Estimator("grppo"), "estimator='grppo' is unknown; choose one of grpo, dr_grpo"),
    (lambda: Estimator("custom"), "function=..."),
    (
        lambda: Estimator("custom", function=lambda rewards, lengths: rewards),
        "can be called as function(rewards, *, lengths, measures) (got <lambda>(rewards, lengths))",
    ),
    (lambda: Shape(scale=math.nan), "scale needs a finite number (got nan)"),
    (lambda: AdaptiveKL(-1.0, 100, 0.1), "target needs a finite number > 0 (got -1.0)"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_a_part_refuses_what_it_does_not_take_with_what_to_type(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_a_name_as_a_text_is_the_entry_of_its_enumeration():
    settings = OptimizerSettings(learning_rate=1e-3, name="muon")
    assert settings.name is OptimizerName.muon
    rollout = PolicyRolloutSettings(max_completion_length=7, truncated="mask")
    estimator = Estimator.of(AdvantageSettings(estimator="grpo"), rollout)
    assert estimator == Estimator("grpo")


def test_numbers_that_mean_the_same_have_one_form():
    assert PolicyRolloutSettings(max_completion_length=7, top_p=1).top_p is None
    assert EvaluationSettings(top_p=1).top_p == 1  # beside a top_p of the rollouts


def test_a_task_that_nobody_scores_keeps_what_is_set_for_its_verifiers():
    settings = PromptsTaskSettings(path="x.jsonl", verifier_processes=2, verifier_seconds=5)
    task = scored_by_nobody(settings)
    assert isinstance(task, PromptsTaskSettings)
    assert (task.verifier, task.verifier_processes) == ("exact_match", 0)
