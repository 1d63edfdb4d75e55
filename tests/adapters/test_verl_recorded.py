"""The function of examples/recorders records a batch of verl's layout, padded on both sides, as
rows with their log-probs."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from builders.models import small_llama
from builders.rollout_rows import recorded_rollouts

PAD = 0


def test_rows_of_a_batch_of_verl_have_the_models_log_probs(tmp_path):
    """Padding is on both sides of a response."""
    code = (Path(__file__).parents[2] / "examples/recorders/of_verl.py").read_text()
    trainer = type("RayPPOTrainer", (), {})
    names = {"json": json, "torch": torch, "RayPPOTrainer": trainer}
    exec(code[code.index("def record") :], names)  # without verl's import

    model = small_llama()
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]]
    responses = [[6, 7], [8, 9, 10, 2], [5], [3, 3, 3]]
    rows, width = len(prompts), 4
    batch = {
        "prompts": torch.full((rows, width), PAD),
        "responses": torch.full((rows, width), PAD),
        "attention_mask": torch.zeros(rows, 2 * width, dtype=torch.long),
        "response_mask": torch.zeros(rows, width, dtype=torch.long),
        "old_log_probs": torch.zeros(rows, width),
        "rollout_log_probs": torch.zeros(rows, width),
        "token_level_scores": torch.zeros(rows, width),
    }
    expected = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        size = len(response)
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        log_probs = torch.stack(
            [log_probs[len(prompt) - 1 + t, token] for t, token in enumerate(response)]
        )
        expected.append(log_probs)
        batch["prompts"][i, width - len(prompt) :] = torch.tensor(prompt)
        batch["responses"][i, :size] = torch.tensor(response)
        batch["attention_mask"][i, width - len(prompt) : width + size] = 1
        batch["response_mask"][i, :size] = 1
        batch["old_log_probs"][i, :size] = log_probs
        batch["rollout_log_probs"][i, :size] = log_probs - 0.25
        batch["token_level_scores"][i, size - 1] = float(i)
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    data = SimpleNamespace(batch=batch, non_tensor_batch={"uid": ["a", "b", "a", "b"]})
    trainer()._log_rollout_data(data, {}, {}, str(tmp_path))

    rollouts = recorded_rollouts(tmp_path / "rollouts.jsonl")
    documents = {}
    for document in map(rollouts.document, range(rows)):
        documents[document.reward] = document
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        document = documents[float(i)]
        assert document.tokens.tolist() == prompt + response
        assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * len(response)
        torch.testing.assert_close(document.old_log_probs, expected[i])
        torch.testing.assert_close(document.sampling_log_probs, expected[i] - 0.25)
        # By dr_grpo, in groups with the rewards i and i + 2.
        assert document.advantages.tolist() == [(-1.0, 1.0)[i // 2]] * len(response)
