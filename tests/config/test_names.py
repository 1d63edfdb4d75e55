"""Names of runs and of folders have what their overrides change, and are names of directories."""

import re

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import changed, digest, name_from, plain_config, run_name

DEFAULTS = {"loss": "gspo", "aggregation": "sample_mean"}
ON_THE_HUB = [
    "model=huggingface",
    "model.path=Qwen/Qwen3-0.6B",
    "task=prompts",
    "task.path=~/data/gsm8k.jsonl",
]
LONG = [f"task.options.key{i}={i}" for i in range(40)]


ANSWERS = [
    "task.verifier=math_verify",
    "rollout.max_completion_length=1024",
    "trainer.max_steps=2000",
]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default"),
        (["loss=gspo", "aggregation=constant"], "aggregation-constant"),
        (["loss=gspo", "experiment=dapo"], "loss-gspo_dapo"),
        (["optimizer.learning_rate=3e-4", "seed=1"], "learning-rate-3e-4_seed-1"),
        (["tracking=none", "hydra.run.dir=x", "hydra/launcher=joblib"], "default"),
        (["model.path=/home/me/../some model"], "some-model"),
        (["loss=clip_0.1,my_losses.Clip"], "loss-clip-0.1-Clip"),
        ([*ON_THE_HUB, "loss=grpo"], "Qwen3-0.6B_gsm8k.jsonl_loss-grpo"),
        # Sweeps of earlier versions are found by this name, digits included.
        (
            [*ON_THE_HUB, *ANSWERS, "loss=grpo", "seed=3"],
            "max-steps-2000_loss-grpo_seed-3_Qwen3-0.6B_gsm8k.jsonl_verifier-math-veri-c74729",
        ),
    ],
)
def test_a_folder_is_named_by_the_overrides_that_change_a_default(overrides, name):
    assert name_from(overrides, DEFAULTS) == name


def test_long_names_of_folders_keep_the_seed():
    name = name_from([*ON_THE_HUB, *ANSWERS, "loss=grpo", "seed=4"], DEFAULTS)
    assert name.startswith(
        "max-steps-2000_loss-grpo_seed-4_Qwen3-0.6B_gsm8k.jsonl_verifier-math-veri-"
    )


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "gspo_sample-mean"),
        (["loss=gspo", "seed=1"], "gspo_sample-mean_seed-1"),
        # Loss and aggregation are those of the configuration, here gspo and sample_mean.
        (["seed=1", "loss=grpo", "aggregation=token_mean"], "gspo_sample-mean_seed-1"),
        (["experiment=dapo", "loss.epsilon_high=0.3"], "gspo_sample-mean_dapo_epsilon-high-0.3"),
        (["tracking=none", "hydra.run.dir=x"], "gspo_sample-mean"),
        (["experiment=mine_0.1"], "gspo_sample-mean_mine-0.1"),
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
        (["loss=clip_0.1", "aggregation=mine_0.5"], "clip-0.1_mine-0.5"),
        (["loss=custom", "loss.path=mine.Squared"], "mine.Squared"),
        (["aggregation=constant", "aggregation.reducer=mine.weights"], "constant_mine.weights"),
        (["seed=1"], "seed-1"),
        ([], "default"),
    ],
)
def test_names_of_the_runs_of_a_sweep_have_the_overrides_that_vary(overrides, name):
    assert run_name(overrides, {}, None, None) == name


@pytest.mark.parametrize("seed", [3, 4])
def test_a_long_name_of_a_run_ends_after_a_whole_word_with_a_hash(seed):
    name = run_name([*ON_THE_HUB, *ANSWERS, f"seed={seed}"], {}, "grpo", "token_mean")
    words = f"grpo_token-mean_max-steps-2000_seed-{seed}_Qwen3-0.6B_gsm8k.jsonl"
    assert re.fullmatch(re.escape(words) + "-[0-9a-f]{6}", name)


def test_a_single_long_word_is_cut_at_a_dash_or_within():
    with_dashes = run_name([f"task.path={'-'.join(['gsm8k'] * 30)}"], {}, None, None)
    assert re.fullmatch(r"gsm8k(-gsm8k){11}-[0-9a-f]{6}", with_dashes)
    without_dashes = run_name([f"task.path={'a' * 200}"], {}, None, None)
    assert without_dashes.startswith("a" * 73 + "-")


def test_long_names_of_other_overrides_differ():
    folders = {name_from(LONG, {}), name_from([*LONG, "seed=1"], {})}
    runs = {
        run_name(overrides, {}, "grpo", "token_mean") for overrides in (LONG, [*LONG, "seed=1"])
    }
    assert (len(folders), len(runs)) == (2, 2)


@pytest.mark.parametrize(
    "overrides",
    [
        LONG,
        [*LONG, "seed=1"],
        ["experiment=../../.x"],
        ["a=.."],
        ["task.path='a b/../c d'", "seed=1"],
    ],
)
def test_names_are_names_of_directories_of_at_most_80_letters(overrides):
    for name in (
        name_from(overrides, {}),
        run_name(overrides, {}, None, None),
        run_name(overrides, {}, "a b.C", None),
    ):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name)


def test_gradient_checkpointing_changes_no_digest_since_it_changes_nothing_that_is_learned():
    """It was in digests, with the value that was its default."""
    config = plain_config(compose(["model=huggingface", "model.path=a/b"]).config)
    before = "3ce88671"
    assert digest(config) == before
    for value in (True, False):
        other = config | {"model": config["model"] | {"gradient_checkpointing": value}}
        assert digest(other) == before
        assert changed(config, other) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "on"),
    [
        ("loss=dppo", "loss.sides", "both"),
        ("correction=token_mask", "correction.normalize", "step"),
        ("correction=sequence_mask", "correction.measure", "k3"),
        ("kl=full_jsd", "kl.update_every", 3),
        ("kl=k3", "kl.beta", None),
        ("advantage=grpo", "advantage.reward_shift", 0.5),
        ("advantage=grpo", "advantage.reward_scale", 2.0),
        ("advantage=grpo", "advantage.reward_clip", 1.0),
        ("advantage=grpo", "advantage.clip_low", -1.0),
        ("advantage=grpo", "advantage.clip_high", 1.0),
        ("optimizer.schedule=cosine", "optimizer.min_learning_rate", 1e-5),
    ],
)
def test_a_key_that_is_off_is_in_no_digest_and_no_comparison(overrides, key, on):
    """As a run from before there was the key."""
    now = plain_config(compose([overrides]).config)
    group, leaf = key.split(".")
    before = now | {group: {name: value for name, value in now[group].items() if name != leaf}}
    assert digest(before) == digest(now)
    assert changed(before, now) == {}
    if on is not None:
        switched = now | {group: now[group] | {leaf: on}}
        assert digest(switched) != digest(now)
