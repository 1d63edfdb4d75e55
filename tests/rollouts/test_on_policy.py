"""Old log-probs by the update's own forward pass, where it begins with the weights that sampled,
against two passes.

With `rollout.save_path` both passes are made, since the recorded rollouts hold the old log-probs.
"""

import itertools

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

from pgtoolkit.errors import DataError

WHOLE = "accumulation.docs_per_step=16"
"""One update of each batch of rollouts; two in the short settings."""

LOSSES = ("loss=grpo", "loss=gspo", "loss=cispo", "loss=reinforce")
BESIDE = [
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


def trained(count, *overrides, of=SHORT):
    """The metrics of so many steps, the weights after them, and the documents of each forward pass
    before an update."""
    module, loader = module_and_loader(
        *last_of_each_key(*of, "optimizer.learning_rate=0.02", *overrides), dtype=None
    )
    log_probs, passes, rows = module.log_probs, [], []

    def noted(micro_batch, temperature=None):
        passes.append(micro_batch.num_documents)
        return log_probs(micro_batch, temperature)

    module.log_probs = noted
    for number, step in enumerate(itertools.islice(loader, count)):
        rows.append(module.training_step(step, number)["metrics"])
    loader.source.close()
    rows = [{name: x for name, x in row.items() if name not in CLOCK_COLUMNS} for row in rows]
    return rows, module.model.state_dict(), passes


CHOICES = covering(LOSSES, (8, 16), (24, 1024), ("torch", "auto"))


@pytest.mark.parametrize(
    ("loss", "docs", "room", "kernel", "beside"),
    [(*choice, BESIDE[number % len(BESIDE)]) for number, choice in enumerate(CHOICES)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_metrics_and_weights_are_those_of_two_passes_to_the_last_bit(
    tmp_path, loss, docs, room, kernel, beside
):
    """But for rounding where two passes see other shapes, so that not every ratio is 1: the fused
    head takes rows in another order, and further rounds of sampling come as micro-batches of their
    own."""
    cuts = [
        f"accumulation.docs_per_step={docs}",
        f"accumulation.max_tokens={room}",
        f"kernel={kernel}",
    ]
    rows, weights, passed = trained(4, loss, *beside, *cuts)
    expected, expected_weights, twice = trained(
        4, loss, *beside, *cuts, f"rollout.save_path={tmp_path / 'saved'}"
    )
    of_first = [row for row in expected if row["staleness"] == 0]
    as_given = kernel == "torch" and "rollout.max_sampling_rounds=3" not in beside
    if as_given or all(
        row.get("max_ratio_new_old") == row.get("min_ratio_new_old") == 1 for row in of_first
    ):
        assert rows == expected
        assert_equal(weights, expected_weights)
    else:
        for row, two in zip(rows, expected, strict=True):
            assert row == pytest.approx(two, rel=1e-5, abs=1e-6)
    stays = "correction=token_truncate" in beside or (
        docs == 8 and "rollout.max_sampling_rounds=3" in beside
    )
    # in whole micro-batches
    left_out = 0 if stays else sum(twice) if docs == 16 else 12 if room == 24 else 0
    assert sum(twice) - sum(passed) == left_out


def test_adapters_are_trained_as_with_two_passes(tmp_path):
    folder = save_with_tokenizer(small_llama(3, num_hidden_layers=2), tmp_path)
    chosen = with_model(
        folder, "model.lora_rank=2", "kl=k3", "kl.coefficient=0.1", "kl.reference=initial", WHOLE
    )
    rows, weights, passed = trained(3, "loss=gspo", of=chosen)
    expected, expected_weights, twice = trained(
        3, "loss=gspo", f"rollout.save_path={tmp_path / 'saved'}", of=chosen
    )
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert (sum(passed), sum(twice)) == (0, 48)


def test_conversations_are_trained_as_with_two_passes(tmp_path):
    game = "task=guess", "task.numbers=6", "task.max_turns=3", "rollout.max_completion_length=24"
    chosen = [
        *(setting for setting in SHORT if not setting.startswith("task.")),
        *game,
        "accumulation.max_tokens=64",
    ]
    rows, weights, passed = trained(4, "loss=gspo", "kernel=torch", of=chosen)
    expected, expected_weights, twice = trained(
        4, "loss=gspo", "kernel=torch", f"rollout.save_path={tmp_path / 'saved'}", of=chosen
    )
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert 0 < sum(passed) < sum(twice) == 32


def test_the_first_update_of_a_batch_has_ratios_of_one():
    rows, _, passed = trained(3, WHOLE, "loss=gspo", "rollout.temperature=0.7")
    assert passed == []
    for row in rows:
        assert (
            row["max_ratio_new_old"]
            == row["min_ratio_new_old"]
            == row["effective_sample_size"]
            == 1
        )
        assert row["kl_new_old"] == row["clipped_ratio_fraction"] == 0
        assert row["old_logprobs"] == row["new_logprobs"] < -1
        assert row["difference_old_sampling"] == pytest.approx(0, abs=1e-6)


def test_under_a_lag_the_only_update_of_a_batch_gives_its_proximal_log_probs(tmp_path):
    chosen = WHOLE, "loss=gspo", "kernel=torch", "rollout.lag=2", "rollout.old_log_probs=proximal"
    rows, weights, passed = trained(5, *chosen)
    expected, expected_weights, twice = trained(
        5, *chosen, f"rollout.save_path={tmp_path / 'saved'}"
    )
    assert rows == expected
    assert_equal(weights, expected_weights)
    assert (sum(passed), sum(twice)) == (0, 80)
    assert [row["staleness"] for row in rows] == [0, 1, 2, 2, 2]
    assert {row["max_ratio_new_old"] for row in rows} == {1}
    assert min(row["max_difference_old_sampling"] for row in rows[1:]) > 1e-2


@pytest.mark.parametrize("docs", [8, 16])
def test_without_a_lag_training_and_proximal_are_the_same_run(docs):
    chosen = "loss=gspo", f"accumulation.docs_per_step={docs}"
    runs = [
        trained(3, *chosen, f"rollout.old_log_probs={name}") for name in ("training", "proximal")
    ]
    assert_equal(*runs)


def test_documents_that_an_update_came_before_need_old_log_probs():
    module, loader = module_and_loader(*SHORT[:-1], WHOLE, "loss=grpo")
    step = next(iter(loader))
    assert {(d.on_policy, d.old_log_probs, d.model_version) for d in step.documents} == {
        (True, None, 0)
    }
    assert all(
        m.old_log_probs is None and m.sampling_log_probs is not None for m in step.micro_batches
    )
    module.training_step(step, 0)
    with pytest.raises(
        DataError,
        match=r"needs old_log_probs of every document \(got none of prompt 0, completion 0",
    ):
        module.training_step(step, 1)
    loader.source.close()


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({"data_parallel": 2}, []),
        ({"tensor_parallel": 2}, []),
        ({"sequence_data_parallel": 2}, ["accumulation.docs_per_step=8"]),
        ({"pipeline_parallel": 2}, ["metrics=none"]),
    ],
    ids=str,
)
def test_ranks_make_no_pass_of_their_own(tmp_path, sizes, more):
    chosen = [
        *SHORT,
        WHOLE,
        "loss=gspo",
        "advantage=rloo",
        "trainer.max_steps=2",
        "trainer.checkpoint_every=2",
        *more,
    ]
    one_pass = run_on_ranks(tmp_path / "run", last_of_each_key(*chosen), **sizes)
    two_passes = run_on_ranks(
        tmp_path / "two",
        last_of_each_key(*chosen, f"rollout.save_path={tmp_path / 'saved'}"),
        **sizes,
    )
    if sizes == {"data_parallel": 2}:
        # Of two passes the first deals out groups, the second documents: they round otherwise.
        for row, two in zip(metrics_of(one_pass), metrics_of(two_passes), strict=True):
            assert row == pytest.approx(two, rel=1e-5, abs=1e-6)
        return
    assert metrics_of(one_pass) == metrics_of(two_passes)
    for part in ("model", "optimizer"):
        assert_equal(checkpoint_of(one_pass, 2)[part], checkpoint_of(two_passes, 2)[part])
