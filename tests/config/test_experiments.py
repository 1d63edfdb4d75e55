"""Every file in conf/experiment and conf/debug begins with its command, and the run that it
describes makes a step with finite numbers."""

import json
import math
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import checkpoint_of, config_of

from pgtoolkit.assembly.train import train
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import config_directory
from pgtoolkit.config.validate import validate

FILES = {
    file.stem: file
    for folder in ("experiment", "debug")
    for file in (config_directory() / folder).glob("*")
}
LOSS_AND_AGGREGATION = {
    "cispo": ("cispo", "token_mean"),
    "distillation": ("reinforce", "token_mean"),
    "dppo": ("dppo", "token_mean"),
    "kimi": ("kimi", "token_mean"),
    "reinforce": ("reinforce", "constant"),
    "sft": ("reinforce", "token_mean"),
    "vespo": ("vespo", "token_mean"),
    "dapo": ("grpo", "token_mean"),
    "float16": ("reinforce", "constant"),
    "dr_grpo": ("grpo", "constant"),
    "gmpo": ("gmpo", "sample_mean"),
    "grpo": ("grpo", "sample_mean"),
    "gsm8k": ("grpo", "token_mean"),
    "gspo_paper": ("gspo", "sample_mean"),
    "guess": ("grpo", "sample_mean"),
    "icepop": ("grpo", "sample_mean"),
    "ipo": ("dppo", "token_mean"),
    "luspo": ("gspo", "constant"),
    "ppo": ("grpo", "token_mean"),
    "prompt_mean": ("grpo", "prompt_mean"),
    "rloo": ("grpo", "constant"),
    "scalerl": ("cispo", "prompt_mean"),
    "sapo": ("sapo", "sample_mean"),
    "sums": ("grpo", "token_mean"),
    "on_policy": ("gspo", "sample_mean"),
    "short": ("gspo", "sample_mean"),
}
SMALL = (
    "tracking=none",
    "trainer.max_steps=1",
    "rollout.prompts_per_batch=3",
    "rollout.group_size=4",
    "rollout.max_completion_length=4",
    "task.num_digits=3",
    "model.hidden_size=16",
    "model.num_layers=1",
    "optimizer.warmup_steps=0",
)


def test_every_file_has_a_loss_and_an_aggregation_in_the_table_of_this_test():
    assert LOSS_AND_AGGREGATION.keys() == FILES.keys()


@pytest.mark.parametrize("name", LOSS_AND_AGGREGATION)
def test_a_file_begins_with_its_command_and_names_its_paper(name):
    command = f"{FILES[name].parent.name}={name}"
    lines = FILES[name].read_text().splitlines()
    assert lines[:2] == ["# @package _global_", f"# pgtk {command}"]
    assert command.startswith("debug") or name == "guess" or "arXiv" in "".join(lines[2:6])


def small_settings(name: str, folder: Path) -> list[str]:
    """Return overrides that make the run of a file small, with the models and data that it needs,
    which are written below `folder`."""

    def without(*prefixes: str) -> list[str]:
        return [setting for setting in SMALL if not setting.startswith(prefixes)]

    if name == "guess":
        return without("task.", "rollout.max_comp")
    if name == "sft":
        row = good_row(token_ids=[4, 3, 2, 1, 0], reward=..., old_log_probs=..., group_id=...)
        rows = write_jsonl(folder / "rollouts.jsonl", [row] * 12)
        return [*without("rollout.", "task."), f"rollout.path={rows}"]
    if name == "distillation":
        student = save_with_tokenizer(small_llama(0), folder / "student")
        teacher = save_with_tokenizer(small_llama(1), folder / "teacher")
        return [*without("model."), f"model.path={student}", f"kl.reference={teacher}"]
    if name == "float16":
        model = save_with_tokenizer(small_llama(0), folder / "model")
        return [*without("model."), f"model.path={model}"]
    if name == "gsm8k":
        model = save_with_tokenizer(small_llama(0), folder / "model")
        row = {"question": "67=", "answer": "6 * 7 = 42\n#### 42"}
        data = folder / "data"
        data.mkdir()
        for split in ("train", "test"):
            write_jsonl(data / f"{split}.jsonl", [row] * 3)
        return [
            *without("model.", "task."),
            f"model.path={model}",
            f"task.path={data}",
            "task.config=null",
            f"evaluation.sets={{test: {{path: {data}, config: null, split: test}}}}",
            "evaluation.prompts_per_set=2",
            "evaluation.max_completion_length=4",
        ]
    if name == "sums":
        llama = small_llama(0, vocab_size=97, eos_token_id=96, max_position_embeddings=64)
        model = save_with_tokenizer(llama, folder / "model", alphabet=None)
        return [
            *without("model.", "task."),
            f"model.path={model}",
            "evaluation.prompts_per_set=2",
            "accumulation.max_tokens=64",
        ]
    return [*SMALL]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSS_AND_AGGREGATION)
def test_the_run_of_a_file_makes_a_step_with_its_loss_and_finite_numbers(name, tmp_path):
    overrides = [f"{FILES[name].parent.name}={name}", *small_settings(name, tmp_path)]
    config = config_of(*overrides)
    assert validate(config)[1].problems == []
    train(config, tmp_path, overrides=overrides)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["num_documents"] == min(12, config.accumulation.docs_per_step)
    assert {"loss", "grad_norm", "new_logprobs"} <= row.keys()
    assert ("ratio_new_old" in row) == ("reward" in row) == (name != "sft")
    assert all(math.isfinite(value) for value in row.values()), row
    assert ("entropy" in row) is (name == "on_policy")
    assert row.get("ratio_new_old", 1) == pytest.approx(1, abs=1e-6)
    assert (config.loss.name, config.aggregation.mode) == LOSS_AND_AGGREGATION[name]
    assert all(
        torch.isfinite(weight).all() for weight in checkpoint_of(tmp_path, 1)["model"].values()
    )


@pytest.mark.parametrize(
    ("overrides", "use"),
    [
        # The same number is another width of the clip of a document's ratio, and of CISPO's weight.
        (["experiment=dapo", "loss=gspo"], "loss.epsilon_high=0.0004"),
        (["experiment=[dapo,cispo]"], "loss.epsilon_high=4"),
        (["experiment=prompt_mean", "loss=gmpo"], "loss.epsilon_high=0.4"),
        (["experiment=mine", "loss=gspo", "seed=3"], "loss.epsilon_low=0.0003"),
        (
            ["experiment=float16", "model=huggingface", "correction=token_mask"],
            "correction.high=5",
        ),
    ],
)
def test_a_number_that_a_file_sets_for_its_own_option_is_refused_with_another(
    tmp_path, monkeypatch, overrides, use
):
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /loss: grpo]\nloss: {epsilon_low: 0.1}\nseed: 2\n"
    )
    key = use.partition("=")[0]

    def problems(*more: str) -> list[str]:
        found = compose([*overrides, *more]).problems
        return [problem for problem in found if f"It sets {key}=" in problem]

    (problem,) = problems()
    assert problem.endswith(f" Use {use}.")
    assert problems(use) == []
    assert problems(f"{use}1") == []
    assert compose(["experiment=mine", "loss=grpo"]).problems == []
