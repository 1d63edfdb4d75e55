"""Supervised fine-tuning (`experiment=sft`) trains as a plain loop of cross-entropy does.

It reports no metric of rewards and old log-probs where the rows have none.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from builders.runs import config_of, module_and_loader
from keys.small_runs import rows_file

from pgtoolkit.assembly.train import train
from pgtoolkit.errors import DataError
from pgtoolkit.training.settings import OptimizerSettings

WITHOUT_NUMBERS = dict.fromkeys(("reward", "old_log_probs", "advantage", "group_id"), ...)
"""Makes `rows_file` leave out all but the tokens of a row and their mask."""
SMALL = (
    "tracking=none",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "trainer.device=cpu",
    "experiment=sft",
    "accumulation.docs_per_step=4",
    "accumulation.max_tokens=14",
    "trainer.max_steps=3",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "optimizer.learning_rate=0.01",
)
REFERENCE = ("kl.coefficient=0.1", "kl.reference=recorded")


def test_supervised_fine_tuning_is_a_loop_of_cross_entropy(tmp_path):
    """Three updates in float64, four documents each in two micro-batches, of different lengths."""
    path = tmp_path / "rollouts.jsonl"
    rows = []
    for i, length in enumerate([5, 3, 7, 4, 6, 5, 3, 7, 4, 4, 6, 3]):
        tokens = [(3 * i + t) % 11 for t in range(length)]
        rows.append({"token_ids": tokens, "loss_mask": [t >= 1 + i % 2 for t in range(length)]})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    overrides = (
        *SMALL,
        f"rollout.path={path}",
        "optimizer.max_grad_norm=null",
        "optimizer.weight_decay=0",
    )
    module, loader = module_and_loader(*overrides)
    adamw = OptimizerSettings(learning_rate=0.01)
    model = copy.deepcopy(module.model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.01,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.epsilon,
        weight_decay=0,
    )
    for number, step in enumerate(loader):
        metrics = module.training_step(step, number)["metrics"]
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        count = 0
        for row in rows[4 * number : 4 * number + 4]:
            tokens = torch.tensor(row["token_ids"])
            targets = torch.where(torch.tensor(row["loss_mask"]), tokens, -100)[1:]
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            count += int((targets >= 0).sum())
        (loss / count).backward()
        optimizer.step()
        assert metrics["num_micro_batches"] > 1
        assert metrics["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-12)
    for weight, expected in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-11)


def metrics_after_training(folder: Path, *overrides: str) -> list[dict]:
    settings = [*SMALL, *overrides]
    train(config_of(*settings), folder, overrides=settings)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_without_rewards_and_old_log_probs_have_no_metrics_of_them(tmp_path, capsys):
    path = rows_file(tmp_path, 8, **WITHOUT_NUMBERS)
    rows = metrics_after_training(tmp_path, f"rollout.path={path}", "metrics=with_entropy")
    assert len(rows) == 2
    expected = {
        *("step", "time", "loss", "grad_norm", "new_logprobs", "entropy"),
        *("advantage", "max_advantage", "min_advantage", "zero_advantage_group_fraction"),
        *("num_tokens", "num_documents", "num_empty_documents", "num_groups"),
        *("num_micro_batches", "num_skipped_steps", "documents_seen", "completion_length"),
        *("learning_rate", "weight_sum", "tokens_per_second", "seconds_update"),
    }
    for row in rows:
        assert {name for name in row if not name.startswith("system/")} == expected
        assert row["advantage"] == row["max_advantage"] == row["min_advantage"] == 1
        # All documents have the same length.
        assert row["loss"] == pytest.approx(-row["new_logprobs"])
    printed = "".join(capsys.readouterr())
    assert "every advantage is 1 (supervised fine-tuning)" in printed
    assert "differ from the old ones" not in printed
    assert "loss=grpo" not in printed  # no counterpart that could not read these rows


def test_recorded_advantages_and_old_log_probs_are_used(tmp_path):
    path = rows_file(tmp_path, 4, reward=..., group_id=...)  # advantages 0, 1/8, 2/8, 3/8
    (row,) = metrics_after_training(tmp_path, f"rollout.path={path}")
    assert row["advantage"] == pytest.approx(1.5 / 8)
    assert row["old_logprobs"] == pytest.approx(-2.4)
    assert "ratio_new_old" in row


@pytest.mark.parametrize(
    ("overrides", "missing", "message"),
    [
        (
            ["loss=grpo"],
            ("old_log_probs", "reward"),
            r"rollouts\.jsonl:1:old_log_probs: is missing",
        ),
        (["loss=grpo"], ("reward", "advantage"), r"rollouts\.jsonl:1:advantage: is missing"),
        (
            ["correction=off_policy_mask"],
            ("old_log_probs",),
            r"rollouts\.jsonl:1:old_log_probs: is missing",
        ),
        (
            ["kl=k3_ratio", *REFERENCE],
            ("old_log_probs",),
            r"rollouts\.jsonl:1:old_log_probs: is missing",
        ),
        (
            [],
            ("old_log_probs", "advantage"),
            r"rollouts\.jsonl:1:advantage: .* have a reward: advantage=dr_grpo",
        ),
    ],
)
def test_a_loss_is_refused_where_rows_lack_a_number_that_it_reads(
    tmp_path, overrides, missing, message
):
    rows = rows_file(tmp_path, 4, **dict.fromkeys(missing, ...))
    with pytest.raises(DataError, match=message):
        module_and_loader(*SMALL, f"rollout.path={rows}", *overrides)


def test_a_penalty_that_does_not_read_old_log_probs_needs_none(tmp_path):
    vector = [0, 0, -2.5, -2.4, -2.3]
    vectors = {"ref_log_probs": vector, "sampling_log_probs": vector}
    path = rows_file(tmp_path, 4, **WITHOUT_NUMBERS | vectors)
    penalties = ["kl=k3", *REFERENCE, "entropy.coefficient=0.01", "metrics=with_entropy"]
    (row,) = metrics_after_training(tmp_path / "run", f"rollout.path={path}", *penalties)
    assert row["loss"] == pytest.approx(
        -row["new_logprobs"] + 0.1 * row["kl_ref"] - 0.01 * row["entropy"], rel=1e-5
    )
    assert row["kl_ref"] > 0
    assert not [
        name for name in row if name.endswith("_sampling") or "ratio" in name or "old" in name
    ]


@pytest.mark.parametrize("field", ["old_log_probs", "advantage"])
def test_a_number_that_only_some_rows_have_is_refused(tmp_path, field):
    path = rows_file(tmp_path, 4, reward=...)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[2][field]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(
        DataError, match=rf"rollouts\.jsonl:3:{field}: is missing; other rows have one"
    ):
        module_and_loader(*SMALL, f"rollout.path={path}")


def test_a_step_without_the_old_log_probs_that_its_loss_reads_is_refused(tmp_path):
    """The loader of another configuration does not check for them, and zeros would be silently
    wrong."""
    _, loader = module_and_loader(
        *SMALL, f"rollout.path={rows_file(tmp_path, 4, **WITHOUT_NUMBERS)}"
    )
    module, _ = module_and_loader("loss=grpo", "trainer.device=cpu", "tracking=none")
    with pytest.raises(
        DataError,
        match=r"needs old_log_probs of every document \(got none of .*rollouts\.jsonl:1\)",
    ):
        module.training_step(next(iter(loader)), 0)
