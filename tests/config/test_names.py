"""Names of runs and of folders: what their overrides change, in the letters of a directory's
name."""

import re

import pytest

from pgtoolkit.config.names import name_from, run_name

DEFAULTS = {"loss": "gspo", "aggregation": "sample_mean"}
ON_THE_HUB = [
    "model=huggingface",
    "model.path=Qwen/Qwen3-0.6B",
    "task=prompts",
    "task.path=~/data/gsm8k.jsonl",
]
LONG = [f"task.options.key{i}={i}" for i in range(40)]


def test_a_folder_is_named_by_what_was_typed():
    assert name_from([], DEFAULTS) == "default"
    assert name_from(["loss=gspo", "aggregation=constant"], DEFAULTS) == "aggregation-constant"
    assert name_from(["loss=gspo", "experiment=dapo"], DEFAULTS) == "loss-gspo_dapo"
    assert (
        name_from(["optimizer.learning_rate=3e-4", "seed=1"], DEFAULTS)
        == "learning-rate-3e-4_seed-1"
    )
    assert (
        name_from(["tracking=none", "hydra.run.dir=x", "hydra/launcher=joblib"], DEFAULTS)
        == "default"
    )
    assert name_from(["model.path=/home/me/../some model"], DEFAULTS) == "some-model"
    assert name_from([*ON_THE_HUB, "loss=grpo"], DEFAULTS) == "Qwen3-0.6B_gsm8k.jsonl_loss-grpo"
    # By which sweeps of earlier versions are found: the letters and the digits are theirs.
    answers = [
        "task.verifier=math_verify",
        "rollout.max_completion_length=1024",
        "trainer.max_steps=2000",
    ]
    both = [
        name_from([*ON_THE_HUB, *answers, "loss=grpo", f"seed={seed}"], DEFAULTS) for seed in (3, 4)
    ]
    assert (
        both[0]
        == "max-steps-2000_loss-grpo_seed-3_Qwen3-0.6B_gsm8k.jsonl_verifier-math-veri-c74729"
    )
    assert both[1].startswith(
        "max-steps-2000_loss-grpo_seed-4_Qwen3-0.6B_gsm8k.jsonl_verifier-math-veri-"
    )


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "gspo_sample-mean"),
        (["loss=gspo", "seed=1"], "gspo_sample-mean_seed-1"),
        # as the configuration has it
        (["seed=1", "loss=grpo", "aggregation=token_mean"], "gspo_sample-mean_seed-1"),
        (["experiment=dapo", "loss.epsilon_high=0.3"], "gspo_sample-mean_dapo_epsilon-high-0.3"),
        (["tracking=none", "hydra.run.dir=x"], "gspo_sample-mean"),
        ([*ON_THE_HUB, "loss=grpo"], "gspo_sample-mean_Qwen3-0.6B_gsm8k.jsonl"),
    ],
)
def test_names_of_runs_begin_with_loss_and_aggregation(overrides, name):
    assert run_name(overrides, DEFAULTS, "gspo", "sample_mean") == name


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["seed=1", "aggregation=token_mean", "loss=grpo"], "grpo_token-mean_seed-1"),
        (["loss=gspo", "seed=1"], "gspo_seed-1"),
        (["loss=custom", "loss.path=mine.Squared"], "mine.Squared"),
        (["aggregation=constant", "aggregation.reducer=mine.weights"], "constant_mine.weights"),
        (["seed=1"], "seed-1"),
        ([], "default"),
    ],
)
def test_in_a_sweep_names_have_what_varies(overrides, name):
    assert run_name(overrides, {}, None, None) == name


def test_a_long_name_keeps_its_words():
    answers = [
        "task.verifier=math_verify",
        "rollout.max_completion_length=1024",
        "trainer.max_steps=2000",
    ]
    names = [
        run_name([*ON_THE_HUB, *answers, f"seed={seed}"], {}, "grpo", "token_mean")
        for seed in (3, 4)
    ]
    words = "grpo_token-mean_max-steps-2000_seed-3_Qwen3-0.6B_gsm8k.jsonl"
    assert re.fullmatch(re.escape(words) + "-[0-9a-f]{6}", names[0])
    assert names[1].startswith(words.replace("seed-3", "seed-4"))
    names = {
        run_name(LONG, {}, "grpo", "token_mean"),
        run_name([*LONG, "seed=1"], {}, "grpo", "token_mean"),
    }
    assert len(names) == 2
    one_word = ["-".join(["gsm8k"] * 30), "a" * 200]
    long = [run_name([f"task.path={word}"], {}, None, None) for word in one_word]
    assert re.fullmatch(r"gsm8k(-gsm8k){11}-[0-9a-f]{6}", long[0])
    assert long[1].startswith("a" * 73 + "-")


def test_names_are_names_of_directories():
    names = {name_from(LONG, {}), name_from([*LONG, "seed=1"], {}), run_name(LONG, {}, None, None)}
    assert len(names) == 3
    odd = ["experiment=../../.x"], ["a=.."], ["task.path='a b/../c d'", "seed=1"]
    names |= {name_from(words, {}) for words in odd} | {
        run_name(words, {}, "a b.C", None) for words in odd
    }
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name)
