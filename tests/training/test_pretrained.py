"""A pretrained model takes a step of training: SmolLM2-135M-Instruct on sums in words.

Rewards and evaluations are counted again from the texts that were kept, and transformers loads the
export and writes the same completions.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgtoolkit.cli import main
from pgtoolkit.runs.completion_files import (
    TRAINING,
    CompletionRow,
    completion_files,
    read_completions,
)

MODEL = Path(
    os.environ.get("PGTOOLKIT_SMOLLM2", Path(__file__).parents[2] / "outputs" / "study" / "smollm2")
)
MISSING = (
    f"needs SmolLM2-135M-Instruct in {MODEL}, or in PGTOOLKIT_SMOLLM2: docs/data.md says how "
    "it is made of a wheel"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason=MISSING),
]
SUMS = ["task.num_digits=1", "evaluation.prompts_per_set=3"]
RUN = [
    "experiment=sums",
    f"model.path={MODEL}",
    "tracking=none",
    "trainer.device=cpu",
    "trainer.max_steps=1",
    "optimizer.warmup_steps=0",
    "accumulation.docs_per_step=16",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "rollout.keep_completions=16",
    "rollout.max_completion_length=20",
    "evaluation.every=1",
    "evaluation.completions_per_prompt=1",
    *SUMS,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Path]:
    """Train one step; the current directory is the parent of the run's until the last test."""
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*RUN, f"hydra.run.dir={folder / 'run'}"]) == 0
        yield folder / "run"


@pytest.fixture(scope="module")
def exported(run) -> Path:
    folder = run.parent / "exported"
    assert main(["export", str(run), str(folder)]) == 0
    return folder


def completions_of(folder: Path, name: str) -> list[CompletionRow]:
    files = [file.path for file in completion_files(folder) if file.set == name]
    assert files
    return [row for path in files for row in read_completions(path)]


def question_and_sum(prompt: str) -> tuple[str, int]:
    first, second = re.search(
        r"What is (\d) \+ (\d)\? Answer with the number only\.", prompt
    ).groups()
    return f"What is {first} + {second}? Answer with the number only.", int(first) + int(second)


def is_right(row: CompletionRow) -> bool:
    numbers = re.findall(r"\d+", row.completion)
    return bool(numbers) and int(numbers[-1]) == question_and_sum(row.prompt)[1]


def test_completions_of_a_step_have_the_rewards_of_their_texts(run):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = completions_of(run, TRAINING)
    assert len(rows) == 16
    for row in rows:
        messages = [{"role": "user", "content": question_and_sum(row.prompt)[0]}]
        assert row.prompt == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert row.reward == is_right(row)
        assert row.finish_reason == (
            "stop" if row.completion.endswith(tokenizer.eos_token) else "length"
        )
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["reward"] == pytest.approx(sum(map(is_right, rows)) / 16)
    assert 0 < metrics["reward"] < 1
    assert metrics["grad_norm"] > 0


def test_evaluations_before_and_after_the_step_count_right_answers_to_other_prompts(run):
    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    held_out = completions_of(run, "held_out")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 1]
    for evaluation in evaluations:
        answers = [row for row in held_out if row.step == evaluation["step"]]
        assert len(answers) == 3
        assert evaluation["pass@1"] == pytest.approx(sum(map(is_right, answers)) / 3)
    training_prompts = {row.prompt for row in completions_of(run, TRAINING)}
    assert not {row.prompt for row in held_out} & training_prompts


def test_the_export_differs_from_the_model_by_one_small_step(exported):
    before = load_file(MODEL / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after  # it is that of the embedding
    changes = [(after[name].float() - before[name].float()).abs().max().item() for name in after]
    assert sum(change > 0 for change in changes) > len(after) / 2
    assert max(changes) < 1e-3  # one step at a rate of 1e-5, in bfloat16


def test_transformers_writes_what_an_evaluation_of_the_export_writes(exported):
    greedy = [
        "evaluation.completions_per_prompt=1",
        "evaluation.temperature=0",
        "evaluation.max_completion_length=20",
    ]
    arguments = [str(exported), "task=sums", *SUMS, *greedy, "trainer.device=cpu"]
    assert main(["evaluate", *arguments]) == 0
    (folder,) = (exported.parent / "outputs" / "evaluations").iterdir()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for row in completions_of(folder, "held_out"):
        inputs = tokenizer(row.prompt, add_special_tokens=False, return_tensors="pt")
        tokens = model.generate(
            **inputs, do_sample=False, max_new_tokens=20, temperature=None, top_p=None, top_k=None
        )
        assert tokenizer.decode(tokens[0][inputs["input_ids"].shape[1] :]) == row.completion
