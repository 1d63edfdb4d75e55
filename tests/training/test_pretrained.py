"""A step of the real thing: SmolLM2-135M-Instruct on sums in words, evaluated, exported, and loaded
by transformers."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgtoolkit.cli import main
from pgtoolkit.runs.completion_files import TRAINING, completion_files, read_completions

MODEL = Path(
    os.environ.get("PGTOOLKIT_SMOLLM2", Path(__file__).parents[2] / "outputs" / "study" / "smollm2")
)
MISSING = (
    f"needs SmolLM2-135M-Instruct in {MODEL}, or in PGTOOLKIT_SMOLLM2: docs/data.md says how "
    "it is made of a wheel"
)
SUMS = ["task.num_digits=1", "evaluation.prompts_per_set=3"]


def rows_of(folder, name):
    files = [file.path for file in completion_files(folder) if file.set == name]
    assert files
    return [row for path in files for row in read_completions(path)]


def sum_of(text):
    """The problem and its sum, out of the text of a prompt."""
    first, second = re.search(
        r"What is (\d) \+ (\d)\? Answer with the number only\.", text
    ).groups()
    return f"What is {first} + {second}? Answer with the number only.", int(first) + int(second)


def is_right(row):
    numbers = re.findall(r"\d+", row.completion)
    return bool(numbers) and int(numbers[-1]) == sum_of(row.prompt)[1]


@pytest.mark.slow
@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason=MISSING)
def test_a_pretrained_model_takes_a_step_and_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    settings = [
        "experiment=sums",
        f"model.path={MODEL}",
        f"hydra.run.dir={run}",
        "tracking=none",
        *SUMS,
    ]
    settings += ["trainer.max_steps=1", "optimizer.warmup_steps=0", "accumulation.docs_per_step=16"]
    settings += [
        "rollout.prompts_per_batch=4",
        "rollout.group_size=4",
        "rollout.keep_completions=16",
    ]
    settings += [
        "rollout.max_completion_length=20",
        "evaluation.every=1",
        "evaluation.completions_per_prompt=1",
    ]
    assert main([*settings, "trainer.device=cpu"]) == 0

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = rows_of(run, TRAINING)
    assert len(rows) == 16
    for row in rows:
        asked = [{"role": "user", "content": sum_of(row.prompt)[0]}]
        assert row.prompt == tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        assert row.reward == is_right(row)
        assert row.finish_reason == (
            "stop" if row.completion.endswith(tokenizer.eos_token) else "length"
        )
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["reward"] == pytest.approx(sum(map(is_right, rows)) / 16)
    assert 0 < metrics["reward"] < 1
    assert metrics["grad_norm"] > 0

    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    held_out = rows_of(run, "held_out")
    assert [row["step"] for row in evaluations] == [0, 1]
    for evaluation in evaluations:
        answers = [row for row in held_out if row.step == evaluation["step"]]
        assert len(answers) == 3
        assert evaluation["pass@1"] == pytest.approx(sum(map(is_right, answers)) / 3)
    assert not {row.prompt for row in held_out} & {row.prompt for row in rows}

    exported = tmp_path / "exported"
    assert main(["export", str(run), str(exported)]) == 0
    before = load_file(MODEL / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after  # it is that of the embedding
    changed = [name for name in after if not torch.equal(after[name].float(), before[name].float())]
    assert len(changed) > len(after) / 2
    largest = max(
        (after[name].float() - before[name].float()).abs().max().item() for name in changed
    )
    assert largest < 1e-3  # one step at a rate of 1e-5, in bfloat16

    greedy = [
        "evaluation.completions_per_prompt=1",
        "evaluation.temperature=0",
        "trainer.device=cpu",
    ]
    greedy.append("evaluation.max_completion_length=20")
    assert main(["evaluate", str(exported), "task=sums", *SUMS, *greedy]) == 0
    (folder,) = (tmp_path / "outputs" / "evaluations").iterdir()
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for row in rows_of(folder, "held_out"):
        asked = tokenizer(row.prompt, add_special_tokens=False, return_tensors="pt")
        length = asked["input_ids"].shape[1]
        tokens = model.generate(
            **asked, do_sample=False, max_new_tokens=20, temperature=None, top_p=None, top_k=None
        )
        assert tokenizer.decode(tokens[0][length:]) == row.completion
