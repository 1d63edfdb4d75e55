"""The trainer of examples/recorders records what TRL trains on, with TRL's log-probs."""

import json
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl")
pytest.importorskip("peft", reason="the extra lora")

from adapters import trl_runs
from builders.models import small_llama

from pgtoolkit.cli import main


def test_the_tokens_that_trl_trains_on_are_recorded_with_their_log_probs(tmp_path, monkeypatch):
    recorder = runpy.run_path(str(Path(__file__).parents[2] / "examples/recorders/of_trl.py"))
    monkeypatch.setattr(trl_runs, "GRPOTrainer", recorder["Recorded"])
    monkeypatch.chdir(tmp_path)
    small_llama().save_pretrained(tmp_path / "model")
    changes = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.0}
    trained = trl_runs.trainer(str(tmp_path / "model"), None, changes)
    trained.train()
    rows = [json.loads(line) for line in Path("rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 8  # two updates on one batch of two groups
    policy = trained.accelerator.unwrap_model(trained.model)
    for row in rows:
        tokens, mask = torch.tensor([row["token_ids"]]), torch.tensor(row["loss_mask"])
        with torch.no_grad():
            new = policy(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        old = torch.tensor(row["old_log_probs"])
        assert (old[mask] - new[mask[1:]]).abs().max() < 1e-5
    assert (
        main(["check", "rollout=recorded", "rollout.path=rollouts.jsonl", "advantage=given"]) == 0
    )
