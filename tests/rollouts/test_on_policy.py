"""Old log-probs by the update's own forward pass, where the update begins with the weights that
sampled: metrics and weights are those of a run that makes a forward pass for them.

`rollout.save_path` brings such a run about, since recorded rollouts hold the old log-probs.
"""

import itertools
from pathlib import Path

import pytest
from builders.losses import covering
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import run_on_ranks
from builders.runs import (
    CLOCK_COLUMNS,
    SHORT,
    assert_equal,
    checkpoint_of,
    last_of_each_key,
    metrics_of,
    module_and_loader,
    with_model,
)
from torch import Tensor

from pgtoolkit.batch import MicroBatch
from pgtoolkit.errors import DataError

ONE_UPDATE = "accumulation.docs_per_step=16"
"""One update of each batch of rollouts; the short settings have two."""

LOSSES = ("loss=grpo", "loss=gspo", "loss=cispo", "loss=reinforce")
SETTINGS = [
    (),
    (
        "metrics=with_entropy",
        "entropy.coefficient=0.01",
        "rollout.top_p=0.9",
        "rollout.temperature=0.8",
    ),
    (
        "kl=k3_ratio",
        "kl.coefficient=0.1",
        "kl.reference=initial",
        "aggregation=token_mean",
        "aggregation.divisor=null",
    ),
    ("correction=off_policy_mask", "correction.threshold=0.01", "advantage=rloo"),
    ("kl=full_reverse", "kl.coefficient=0.1", "kl.reference=initial", "rollout.truncated=mask"),
    ("correction=token_truncate", "metrics=none"),
    ("rollout.max_sampling_rounds=3", "accumulation.last_step=carry"),
    ("aggregation=prompt_mean", "aggregation.divisor=null"),
]


def save_to(folder: Path) -> str:
    """Return the override of a run that makes forward passes for the old log-probs."""
    return f"rollout.save_path={folder / 'saved'}"


def trained(
    num_steps: int, *overrides: str, settings: list[str] | tuple[str, ...] = SHORT
) -> tuple[list[dict], dict[str, Tensor], int]:
    """Return the metrics of each step, the weights after the last, and the number of documents in
    forward passes before updates."""
    overrides = tuple(last_of_each_key(*settings, "optimizer.learning_rate=0.02", *overrides))
    module, loader = module_and_loader(*overrides, dtype=None)
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
    loader.source.close()
    return rows, module.model.state_dict(), sum(passes)


def has_ratios_of_one(row: dict) -> bool:
    return row.get("max_ratio_new_old") == row.get("min_ratio_new_old") == 1


def expected_saving(settings: tuple[str, ...], docs_per_step: int, passes: int) -> int:
    """Return how many documents of four steps need no forward pass, of `passes` with them all."""
    if "correction=token_truncate" in settings:
        return 0
    if docs_per_step == 16:
        return passes
    if "rollout.max_sampling_rounds=3" in settings:
        return 0
    return passes // 2  # the documents of the first of a batch's two updates


CHOICES = covering(LOSSES, (8, 16), (24, 1024), ("torch", "auto"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "docs_per_step", "max_tokens", "kernel", "settings"),
    [(*choice, SETTINGS[number % len(SETTINGS)]) for number, choice in enumerate(CHOICES)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_metrics_and_weights_are_those_with_a_second_pass(
    tmp_path, loss, docs_per_step, max_tokens, kernel, settings
):
    """They are equal to the last bit, but for rounding where the second pass sees other shapes, so
    that not every ratio is 1: the fused head takes rows in another order, and further rounds of
    sampling come as micro-batches of their own."""
    overrides = [
        loss,
        *settings,
        f"accumulation.docs_per_step={docs_per_step}",
        f"accumulation.max_tokens={max_tokens}",
        f"kernel={kernel}",
    ]
    rows, weights, passes = trained(4, *overrides)
    expected, expected_weights, all_passes = trained(4, *overrides, save_to(tmp_path))
    same_shapes = kernel == "torch" and "rollout.max_sampling_rounds=3" not in settings
    if same_shapes or all(has_ratios_of_one(row) for row in expected if row["staleness"] == 0):
        assert rows == expected
        assert_equal(weights, expected_weights)
    else:
        for row, expected_row in zip(rows, expected, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)
    saving = expected_saving(settings, docs_per_step, all_passes)
    assert all_passes - passes == saving


def test_adapters_are_trained_as_with_a_second_pass(tmp_path):
    folder = save_with_tokenizer(small_llama(3, num_hidden_layers=2), tmp_path)
    settings = with_model(
        folder,
        "model.lora_rank=2",
        "kl=k3",
        "kl.coefficient=0.1",
        "kl.reference=initial",
        ONE_UPDATE,
        "loss=gspo",
    )
    rows, weights, passes = trained(3, settings=settings)
    expected, expected_weights, all_passes = trained(3, save_to(tmp_path), settings=settings)
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert passes == 0
    assert all_passes == 48


def test_conversations_are_trained_as_with_a_second_pass(tmp_path):
    settings = [
        *(setting for setting in SHORT if not setting.startswith("task.")),
        "task=guess",
        "task.numbers=6",
        "task.max_turns=3",
        "rollout.max_completion_length=24",
        "accumulation.max_tokens=64",
        "loss=gspo",
        "kernel=torch",
    ]
    rows, weights, passes = trained(4, settings=settings)
    expected, expected_weights, all_passes = trained(4, save_to(tmp_path), settings=settings)
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert 0 < passes < all_passes == 32


def test_the_first_update_of_a_batch_has_ratios_of_one():
    rows, _, passes = trained(3, ONE_UPDATE, "loss=gspo", "rollout.temperature=0.7")
    assert passes == 0
    for row in rows:
        assert has_ratios_of_one(row)
        assert row["effective_sample_size"] == 1
        assert row["kl_new_old"] == row["clipped_ratio_fraction"] == 0
        assert row["old_logprobs"] == row["new_logprobs"] < -1
        assert row["difference_old_sampling"] == pytest.approx(0, abs=1e-6)


def test_under_a_lag_the_only_update_of_a_batch_gives_its_proximal_log_probs(tmp_path):
    overrides = (
        ONE_UPDATE,
        "loss=gspo",
        "kernel=torch",
        "rollout.lag=2",
        "rollout.old_log_probs=proximal",
    )
    rows, weights, passes = trained(5, *overrides)
    expected, expected_weights, all_passes = trained(5, *overrides, save_to(tmp_path))
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert passes == 0
    assert all_passes == 80
    assert [row["staleness"] for row in rows] == [0, 1, 2, 2, 2]
    assert all(has_ratios_of_one(row) for row in rows)
    assert min(row["max_difference_old_sampling"] for row in rows[1:]) > 1e-2


@pytest.mark.parametrize("docs_per_step", [8, 16])
def test_without_a_lag_training_and_proximal_log_probs_are_the_same(docs_per_step):
    overrides = ("loss=gspo", f"accumulation.docs_per_step={docs_per_step}")
    training = trained(3, *overrides, "rollout.old_log_probs=training")
    proximal = trained(3, *overrides, "rollout.old_log_probs=proximal")
    assert_equal(training, proximal)


def test_after_an_update_documents_without_old_log_probs_are_refused():
    module, loader = module_and_loader(*SHORT[:-1], ONE_UPDATE, "loss=grpo")
    step = next(iter(loader))
    loader.source.close()
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
        ONE_UPDATE,
        "loss=gspo",
        "advantage=rloo",
        "trainer.max_steps=2",
        "trainer.checkpoint_every=2",
        *settings,
    ]
    one_pass = run_on_ranks(tmp_path / "one pass", last_of_each_key(*overrides), **ranks)
    two_passes = run_on_ranks(
        tmp_path / "two passes", last_of_each_key(*overrides, save_to(tmp_path)), **ranks
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
