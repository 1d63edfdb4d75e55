"""Supervised fine-tuning (`experiment=sft`) against a plain loop of cross-entropy, and what it does
not claim."""

import copy
import json

import pytest
import torch
from builders.runs import config_of, module_and_loader
from keys import rows_file

from pgtoolkit.errors import DataError
from pgtoolkit.training.train import train

ONLY_TOKENS = dict.fromkeys(("reward", "old_log_probs", "advantage", "group_id"), ...)
SMALL = (
    *(
        "tracking=none",
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.num_heads=2",
        "trainer.device=cpu",
    ),
    *(
        "experiment=sft",
        "accumulation.docs_per_step=4",
        "accumulation.max_tokens=14",
        "trainer.max_steps=3",
    ),
    *("optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.learning_rate=0.01"),
)
REFERENCE = ("kl.coefficient=0.1", "kl.reference=recorded")


def test_it_is_a_loop_of_cross_entropy(tmp_path):
    """Three updates in float64, four documents each in two micro-batches, of different lengths."""
    path, rows = tmp_path / "rollouts.jsonl", []
    for i, length in enumerate([5, 3, 7, 4, 6, 5, 3, 7, 4, 4, 6, 3]):
        tokens = [(3 * i + t) % 11 for t in range(length)]
        rows.append({"token_ids": tokens, "loss_mask": [t >= 1 + i % 2 for t in range(length)]})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    module, loader = module_and_loader(
        *SMALL, f"rollout.path={path}", "optimizer.max_grad_norm=null", "optimizer.weight_decay=0"
    )
    chosen = module.config.optimizer
    model = copy.deepcopy(module.model)
    betas = chosen.beta1, chosen.beta2
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=betas, eps=chosen.epsilon, weight_decay=0
    )
    for number, step in enumerate(loader):
        found = module.training_step(step, number)["metrics"]
        optimizer.zero_grad()
        loss, count = 0, 0
        for row in rows[4 * number : 4 * number + 4]:
            tokens = torch.tensor(row["token_ids"])
            targets = torch.where(torch.tensor(row["loss_mask"]), tokens, -100)[1:]
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            count += int((targets >= 0).sum())
        (loss / count).backward()
        optimizer.step()
        assert found["num_micro_batches"] > 1
        assert found["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-12)
    for ours, theirs in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def trained(folder, *overrides):
    """The rows of metrics.jsonl."""
    overrides = [*SMALL, *overrides]
    train(config_of(*overrides), folder, overrides=overrides)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_nothing_is_told_of_rewards_and_old_log_probs_that_nobody_has(tmp_path, capsys):
    rows = rows_file(tmp_path, 8, **ONLY_TOKENS)
    found = trained(tmp_path, f"rollout.path={rows}", "metrics=with_entropy")
    assert len(found) == 2
    known = {
        "loss",
        "grad_norm",
        "new_logprobs",
        "entropy",
        "advantage",
        "max_advantage",
        "min_advantage",
    }
    known |= {
        "num_tokens",
        "num_documents",
        "num_empty_documents",
        "num_groups",
        "num_micro_batches",
        "learning_rate",
    }
    known |= {"documents_seen", "num_skipped_steps", "tokens_per_second", "seconds_update"}
    known |= {"zero_advantage_group_fraction", "step", "time", "completion_length", "weight_sum"}
    for row in found:
        assert {name for name in row if not name.startswith("system/")} == known
        assert row["advantage"] == row["max_advantage"] == row["min_advantage"] == 1
        # all documents have the same length
        assert row["loss"] == pytest.approx(-row["new_logprobs"])
    printed = "".join(capsys.readouterr())
    assert "every advantage is 1 (supervised fine-tuning)" in printed
    assert "differ from the old ones" not in printed
    assert "loss=grpo" not in printed  # no counterpart that could not read these rows


def test_recorded_advantages_and_old_log_probs_are_taken_where_they_are(tmp_path):
    rows = rows_file(tmp_path, 4, reward=..., group_id=...)  # advantages 0, 1/8, 2/8, 3/8
    (row,) = trained(tmp_path, f"rollout.path={rows}")
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
def test_what_is_needed_is_asked_for(tmp_path, overrides, missing, message):
    rows = rows_file(tmp_path, 4, **dict.fromkeys(missing, ...))
    with pytest.raises(DataError, match=message):
        module_and_loader(*SMALL, f"rollout.path={rows}", *overrides)


def test_a_penalty_that_does_not_read_old_log_probs_needs_none(tmp_path):
    vector = [0, 0, -2.5, -2.4, -2.3]
    rows = rows_file(
        tmp_path, 4, **ONLY_TOKENS | {"ref_log_probs": vector, "sampling_log_probs": vector}
    )
    with_rows = [f"rollout.path={rows}", "metrics=with_entropy"]
    (row,) = trained(
        tmp_path / "penalties", *with_rows, "kl=k3", *REFERENCE, "entropy.coefficient=0.01"
    )
    assert row["loss"] == pytest.approx(
        -row["new_logprobs"] + 0.1 * row["kl_ref"] - 0.01 * row["entropy"], rel=1e-5
    )
    assert row["kl_ref"] > 0
    assert not [
        name for name in row if name.endswith("_sampling") or "ratio" in name or "old" in name
    ]


@pytest.mark.parametrize("field", ["old_log_probs", "advantage"])
def test_what_some_rows_lack_is_refused(tmp_path, field):
    path = rows_file(tmp_path, 4, reward=...)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[2][field]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(
        DataError, match=rf"rollouts\.jsonl:3:{field}: is missing; other rows have one"
    ):
        module_and_loader(*SMALL, f"rollout.path={path}")


def test_a_loader_of_ones_own_gives_what_the_loss_reads(tmp_path):
    """Old log-probs that are missing would be taken for 0."""
    _, loader = module_and_loader(*SMALL, f"rollout.path={rows_file(tmp_path, 4, **ONLY_TOKENS)}")
    module, _ = module_and_loader("loss=grpo", "trainer.device=cpu", "tracking=none")
    with pytest.raises(
        DataError,
        match=r"needs old_log_probs of every document \(got none of .*rollouts\.jsonl:1\)",
    ):
        module.training_step(next(iter(loader)), 0)
