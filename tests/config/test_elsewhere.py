"""The names of TRL and verl for our keys: each of theirs is known, against the installed TRL and
verl's list, and a configuration file of theirs becomes a command of ours."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.elsewhere import NONE, keys_called, known_as, rows_of_trainers
from pgtoolkit.config.explain import explain
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import KEYS, plain_value
from pgtoolkit.config.schema import Config
from pgtoolkit.config.translate_file import default_of
from pgtoolkit.config.validate import validated


def test_every_field_of_trl_s_configuration_is_known():
    trl = pytest.importorskip("trl")
    names = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert len(names) > 150
    assert (
        sorted(name for name in names if not any(row.trainer == "TRL" for _, row in known_as(name)))
        == []
    )
    scripts = [*dataclasses.fields(trl.ModelConfig), *dataclasses.fields(trl.ScriptArguments)]
    assert sorted(field.name for field in scripts if not known_as(field.name, "TRL")) == []


def test_the_defaults_of_trl_are_those_of_the_installed_class():
    trl = pytest.importorskip("trl")
    for kind in (trl.GRPOConfig, trl.ModelConfig):
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
        for row in rows_of_trainers():
            for name in row.names if len(row.names) == len(row.defaults) else ():
                if row.trainer == "TRL" and name in fields:
                    theirs = getattr(fields[name], "value", fields[name])
                    assert default_of("TRL", name) == theirs, name


def test_every_key_of_verl_s_sections_is_known():
    names = (Path(__file__).parent / "verl_names.txt").read_text().splitlines()[1:]
    assert len(names) == 196
    assert [name for name in names if not known_as(name, "verl")] == []
    for name in (
        "norm_adv_by_std_in_grpo",
        "total_epochs",
        "top_k",
        "kl_loss_coef",
        "actor_rollout_ref.model.path",
    ):
        assert known_as(name, "verl"), name


def test_the_tables_of_other_trainers_name_keys_and_options_that_exist():
    keys = {key.name for key in KEYS} | {"hydra.run.dir", "task.verifiers"}
    groups = options()
    theirs = {name for row in rows_of_trainers() for name in row.names}
    for row in rows_of_trainers():
        assert len(row.defaults) in (0, 1, len(row.names)), row
        assert row.here != NONE or row.remark, row
        for code in re.findall("`([^`]+)`", row.here + row.remark):
            key, _, value = code.partition("=")
            if re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", key):
                assert key in keys | theirs or code in {"metrics.jsonl", "pgtoolkit.policy_loss"}, (
                    row
                )
            elif value and key in groups:
                assert value in groups[key], row


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("num_generations", ["rollout.group_size"]),
        ("actor_rollout_ref.rollout.n", ["rollout.group_size"]),
        ("actor_rollout_ref.rollout.val_kwargs.n", ["evaluation.completions_per_prompt"]),
        ("clip_ratio_low", ["loss.epsilon_low"]),
        ("epsilon", ["loss.epsilon_low", "loss.epsilon_high"]),
        ("scale_rewards", []),
        ("actor_rollout_ref.actor.profiler.tool_config.npu.level", []),
        ("nothing_of_theirs", []),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_the_keys_that_take_its_value(name, keys):
    assert keys_called(name) == keys


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("reward_funcs", "here: `task.verifier`, or `task.verifiers` for several"),
        ("reward_weights", "here: `weight` of each of `task.verifiers`"),
        ("num_train_epochs", "here: `trainer.max_steps`, counted in optimizer steps"),
        ("save_steps", "here: `trainer.checkpoint_every`"),
        ("report_to", "here: `tracking`"),
        ("bf16", "here: `model.dtype` = `bfloat16`, `float16` or `float32`"),
        (
            "top_k",
            "here: there is none completions come from the distribution that log-probs are of",
        ),
        ("warmup_ratio", "here: `optimizer.warmup_steps`, a share of `trainer.max_steps`"),
        ("ppo_epochs", "here: there is none each completion is trained on once"),
        ("norm_adv_by_std_in_grpo", "here: `advantage` = `grpo`, false: `dr_grpo`"),
        ("total_epochs", "trainer.total_epochs: a key of verl"),
        ("lam", "here: `advantage.gae_lambda`"),
    ],
)
def test_explain_answers_the_words_of_other_trainers(word, answer):
    assert answer in " ".join(explain(word).split())


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "num_iterations=2",
            "TRL's num_iterations has no equal here: each completion is trained on once. Use pgtk",
        ),
        ("data.train_batch_size=64", "Use rollout.prompts_per_batch=64."),
        ("actor_rollout_ref.actor.ppo_epochs=2", "verl's ppo_epochs has no equal here"),
        (
            "scale_rewards=batch",
            "TRL's scale_rewards is here `advantage` = `grpo`; `batch` is `batch_std`",
        ),
    ],
)
def test_a_typed_key_of_another_trainer_is_answered_from_the_tables(capsys, override, answer):
    assert answer in refusal(capsys, override)


TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "prompts.jsonl",
    "learning_rate": 2e-6,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_completion_length": 256,
    "epsilon_high": 0.28,
    "beta": 0.04,
    "num_iterations": 2,
    "top_k": 0,
    "save_steps": 100,
    "warmup_ratio": 0.1,
    "bf16": True,
    "zzz": 3,
}
VERL = {
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "actor": {
            "optim": {"lr": 2e-6},
            "ppo_mini_batch_size": 64,
            "ppo_epochs": 2,
            "policy_loss": {"loss_mode": "gspo"},
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
            "loss_agg_mode": "seq-mean-token-mean",
        },
        "rollout": {"n": 8},
    },
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    "data": {
        "train_files": ["train.parquet"],
        "train_batch_size": 256,
        "max_response_length": 1024,
    },
    "trainer": {"total_training_steps": 100, "logger": ["console", "wandb", "mlflow", "swanlab"]},
}


def translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], *more: str
) -> tuple[list[str], str]:
    """Translate a configuration of another trainer; return the overrides of the command, and the
    page."""
    (tmp_path / "theirs.json").write_text(json.dumps(values))
    assert main(["translate", str(tmp_path / "theirs.json"), *more]) == 0
    page = capsys.readouterr().out
    (command,) = re.findall(r"^  pgtk (.*)$", page, re.MULTILINE)
    return shlex.split(command), page


def valid_config(overrides: list[str]) -> Config:
    """Return the configuration of the overrides, after asserting that it has no problem but missing
    files."""
    composed = compose(overrides)
    _, report = validated(composed)
    assert [
        problem
        for problem in report.problems
        if "model.path" not in problem and "task.path" not in problem
    ] == []
    return composed.config


def test_a_configuration_of_trl_becomes_a_command(tmp_path, capsys):
    overrides, page = translated(tmp_path, capsys, TRL, "--processes", "2")
    config = valid_config(overrides)
    expected = {
        "rollout.group_size": 8,
        # 2 processes x 4 documents x 8 micro-batches, 8 completions of a prompt
        "rollout.prompts_per_batch": 8,
        "accumulation.docs_per_step": 64,
        "loss.epsilon_low": 0.2,
        "loss.epsilon_high": 0.28,
        "kl.coefficient": 0.04,
        "optimizer.learning_rate": 2e-6,
        "optimizer.beta2": 0.999,
        "optimizer.schedule": "linear",
        "trainer.checkpoint_every": 100,
        "model.dtype": "bfloat16",
    }
    assert {key: plain_value(config, key) for key in expected} == expected
    assert {"loss=grpo", "aggregation=token_mean", "advantage=grpo", "kl=k3_ratio"} <= {*overrides}
    silent = page.partition("that differ here:\n")[2].partition("\n\n")[0]
    assert (
        "aggregation=token_mean: loss_type=dapo there, sample_mean here; gradients have another "
        "size"
    ) in silent
    assert "optimizer.beta2=0.999: adam_beta2=0.999 there, 0.95 here" in silent
    assert "epsilon_high" not in silent
    assert "rollout.group_size" not in silent  # 8 on both sides
    without_equal = page.partition("What has no equal here:\n")[2].partition("\n\n")[0]
    # top_k=0 changes nothing, and is left out.
    assert without_equal.strip() == "num_iterations=2: each completion is trained on once"
    assert "warmup_ratio=0.1: optimizer.warmup_steps, a share of trainer.max_steps" in page
    assert page.endswith("Keys that TRL is not known to have:\n  zzz\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        (
            {"loss_type": "dr_grpo"},
            ["aggregation=constant", "aggregation.divisor=512", "loss=grpo"],
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            ["loss=cispo", "loss.epsilon_high=4", "aggregation=token_mean"],
        ),
        (
            {"importance_sampling_level": "sequence", "loss_type": "luspo"},
            ["loss=gspo", "aggregation.divisor=1"],
        ),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
            ["loss.epsilon_low=0.0003"],
        ),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
            ["loss=sapo", "loss.temperature_negative=1.2"],
        ),
        ({"scale_rewards": "none"}, ["advantage=dr_grpo"]),
        ({"scale_rewards": False}, ["advantage=dr_grpo"]),
        ({"beta": 0.1, "use_bias_correction_kl": False}, ["kl=k3", "kl.coefficient=0.1"]),
        ({"delta": 4.0}, ["loss.dual_clip=4"]),
        (
            {"use_vllm": True},
            ["sampler=vllm", "correction=sequence_mask", "sampler.gpu_memory_share=0.3"],
        ),
        ({"generation_batch_size": 128, "num_generations": 16}, ["rollout.prompts_per_batch=8"]),
        ({"max_grad_norm": 0}, ["optimizer.max_grad_norm=null"]),
    ],
)
def test_a_value_of_trl_is_translated(tmp_path, capsys, values, overrides):
    command, _ = translated(tmp_path, capsys, {"model_name_or_path": "m"} | values)
    assert {*overrides} <= {*command}
    valid_config(command)


def test_a_configuration_of_verl_becomes_a_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda package: True)
    overrides, page = translated(tmp_path, capsys, VERL)
    config = valid_config(overrides)
    expected = {
        "loss.epsilon_low": 3e-4,
        "loss.epsilon_high": 4e-4,
        "rollout.prompts_per_batch": 256,
        "accumulation.docs_per_step": 512,
        "rollout.max_completion_length": 1024,
        "trainer.max_steps": 400,
    }
    assert {key: plain_value(config, key) for key in expected} == expected
    assert Path(config.task.path).name == "train.parquet"
    assert {"loss=gspo", "advantage=dr_grpo", "aggregation=sample_mean"} <= {*overrides}
    assert "ppo_epochs=2: each completion is trained on once" in page
    assert {"tracking=mlflow", "tracking.also=[wandb]"} <= {*overrides}
    assert "trainer.logger=[console,wandb,mlflow,swanlab]: tracking" in page


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ({"use_kl_in_reward": True}, ["kl=k1", "kl.coefficient=0.001", "kl.place=reward"]),
        (
            {"adv_estimator": "gae", "gamma": 0.99},
            ["advantage=gae", "advantage.gae_lambda=1", "advantage.gamma=0.99"],
        ),
        (
            {"use_kl_in_reward": True, "kl_penalty": "low_var_kl", "kl_ctrl": {"kl_coef": 0.05}},
            ["kl=k3", "kl.coefficient=0.05", "kl.place=reward"],
        ),
    ],
)
def test_a_value_of_verl_is_translated(tmp_path, capsys, algorithm, overrides):
    command, _ = translated(tmp_path, capsys, VERL | {"algorithm": VERL["algorithm"] | algorithm})
    assert {*overrides} <= {*command}
    valid_config(command)


def test_a_file_that_is_missing_damaged_or_has_a_wrong_value_is_refused(tmp_path, capsys):
    assert "needs a file" in refusal(capsys, "translate", tmp_path / "none.yaml")
    for content in ("- 1\n- 2\n", "a: [1\n", "learning_rate: fast\n"):
        (tmp_path / "bad.yaml").write_text(content)
        assert refusal(capsys, "translate", tmp_path / "bad.yaml").startswith("pgtk: error: ")
