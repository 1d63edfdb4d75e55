"""Old log-probs by the update's own forward pass, where the update begins with the weights that
sampled: metrics and weights are those of a run that makes a forward pass for them.

`rollout.save_path` brings such a run about, since recorded rollouts hold the old log-probs.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from builders.losses import covering
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.parallel_runs import run_on_ranks
from builders.parts import (
    ACCUMULATION,
    LOSS,
    ROLLOUT,
    frozen_copy,
    short_loader,
    short_module,
    short_policy,
)
from builders.runs import (
    CLOCK_COLUMNS,
    SHORT,
    assert_equal,
    checkpoint_of,
    last_of_each_key,
    metrics_of,
)
from torch import Tensor

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.batch import MicroBatch
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import OffPolicyMask, TokenTruncate
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.kl import KL
from pgtoolkit.model.lora import adapted_layers
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recording import recording_folder
from pgtoolkit.rollouts.settings import LastStep, OldLogProbs, Truncated
from pgtoolkit.tasks.settings import GuessTaskSettings
from pgtoolkit.tasks.tasks import Task
from pgtoolkit.training.settings import OptimizerSettings

ONE_UPDATE = {"docs_per_step": 16}
"""One update of each batch of rollouts; the short settings have two."""

LOSSES = ("grpo", "gspo", "cispo", "reinforce")


class Changes(NamedTuple):
    """What a run has in place of the short settings."""

    loss: Mapping[str, object] = MappingProxyType({})
    rollout: Mapping[str, object] = MappingProxyType({})
    accumulation: Mapping[str, object] = MappingProxyType({})
    estimator: str = "dr_grpo"


SHORT_RUN = Changes()
SETTINGS = [
    SHORT_RUN,
    Changes(
        {"metrics": "with_entropy", "entropy_coefficient": 0.01, "temperature": 0.8},
        {"top_p": 0.9, "temperature": 0.8},
    ),
    Changes({"kl": KL("k3_ratio", 0.1), "aggregation": aggregation_of("token_mean")}),
    Changes({"correction": OffPolicyMask(0.01)}, estimator="rloo"),
    Changes(
        {"kl": KL("full_reverse", 0.1), "masks_truncated": True}, {"truncated": Truncated.mask}
    ),
    Changes({"correction": TokenTruncate(), "metrics": "none"}),
    Changes({}, {"max_sampling_rounds": 3}, {"last_step": LastStep.carry}),
    Changes({"aggregation": aggregation_of("prompt_mean")}),
]


def trained(
    num_steps: int,
    family: str = "gspo",
    changes: Changes = SHORT_RUN,
    kernel: str = "auto",
    folder: Path | None = None,
    policy: Policy | None = None,
    task: Task | None = None,
) -> tuple[list[dict], dict[str, Tensor], int]:
    """Return the metrics of each step, the weights after the last, and the number of documents in
    forward passes before updates.

    folder: where rollouts are recorded; then forward passes are made for their old log-probs.
    """
    loss = replace(LOSS, family=FAMILIES[family](), **changes.loss)
    rollout = replace(ROLLOUT, save_path=folder and str(folder), **changes.rollout)
    policy = policy or short_policy()
    reference = None
    if loss.kl is not None:
        reference = policy if adapted_layers(policy.model) else frozen_copy(policy)
    module = short_module(
        loss,
        kernel,
        policy=policy,
        reference=reference,
        optimizer=OptimizerSettings(learning_rate=0.02),
        dtype=None,
    )
    loader = short_loader(
        module,
        rollout,
        replace(ACCUMULATION, **changes.accumulation),
        task=task,
        estimator=Estimator(changes.estimator),
        folder=folder and recording_folder(str(folder)),
    )
    log_probs = module.log_probs
    passes = []

    def counted_log_probs(micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        passes.append(micro_batch.num_documents)
        return log_probs(micro_batch, temperature)

    module.log_probs = counted_log_probs
    rows = []
    for number, step in enumerate(itertools.islice(loader, num_steps)):
        metrics = module.training_step(step, number)["metrics"]
        rows.append({name: value for name, value in metrics.items() if name not in CLOCK_COLUMNS})
    return rows, module.model.state_dict(), sum(passes)


def has_ratios_of_one(row: dict) -> bool:
    return row.get("max_ratio_new_old") == row.get("min_ratio_new_old") == 1


def expected_saving(changes: Changes, docs_per_step: int, passes: int) -> int:
    """Return how many documents of four steps need no forward pass, of `passes` with them all."""
    if isinstance(changes.loss.get("correction"), TokenTruncate):
        return 0
    if docs_per_step == 16:
        return passes
    if "max_sampling_rounds" in changes.rollout:
        return 0
    return passes // 2  # the documents of the first of a batch's two updates


CHOICES = covering(LOSSES, (8, 16), (24, 1024), ("torch", "auto"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "docs_per_step", "max_tokens", "kernel", "number"),
    [(*choice, number % len(SETTINGS)) for number, choice in enumerate(CHOICES)],
)
def test_metrics_and_weights_are_those_with_a_second_pass(
    tmp_path, loss, docs_per_step, max_tokens, kernel, number
):
    """They are equal to the last bit, but for rounding where the second pass sees other shapes, so
    that not every ratio is 1: the fused head takes rows in another order, and further rounds of
    sampling come as micro-batches of their own."""
    changes = SETTINGS[number]
    sizes = {"docs_per_step": docs_per_step, "max_tokens": max_tokens}
    changes = changes._replace(accumulation=changes.accumulation | sizes)
    rows, weights, passes = trained(4, loss, changes, kernel)
    expected, expected_weights, all_passes = trained(4, loss, changes, kernel, tmp_path / "saved")
    same_shapes = kernel == "torch" and "max_sampling_rounds" not in changes.rollout
    if same_shapes or all(has_ratios_of_one(row) for row in expected if row["staleness"] == 0):
        assert rows == expected
        assert_equal(weights, expected_weights)
    else:
        for row, expected_row in zip(rows, expected, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)
    saving = expected_saving(changes, docs_per_step, all_passes)
    assert all_passes - passes == saving


def test_adapters_are_trained_as_with_a_second_pass(tmp_path):
    folder = save_with_tokenizer(small_llama(3, num_hidden_layers=2), tmp_path / "model")
    changes = Changes({"kl": KL("k3", 0.1)}, accumulation=ONE_UPDATE)

    def policy() -> Policy:
        torch.manual_seed(0)
        return build_policy(model_config(folder, lora_rank=2), None, on_gpu=False)

    rows, weights, passes = trained(3, changes=changes, policy=policy())
    expected, expected_weights, all_passes = trained(
        3, changes=changes, policy=policy(), folder=tmp_path / "saved"
    )
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert passes == 0
    assert all_passes == 48


def test_conversations_are_trained_as_with_a_second_pass(tmp_path):
    changes = Changes(
        {"aggregation": aggregation_of("constant", 24)},
        {"max_completion_length": 24},
        {"max_tokens": 64},
    )
    task = make_task(GuessTaskSettings(numbers=6, max_turns=3), seed=0)

    def run(folder: Path | None = None) -> tuple[list[dict], dict[str, Tensor], int]:
        policy = short_policy(task.alphabet)
        return trained(4, "gspo", changes, "torch", folder, policy, task)

    rows, weights, passes = run()
    expected, expected_weights, all_passes = run(tmp_path / "saved")
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert 0 < passes < all_passes == 32


def test_the_first_update_of_a_batch_has_ratios_of_one():
    changes = Changes({"temperature": 0.7}, {"temperature": 0.7}, ONE_UPDATE)
    rows, _, passes = trained(3, changes=changes)
    assert passes == 0
    for row in rows:
        assert has_ratios_of_one(row)
        assert row["effective_sample_size"] == 1
        assert row["kl_new_old"] == row["clipped_ratio_fraction"] == 0
        assert row["old_logprobs"] == row["new_logprobs"] < -1
        assert row["difference_old_sampling"] == pytest.approx(0, abs=1e-6)


def test_under_a_lag_the_only_update_of_a_batch_gives_its_proximal_log_probs(tmp_path):
    rollout = {"lag": 2, "old_log_probs": OldLogProbs.proximal}
    changes = Changes({}, rollout, ONE_UPDATE)
    rows, weights, passes = trained(5, "gspo", changes, "torch")
    expected, expected_weights, all_passes = trained(
        5, "gspo", changes, "torch", tmp_path / "saved"
    )
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert passes == 0
    assert all_passes == 80
    assert [row["staleness"] for row in rows] == [0, 1, 2, 2, 2]
    assert all(has_ratios_of_one(row) for row in rows)
    assert min(row["max_difference_old_sampling"] for row in rows[1:]) > 1e-2


@pytest.mark.parametrize("docs_per_step", [8, 16])
def test_without_a_lag_training_and_proximal_log_probs_are_the_same(docs_per_step):
    training, proximal = (
        trained(3, "gspo", Changes({}, {"old_log_probs": old}, {"docs_per_step": docs_per_step}))
        for old in (OldLogProbs.training, OldLogProbs.proximal)
    )
    assert_equal(training, proximal)


def test_after_an_update_documents_without_old_log_probs_are_refused():
    module = short_module(replace(LOSS, family=FAMILIES["grpo"]()))
    step = next(iter(short_loader(module, accumulation=replace(ACCUMULATION, **ONE_UPDATE))))
    for document in step.documents:
        assert document.on_policy is True
        assert document.old_log_probs is None
        assert document.model_version == 0
    for micro_batch in step.micro_batches:
        assert micro_batch.old_log_probs is None
        assert micro_batch.sampling_log_probs is not None
    module.training_step(step, 0)
    with pytest.raises(
        DataError,
        match=r"needs old_log_probs of every document \(got none of prompt 0, completion 0"
        ".* or use loss=reinforce correction=none kl=none",
    ):
        module.training_step(step, 1)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        ({"data_parallel": 2}, []),
        ({"tensor_parallel": 2}, []),
        ({"sequence_data_parallel": 2}, ["accumulation.docs_per_step=8"]),
        ({"pipeline_parallel": 2}, ["metrics=none"]),
    ],
    ids=str,
)
def test_on_several_ranks_metrics_and_weights_are_those_with_a_second_pass(
    tmp_path, ranks, settings
):
    overrides = [
        *SHORT,
        "accumulation.docs_per_step=16",
        "loss=gspo",
        "advantage=rloo",
        "trainer.max_steps=2",
        "trainer.checkpoint_every=2",
        *settings,
    ]
    save_path = f"rollout.save_path={tmp_path / 'saved'}"
    one_pass = run_on_ranks(tmp_path / "one pass", last_of_each_key(*overrides), **ranks)
    two_passes = run_on_ranks(
        tmp_path / "two passes", last_of_each_key(*overrides, save_path), **ranks
    )
    rows = metrics_of(one_pass)
    expected = metrics_of(two_passes)
    if ranks == {"data_parallel": 2}:
        # The first of two passes divides groups among ranks, the second documents, which rounds
        # in another way.
        for row, expected_row in zip(rows, expected, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)
        return
    assert rows == expected
    for part in ("model", "optimizer"):
        assert_equal(checkpoint_of(one_pass, 2)[part], checkpoint_of(two_passes, 2)[part])
