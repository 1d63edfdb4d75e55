"""The trainer of examples/recorders records what TRL trains on, with its log-probs and rewards."""

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


def _recorded(folder, monkeypatch, changes):
    """Train with the recorder and return the trainer and the rows."""
    recorder = runpy.run_path(str(Path(__file__).parents[2] / "examples/recorders/of_trl.py"))
    monkeypatch.setattr(trl_runs, "GRPOTrainer", recorder["Recorded"])
    monkeypatch.chdir(folder)
    small_llama().save_pretrained(folder / "model")
    trained = trl_runs.trainer(str(folder / "model"), None, changes)
    trained.train()
    return trained, [json.loads(line) for line in Path("rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("iterations", [1, 2])  # with 1 TRL computes no old log-probs
def test_the_tokens_that_trl_trains_on_are_recorded_with_their_log_probs(
    iterations, tmp_path, monkeypatch
):
    changes = {"num_iterations": iterations, "max_steps": iterations, "learning_rate": 0.0}
    trained, rows = _recorded(tmp_path, monkeypatch, changes)
    assert len(rows) == 8  # one batch of two groups
    policy = trained.accelerator.unwrap_model(trained.model)
    for row in rows:
        tokens, mask = torch.tensor([row["token_ids"]]), torch.tensor(row["loss_mask"])
        with torch.no_grad():
            new = policy(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        old = torch.tensor(row["old_log_probs"])
        assert (old[mask] - new[mask[1:]]).abs().max() < 1e-5
        (reward,) = trl_runs.reward([tokens[0][mask].tolist()])
        assert row["reward"] == pytest.approx(reward)
        assert not row["score_failed"]
    assert (
        main(["check", "rollout=recorded", "rollout.path=rollouts.jsonl", "advantage=given"]) == 0
    )


def test_parity_on_recorded_rows_has_the_loss_that_trl_logs(tmp_path, monkeypatch, capsys):
    changes = {"max_steps": 2, "beta": 0.5, "loss_type": "grpo", "num_iterations": 2}
    changes |= {"mask_truncated_completions": True, "epsilon": 0.01}
    trained, rows = _recorded(tmp_path, monkeypatch, changes)
    trained.processing_class.save_pretrained("model")
    assert len({row["truncated"] for row in rows}) == 2
    assert all(any(row["loss_mask"]) is not row["truncated"] for row in rows)
    Path("grpo.json").write_text(json.dumps(trained.args.to_dict()))
    words = ["model=huggingface", "model.path=model", "advantage=grpo", "loss=grpo"]
    assert main(["parity", "grpo.json", "rollouts.jsonl", *words]) == 7
    page = capsys.readouterr().out
    logged = trained.state.log_history[0]["loss"]
    assert f"loss {logged:.6g}" in page
    assert "step has" not in page
    Path("grpo.json").write_text(
        json.dumps(trained.args.to_dict() | {"gradient_accumulation_steps": 1})
    )
    main(["parity", "grpo.json", "rollouts.jsonl", *words])
    assert "for theirs type accumulation.docs_per_step=4" in capsys.readouterr().out
