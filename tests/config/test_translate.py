"""`pgtk translate`: what values of TRL and verl become here, what has no equal, which files are
read, and which are refused."""

import dataclasses
import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.trainer_keys import tables
from pgtoolkit.config.translate import IDLE, Translation
from pgtoolkit.config.translate_file import TheirConfig, read
from pgtoolkit.config.translate_page import translate
from pgtoolkit.config.translate_shell import Script
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.group_rollouts import overlong_penalty
from pgtoolkit.system.report import text


def translated(folder: Path, name: str, content: object):
    """Return the translation of a file with this text, or with a dictionary as JSON."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Translation(read(path))


def found(translation: Translation, expected: dict[str, object]) -> dict[str, object]:
    """Return what the command has of the expected keys, in the types that are expected; "left",
    "near" and "apart" for keys of theirs that are listed, and None for those that are nowhere."""
    result: dict[str, object] = {key: value for key, (value, _) in translation.typed.items()}
    result |= dict.fromkeys((line.partition("=")[0] for line in translation.apart), "apart")
    result |= dict.fromkeys((line.partition("=")[0] for line in translation.differing), "near")
    result |= dict.fromkeys((re.split("[= ]", shown)[0] for shown, *_ in translation.left), "left")
    for key, value in expected.items():
        if key in result and text(result[key]) == text(value):
            result[key] = value
    return {key: result.get(key) for key in expected}


SOFT = "get_soft_overlong_punishment"

TRL = [
    # Every number of steps, the other split of the prompts, with as many completions.
    (
        {"eval_strategy": "steps", "eval_steps": 50, "dataset_name": "org/set"}
        | {"dataset_test_split": "dev", "num_generations_eval": 2},
        {"evaluation.every": 50, "evaluation.sets.held_out.split": "dev"}
        | {"evaluation.prompts_per_set": 1000000, "evaluation.completions_per_prompt": 2}
        | {"eval_strategy": "near"},
    ),
    (
        {"eval_strategy": "epoch", "dataset_name": "org/set"},
        {"evaluation.every": None, "eval_strategy": "left"},
    ),
    ({"eval_strategy": "steps", "eval_steps": 50}, {"evaluation.every": None}),
    # Sizes are per process: documents of a step, and prompts of the batch that is sampled at once.
    ({}, {"accumulation.docs_per_step": 8, "rollout.prompts_per_batch": 1}),
    (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 4},
        {"accumulation.docs_per_step": 32, "rollout.prompts_per_batch": 8, "rollout.group_size": 4},
    ),
    (
        {"generation_batch_size": 128, "num_generations": 16},
        {"accumulation.docs_per_step": 8, "rollout.prompts_per_batch": 8},
    ),
    (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"rollout.prompts_per_batch": 2, "accumulation.last_step": "carry"},
    ),
    ({"per_device_train_batch_size": 2}, {"generation_batch_size": "left"}),
    # `constant` has no warm-up, a share is one of max_steps, rounded up.
    ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"optimizer.warmup_steps": 0}),
    (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 10, "warmup_steps": "near"},
    ),
    ({"warmup_steps": 0.1, "max_steps": 205}, {"optimizer.warmup_steps": 21}),
    ({"warmup_ratio": 0.03, "max_steps": 100}, {"optimizer.warmup_steps": 3}),
    ({"warmup_ratio": 0.03}, {"optimizer.warmup_steps": None, "warmup_ratio": "left"}),
    (
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-7},
            "warmup_steps": 0,
        },
        {"optimizer.schedule": "cosine", "optimizer.min_learning_rate": 1e-7},
    ),
    (
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "learning_rate": 2e-6,
        },
        {"optimizer.schedule": "cosine", "optimizer.min_learning_rate": 2e-7},
    ),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, {"lr_scheduler_type": "left"}),
    (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}},
        {"optimizer.schedule": None, "lr_scheduler_type": "left"},
    ),
    ({"save_steps": 0.1, "max_steps": 55}, {"trainer.checkpoint_every": 6}),
    # All checkpoints are kept there, unless save_total_limit says how many.
    ({"save_steps": 5}, {"trainer.keep_checkpoints": 10**6}),
    ({"save_steps": 0.1, "max_steps": 55}, {"trainer.keep_checkpoints": 10**6}),
    ({"save_steps": 5, "save_total_limit": 3}, {"trainer.keep_checkpoints": 3}),
    ({"save_total_limit": None}, {"trainer.keep_checkpoints": 10**6}),
    # A share of the steps is rounded up, and is of their number, where that is known.
    (
        {"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 55, "dataset_name": "org/set"},
        {"evaluation.every": 6},
    ),
    (
        {"eval_strategy": "steps", "logging_steps": 0.2, "max_steps": 55}
        | {"dataset_name": "org/set"},
        {"evaluation.every": 11},
    ),
    (
        {"eval_strategy": "steps", "eval_steps": 0.1, "dataset_name": "org/set"},
        {"evaluation.every": None, "eval_steps": "left"},
    ),
    # Trackers are those of the list, in whatever order.
    (
        {"report_to": ["tensorboard", "wandb", "mlflow"]},
        {"tracking": "mlflow", "tracking.also": ["wandb", "tensorboard"], "report_to": None},
    ),
    ({"report_to": ["wandb", "mlflow"]}, {"tracking": "mlflow", "tracking.also": ["wandb"]}),
    ({"report_to": ["swanlab", "wandb"]}, {"tracking": "wandb", "report_to": "near"}),
    ({"save_steps": 0.1}, {"trainer.checkpoint_every": None, "save_steps": "left"}),
    ({"max_steps": 55}, {"trainer.max_steps": 55, "num_train_epochs": None}),
    ({}, {"num_train_epochs": "left"}),
    ({"max_prompt_length": 512}, {"max_prompt_length": "left"}),
    # What does nothing beside the other keys is listed, but not what their program derived itself.
    ({"lora_r": 4, "dataset_test_split": "dev"}, {"lora_r": "left", "dataset_test_split": "left"}),
    ({"num_train_epochs": 3}, {"trainer.max_steps": None, "num_train_epochs": "left"}),
    ({"use_bias_correction_kl": False}, {"use_bias_correction_kl": "left", "kl": "none"}),
    ({"steps_per_generation": 1}, {"steps_per_generation": None}),
    # cispo caps the ratio itself, which is 0.2 by default; with a ratio of the completion it and
    # sapo are other losses.
    (
        {"loss_type": "cispo"},
        {
            "loss_type": "near",
            "loss": "cispo",
            "loss.epsilon_high": 1e-9,
            "aggregation": "token_mean",
        },
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss": "cispo", "loss.epsilon_high": 4, "aggregation": "token_mean"},
    ),
    ({"loss_type": "cispo", "epsilon_high": 1.28}, {"loss.epsilon_high": 0.28}),
    (
        {"loss_type": "cispo", "epsilon_high": 5, "importance_sampling_level": "sequence"},
        {"importance_sampling_level": "left", "loss": "LOSS", "aggregation": "token_mean"},
    ),
    (
        {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
        {"loss": "sapo", "aggregation": "sample_mean", "loss.temperature_negative": 1.2},
    ),
    (
        {"loss_type": "sapo", "importance_sampling_level": "sequence", "sapo_temperature_neg": 2},
        {"loss": "LOSS", "aggregation": "sample_mean", "sapo_temperature_neg": "left"},
    ),
    (
        {"loss_type": "dr_grpo", "max_completion_length": 300},
        {"loss": "grpo", "aggregation": "constant", "aggregation.divisor": 300},
    ),
    (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss": "gspo", "loss.epsilon_low": 0.2, "aggregation.divisor": 1},
    ),
    (
        {"loss_type": "bnpo", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
        {"loss_type": "near", "loss": "grpo", "aggregation": "token_mean"},
    ),
    ({"loss_type": "bnpo"}, {"aggregation": "token_mean", "loss_type": None}),
    (
        {"loss_type": "bnpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"aggregation": "sample_mean"},
    ),
    (
        {"loss_type": "new_loss", "scale_rewards": "other"},
        {"loss_type": "left", "loss": "LOSS", "aggregation": "AGGREGATION"}
        | {"advantage": "ADVANTAGE", "kl": "none"},
    ),
    ({"steps_per_generation": 4}, {"aggregation": "token_mean", "loss_type": "near"}),
    ({"epsilon": 0.1}, {"loss.epsilon_low": 0.1, "loss.epsilon_high": 0.1}),
    ({"epsilon": 0.1, "epsilon_high": 0.3}, {"loss.epsilon_low": 0.1, "loss.epsilon_high": 0.3}),
    ({"delta": 4.0}, {"loss.dual_clip": 4}),
    ({"delta": 1.1}, {"loss.dual_clip": None, "delta": "left"}),
    ({"delta": 4.0, "importance_sampling_level": "sequence"}, {"delta": "left"}),
    # The penalty is weighted by the token's ratio, or by the completion's.
    ({"beta": 0.04}, {"kl": "k3_ratio", "kl.coefficient": 0.04}),
    ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl": "k3", "kl.coefficient": 0.04}),
    (
        {"beta": 0.04, "importance_sampling_level": "sequence", "sync_ref_model": True},
        {"beta": "near", "kl": "k3_ratio", "kl.coefficient": 0.04, "kl.update_every": 512},
    ),
    # The kwargs of sampling come before the keys of the same names.
    (
        {"top_p": 0.9, "generation_kwargs": {"top_p": 0.8, "top_k": 9, "temperature": 0.5}},
        {"rollout.top_p": 0.8, "rollout.top_k": 9, "rollout.temperature": 0.5}
        | {"sampler.keep_top": 0, "generation_kwargs.temperature": "near"},
    ),
    (
        {"generation_kwargs": {"temperature": 1.0, "stop": ["</a>"], "min_p": 0.05}},
        {"generation_kwargs.temperature": None, "rollout.stop": ["</a>"]}
        | {"generation_kwargs.min_p": "left"},
    ),
    (
        {"use_vllm": True, "generation_kwargs": {"top_p": 0.8}},
        {"vllm_importance_sampling_correction": "left", "rollout.top_p": 0.8},
    ),
    (
        {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 64},
        {"kl.update_every": 64, "kl.update_rate": 0.6},
    ),
    # vLLM's correction is on by default; one that is capped by nothing is capped beyond e^20.
    ({"use_vllm": True}, {"sampler": "vllm", "correction": "sequence_mask"}),
    (
        {
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": None,
        },
        {"correction": "token_mask", "correction.low": "null", "correction.high": 1e9},
    ),
    (
        {"use_vllm": True, "loss_type": "vespo"},
        {"vllm_importance_sampling_correction": "left", "correction": None, "loss": "vespo"},
    ),
    (
        {"use_vllm": True, "top_p": 0.9},
        {"vllm_importance_sampling_correction": "left", "rollout.top_p": 0.9},
    ),
    (
        {"use_vllm": True, "top_k": 9},
        {"vllm_importance_sampling_correction": "left", "sampler.keep_top": 0},
    ),
    ({"off_policy_mask_threshold": None}, {"off_policy_mask_threshold": None, "correction": None}),
    ({"off_policy_mask_threshold": 0.3}, {"correction.threshold": 0.3}),
    (
        {"off_policy_mask_threshold": 0.3, "use_vllm": True},
        {"off_policy_mask_threshold": "left", "correction": "sequence_mask"},
    ),
    ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, {"vllm_tensor_parallel_size": "left"}),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "node7"},
        {"sampler.urls": "[http://node7:8000]"},
    ),
    ({"scale_rewards": False}, {"advantage": "dr_grpo", "scale_rewards": None}),
    ({"scale_rewards": "batch"}, {"advantage": "batch_std", "scale_rewards": "near"}),
    ({}, {"advantage": "grpo", "scale_rewards": "near"}),
    *(
        (
            {"multi_objective_aggregation": "normalize_then_sum"} | rewards,
            {"advantage": advantage, "multi_objective_aggregation": said},
        )
        for rewards, advantage, said in (
            ({}, "ADVANTAGE", "left"),
            ({"reward_funcs": "my.reward"}, "grpo", "near"),
            ({"reward_funcs": ["my.reward"], "reward_weights": [2]}, "grpo", "near"),
            ({"reward_funcs": ["my.reward", "my.form"]}, "gdpo", "near"),
        )
    ),
    # bf16 is on unless it is set, with weights in float32.
    ({}, {"model.dtype": "bfloat16", "model.fp32_lm_head": False}),
    ({"fp16": True}, {"model.dtype": "float16"}),
    ({"bf16": False}, {"model.dtype": "float32"}),
    ({"dtype": "bfloat16"}, {"dtype": "left"}),
    ({"cast_lm_head_to_fp32": True}, {"model.fp32_lm_head": True}),
    # The bonus is a mean over tokens of a micro-batch.
    ({"entropy_coef": 0.01}, {"entropy.coefficient": 0.01}),
    ({"entropy_coef": 0.01, "gradient_accumulation_steps": 2}, {"entropy_coef": "left"}),
    ({"entropy_coef": 0.01, "loss_type": "grpo"}, {"entropy_coef": "left"}),
    (
        {"entropy_coef": 0.01, "loss_type": "grpo", "per_device_train_batch_size": 1}
        | {"gradient_accumulation_steps": 8},
        {"entropy.coefficient": 0.01},
    ),
    (
        {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]},
        {"model.lora_rank": 8, "model.lora_targets": ["q_proj", "v_proj"], "lora_dropout": "left"},
    ),
    ({"lora_r": 8}, {"model.lora_rank": None}),
    *(
        (
            {"mask_truncated_completions": True, "loss_type": loss, "num_generations": 2}
            | {"per_device_train_batch_size": size},
            {"rollout.truncated": "mask", "mask_truncated_completions": remark},
        )
        for loss, size, remark in (
            ("dapo", 2, "apart"),
            ("bnpo", 2, "apart"),
            ("bnpo", 1, None),
            ("grpo", 2, None),
        )
    ),
    ({"top_k": 50, "min_p": 0.1}, {"rollout.top_k": 50, "sampler.keep_top": 0, "min_p": "left"}),
    ({"top_k": 5, "top_p": 0.9}, {"rollout.top_k": 5, "rollout.top_p": 0.9, "sampler.keep_top": 0}),
    ({"num_iterations": 2}, {"rollout.passes": 2, "num_iterations": None}),
    (
        {"num_iterations": 2, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
        {"rollout.passes": None, "accumulation.last_step": "carry", "num_iterations": "left"},
    ),
    ({"top_k": 0, "top_p": 1, "repetition_penalty": 1.0}, {"top_k": None, "rollout.top_p": None}),
    ({"max_grad_norm": 0}, {"optimizer.max_grad_norm": "null"}),
    (
        {"report_to": ["wandb", "tensorboard"], "project": "p"},
        {"tracking": "wandb", "tracking.also": "[tensorboard]", "tracking.experiment": "p"},
    ),
    ({"report_to": "swanlab"}, {"report_to": "left", "tracking": None}),
    (
        {"reward_funcs": ["accuracy_reward"]},
        {"task.verifier": "trl.rewards.accuracy_reward"},
    ),
    (
        {"reward_funcs": ["my.reward", "think_format_reward"], "reward_weights": [1.0, 0.5]},
        {
            "task.verifiers": {
                "reward": {"verifier": "my.reward", "weight": 1.0},
                "think_format_reward": {
                    "verifier": "trl.rewards.think_format_reward",
                    "weight": 0.5,
                },
            },
            "reward_funcs": None,
            "reward_weights": None,
        },
    ),
    # A weight is missing, two have one name, and one is no function.
    (
        {"reward_funcs": ["my.reward", "my.other"], "reward_weights": [1]},
        {"reward_funcs": "left", "reward_weights": "left", "task.verifiers": None},
    ),
    ({"reward_funcs": ["my.reward", "other.reward"]}, {"reward_funcs": "left"}),
    # One without a path leaves the others in the command.
    (
        {"reward_funcs": ["my.reward", "org/judge-7b", "make(3)"], "reward_weights": [1, 2, 0.5]},
        {
            "task.verifiers": {
                "reward": {"verifier": "my.reward", "weight": 1},
                "judge": {"verifier": "VERIFIER", "weight": 2},
                "make": {"verifier": "VERIFIER", "weight": 0.5},
            },
            "reward_funcs": "left",
            "task.verifier": None,
        },
    ),
    ({"reward_funcs": ["make(3)"]}, {"reward_funcs": "left", "task.verifier": "VERIFIER"}),
    # By its name alone it is of 1280 tokens, the last 256 of which cost something.
    (
        {"reward_funcs": ["my.reward", SOFT], "max_completion_length": 1280}
        | {"reward_weights": [1, 0.5]},
        {"task.verifier": "my.reward", "rollout.overlong_buffer": 256}
        | {"rollout.overlong_penalty": 0.5, "reward_weights": None, SOFT: None},
    ),
    (
        {"reward_funcs": [SOFT, "my.reward"], "max_completion_length": 1152},
        {"task.verifier": "my.reward", "rollout.overlong_buffer": 128}
        | {"rollout.overlong_penalty": 0.5},
    ),
    (
        {"reward_funcs": [f"{SOFT}(max_completion_len=100, soft_punish_cache=20)"]}
        | {"max_completion_length": 100, "reward_weights": [2]},
        {"rollout.overlong_buffer": 20, "rollout.overlong_penalty": 2}
        | {"task.verifier": "VERIFIER", "reward_funcs": None},
    ),
    # It is 0 up to 1024 tokens, -1 beyond 1280, and no part of one reward among several.
    *(
        (
            {"reward_funcs": ["my.reward", SOFT]} | values,
            {"task.verifier": "my.reward", "rollout.overlong_buffer": None}
            | {f"{SOFT}.max_completion_len": said},
        )
        for values, said in (
            ({"max_completion_length": 1024}, "near"),
            ({"max_completion_length": 1281}, "left"),
            (
                {"max_completion_length": 1280}
                | {"multi_objective_aggregation": "normalize_then_sum"},
                "left",
            ),
        )
    ),
    (
        {"reward_funcs": ["my.reward", SOFT], "reward_weights": [1]},
        {"reward_funcs": "left", "rollout.overlong_buffer": None, "task.verifiers": None},
    ),
    ({"reward_funcs": ["my.reward"], "reward_weights": [2]}, {"task.verifier": None}),
    ({}, {"task.verifier": "VERIFIER"}),
    # A mixture of one data set is that one; of two, or of a part, it has no equal.
    (
        {"datasets": [{"path": "org/set", "name": "main"}]},
        {"task.path": "org/set", "task.config": "main", "task.split": "train"}
        | {"train_dataset.path": "near"},
    ),
    ({"datasets": [{"path": "json", "data_files": ["a.jsonl"]}]}, {"task.path": "a.jsonl"}),
    ({"datasets": [{"path": "json", "data_files": ["a", "b"]}]}, {"train_dataset.path": "left"}),
    (
        {"datasets": [{"path": "org/set", "split": "train[:5%]"}]},
        {"train_dataset.path": "left", "train_dataset.split": "left", "task.split": None},
    ),
    ({"datasets": [{"path": "org/set"}, {"path": "org/other"}]}, {"datasets": "left"}),
    (
        {"dataset_name": "trl-lib/DeepMath-103K"},
        {"task.path": "trl-lib/DeepMath-103K", "task.split": "train"},
    ),
    ({"dataset_name": "prompts.jsonl"}, {"task.path": "prompts.jsonl", "task.split": None}),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"task.chat_arguments": {"enable_thinking": False}},
    ),
    # Numbers that are taken as they are, each by its own key.
    (
        {"adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-7, "learning_rate": 2e-6}
        | {"weight_decay": 0.02, "max_grad_norm": 0.3, "gradient_checkpointing": False},
        {"optimizer.beta1": 0.8, "optimizer.beta2": 0.97, "optimizer.epsilon": 1e-7}
        | {"optimizer.learning_rate": 2e-6, "optimizer.weight_decay": 0.02}
        | {"optimizer.max_grad_norm": 0.3, "model.gradient_checkpointing": False},
    ),
    (
        {"dataset_name": "a/b", "dataset_config": "c", "dataset_train_split": "d", "run_name": "e"}
        | {"save_total_limit": 3, "use_vllm": True, "vllm_mode": "colocate"}
        | {"vllm_gpu_memory_utilization": 0.4},
        {"task.path": "a/b", "task.config": "c", "task.split": "d", "tracking.run_name": "e"}
        | {"trainer.keep_checkpoints": 3, "sampler.gpu_memory_share": 0.4},
    ),
    (
        {"loss_type": "vespo", "vespo_k_pos": 2.1, "vespo_k_neg": 2.2}
        | {"vespo_lambda_pos": 2.3, "vespo_lambda_neg": 2.4},
        {"loss.power_positive": 2.1, "loss.power_negative": 2.2}
        | {"loss.decay_positive": 2.3, "loss.decay_negative": 2.4},
    ),
    (
        {"loss_type": "vespo"},
        {"loss.power_positive": 2, "loss.power_negative": 3}
        | {"loss.decay_positive": 3, "loss.decay_negative": 2},
    ),
    ({"loss_type": "sapo", "sapo_temperature_pos": 1.3}, {"loss.temperature_positive": 1.3}),
    (
        {"beta": 0.04, "sync_ref_model": True},
        {"kl.update_every": 512, "kl.update_rate": 0.6},
    ),
    ({"top_entropy_quantile": 0.2}, {"entropy.top_fraction": 0.2}),
    (
        {"top_entropy_quantile": 0.2, "entropy_coef": 0.01},
        {"entropy.coefficient": 0.01, "entropy_coef": "apart"},
    ),
    (
        {"top_entropy_quantile": 0.2, "gradient_accumulation_steps": 2},
        {"top_entropy_quantile": "left", "entropy.top_fraction": None},
    ),
]


@pytest.mark.parametrize(("values", "expected"), TRL, ids=lambda value: str([*value.items()])[:60])
def test_a_value_of_trl(tmp_path, values, expected):
    translation = translated(tmp_path, "theirs.json", {"num_generations": 8} | values)
    assert found(translation, expected) == expected


def test_a_value_is_explained_by_the_key_that_the_file_sets(tmp_path, capsys):
    """That is another one than the row's own, which is at its default."""
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"num_generations": 8, "max_steps": 50, "warmup_ratio": 0.1}))
    assert main(["translate", str(file)]) == 0
    page = capsys.readouterr().out
    assert "optimizer.warmup_steps=5" in page
    assert (
        " trainer.max_steps=50\n\nFor a try of two steps, type trainer.max_steps=2 in place of its "
        "last word, as a key is typed once. That it notes that the steps end in the warm-up is of "
        "the try alone.\n" in page
    )
    assert "Keys of earlier versions, which TRL 1.16.0 does not have:\n  warmup_ratio\n" in page
    assert "optimizer.warmup_steps=5:" not in page  # in the list of their defaults
    assert "\n  warmup_ratio=0.1: the rate is 0 at the first update there" in page
    assert "warmup_steps=0" not in page
    file.write_text(json.dumps({"num_generations": 8, "max_steps": 50}))
    assert main(["translate", str(file)]) == 0
    assert "end in the warm-up" not in capsys.readouterr().out  # there is none


SIZES = {"data.train_batch_size": 512, "actor_rollout_ref.rollout.n": 8}
"""With 256 prompts in a mini-batch there are two updates a batch."""
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"
CORRECTION = "algorithm.rollout_correction"
BYPASS = {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"}
BYPASS |= {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_rs": "token_k3"}
BYPASS |= {f"{CORRECTION}.rollout_rs_threshold": 0.1}
GRPO = {"algorithm.adv_estimator": "grpo"}
OPTIM = "actor_rollout_ref.actor.optim"
MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron", "trainer.total_training_steps": 100}
FALLING = {f"{OPTIM}.min_lr": 1e-7, f"{OPTIM}.lr_decay_steps": 100}
GAE = {"algorithm.adv_estimator": "gae"}
VALIDATION = {
    "trainer.test_freq": 5,
    "data.val_files": ["test.parquet"],
    "actor_rollout_ref.rollout.val_kwargs.n": 4,
}
"""A step of verl is two updates, by its defaults of the sizes."""

VERL = [
    (
        VALIDATION | {"actor_rollout_ref.rollout.val_kwargs.n": 1},
        {"evaluation.every": 10, "evaluation.sets.held_out.path": "test.parquet"}
        | {"evaluation.prompts_per_set": 1000000, "evaluation.completions_per_prompt": 1}
        | {"data.val_max_samples": None}
        | {"evaluation.temperature": 0, "evaluation.top_p": None, "trainer.test_freq": None},
    ),
    (
        VALIDATION
        | {
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6,
            "trainer.val_before_train": False,
        },
        {"evaluation.completions_per_prompt": 4, "evaluation.temperature": 0.6}
        | {"evaluation.top_p": None, "evaluation.top_k": None}
        | {"trainer.val_before_train": "near"},
    ),
    # At temperature 0, their default, all completions are the same.
    (VALIDATION, {"evaluation.completions_per_prompt": 1, f"{VAL}.n": "near"}),
    # The loops of agents take the temperature without do_sample, and only hf_rollout.py reads it.
    (VALIDATION | {f"{VAL}.temperature": 0.6}, {"evaluation.temperature": 0.6}),
    (
        VALIDATION | {f"{VAL}.temperature": 0.6, f"{VAL}.top_p": 0.9, f"{ROLLOUT}.name": "hf"},
        {"evaluation.temperature": 0, f"{VAL}.top_p": "left", "evaluation.top_p": None},
    ),
    # What is not typed is as in training here, and without a limit there.
    *(
        (
            VALIDATION
            | {f"{VAL}.temperature": 1.0}
            | {f"{ROLLOUT}.{key}": value for key, value in training.items()}
            | {f"{VAL}.{key}": value for key, value in validation.items()},
            {f"evaluation.{key}": value for key, value in expected.items()},
        )
        for training, validation, expected in [
            ({"top_k": 2}, {}, {"top_k": 1000000, "top_p": None}),
            ({"top_k": 50}, {"top_k": 20}, {"top_k": 20}),
            ({"top_k": 50}, {"top_k": 50}, {"top_k": None}),
            ({"top_k": -1}, {"top_k": 0}, {"top_k": None}),
            ({"top_p": 0.9}, {}, {"top_p": 1.0, "top_k": None}),
            ({"top_p": 0.9}, {"top_p": 0.9}, {"top_p": None}),
            ({"top_k": 50, "top_p": 0.9}, {"temperature": 0}, {"top_k": None, "top_p": None}),
        ]
    ),
    (
        VALIDATION | {"data.val_max_samples": 100},
        {"evaluation.every": 10, "evaluation.prompts_per_set": 100}
        | {"data.val_max_samples": "near"},
    ),
    # Several files are several sets, by their names, where these differ.
    (
        VALIDATION | {"data.val_files": ["d/a.parquet", "d/b.parquet"]},
        {"evaluation.sets": {"a": {"path": "d/a.parquet"}, "b": {"path": "d/b.parquet"}}}
        | {"evaluation.every": 10, "evaluation.temperature": 0, "data.val_files": None}
        | {"evaluation.prompts_per_set": 1000000, "evaluation.completions_per_prompt": 1}
        | {"data.val_files": "near", "evaluation.sets.held_out.path": None},
    ),
    *(
        (
            VALIDATION | {"data.val_files": files},
            {"evaluation.every": 10}
            | {"evaluation.sets": {n: {"path": p} for n, p in zip(names, files, strict=True)}},
        )
        for files, names in [
            (["d/a.parquet", "e/a.parquet"], ["d", "e"]),
            (["d/a.parquet", "d/b.parquet", "e/a.parquet"], ["d_a", "d_b", "e_a"]),
            (["d/aime-24.parquet", "d/amc.parquet"], ["aime_24", "amc"]),
        ]
    ),
    (
        VALIDATION | {"data.val_files": ["d/a.parquet", "d/a.parquet"]},
        {"evaluation.every": None, "data.val_files": "left", f"{VAL}.n": "left"},
    ),
    ({"data.val_files": "test.parquet"}, {"evaluation.every": None, "data.val_files": "left"}),
    (
        {"data.val_files": "test.parquet", "trainer.val_before_train": False},
        {"data.val_files": "left", "trainer.val_before_train": None},
    ),
    (
        {},
        {"rollout.prompts_per_batch": 512, "accumulation.docs_per_step": 2048, "loss": "grpo"}
        | {"loss.dual_clip": 3, "aggregation": "token_mean", "rollout.group_size": 8},
    ),
    (
        {"trainer.total_training_steps": 100},
        {"trainer.max_steps": 200, "trainer.total_epochs": None},
    ),
    (
        {f"{ACTOR}.ppo_epochs": 3, "trainer.total_training_steps": 100},
        {"rollout.passes": 3, "trainer.max_steps": 600},
    ),
    ({f"{ACTOR}.shuffle": True}, {f"{ACTOR}.shuffle": "left", "rollout.pass_order": None}),
    ({"trainer.save_freq": 20}, {"trainer.checkpoint_every": 40, "trainer.total_epochs": "left"}),
    # Warm-up counts batches.
    ({f"{ACTOR}.optim.lr_warmup_steps": 10}, {"optimizer.warmup_steps": 20}),
    (
        {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 105},
        {"optimizer.warmup_steps": 20},
    ),
    (
        {f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1},
        {"optimizer.warmup_steps": None, f"{ACTOR}.optim.lr_warmup_steps_ratio": "left"},
    ),
    ({}, {"optimizer.warmup_steps": "0", "optimizer.beta2": 0.999}),
    ({f"{ACTOR}.optim.lr_scheduler_type": "cosine"}, {"optimizer.schedule": "cosine"}),
    # The trainer sets the total of the schedule itself.
    ({f"{ACTOR}.optim.total_training_steps": 9}, {f"{ACTOR}.optim.total_training_steps": "left"}),
    (
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.min_lr_ratio": 0.1},
        {"optimizer.schedule": "cosine", "optimizer.min_learning_rate": 1e-7},
    ),
    # The critic alone: from the first batch on, the policy is updated at critic_warmup=1.
    (GAE | {"trainer.critic_warmup": 1}, {"critic.steps_before_policy": 0}),
    (GAE | {"trainer.critic_warmup": 6}, {"critic.steps_before_policy": 10}),
    (GAE, {"advantage": "gae", "advantage.gae_lambda": 1, "critic.clip": 0.5}),
    (GAE | {"critic.optim.weight_decay": 0.1}, {"critic.optim.weight_decay": "left"}),
    ({"critic.optim.lr": 1e-4}, {"critic.learning_rate": None, "critic.optim.lr": "left"}),
    # Losses by their own bounds; clip_ratio alone does nothing beside its two bounds.
    ({f"{ACTOR}.clip_ratio": 0.3}, {f"{ACTOR}.clip_ratio": "left", "loss.epsilon_low": 0.2}),
    (
        {f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_low": None},
        {"loss.epsilon_low": 0.3, "loss.epsilon_high": 0.2},
    ),
    ({f"{ACTOR}.clip_ratio_high": 0.28}, {"loss.epsilon_high": 0.28}),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "dppo_kl"},
        {"loss": "dppo", "loss.divergence": "binary_kl", "loss.delta_low": 0.2}
        | {"loss.delta_high": 0.2, "loss.ratio_cap": 3},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "dppo_tv", f"{ACTOR}.clip_ratio_c": 20.0},
        {"loss": "dppo", "loss.delta_low": 0.2, "loss.ratio_cap": 20},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.1},
        {"loss": "sapo", "aggregation": "sample_mean", "loss.temperature_negative": 1.1},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"},
        {"loss": "gmpo", "aggregation": "sample_mean", "loss.epsilon_low": 0.2}
        | {f"{ACTOR}.policy_loss.loss_mode": "near"},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.entropy_coeff": 0.01},
        {f"{ACTOR}.entropy_coeff": "left", "entropy.coefficient": None},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10},
        {"loss": "cispo", "loss.epsilon_low": "null", "loss.epsilon_high": 0.2},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.5},
        {"loss": "kimi", "loss.tau": 0.5},
    ),
    ({f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}, {"loss": "LOSS"}),
    # 1 / (D * L) is 1 for L = 1 / D.
    (
        {f"{ACTOR}.loss_agg_mode": "token-sum"},
        {"aggregation": "constant", "aggregation.divisor": 1 / 2048},
    ),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, {"aggregation.divisor": "1"}),
    (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 4096},
        {"aggregation": "constant", "aggregation.divisor": 4096},
    ),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, {f"{ACTOR}.loss_agg_mode": "left"}),
    # k3+ has the gradient of k2; abs and full have no equal.
    (
        {f"{ACTOR}.use_kl_loss": True},
        {"kl": "k3", "kl.coefficient": 0.001, f"{ACTOR}.kl_loss_type": "near"},
    ),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+"}, {"kl": "k2"}),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "low_var_kl+"}, {"kl": "k2"}),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "mse"}, {"kl": "k2"}),
    (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "abs"},
        {"kl": "KL", "kl.coefficient": 0.001, f"{ACTOR}.kl_loss_type": "left"},
    ),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, {"kl": "none"}),
    ({}, {"kl": "none"}),
    (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.policy_loss.loss_mode": "sapo"},
        {"kl": "k3", f"{ACTOR}.use_kl_loss": "near"},
    ),
    (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01}
        | {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5},
        {"kl": "k3", "kl.coefficient": 0.01, "algorithm.use_kl_in_reward": "left"}
        | {f"{ACTOR}.kl_loss_coef": None, "algorithm.kl_ctrl.kl_coef": "left"},
    ),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05},
        {"kl": "k1", "kl.place": "reward", "kl.coefficient": 0.05},
    ),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k3+"},
        {"kl": "k3", "algorithm.kl_penalty": "near"},
    ),
    (
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": 0.2,
        },
        {"kl": "k1", "kl.place": "reward", "kl.target": 0.2, "kl.horizon": 10000},
    ),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, {"advantage": "dr_grpo"}),
    (
        {"algorithm.adv_estimator": "grpo_passk"},
        {"algorithm.adv_estimator": "near", "advantage": "pass_at_k"},
    ),
    ({"algorithm.adv_estimator": "remax"}, {"advantage": "ADVANTAGE"}),
    # Rewards to go have the later penalties alone, and GDPO's scores none.
    *(
        ({"algorithm.adv_estimator": name, "algorithm.use_kl_in_reward": True} | loss, expected)
        for name, loss, expected in [
            # What is left to be filled in has their coefficient all the same.
            (
                "reinforce_plus_plus",
                {"algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_ctrl.type": "adaptive"},
                {"kl": "KL", "kl.place": None, "kl.coefficient": 0.01}
                | {"kl.target": 0.1, "kl.horizon": 10000, "algorithm.kl_ctrl.kl_coef": None},
            ),
            (
                "reinforce_plus_plus",
                {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.2},
                {"kl": "k3", "kl.coefficient": 0.2, "algorithm.use_kl_in_reward": "left"},
            ),
            ("reinforce_plus_plus_baseline", {}, {"kl": "k1", "kl.place": "reward"}),
            ("gae", {}, {"kl": "k1", "kl.place": "reward"}),
            ("gdpo", {}, {"kl": "none", "algorithm.use_kl_in_reward": "left"}),
        ]
    ),
    # Verl hands the deviation to grpo and grpo_passk alone, and a discount acts with two of all.
    (
        {"algorithm.adv_estimator": "grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo": False},
        {"algorithm.adv_estimator": "near", "advantage": "grpo"},
    ),
    (
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.95},
        {"algorithm.gamma": "left", "advantage.gamma": None},
    ),
    ({"algorithm.adv_estimator": "rloo", "algorithm.gamma": 1}, {"algorithm.gamma": None}),
    (
        {"algorithm.adv_estimator": "grpo_passk", "algorithm.norm_adv_by_std_in_grpo": False},
        {"advantage": "pass_at_k", "algorithm.adv_estimator": None},
    ),
    *(
        (
            {"algorithm.adv_estimator": name},
            {"algorithm.adv_estimator": "near", "advantage": name},
        )
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
    ),
    (
        {f"{CORRECTION}.rollout_is": "token"},
        {"correction": "token_truncate", f"{CORRECTION}.rollout_is": None},
    ),
    # A loss of documents has the mean of their tokens' factors; a factor of a document is its own.
    *(
        (
            {f"{ACTOR}.policy_loss.loss_mode": mode, f"{CORRECTION}.rollout_is": level},
            {f"{CORRECTION}.rollout_is": near, "correction": f"{level}_truncate"},
        )
        for mode in ("gspo", "geo_mean")
        for level, near in (("token", "near"), ("sequence", None))
    ),
    # A deprecated name counts before the one that has taken its place.
    (
        {f"{ACTOR}.optim.grad_clip": 0.3, f"{ACTOR}.optim.clip_grad": 2},
        {"optimizer.max_grad_norm": 0.3, f"{ACTOR}.optim.grad_clip": None},
    ),
    (
        GAE | {f"{ACTOR}.optim.grad_clip": 0.3, "critic.optim.grad_clip": 0.3},
        {"optimizer.max_grad_norm": 0.3, "critic.optim.clip_grad": None}
        | {"critic.optim.grad_clip": None},
    ),
    (GAE | {"critic.optim.grad_clip": 0.3}, {"critic.optim.grad_clip": "left"}),
    (
        {"trainer.remove_previous_ckpt_in_save": True, "trainer.max_actor_ckpt_to_keep": 5},
        {"trainer.keep_checkpoints": 1},
    ),
    # null keeps all of them there, and 1000000 is the most that is taken here.
    ({"trainer.save_freq": 20}, {"trainer.keep_checkpoints": 10**6}),
    ({"trainer.max_actor_ckpt_to_keep": None}, {"trainer.keep_checkpoints": 10**6}),
    (
        {"trainer.save_freq": 20, "trainer.max_actor_ckpt_to_keep": 5},
        {"trainer.keep_checkpoints": 5},
    ),
    ({}, {"trainer.keep_checkpoints": None}),
    # Megatron's optimizer, whose schedule ends after lr_decay_steps.
    (
        MEGATRON | FALLING | {f"{OPTIM}.lr_decay_style": "cosine"},
        {"optimizer.schedule": "cosine", "optimizer.min_learning_rate": 1e-7}
        | dict.fromkeys(FALLING)
        | {f"{OPTIM}.lr_decay_style": "near"},
    ),
    (
        MEGATRON | FALLING | {f"{OPTIM}.lr_decay_style": "linear", f"{OPTIM}.lr_decay_steps": 50},
        {"optimizer.schedule": "linear", "optimizer.min_learning_rate": 1e-7}
        | {f"{OPTIM}.lr_decay_steps": "left"},
    ),
    (
        MEGATRON | FALLING | {f"{OPTIM}.lr_decay_style": "WSD", f"{OPTIM}.lr_wsd_decay_steps": 9},
        {"optimizer.schedule": None, f"{OPTIM}.lr_decay_style": "left"}
        | {f"{OPTIM}.min_lr": "left", f"{OPTIM}.lr_wsd_decay_steps": "left"},
    ),
    (
        MEGATRON | {f"{OPTIM}.lr_warmup_steps_ratio": 0.1, f"{OPTIM}.lr_decay_steps": 50},
        {"optimizer.warmup_steps": 10},
    ),
    (
        MEGATRON | {f"{OPTIM}.lr_warmup_steps": 4, f"{OPTIM}.lr_warmup_init": 1e-7},
        {"optimizer.warmup_steps": 8, f"{OPTIM}.lr_warmup_init": "left"},
    ),
    (
        MEGATRON | {f"{OPTIM}.optimizer": "adam", f"{OPTIM}.weight_decay": 0.1},
        {f"{OPTIM}.optimizer": None, f"{OPTIM}.weight_decay": None, "optimizer.weight_decay": 0.1},
    ),
    (
        MEGATRON | {f"{OPTIM}.optimizer": "muon", f"{OPTIM}.muon_momentum": 0.9},
        {f"{OPTIM}.optimizer": "left", f"{OPTIM}.muon_momentum": "left"},
    ),
    (
        MEGATRON | {f"{OPTIM}.exp_avg_dtype": "bf16"},
        {f"{OPTIM}.exp_avg_dtype": "left"},
    ),
    # A reward model by its older name, too.
    (
        {"reward_model.enable": True, "reward_model.model.path": "org/model"},
        {"task.verifier": "VERIFIER", "reward_model.enable": "left"}
        | {"reward_model.model.path": "left"},
    ),
    (
        {"reward_model.enable": False, "reward.reward_model.enable": True},
        {"task.verifier": "VERIFIER"},
    ),
    ({"algorithm.gdpo_reward_keys": ["a", "b"]} | GRPO, {"algorithm.gdpo_reward_keys": "left"}),
    (
        {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp32"}},
        {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "left"},
    ),
    (
        {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": 5},
        {"correction": "sequence_truncate", "correction.high": 5},
    ),
    (
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        {"correction": "token_mask", "correction.low": 0.5, "correction.high": 5},
    ),
    (
        {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": 2},
        {f"{CORRECTION}.rollout_rs": "left", "correction": "none"},
    ),
    # A mask of tokens shrinks the token mean there, one of completions the mean of completions not.
    *(
        (
            {
                f"{CORRECTION}.rollout_rs": option,
                f"{CORRECTION}.rollout_rs_threshold": threshold,
                f"{ACTOR}.loss_agg_mode": mode,
            },
            expected,
        )
        for option, threshold, mode, expected in [
            (
                "token_k3",
                0.1,
                "token-sum",
                {
                    "correction": "token_mask",
                    "correction.measure": "k3",
                    "correction.threshold": 0.1,
                },
            ),
            ("token_k3", 0.1, "seq-mean-token-mean", {f"{CORRECTION}.rollout_rs": "left"}),
            ("seq_max_k2", 0.1, "token-mean", {f"{CORRECTION}.rollout_rs": "left"}),
            (
                "seq_max_k2",
                "0.1",
                "seq-mean-token-mean",
                {
                    "correction": "sequence_mask",
                    "correction.mean": "worst",
                    "correction.factor": "one",
                    "correction.measure": "k2",
                    "correction.threshold": 0.1,
                },
            ),
            (
                "seq_mean_k1",
                "0.5_4",
                "seq-mean-token-mean",
                {
                    "correction": "sequence_mask",
                    "correction.mean": "geometric",
                    "correction.factor": "one",
                    "correction.low": 0.25,
                    "correction.high": 2,
                },
            ),
            (
                "seq_sum_k1",
                4,
                "seq-mean-token-mean",
                {"correction.mean": "product", "correction.low": 0.25, "correction.high": 4},
            ),
            ("seq_sum_k3,token_k1", "1,2", "token-sum", {f"{CORRECTION}.rollout_rs": "left"}),
        ]
    ),
    ({f"{CORRECTION}.bypass_mode": True}, {"rollout.old_log_probs": "sampling"}),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"}
        | {"launch.module": "recipe.dapo.main_dapo"},
        {"rollout.old_log_probs": None, "correction": "token_truncate"},
    ),
    # What a step has follows the lengths of completions, but where a batch is one step.
    ({}, {"trainer.balance_batch": "near"}),
    ({f"{ACTOR}.ppo_mini_batch_size": 512}, {"trainer.balance_batch": None}),
    (
        {"trainer.balance_batch": False, "trainer.use_v1": False},
        {"trainer.balance_batch": None},
    ),
    # A key of another section of the same last name is another key.
    (
        {"reward.reward_model.rollout.temperature": 0.5, "critic.model.path": "other"},
        {"rollout.temperature": 1, "model.path": "~/models/deepseek-llm-7b-chat"},
    ),
    (
        {"reward_model.reward_manager": "dapo", "data.max_response_length": 1024}
        | {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True}
        | {"reward_model.reward_kwargs.overlong_buffer_cfg.len": 256},
        {"rollout.overlong_buffer": 256, "rollout.overlong_penalty": 1},
    ),
    (
        {"reward_model.reward_manager": "dapo", "reward_model.overlong_buffer.enable": True}
        | {
            "reward_model.overlong_buffer.len": 64,
            "reward_model.overlong_buffer.penalty_factor": 2,
        },
        {"rollout.overlong_buffer": 64, "rollout.overlong_penalty": 2},
    ),
    ({"algorithm.filter_groups.enable": True}, {"rollout.max_sampling_rounds": 1000}),
    ({f"{ACTOR}.use_kl_loss": True}, {f"{ACTOR}.use_kl_loss": None, "kl": "k3"}),
    ({"algorithm.filter_groups.metric": "acc"}, {"algorithm.filter_groups.metric": "left"}),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 24000},
        {"accumulation.max_tokens": 24000, f"{ACTOR}.use_dynamic_bsz": None},
    ),
    # Other servers than vLLM's have no equal; what has their default says nothing of them.
    (
        {"actor_rollout_ref.rollout.max_num_seqs": 256}
        | {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.7},
        {"actor_rollout_ref.rollout.max_num_seqs": None}
        | {"actor_rollout_ref.rollout.gpu_memory_utilization": "left"},
    ),
    (
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 24000},
        {"accumulation.max_tokens": 4096, f"{ACTOR}.ppo_max_token_len_per_gpu": "left"},
    ),
    ({f"{ACTOR}.fsdp_config.model_dtype": "bf16"}, {f"{ACTOR}.fsdp_config.model_dtype": "left"}),
    (
        {"data.max_prompt_length": 3000, "data.max_response_length": 9000},
        {"accumulation.max_tokens": 12000, "rollout.max_completion_length": 9000},
    ),
    ({"trainer.logger": ["console"], "trainer.project_name": "p"}, {"tracking": "none"}),
    (
        {"trainer.logger": ["tensorboard", "console", "wandb"]},
        {"tracking": "wandb", "tracking.also": ["tensorboard"], "trainer.logger": None},
    ),
    ({"trainer.logger": ["wandb", "swanlab"]}, {"tracking": "wandb", "trainer.logger": "near"}),
    *(
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": name}, {"kl": kind})
        for name, kind in {"kl": "k1", "k2": "k2", "kl+": "k2", "abs+": "k2"}.items()
    ),
    *(
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": name}, {"kl": kind})
        for name, kind in {"kl+": "k1", "mse+": "k2", "low_var_kl": "k3"}.items()
    ),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, {"aggregation": "sample_mean"}),
    ({f"{ACTOR}.policy_loss.loss_mode": "gpg"}, {"loss": "reinforce"}),
    # The file of a function that the current directory has is a module.
    (
        {"custom_reward_function.path": "recipe/own/reward.py"},
        {"task.verifier": "recipe.own.reward.compute_score"},
    ),
    (
        {"reward.custom_reward_function.path": "own.py"}
        | {"reward.custom_reward_function.name": "score"}
        | {"reward.custom_reward_function.reward_kwargs.weight": 2},
        {"task.verifier": "own.score"}
        | {"reward.custom_reward_function.reward_kwargs.weight": "left"},
    ),
    (
        {"custom_reward_function.path": "/shared/own-2.py"},
        {"task.verifier": "VERIFIER", "custom_reward_function.path": "left"},
    ),
    ({"custom_reward_function.path": "/job-2/own.py"}, {"task.verifier": "own.compute_score"}),
    # The rate of other engines falls by default: TorchTitan's to 0 at 10,000 batches.
    (
        {"model_engine": "torchtitan", "trainer.total_training_steps": 2500},
        {"optimizer.schedule": "linear", "optimizer.min_learning_rate": 0.75e-6},
    ),
    (
        {"model_engine": "torchtitan", "trainer.total_training_steps": 2500}
        | {"actor_rollout_ref.actor.optim.lr_warmup_steps": 500}
        | {"actor_rollout_ref.actor.optim.min_lr_factor": 0.05},
        # From 1 at 500 to 0.05 at 10,000, at 2,500.
        {"optimizer.min_learning_rate": 0.8e-6, "optimizer.warmup_steps": 1000},
    ),
    (
        {"model_engine": "torchtitan"},
        {"optimizer.schedule": None, "actor_rollout_ref.actor.optim.decay_type": "left"},
    ),
    (
        {"model_engine": "torchtitan", "trainer.total_training_steps": 2500}
        | {"actor_rollout_ref.actor.optim.decay_type": "sqrt"},
        {"optimizer.schedule": None, "actor_rollout_ref.actor.optim.decay_type": "left"},
    ),
    # VeOmni's falls by a cosine to lr_min, and its warm-up is a share of the batches.
    (
        {"model_engine": "veomni", "actor_rollout_ref.actor.optim.lr_min": 1e-7}
        | {"actor_rollout_ref.actor.optim.lr_warmup_steps": 10},
        {"optimizer.schedule": "cosine", "optimizer.min_learning_rate": 1e-7}
        | {"optimizer.warmup_steps": 0},
    ),
    (
        {"model_engine": "veomni", "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant"},
        {"optimizer.schedule": "constant", "optimizer.min_learning_rate": None},
    ),
    ({}, {"task.verifier": "verl.utils.reward_score.default_compute_score"}),
    ({"algorithm.adv_estimator": "rloo"}, {"advantage": "rloo"}),
    ({"algorithm.adv_estimator": "opo"}, {"advantage": "opo"}),
    ({"algorithm.adv_estimator": "grpo_vectorized"}, {"advantage": "grpo"}),
    # Numbers that are taken as they are, each by its own key.
    (
        GAE | {"algorithm.gamma": 0.9, "algorithm.lam": 0.8, "critic.cliprange_value": 0.4},
        {"advantage.gamma": 0.9, "advantage.gae_lambda": 0.8, "critic.clip": 0.4},
    ),
    (
        {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 32}
        | {"actor_rollout_ref.model.enable_gradient_checkpointing": False}
        | {f"{ACTOR}.optim.clip_grad": 0.3, "trainer.max_actor_ckpt_to_keep": 4},
        {"model.lora_rank": 8, "model.lora_alpha": 32, "model.gradient_checkpointing": False}
        | {"optimizer.max_grad_norm": 0.3, "trainer.keep_checkpoints": 4},
    ),
    (
        {"data.prompt_key": "q", "data.apply_chat_template_kwargs": {"enable_thinking": False}}
        | {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.max_num_seqs": 99}
        | {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6},
        {"task.prompt_field": "q", "task.chat_arguments": {"enable_thinking": False}}
        | {"sampler.max_sequences": 99, "sampler.gpu_memory_share": 0.6},
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_pos": 1.2},
        {"loss.temperature_positive": 1.2},
    ),
]


@pytest.mark.parametrize(("values", "expected"), VERL, ids=lambda value: str([*value.items()])[:60])
def test_a_value_of_verl(tmp_path, values, expected):
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
    assert found(translation, expected) == expected


def test_the_punishment_of_long_completions_is_trls_for_every_length(tmp_path):
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(1280, 256)
    for longest, weight in ((1280, 1), (1100, 0.5)):
        values = {"num_generations": 8, "max_completion_length": longest}
        values |= {"reward_funcs": ["my.reward", SOFT], "reward_weights": [1, weight]}
        typed = translated(tmp_path, "theirs.json", values).typed
        buffer, _ = typed["rollout.overlong_buffer"]
        penalty, _ = typed["rollout.overlong_penalty"]
        for length in range(1, longest + 1):
            ours = overlong_penalty(length, longest, buffer, penalty)
            assert ours == pytest.approx(weight * theirs([[0] * length])[0], abs=1e-12)


def test_the_column_of_answers_and_chats_are_seen_where_the_file_lies_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}], "solution": "1"}\n')
    expected = {"task.path": "p.jsonl", "task.answer_field": "solution"}
    expected |= {"dataset_name": None, "train_dataset.path": None, "task.chat": None}
    for values in (
        {"dataset_name": "p.jsonl"},
        {"datasets": [{"path": "json", "data_files": ["p.jsonl"]}]},
    ):
        translation = translated(tmp_path, "theirs.json", {"num_generations": 8} | values)
        assert found(translation, expected) == expected
    Path("p.jsonl").write_text('{"prompt": "1", "solution": "1", "answer": "2"}\n')
    translation = translated(
        tmp_path, "theirs.json", {"num_generations": 8, "dataset_name": "p.jsonl"}
    )
    expected = {"task.answer_field": None, "dataset_name": None, "task.chat": "never"}
    assert found(translation, expected) == expected
    # A file that the program loads, whose texts it may make chats of.
    for code, expected in (
        ('"p.jsonl")', {"task.chat": "never", "train_dataset.path": None}),
        ('"p.jsonl").map(ask)', {"task.chat": None, "train_dataset.path": "left"}),
        ('"elsewhere.jsonl")', {"task.chat": None, "train_dataset.path": "near"}),
    ):
        program = f'GRPOTrainer("m", train_dataset=load_dataset("json", data_files={code})'
        translation = translated(tmp_path, "train.py", program)
        assert found(translation, expected) == expected
    # Where the rows are not known, a column that is renamed is used all the same.
    renamed = 'load_dataset("csv", data_files="p.csv").rename_column("label", "answer")'
    (tmp_path / "train.py").write_text(f'GRPOTrainer("m", train_dataset={renamed})')
    listed = translate(tmp_path / "train.py", None).partition("What changes what is learned")[2]
    assert "  train_dataset.columns.answer=label: task.answer_field names the column" in listed
    # Without answers reward functions read none; in verl's form they lie elsewhere.
    asked = [{"role": "user", "content": "1"}]
    columns = "train_dataset.columns.answer"
    for more, expected in (
        ({"label": "1"}, {"task.answer_field": "prompt", columns: "near"}),
        ({"reward_model": {"ground_truth": "1"}}, {"task.answer_field": None, columns: None}),
    ):
        Path("p.jsonl").write_text(json.dumps({"prompt": asked} | more))
        translation = translated(
            tmp_path, "theirs.json", {"num_generations": 8, "dataset_name": "p.jsonl"}
        )
        assert found(translation, expected) == expected


def test_epochs_are_steps_where_the_prompts_lie_on_this_machine(tmp_path, monkeypatch):
    """By TRL's RepeatSampler and transformers' trainer, and by verl's dataloader, which all leave
    out a batch that is not whole."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 103)
    trl = {"num_generations": 8, "gradient_accumulation_steps": 2, "num_train_epochs": 2.5}
    trl |= {"num_iterations": 2, "warmup_ratio": 0.1, "save_steps": 0.3}
    # 2 prompts a batch, so 51 of 103; 51 * 2 steps a pass, of which there are 2.5.
    steps = {"trainer.max_steps": 255, "optimizer.warmup_steps": 26}
    steps |= {"trainer.checkpoint_every": 77, "num_train_epochs": None}
    verl = {
        "data.train_batch_size": 16,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_epochs": 3,
    }
    verl |= {f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}
    # 6 of 103 / 16 batches a pass, with 2 updates each; the warm-up is one of 18 batches.
    updates = {"trainer.max_steps": 36, "optimizer.warmup_steps": 2, "trainer.total_epochs": None}
    of_verl = {"data.train_files": "data/train.jsonl"} | GRPO | verl
    translation = translated(tmp_path, "theirs.json", trl | {"dataset_name": "data"})
    assert found(translation, steps) == steps
    assert found(translated(tmp_path, "theirs.json", of_verl), updates) == updates
    # Where the prompts end before the steps that are asked for, a schedule has not come down there.
    for total, says in ((100, "before which the prompts end"), (18, "the rate changes with each")):
        more = {f"{ACTOR}.optim.lr_scheduler_type": "cosine", "trainer.total_training_steps": total}
        translation = translated(tmp_path, "theirs.json", of_verl | more)
        assert found(translation, {"trainer.max_steps": 36}) == {"trainer.max_steps": 36}
        said = [line for line in translation.differing if "lr_scheduler_type=cosine" in line]
        assert says in said[-1]
    # Where prompts are left out, the steps are those without that, and it is said.
    translation = translated(
        tmp_path, "theirs.json", of_verl | {"data.filter_overlong_prompts": True}
    )
    assert found(translation, {"trainer.max_steps": 36}) == {"trainer.max_steps": 36}
    assert [line for line in translation.apart if "trainer.total_epochs=3: prompts of more" in line]
    # Not known: data sets elsewhere.
    for values, key, formula in (
        (
            trl | {"dataset_name": "org/set"},
            "num_train_epochs=2.5",
            "its data is not here, and `trainer.max_steps` counts optimizer steps: "
            "2.5 x (prompts / 2, "
            "rounded down) x 2, rounded up",
        ),
        (
            trl | {"dataset_name": "org/set", "num_train_epochs": 3.0},
            "num_train_epochs=3",
            "its data is not here: type `trainer.max_steps="
            "$((6 * (N / 2)))` with the number of prompts "
            "in the place of N: 3 epochs, 2 steps for each batch",
        ),
        (
            of_verl
            | {"data.filter_overlong_prompts": True, "data.train_files": "elsewhere.parquet"},
            "trainer.total_epochs=3",
            "its data is not here: type `trainer.max_steps="
            "$((6 * (N / 16)))` with the number of prompts "
            "of at most 512 tokens in the place of N: 3 epochs, 2 steps for each batch",
        ),
        (
            of_verl | {"data.train_max_samples": 50, "data.train_files": "elsewhere.parquet"},
            "trainer.total_epochs=3",
            "its data is not here: type `trainer.max_steps="
            "$((6 * (N / 16)))` with the number of at most "
            "50 prompts in the place of N: 3 epochs, 2 steps for each batch",
        ),
    ):
        (reason,) = [
            reason
            for shown, reason, _ in translated(tmp_path, "theirs.json", values).left
            if shown == key
        ]
        assert reason == formula


def test_fewer_prompts_than_a_batch_are_said_with_the_steps_of_as_many_epochs(
    tmp_path, monkeypatch
):
    """3 epochs of 20 prompts are 60, which are 2 batches of 32 here."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 20)
    trl = {"num_generations": 8, "per_device_train_batch_size": 64, "num_train_epochs": 3.0}
    trl |= {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "dataset_name": "data"}
    verl = {"data.train_batch_size": 32, "trainer.total_epochs": 3, f"{ACTOR}.ppo_epochs": 1}
    verl |= {f"{ACTOR}.ppo_mini_batch_size": 8, "data.train_files": "data/train.jsonl"}
    # 4 steps a batch: of 64 in 256 completions, of 8 in 32 prompts.
    for values, key in ((trl, "num_train_epochs=3"), (GRPO | verl, "trainer.total_epochs=3")):
        left = translated(tmp_path, "theirs.json", values).left
        (reason,) = [reason for shown, reason, _ in left if shown == key]
        assert reason.startswith("fewer prompts (20) than a batch (32), ")
        assert "`trainer.max_steps=8` are 3 epochs" in reason


MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
KL_LOSS = {f"{ACTOR}.use_kl_loss": True}


@pytest.mark.parametrize(
    ("values", "expected", "says"),
    [
        # 70 // 24 = 2 batches a pass, of which verl makes 32 prompts, two mini-batches of 16.
        (
            {"data.train_batch_size": 24, MINI: 16},
            {"trainer.max_steps": 2 * 4 * 2, "evaluation.every": 4, "trainer.checkpoint_every": 8}
            | {"optimizer.warmup_steps": 6, "critic.steps_before_policy": None},
            ["v1 fills the batch with empty completions"],
        ),
        # The same for each pass, and for what a critic is trained before the policy.
        (
            GAE
            | {"data.train_batch_size": 24, MINI: 16, f"{ACTOR}.ppo_epochs": 2}
            | {"trainer.critic_warmup": 3, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
            {"trainer.max_steps": 2 * 4 * 4, "critic.steps_before_policy": 2 * 4},
            ["v1 fills the batch", "as if the empty completions were of the batch"],
        ),
        # One step a batch.
        (
            {"data.train_batch_size": 8, MINI: 32, f"{ACTOR}.use_dynamic_bsz": True},
            {"trainer.max_steps": 8 * 4, "evaluation.every": 2, "trainer.checkpoint_every": 4},
            ["v1 fills the batch"],
        ),
        (
            {"data.train_batch_size": 8, MINI: 32},
            {"trainer.max_steps": 8 * 4},
            ["verl refuses a mini-batch larger than the batch"],
        ),
        (
            {"data.train_batch_size": 24, MINI: 16, "trainer.use_v1": False},
            {"trainer.max_steps": 2 * 4 * 2},
            ["the trainer before v1 ends with an error there"],
        ),
        ({"data.train_batch_size": 32, MINI: 16}, {"trainer.max_steps": 2 * 4 * 2}, []),
    ],
)
def test_a_batch_that_is_no_multiple_of_its_mini_batches_makes_whole_steps(
    tmp_path, monkeypatch, values, expected, says
):
    """By `_balance_batch` and `upsample_batch_to_divisible_size` of verl 0.9.1, `make_iterator`,
    which needs a multiple, and `ActorConfig.validate`."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 70)
    usual = {"data.train_files": "p.jsonl", "trainer.total_epochs": 4, "trainer.save_freq": 4}
    usual |= {"trainer.test_freq": 2, "data.val_files": "v.jsonl", f"{ROLLOUT}.n": 4}
    usual |= {f"{ACTOR}.optim.lr_warmup_steps": 3}
    translation = translated(tmp_path, "theirs.json", GRPO | usual | values)
    assert found(translation, expected) == expected
    said = [line for line in translation.differing if line.startswith(f"{MINI}=")]
    assert len(said) == len(says)
    assert all(part in line for part, line in zip(says, said, strict=True))


DAPO = {
    "data.train_files": "p.jsonl",
    "data.train_batch_size": 64,
    "data.gen_batch_size": 192,
    "trainer.total_epochs": 3,
    "actor_rollout_ref.rollout.n": 4,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "seq_reward",
    "algorithm.filter_groups.max_num_gen_batches": 10,
}


@pytest.mark.parametrize(
    ("module", "values", "expected"),
    [
        # The recipe reads 192 prompts at a time: 500 // 192 = 2, three times, and 2 updates each;
        # 10 such batches are 30 of 64.
        (
            "recipe.dapo.main_dapo",
            {},
            {"trainer.max_steps": 12, "rollout.max_sampling_rounds": 30}
            | {"rollout.prompts_per_batch": 64, "trainer.total_epochs": "near"}
            | {"data.gen_batch_size": "near", "algorithm.filter_groups.enable": "near"},
        ),
        # One batch may be too few, and with one round nothing would be left out here.
        (
            "recipe.dapo.main_dapo",
            {"algorithm.filter_groups.max_num_gen_batches": 1, "data.gen_batch_size": 64},
            {"rollout.max_sampling_rounds": 2, "data.gen_batch_size": "left"}
            | {"trainer.max_steps": 7 * 3 * 2},
        ),
        # Without groups to leave out, all 192 are trained on.
        (
            "recipe.dapo.main_dapo",
            {"algorithm.filter_groups.enable": False},
            {"rollout.prompts_per_batch": 192, "trainer.max_steps": 2 * 3 * 6}
            | {"trainer.total_epochs": None, "rollout.max_sampling_rounds": None},
        ),
        # v1 reads single prompts: a step has 64, of 500 // 64 = 7 a pass, and no bound of batches.
        (
            "verl.trainer.main_ppo",
            {},
            {"trainer.max_steps": 7 * 3 * 2, "rollout.max_sampling_rounds": 1000}
            | {"trainer.total_epochs": None, "data.gen_batch_size": "left"},
        ),
        # The trainer before it leaves out no groups.
        (
            "verl.trainer.main_ppo",
            {"trainer.use_v1": False},
            {"rollout.prompts_per_batch": 192, "trainer.max_steps": 2 * 3 * 6}
            | {"algorithm.filter_groups.enable": "left", "rollout.max_sampling_rounds": None},
        ),
        # Training ends with the last pass, or with the last step.
        ("verl.trainer.main_ppo", {"trainer.total_training_steps": 99}, {"trainer.max_steps": 42}),
        ("verl.trainer.main_ppo", {"trainer.total_training_steps": 9}, {"trainer.max_steps": 18}),
        # 130 of the prompts: two batches a pass.
        (
            "verl.trainer.main_ppo",
            {"data.train_max_samples": 130},
            {"trainer.max_steps": 2 * 3 * 2, "data.train_max_samples": "left"},
        ),
        (
            "verl.trainer.main_ppo",
            {"data.train_max_samples": 500},
            {"data.train_max_samples": None},
        ),
    ],
)
def test_the_trainers_of_verl_read_prompts_in_batches_of_their_own(
    tmp_path, monkeypatch, module, values, expected
):
    """By `_init_dataloader` and `fit` of verl 0.9.1's trainers, and by RayDAPOTrainer."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 500)
    words = [f"{key}={value}" for key, value in (GRPO | DAPO | values).items()]
    script = shlex.join(["python", "-m", module, *words])
    assert found(translated(tmp_path, "run.sh", script), expected) == expected


@pytest.mark.parametrize(
    ("values", "learned", "other"),
    [
        # What is off changes nothing, whatever else it says.
        (
            {"algorithm.kl_ctrl.kl_coef": 0.0, f"{ACTOR}.kl_loss_coef": 0.0}
            | {"algorithm.kl_penalty": "abs", f"{ACTOR}.clip_ratio": 0.3}
            | {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2}
            | {"critic.optim.weight_decay": 0.1, f"{CORRECTION}.loss_type": "reinforce"}
            | {"reward.reward_kwargs.overlong_buffer_cfg.enable": True}
            | {"reward.reward_kwargs.max_resp_len": 9, "critic.optim.num_cycles": 1}
            | {f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1, "critic.strategy": "fsdp2"},
            "",
            "kl_ctrl.kl_coef=0 kl_loss_coef=0 kl_penalty=abs clip_ratio=0.3 "
            "critic.optim.weight_decay=0.1 loss_type=reinforce overlong_buffer_cfg.enable=true "
            "num_cycles=1 kl_cov_ratio=0.1 critic.strategy=fsdp2",
        ),
        # A second penalty changes what is learned.
        (
            {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True},
            "use_kl_in_reward=true kl_ctrl.kl_coef=0.001",
            "",
        ),
        # So does the critic's schedule, where it is another than the policy's.
        (
            GAE
            | {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.min_lr_ratio": 0.1}
            | {"critic.optim.lr_scheduler_type": "cosine", "critic.ppo_epochs": 2}
            | {"critic.optim.lr_warmup_steps_ratio": 0.05},
            "critic.optim.lr_scheduler_type=cosine critic.optim.lr_warmup_steps_ratio=0.05 "
            "critic.ppo_epochs=2",
            "",
        ),
        (
            GAE
            | {f"{ACTOR}.optim.warmup_style": "cosine", f"{ACTOR}.optim.min_lr_ratio": 0.1}
            | {"critic.optim.warmup_style": "cosine", "critic.optim.min_lr_ratio": 0.1},
            "",
            "",
        ),
        # What acts with some estimators alone, and a wait for a critic that there is not.
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.95}
            | {"algorithm.lam": 0.9, "algorithm.use_kl_in_reward": True}
            | {"algorithm.use_pf_ppo": True, "trainer.critic_warmup": 5},
            "algorithm.gamma=0.95 use_kl_in_reward=true critic_warmup=5",
            "algorithm.lam=0.9 use_pf_ppo=true",
        ),
        (GAE | {"algorithm.use_pf_ppo": True}, "use_pf_ppo=true", ""),
        # The policy's schedule counts its own batches there, towards the number of all.
        *(
            (
                GAE
                | {f"{of}.optim.warmup_style": "cosine" for of in (ACTOR, "critic")}
                | {"trainer.critic_warmup": batches},
                said,
                "",
            )
            for batches, said in ((1, ""), (5, "actor.optim.warmup_style=cosine"))
        ),
        ({f"{ROLLOUT}.do_sample": False}, "", "do_sample=false"),
        # And which prompts there are, in which order, and how long completions are.
        (
            {"data.shuffle": False, "data.train_max_samples": 640, f"{ACTOR}.shuffle": True}
            | {"data.custom_cls.path": "own.py", "actor_rollout_ref.model.tokenizer_path": "t"}
            | {"actor_rollout_ref.rollout.quantization": "fp8"}
            | {"actor_rollout_ref.model.lora_adapter_path": "adapters"}
            | {"actor_rollout_ref.rollout.ignore_eos": True, f"{ACTOR}.optim.optimizer": "SGD"},
            "data.shuffle=false train_max_samples=640 actor.shuffle=true ignore_eos=true "
            "optimizer=SGD custom_cls.path=own.py tokenizer_path=t quantization=fp8 "
            "lora_adapter_path=adapters",
            "",
        ),
        # And which of the completions are trained on, by what model and what reward.
        (
            {f"{ROLLOUT}.over_sample_rate": 0.1, f"{ROLLOUT}.response_length": 99}
            | {f"{ROLLOUT}.logprobs_mode": "raw_logprobs", f"{ROLLOUT}.max_model_len": 600}
            | {"actor_rollout_ref.model.override_config.attention_dropout": 0.1}
            | {"actor_rollout_ref.model.override_config.attn_implementation": "eager"}
            | {"actor_rollout_ref.model.external_lib": "own", "data.reward_fn_key": "kind"}
            | {"reward.reward_manager.module.path": "own.py", "sandbox_fusion.url": "http://s"}
            | {f"{ACTOR}.router_replay.mode": "R2", f"{ROLLOUT}.mode": "sync"}
            | {"trainer.v1.sampler.custom_sampler.path": "own.py", f"{ACTOR}.optim.num_cycles": 2}
            | {"trainer.v1.separate_async.parameter_sync_step": 2},
            "over_sample_rate=0.1 response_length=99 logprobs_mode=raw_logprobs max_model_len=600 "
            "attention_dropout=0.1 external_lib=own reward_fn_key=kind module.path=own.py url=http "
            "router_replay.mode=R2 custom_sampler.path=own.py",
            "attn_implementation=eager rollout.mode=sync optim.num_cycles=2 parameter_sync_step=2",
        ),
        (
            {f"{ROLLOUT}.max_model_len": 4096, f"{ACTOR}.optim.lr_scheduler_type": "cosine"}
            | {f"{ACTOR}.optim.num_cycles": 2, "trainer.v1.trainer_mode": "separate_async"}
            | {"trainer.v1.separate_async.parameter_sync_step": 2},
            "lr_scheduler_type=cosine optim.num_cycles=2 trainer_mode=separate_async "
            "parameter_sync_step=2",
            "",
        ),
        # With bypass_mode the trainer of v1 trains loss_mode without a correction, the one before
        # it the loss of loss_type, and DAPO's reads no bypass_mode.
        (
            BYPASS | {f"{CORRECTION}.rollout_is_batch_normalize": True},
            "loss_type=reinforce rollout_is=token rollout_rs=token_k3 "
            "rollout_is_batch_normalize=true",
            "",
        ),
        ({f"{CORRECTION}.bypass_mode": True}, "", ""),
        (
            BYPASS | {"trainer.use_v1": False, "trainer.v1.trainer_mode": "colocate_async"},
            "bypass_mode=true loss_type=reinforce rollout_is=token rollout_rs=token_k3",
            "trainer_mode=colocate_async",
        ),
        (
            BYPASS | {"trainer.use_v1": False, f"{CORRECTION}.loss_type": "ppo_clip"},
            "bypass_mode=true loss_type=ppo_clip rollout_rs=token_k3",
            "rollout_is=token",
        ),
        (
            BYPASS | {"launch.module": "recipe.dapo.main_dapo"},
            "rollout_rs=token_k3",
            "bypass_mode=true loss_type=reinforce",
        ),
    ],
)
def test_what_is_left_out_of_verl_stands_where_it_belongs(tmp_path, values, learned, other):
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(SIZES | GRPO | {"trainer.total_training_steps": 9} | values))
    parts = dict(re.findall(r"\n(What \w+) .*:\n((?:  .*\n?)+)", translate(path, None)))
    listed = parts.get("What changes", "")
    others = parts.get("What else", "")
    assert [shown for shown in learned.split() if shown not in listed or shown in others] == []
    assert [shown for shown in other.split() if shown not in others or shown in listed] == []
    assert bool(listed) == bool(learned)
    assert bool(others) == bool(other)


def test_what_is_left_out_of_trl_stands_where_it_belongs(tmp_path):
    program = (
        'data = load_dataset("org/set", revision="v2")\n'
        'model = Auto.from_pretrained("m", attention_dropout=0.1, device_map="a")\n'
        "GRPOTrainer(model, train_dataset=data, optimizers=(mine, None), callbacks=[own],\n"
        "    reward_processing_classes=[tokens], args=GRPOConfig(num_generations=4,\n"
        '    deepspeed="ds.json", auto_find_batch_size=True, use_cache=True))\n'
    )
    (tmp_path / "train.py").write_text(program)
    page = translate(tmp_path / "train.py", None)
    parts = dict(re.findall(r"\n(What \w+) .*:\n((?:  .*\n?)+)", page))
    for shown in (
        *("revision=v2", "attention_dropout=0.1", "optimizers=", "reward_processing_classes="),
        *("deepspeed=", "auto_find_batch_size=true", "callbacks="),  # which may end it
    ):
        assert shown in parts["What changes"], shown
    for shown in ("model_init_kwargs.device_map=a", "use_cache=true"):
        assert shown in parts["What else"], shown


@pytest.mark.parametrize(
    ("accumulation", "per_generation", "weighed", "shuffled"),
    [(4, 4, False, False), (4, 1, True, False), (1, 4, True, True), (4, 6, True, True)],
)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo"])
def test_what_a_generated_batch_that_is_no_step_changes_is_said(
    tmp_path, loss_type, accumulation, per_generation, weighed, shuffled
):
    """TRL counts num_items_in_batch over a generated batch, and shuffles that before it cuts it."""
    values = {"loss_type": loss_type, "gradient_accumulation_steps": accumulation}
    values |= {"steps_per_generation": per_generation, "num_generations": 4}
    translation = translated(tmp_path, "file.json", values)
    said = "a token has the weight steps_per_generation / gradient_accumulation_steps"
    is_weighed = weighed and loss_type != "grpo"
    assert is_weighed == any(f": {said}" in line for line in translation.differing)
    begins = f"steps_per_generation={per_generation}: the documents of a generated batch are shuffl"
    assert [line[: len(begins)] for line in translation.apart] == [begins] * shuffled


def test_several_files_are_a_glob_that_fits_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, rows in (("gsm8k/train", 7), ("math/train", 5), ("dapo/test", 3), ("b_1", 1)):
        file = Path(f"{place}.jsonl")
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"prompt": "1", "answer": "1"}\n' * rows)
    sizes = {"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4}
    for files, path, steps in (
        (["gsm8k/train.jsonl", "math/train.jsonl"], "*/train.jsonl", 3),
        ([str(tmp_path / "math/train.jsonl"), str(tmp_path / "gsm8k/train.jsonl")],
         f"{tmp_path}/*/train.jsonl", 3),
        (["gsm8k/train.jsonl", "dapo/test.jsonl"], "PROMPTS", None),  # of different names
        (["far/a_train.parquet", "far/bb_train.parquet"], "far/*_train.parquet", None),
        (["gsm8k/train.jsonl", "gsm8k/train.jsonl"], "PROMPTS", None),
        (["far/a.parquet", "b.parquet"], "PROMPTS", None),
        (["b_[1].jsonl", "b_[2].jsonl"], "PROMPTS", None),
        (["gsm8k/train.jsonl"], "gsm8k/train.jsonl", 1),
    ):  # fmt: skip
        values = sizes | {"data.train_files": files, "trainer.total_epochs": 1}
        translation = translated(tmp_path, "theirs.json", GRPO | values)
        expected = {"task.path": path, "trainer.max_steps": steps}
        expected["data.train_files"] = "left" if path == "PROMPTS" else "near"
        if len(files) == 1:
            del expected["data.train_files"]
        assert found(translation, expected) == expected
    Path("other").mkdir()
    Path("other/train.jsonl").write_text("{}")
    values = sizes | {"data.train_files": ["gsm8k/train.jsonl", "math/train.jsonl"]}
    assert "task.path" in translated(tmp_path, "theirs.json", GRPO | values).to_fill


def test_a_refused_set_takes_all_of_its_evaluation_along(tmp_path, monkeypatch):
    """The prompts of training are none to evaluate on: said once, with all that follows."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    translation = translated(
        tmp_path,
        "theirs.json",
        GRPO | VALIDATION | {"data.train_files": "p.jsonl", "data.val_files": "p.jsonl"},
    )
    translation.check()
    refused = [shown for shown, reason, _ in translation.left if "is refused here" in reason]
    assert refused == ["data.val_files=p.jsonl", "trainer.test_freq=5", f"{VAL}.n=4"]
    assert not any(key.startswith("evaluation.") for key in translation.typed)
    program = (
        'data = load_dataset("json", data_files="p.jsonl", split="train")\n'
        'config = GRPOConfig(eval_strategy="steps", eval_steps=5)\n'
        'GRPOTrainer("m", ["my.reward"], config, data, eval_dataset=data)\n'
    )
    translation = translated(tmp_path, "run.py", program)
    translation.check()
    refused = [shown for shown, reason, _ in translation.left if "is refused here" in reason]
    assert refused.count("eval_strategy=steps") == 1


def test_the_command_evaluates_as_their_defaults_do(tmp_path):
    """A default of theirs stands in the command although nothing is learned from it."""
    script = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.test_freq=1"
    translation = translated(tmp_path, "run.sh", f"{script} data.val_files=dev.parquet")
    translation.check()
    typed = {key: value for key, (value, _) in translation.typed.items() if "evaluation" in key}
    assert typed == {
        "evaluation.every": 4,
        "evaluation.sets.held_out.path": "dev.parquet",
        "evaluation.prompts_per_set": 1000000,
        "evaluation.completions_per_prompt": 1,
        "evaluation.temperature": 0,
    }


def test_nothing_is_said_of_an_evaluation_without_prompts(tmp_path):
    script = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.val_files={}"
    assert [
        any("data.val_files" in shown for shown, *_ in translated(tmp_path, "run.sh", of).left)
        for of in (script.format(""), script.format("dev.parquet"))
    ] == [False, True]


def test_the_printed_command_is_accepted_and_names_what_is_assumed_near_left_and_unknown(
    tmp_path, capsys
):
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nnum_generations: 8\nlearning_rate: 2e-6\n"
        "seed: 3\ntop_k: 0\nlogging_steps: 10\nloss_type: nonsense\nzzz: 3\n"
        "warmup_steps: 0.1\nsave_steps: 0.1\nmax_steps: -1\n"
        "reward_funcs: [accuracy_reward, think, get_soft_overlong_punishment]\n"
    )
    assert main(["translate", str(tmp_path / "grpo.yaml"), "--processes", "4"]) == 0
    page = capsys.readouterr().out
    (command,) = re.findall(r"^  pgtk (.*)$", page, re.MULTILINE)
    _, report = validated(compose(shlex.split(command)))
    problems = [problem for problem in report.problems if problem not in report.lacking]
    assert [problem.partition(" ")[0] for problem in problems] == [
        "loss=LOSS",
        "aggregation=AGGREGATION",
        "task.verifiers.think.verifier=VERIFIER",
    ]
    filled = command.replace("LOSS", "grpo").replace("AGGREGATION", "token_mean")
    _, report = validated(compose(shlex.split(filled.replace("VERIFIER", "exact_match"))))
    assert [problem for problem in report.problems if problem not in report.lacking] == []
    assert {"accumulation.docs_per_step=32", "optimizer.learning_rate=2e-06", "seed=3"} <= {
        *shlex.split(command)
    }
    assert "\n\nFor a try of two steps, type trainer.max_steps=2 behind it. That it" in page
    learned, _, others = page.partition("What changes what is learned, and is left out:")[
        2
    ].partition("Assumed:")
    assert "\n  reward_funcs=[accuracy_reward,think]: " in learned
    assert "; without a path: think\n" in learned
    assert "loss_type=nonsense: " in learned
    assert "save_steps=0.1" in others.partition("What else has no equal here, and is left out:")[2]
    to_fill = ("task.path", "loss", "aggregation", "task.verifiers.think.verifier")
    assert f"\nTo be filled in: {', '.join(to_fill)}.\n" in page
    assert "optimizer.beta2=0.999 (ours is 0.95)" in page
    assert "  scale_rewards=group (their default): 1e-4 is added" in page
    share = "a share of the steps, whose number follows from the data there: optimizer.warmup_steps"
    assert f"  warmup_steps=0.1: {share} is 0.1 x trainer.max_steps, rounded up; the" in page
    every = "trainer.checkpoint_every=100 trainer.keep_checkpoints=2"
    share = (
        "a share of the steps, whose number follows from the data there: trainer.checkpoint_every"
    )
    said = f"{share} is 0.1 x trainer.max_steps, rounded up; the defaults"
    assert f"  save_steps=0.1: {said} here are {every}\n" in page
    assert "is not known to have:\n  zzz\n" in page
    assert "top_k" not in page
    assert "logging_steps" not in page


SCRIPT = """#!/usr/bin/env bash
set -x
MODEL=${1:-Qwen/Qwen3-8B}
MORE="actor_rollout_ref.rollout.temperature=0.9 \\
  data.seed=3"
n=${N:-8}
epochs=15 # as usual
BACKEND=${BACKEND:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
rate=${RATE:-${OTHER_RATE:-2e-6}}
export LENGTH=$((1024 * 2))
ARGS=(
    data.train_files="['$HOME/data/train.parquet']"  # don't stop here
    data.max_response_length=${LENGTH}
)
if [ "$BACKEND" = npu ]; then
    ARGS+=(actor_rollout_ref.actor.entropy_coeff=0.5)
fi
if some_command; then
    size=7
fi
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.actor.optim.lr=$rate \\
    data.train_batch_size=$size \\
    +actor_rollout_ref.actor.extra=1 \\
    trainer.experiment_name="run_$(date +%s)" \\
    trainer.logger='["console","wandb"]' \\
    $MORE --config-name ppo_trainer "${ARGS[@]}" $@ 2>&1 | tee log.txt
"""


def test_a_shell_script_is_read_as_bash_expands_it(tmp_path):
    commands = [command.words for command in Script(SCRIPT).commands]
    (words,) = [words for words in commands if "verl.trainer.main_ppo" in words]
    assert words[words.index("verl.trainer.main_ppo") + 1 :] == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=2e-6",
        "data.train_batch_size=$size",
        "+actor_rollout_ref.actor.extra=1",
        "trainer.experiment_name=run_$(date +%s)",
        'trainer.logger=["console","wandb"]',
        "actor_rollout_ref.rollout.temperature=0.9",
        "data.seed=3",
        "--config-name",
        "ppo_trainer",
        "data.train_files=['~/data/train.parquet']",
        "data.max_response_length=2048",
        "actor_rollout_ref.actor.entropy_coeff=$ARGS",
        "$@",
    ]
    translation = translated(tmp_path, "run.sh", SCRIPT)
    expected = {
        "rollout.prompts_per_batch": None,
        "data.train_batch_size": "left",
        "trainer.experiment_name": "left",
        "task.path": "~/data/train.parquet",
        "rollout.max_completion_length": 2048,
        "entropy.coefficient": None,
        "actor_rollout_ref.actor.entropy_coeff": "left",
        "optimizer.learning_rate": 2e-6,
        "rollout.temperature": 0.9,
        "tracking": "wandb",
    }
    assert translation.theirs.values["config_name"] == "ppo_trainer"
    assert found(translation, expected) == expected


def test_of_what_a_branch_sets_each_key_is_known_and_the_value_that_it_had_before(tmp_path):
    """As verl's examples of SAPO and of Megatron have it; what a branch empties may hold, too."""
    script = """
ACTOR="
  actor_rollout_ref.actor.optim.lr=2e-6 \\
  actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
CHANGED="actor_rollout_ref.actor.tau_pos=2 actor_rollout_ref.actor.tau_neg=3"
KL="algorithm.use_kl_in_reward=True"
SIZES=(actor_rollout_ref.rollout.n=4)
if [ $x = y ]; then
  ACTOR="$ACTOR trainer.save_freq=5"
  CHANGED="actor_rollout_ref.actor.tau_pos=2 actor_rollout_ref.actor.tau_neg=4"
  KL=""
  SIZES=(data.train_batch_size=64)
  BEHIND="$OTHERS"
fi
MAIN=verl.trainer.main_ppo
python -m $MAIN $ACTOR $CHANGED $KL "${SIZES[@]}" $BEHIND $@ data.max_prompt_length=99
"""
    expected = {
        "optimizer.learning_rate": 2e-6,
        "loss": "sapo",
        "loss.temperature_positive": 2,
        "actor_rollout_ref.actor.tau_neg": "left",
        "loss.temperature_negative": None,
        "algorithm.use_kl_in_reward": "left",
        "actor_rollout_ref.rollout.n": "left",
        "data.train_batch_size": "left",
        "trainer.save_freq": "left",
        "task.max_prompt_length": 99,
    }
    translation = translated(tmp_path, "run.sh", script)
    assert found(translation, expected) == expected
    place = "line 8, if [ $x = y ]; then"
    assert translation.theirs.assumed == [
        "$BEHIND sets nothing",
        f"$ACTOR and $CHANGED and $KL and $SIZES and $BEHIND are not known after {place}",
    ]


def test_words_are_those_that_bash_gives_to_the_command(tmp_path):
    script = r"""
one='a b'; both="${one} $(( (2 + 3) * 4 ))"
unset_before=${nothing:-"de fault"}  # don't
list=(x.y=1 'z w' "$one" # and
  ${nothing-last})
list+=(more)
export number=$((7 / 2)) other=\\$one
run first $one "$one" "${list[@]}" ${list[@]} k="$both" "['$one', '$number']" '$one' \\
  --flag $unset_before "$other" "${one:-other}" "a\\
b" c\\ d 2>/dev/null
""".replace("\\\\", "\\")
    printed = subprocess.run(
        ["bash", "-c", f"run() {{ printf '%s\\n' \"$@\"; }}; {script}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ["run", *printed.stdout.splitlines()] == Script(script).commands[0].words


def test_a_damaged_script_is_read_at_once():
    """Each of these took seconds for 14 words, and doubled with every other one."""
    for script in ("X=(" + " a b" * 300, "X=(" + " " * 600, 'X="' + "$(a " * 300, "${" * 300):
        start = time.perf_counter()
        with pytest.raises(ValueError, match="is not read as bash"):
            Script(script)
        assert time.perf_counter() - start < 1
    (command,) = Script("run $((1 / 0)) $((2 ** 99)) $((3 (4)))").commands
    assert command.words == ["run", "$((1 / 0))", "$((2 ** 99))", "$((3 (4)))"]


PYTHON = """
from trl import GRPOConfig, GRPOTrainer
RATE = 2e-6
raise SystemExit("never run")
def reward(completions, **kwargs):
    return [1.0 for _ in completions]
args = GRPOConfig(
    learning_rate=RATE, num_generations=4, beta=read_beta(), chat_template_kwargs={"a": 1}
)
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=args, reward_funcs=[reward], peft_config=LoraConfig(r=4))
"""


def test_other_forms_of_configurations_are_read(tmp_path):
    expected = {"optimizer.learning_rate": 2e-6, "rollout.group_size": 4}
    program = {
        "beta": "left",
        "kl": "KL",
        "reward_funcs": "left",
        "task.verifier": "VERIFIER",
        "model.lora_rank": 4,
        "model.path": "Qwen/Qwen3-0.6B",
        "task.chat_arguments": {"a": 1},
    }
    translation = translated(tmp_path, "train.py", PYTHON)
    assert found(translation, expected | program) == expected | program
    cells = [
        {"cell_type": "code", "source": ["!pip install trl\n", PYTHON]},
        {"cell_type": "markdown", "source": ["text"]},
    ]
    translation = translated(tmp_path, "train.ipynb", {"cells": cells})
    assert found(translation, expected | program) == expected | program

    values = {"learning_rate": 2e-6, "num_generations": 4}
    wandb = {name: {"value": value, "desc": None} for name, value in values.items()}
    wandb |= {"_wandb": {"value": {"cli_version": "0.31"}}, "wandb_version": 1}
    assert found(translated(tmp_path, "config.yaml", wandb), expected) == expected

    command = "accelerate launch --num_processes 6 grpo.py --learning_rate=2e-6 --no_bf16 "
    command += "--num_generations 4 --report_to wandb tensorboard --config theirs.yaml 2>&1\n"
    more = {"accumulation.docs_per_step": 48, "model.dtype": "float32", "config": "left"}
    more |= {"tracking.also": "[tensorboard]"}
    translation = translated(tmp_path, "run.sh", command)
    assert found(translation, expected | more) == expected | more
    (assumed,) = translation.theirs.assumed
    assert assumed.startswith("grpo.py, which the command starts, is not read")
    docstring = f'"""\n```\n{command}```\n"""\nTrlParser((GRPOConfig, ModelConfig))\n'
    assert found(translated(tmp_path, "script.py", docstring), more) == more

    # Without a key that GRPO alone has, it is assumed.
    shared = translated(tmp_path, "beta.yaml", "beta: 0.04\nmax_steps: 9\nloss_type: dr_grpo\n")
    assert shared.theirs.assumed[0] == "it is of GRPO: it has no key that GRPO alone has"
    sizes = {"trainer.max_steps": 9, "kl.coefficient": 0.04, "aggregation": "constant"}
    assert found(shared, sizes) == sizes

    # A dump says the number of processes by its sizes.
    dump = values | {"generation_batch_size": 64, "steps_per_generation": 2}
    sizes = {"accumulation.docs_per_step": 32, "rollout.prompts_per_batch": 16}
    dump |= {"per_device_train_batch_size": 8}
    assert found(translated(tmp_path, "args.json", dump), sizes) == sizes


def test_a_name_that_is_bound_twice_is_no_constant(tmp_path):
    program = "a = 3\na += 1\nb = 4\nfor c in range(3): pass\nc = 5\ndef f(d): pass\nd = 6\n"
    program += "GRPOConfig(learning_rate=a, num_generations=b, beta=c, seed=d)\n"
    expected = {"learning_rate": "left", "rollout.group_size": 4, "beta": "left", "seed": "left"}
    assert found(translated(tmp_path, "train.py", program), expected) == expected


def test_what_a_program_sets_after_the_call_is_read(tmp_path):
    """In a branch, and where it is set again, its value is not known."""
    program = (
        "if __name__ == '__main__':\n"
        "    args = theirs = GRPOConfig(num_generations=4, learning_rate=1e-6, beta=0.1)\n"
        "    args.learning_rate = 2e-6\n    theirs.max_grad_norm = 0.5\n    args.beta *= 2\n"
        "    other.seed = 7\n    args.max_steps = 8\n    args.max_steps = 9\n"
        "    if quick:\n        args.temperature = 0.5\n"
    )
    expected = {
        "rollout.group_size": 4,
        "optimizer.learning_rate": 2e-6,
        "optimizer.max_grad_norm": 0.5,
        "beta": "left",
        "max_steps": "left",
        "temperature": "left",
    }
    translation = translated(tmp_path, "train.py", program)
    assert found(translation, expected | {"seed": None}) == expected | {"seed": None}
    # TRL's own first example has no GRPOConfig.
    translation = translated(tmp_path, "first.py", "GRPOTrainer(model='m', reward_funcs=f)\n")
    assert found(translation, {"model.path": "m"}) == {"model.path": "m"}


def test_what_a_program_sets_in_another_way_is_said_not_to_be_known(tmp_path):
    program = (
        "from trl import GRPOConfig as Sizes, GRPOTrainer\nparser.add_argument('--lr', default=1.0)"
        "\n{}\nargs = Sizes(num_generations=4, learning_rate=cli.lr)\n{}\nGRPOTrainer('m', r, args)"
    )
    lines = (
        # Another default of an option, a copy with other values, a value of the trainer's own.
        ("parser.set_defaults(lr=2e-6)", "", {"learning_rate": "left"}, None),
        (
            "",
            "args = change(args, beta=1)",
            {"optimizer.learning_rate": 1},
            "args is what GRPOConfig(...) makes, and nothing else",
        ),
        ("", "trainer.args.beta = 1", {"beta": "left", "kl": "KL"}, None),
        # Adapters of unsloth's, by its defaults.
        (
            "model = Fast.get_peft_model(model, r=32, target_modules=['q_proj'])",
            "",
            {"model.lora_rank": 32, "model.lora_alpha": 16, "model.lora_targets": ["q_proj"]},
            None,
        ),
    )
    for before, after, expected, assumed in lines:
        translation = translated(tmp_path, "train.py", program.format(before, after))
        expected = expected | {"rollout.group_size": 4, "model.path": "m"}
        assert found(translation, expected) == expected
        assert assumed is None or assumed in translation.theirs.assumed


def test_a_class_that_is_derived_from_trls_is_read_as_that_one_and_what_it_changes_is_said(
    tmp_path,
):
    program = (
        "import trl\nclass Mine(trl.GRPOTrainer):\n    def compute_loss(self): ...\n"
        "class Sizes(trl.GRPOConfig):\n    beta: float = 0.1\n"
        "Mine('m', r, Sizes(num_generations=4))\n"
    )
    translation = translated(tmp_path, "train.py", program)
    expected = {"rollout.group_size": 4, "model.path": "m"}
    assert found(translation, expected) == expected
    assert translation.theirs.assumed[:2] == [
        "Mine is GRPOTrainer, without its own compute_loss",
        "Sizes is GRPOConfig, without its own beta: float = 0.1",
    ]


def test_words_behind_an_option_are_its_values_only_where_they_can_be(tmp_path):
    """A word for further options is none, and one word of a list is a list."""
    command = (
        "trl grpo --reward_funcs rewards.boxed --reward_weights 2.0 --use_peft "
        "--lora_target_modules q_proj v_proj {} --temperature $T --bf16 $EXTRA_ARGS --top_p 0.5 $P "
        '--seed $EXTRA_SEED --max_steps 10 "$@"'
    )
    for words in ('"$@"', "$*", "${@:2}", '"${ARGS[@]}"', "$TRAIN_FLAGS"):
        theirs = translated(tmp_path, "run.sh", command.format(words)).theirs
        assert theirs.values == {
            "reward_funcs": ["rewards.boxed"],
            "reward_weights": [2.0],
            "use_peft": True,
            "lora_target_modules": ["q_proj", "v_proj"],
            "temperature": "$T",
            "bf16": True,
            "top_p": 0.5,
            "seed": "$EXTRA_SEED",
            "max_steps": 10,
        }
        named = [f"{words.strip(chr(34))} sets nothing"] if words.strip('"')[1] not in "@*" else []
        assert theirs.assumed[:-1] == [
            *([] if words == "${@:2}" else named), "$EXTRA_ARGS sets nothing", "$P sets nothing"
        ]  # fmt: skip
    translation = translated(tmp_path, "run.sh", command.format("--lora_r 4"))
    verifiers = {"boxed": {"verifier": "rewards.boxed", "weight": 2.0}}
    assert translation.typed["task.verifiers"][0] == verifiers
    one = translated(tmp_path, "run.sh", "trl grpo --use_peft --lora_target_modules q_proj")
    assert one.typed["model.lora_targets"][0] == ["q_proj"]
    of_list = translated(tmp_path, "run.sh", "trl grpo --reward_funcs rewards.boxed $SECOND")
    assert of_list.theirs.values["reward_funcs"] == "[rewards.boxed,$SECOND]"


def test_a_reward_in_a_file_is_found_however_a_script_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    script = """
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd -P)"
REAL=$(dirname $(realpath $0))
BELOW=$(cd $(dirname "$0")/rewards && pwd)
%s
python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 custom_reward_function.path=%s/mine.py
"""
    for before, folder, expected in (
        ("", "$PWD", "mine.compute_score"),
        ("", ".", "mine.compute_score"),
        ("", "$(pwd)", "mine.compute_score"),
        ("", "${PWD}/./rewards", "rewards.mine.compute_score"),
        ("", str(tmp_path), "mine.compute_score"),
        ("", '"${HERE}"', "jobs.mine.compute_score"),
        ("", '"$(dirname "$0")"', "jobs.mine.compute_score"),
        ("cd /elsewhere", "$REAL", "jobs.mine.compute_score"),
        # Not known: a folder beside the script, the current one after a change, one above.
        ("", "$BELOW", None),
        ("cd /elsewhere", "$PWD", None),
        ("cd /elsewhere", '"$(dirname "$0")"', None),
        ("", "..", "mine.compute_score"),  # with PYTHONPATH=..
    ):
        translation = translated(tmp_path / "jobs", "run.sh", script % (before, folder))
        # Where it is found, it is said that verl reads the key by its new name alone.
        left = "left" if expected is None else "near"
        verifier = expected or "VERIFIER"
        wanted = {"task.verifier": verifier, "custom_reward_function.path": left}
        assert found(translation, wanted) == wanted, folder


def test_a_key_that_acts_there_is_never_called_idle(tmp_path, capsys):
    """Beside what is idle no part of the command is named."""
    freq, before = "trainer.test_freq", "trainer.val_before_train"
    held_out = {"data.val_files": "test.parquet"}
    server = {"actor_rollout_ref.rollout.name": "sglang"}
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    for values, expected in (
        ({freq: 5, before: False} | held_out, {before: "near"}),
        # The first evaluation alone: there before the first step, here never.
        ({freq: -1} | held_out, {"data.val_files": "left"}),
        ({freq: -1, before: False} | held_out, {"data.val_files": "left", before: None}),
        (server | {share: 0.7}, {share: "left"}),
        (server, {share: None}),
        ({f"{ACTOR}.policy_loss.loss_mode": "clip_cov", f"{ACTOR}.clip_ratio_low": 0.3},
         {f"{ACTOR}.clip_ratio_low": "left"}),
    ):  # fmt: skip
        translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
        assert found(translation, expected) == expected
        idle = [shown for shown, reason, _ in translation.left if reason == IDLE]
        assert idle == (
            ["data.val_files=test.parquet"]
            if values.get(before) is False and values[freq] < 0
            else []
        )
    (tmp_path / "grpo.yaml").write_text("num_generations: 8\nlora_r: 4\n")
    assert main(["translate", str(tmp_path / "grpo.yaml")]) == 0
    assert f"  lora_r=4: {IDLE}\n" in capsys.readouterr().out


def test_a_module_is_no_value_of_the_option_before_it(tmp_path):
    command = "accelerate launch --num_processes 4 -m trl.scripts.grpo --num_generations 4 "
    command += "--per_device_train_batch_size 4\n"
    expected = {"accumulation.docs_per_step": 16, "rollout.group_size": 4}
    assert found(translated(tmp_path, "run.sh", command), expected) == expected


LITERALS = """
import argparse, torch, scores as s
from trl import GRPOConfig
from rewards import digits as figures
PEAK: float = float("3e-6")
PEAK: float = float("3e-6")
BATCH, NAME = 2 * 4, "run"
common = {"beta": 0.01 / 4, "max_steps": 10 ** 3}
more = dict(weight_decay=-1 + 1.25, adam_beta2=[0.9, 0.95][1])
changed = {"seed": 3}
changed["seed"] = 4
extended = [1]
extended.append(2)
parser = argparse.ArgumentParser()
parser.add_argument("-s", "--save-steps", type=int, default="25")
parser.add_argument("--half", dest="fp16", action="store_true")
parser.add_argument("--top_k", required=True)
cli = parser.parse_args()
def numbers(completions, **others):
    return [0.0 for _ in completions]
def main():
    args = GRPOConfig(
        f"{NAME}-out", learning_rate=PEAK * 2, num_generations=BATCH, run_name=f"{NAME}-{BATCH}",
        save_steps=cli.save_steps, fp16=cli.fp16, top_k=cli.top_k, epsilon=2 ** -2, delta=6 // 1,
        max_completion_length=9 ** 999, model_init_kwargs={"dtype": torch.float16},
        reward_weights=extended, **common, **more, **changed, **vars(cli),
    )
    GRPOTrainer(model="m", args=args, reward_funcs=[figures, s.words, numbers])
if __name__ == "__main__":
    main()
"""


def test_literals_of_a_program_are_computed_and_nothing_is_run(tmp_path):
    """Neither what changes a list or a dictionary, nor a function, is followed."""
    expected = {
        "optimizer.learning_rate": 6e-6,
        "rollout.group_size": 8,
        "tracking.run_name": "run-8",
        "kl.coefficient": 0.0025,
        "trainer.max_steps": 1000,
        "optimizer.weight_decay": 0.25,
        "optimizer.beta2": 0.95,
        "loss.epsilon_low": 0.25,
        "loss.dual_clip": 6,
        "trainer.checkpoint_every": 25,
        "model.dtype": "bfloat16",
        "top_k": "left",
        "max_completion_length": "left",
        "model_init_kwargs.dtype": "left",
        "seed": None,
    }
    program = LITERALS.replace("reward_weights=extended, ", "")
    translation = translated(tmp_path, "train.py", program)
    assert found(translation, expected) == expected
    assert translation.theirs.unread == [
        "GRPOConfig gets nothing by **changed, known when it runs",
        "GRPOConfig gets nothing by **vars(cli), known when it runs",
    ]
    assert translation.theirs.assumed[:2] == [
        "cli.save_steps=25, the default of its option",
        "cli.fp16=false, the default of its option",
    ]
    verifiers = {
        name: {"verifier": path, "weight": 1}
        for name, path in {
            "digits": "rewards.digits",
            "words": "scores.words",
            "numbers": "train.numbers",
        }.items()
    }
    assert translation.typed["task.verifiers"][0] == verifiers
    # A program that trains when it is imported, one that no other can import, a list that grows.
    here = {"verifier": "VERIFIER", "weight": 1}
    for name, content, typed in (
        ("train.py", program.replace('if __name__ == "__main__":\n    main', "main"), here),
        ("grpo-train.py", program, here),
        ("train.py", LITERALS, None),
    ):
        rewards = {
            "reward_funcs": "left",
            "task.verifiers": typed and verifiers | {"numbers": typed},
        }
        assert found(translated(tmp_path, name, content), rewards) == rewards


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            'data = load_dataset("json", data_files="a.jsonl", split="train").shuffle(seed=1)',
            {"task.path": "a.jsonl", "task.split": None, "train_dataset.split": None},
        ),
        (
            'files = {"train": "a.parquet", "test": "b.parquet"}\n'
            'data = datasets.load_dataset("parquet", data_files=files)["test"]',
            {"task.path": "b.parquet", "task.split": None},
        ),
        (
            'data = load_dataset("org/set", "main")\n'
            'data = data.rename_column("question", "prompt")\ndata = data["train"]',
            {"task.path": "org/set", "task.config": "main", "task.split": "train"}
            | {"task.prompt_field": "question"},
        ),
        ('data = load_from_disk("folder")', {"task.path": "folder", "task.split": None}),
        (
            'data = load_dataset("org/set", split="train")\n'
            'data = data.rename_column("text", "reference")',
            {"task.path": "org/set", "train_dataset.columns.reference": "left"},
        ),
        # Other rows than those of the file or the split.
        *(
            (f"data = {code}", {"task.path": "PROMPTS", "train_dataset.path": "left"})
            for code in (
                'load_dataset("org/set", split="train[:100]")',
                'load_dataset("org/set", split="train").map(ask)',
                'load_dataset("org/set", split="train").select(range(9))',
                'load_dataset("json", data_files=["a.jsonl", "b.jsonl"])',
                'load_dataset("json", data_files="https://host/a.jsonl")',
                'load_dataset("csv", data_files="a.csv", split="train")',
                'load_dataset("org/set", data_files="a.jsonl")',
            )
        ),
        *(
            (code, {"task.path": "PROMPTS", "train_dataset": "left"})
            for code in (
                "data = rows()",
                'data = load_dataset(name or "org/set", split="train")',
                'data = load_dataset("org/set")\nif quick:\n    data = data["test"]',
                'data, test = load_dataset("org/set", split=["train", "test"])',
                "data = data",
            )
        ),
    ],
)
def test_the_rows_of_a_program_are_those_of_a_file_or_a_split(tmp_path, lines, expected):
    program = f"{lines}\nGRPOTrainer('m', reward, args=GRPOConfig(), train_dataset=data)\n"
    assert found(translated(tmp_path, "train.py", program), expected) == expected


def test_a_module_of_rewards_that_is_not_here_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"num_generations": 8, "reward_funcs": ["mine.digits", "think"], "model": "org/m"}
    for is_here in (False, True):
        if is_here:
            Path("mine.py").write_text("raise SystemExit('never imported')\n")
        translation = translated(tmp_path, "theirs.json", values)
        translation.check()
        (lacking,) = [line for line in translation.lacking if "mine" in line] or [""]
        assert lacking.startswith("mine.digits needs mine: " if not is_here else "")
        assert bool(lacking) != is_here


def test_all_verifiers_of_a_module_that_is_not_here_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    translation = translated(tmp_path, "file.json", {"reward_funcs": ["mine.a", "mine.b"]})
    translation.check()
    assert any(line.startswith("mine.a and mine.b need mine: ") for line in translation.lacking)


def test_a_punishment_that_a_program_makes_is_that_of_trl(tmp_path):
    program = (
        "import rewards\nfrom {} import get_soft_overlong_punishment as soft\nSIZE = 64\n"
        "punish = soft(4 * SIZE, {})\nargs = GRPOConfig(max_completion_length=256)\n"
        "GRPOTrainer('m', [rewards.digits, punish], args)\n"
    )
    expected = {"task.verifier": "rewards.digits", "rollout.overlong_buffer": 64}
    translation = translated(tmp_path, "train.py", program.format("trl.rewards", "SIZE"))
    assert found(translation, expected) == expected
    # One of another package, and one whose sizes are known when it runs.
    expected = {"reward_funcs": "left", "task.verifier": None, "rollout.overlong_buffer": None}
    for module, size in (("mine", "SIZE"), ("trl.rewards", "size()")):
        translation = translated(tmp_path, "train.py", program.format(module, size))
        assert found(translation, expected) == expected


def test_a_model_that_a_program_loads_is_its_folder_with_what_it_is_loaded_with(tmp_path):
    """`from_pretrained` takes the number type of the folder unless it is told another."""
    program = "model = Auto.from_pretrained({}).to('cuda')\nGRPOTrainer(model=model)\n"
    for arguments, dtype in (("'org/m'", "auto"), ("'org/m', torch_dtype=torch.bfloat16", None)):
        translation = translated(tmp_path, "train.py", program.format(arguments))
        expected = {"model.path": "org/m", "model_init_kwargs.dtype": "left"}
        assert found(translation, expected) == expected
        assert dtype is None or translation.theirs.values["model_init_kwargs.dtype"] == dtype
    translation = translated(
        tmp_path, "train.py", program.format("'m', torch_dtype=torch.float32, load_in_4bit=True")
    )
    expected = {"model_init_kwargs.dtype": None, "model_init_kwargs.load_in_4bit": "left"}
    assert found(translation, expected) == expected


def test_a_member_of_an_enumeration_is_its_value(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    program = (
        "import peft\nfrom peft import LoraConfig, TaskType\nfrom mine import Kind\n"
        "from transformers.trainer_utils import IntervalStrategy, SchedulerType as Kinds\n"
        "lora = LoraConfig(task_type=TaskType.CAUSAL_LM, peft_type=peft.PeftType.LORA)\n"
        "args = GRPOConfig(lr_scheduler_type=Kinds.COSINE_WITH_MIN_LR, report_to=Kind.WANDB,\n"
        "    save_strategy=IntervalStrategy.NO)\nGRPOTrainer('m', peft_config=lora, args=args)\n"
    )
    values = translated(tmp_path, "train.py", program).theirs.values
    for name, member in {
        "peft_config.task_type": peft.TaskType.CAUSAL_LM,
        "peft_config.peft_type": peft.PeftType.LORA,
        "lr_scheduler_type": transformers.SchedulerType.COSINE_WITH_MIN_LR,
        "save_strategy": transformers.IntervalStrategy.NO,
        "report_to": "Kind.WANDB",
    }.items():
        assert values[name] == getattr(member, "value", member)


def test_what_has_several_reasons_gives_the_one_that_fits(tmp_path):
    base = {"num_generations": 8, "use_vllm": True, "top_p": 0.95}
    correction = "vllm_importance_sampling_correction"
    cases = [
        (base | {"loss_type": "bnpo"}, correction, "`sampler.keep_top=32` in place of", "vespo"),
        (base | {"loss_type": "vespo", "top_p": 1}, correction, "loss_type=vespo", "top_p"),
        ({"delta": 1.1, "num_generations": 8}, "delta", "1 + epsilon_high", "gspo"),
        ({"loss_type": "other", "num_generations": 8}, "loss_type", "no loss", "cispo"),
    ]
    for values, name, says, not_says in cases:
        translation = translated(tmp_path, "theirs.json", values)
        (reason,) = [said for shown, said, _ in translation.left if shown.startswith(f"{name}=")]
        assert says in reason
        assert not_says not in reason


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, "null", "3"),
        ({"vllm_importance_sampling_clip_max": 5}, "null", "5"),
        ({"vllm_importance_sampling_cap": 2, "vllm_importance_sampling_clip_min": 0.5}, "0.5", "2"),
        ({"vllm_importance_sampling_clip_max": None}, "null", "1000000000"),
    ],
)
def test_an_advice_has_the_numbers_that_the_command_would_have(tmp_path, given, low, high):
    """It is what the command has without top_p, and is accepted."""
    values = {"num_generations": 8, "use_vllm": True} | given
    values |= {"vllm_importance_sampling_mode": "token_truncate"}
    expected = {"correction": "token_truncate", "correction.low": low, "correction.high": high}
    whole = translated(tmp_path, "theirs.json", values)
    assert found(whole, expected) == expected
    cut = translated(tmp_path, "theirs.json", values | {"top_p": 0.95})
    (reason,) = {said for _, said, _ in cut.left if "keep_top" in said}
    advised = dict(re.findall(r"(correction[.\w]*|sampler.keep_top)=([^\s`]+)(?=[` ])", reason)[:4])
    assert advised == expected | {"sampler.keep_top": "32"}
    typed = {key: text(value) for key, (value, _) in cut.typed.items()} | advised
    typed |= {"model.path": "tiny", "task.verifier": "exact_match"}
    config = compose([f"{key}={value}" for key, value in typed.items()])
    assert [problem for problem in validated(config)[1].problems if "PROMPTS" not in problem] == []


@pytest.mark.parametrize(
    ("name", "values", "advice"),
    [
        (
            "theirs.py",
            "import trl\nsoft = trl.rewards.get_soft_overlong_punishment(24, 4)\nGRPOTrainer('m', "
            "[f, soft], GRPOConfig(max_completion_length=64, reward_weights=[1.0, 0.5]))",
            "get_soft_overlong_punishment(24, 4)` in a module of yours is one among "
            "`task.verifiers`, with weight=0.5",
        ),
        (
            "theirs.json",
            {"num_generations": 8, "use_vllm": True, "vllm_tensor_parallel_size": 4},
            "`sampler.tensor_parallel=4`",
        ),
        (
            "theirs.json",
            {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4},
            "`sampler.tensor_parallel=4`",
        ),
        (
            "theirs.py",
            "m, t = FastLanguageModel.from_pretrained('m', fast_inference=True, "
            "gpu_memory_utilization=0.7)\nGRPOTrainer(m)",
            "`sampler.gpu_memory_share=0.7`",
        ),
    ],
)
def test_other_advice_has_the_numbers_of_the_file(tmp_path, name, values, advice):
    assert advice in " ".join(said for _, said, _ in translated(tmp_path, name, values).left)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.py", "GRPOTrainer('m', peft_config=LoraConfig(r=16, lora_alpha=8, use_rslora=True))"),
        ("t.py", "get_peft_model(m, r=16, lora_alpha=8, use_rslora=True)\nGRPOTrainer('m')"),
        ("t.yaml", "{num_generations: 8, use_peft: true, lora_alpha: 8, use_rslora: true}"),
    ],
)
def test_adapters_that_are_scaled_by_the_root_of_the_rank_are_carried(tmp_path, name, content):
    """alpha / sqrt(r) there is alpha' / r here: 8 / 4 = 32 / 16."""
    sizes = {"model.lora_rank": 16, "model.lora_alpha": 32}
    assert found(translated(tmp_path, name, content), sizes) == sizes


HELD_OUT = """
from datasets import load_dataset
{data}
GRPOTrainer("m", f, GRPOConfig(eval_strategy="steps", eval_steps=10, num_generations_eval=2{more}),
    train_dataset={train}, eval_dataset={test})
"""
SET = "evaluation.sets.held_out"


@pytest.mark.parametrize(
    ("data", "train", "test", "expected"),
    [
        (
            'file = load_dataset("json", data_files="test.jsonl", split="train")',
            'load_dataset("json", data_files="train.jsonl", split="train")',
            "file",
            {f"{SET}.path": "test.jsonl", f"{SET}.split": None, "eval_dataset.split": None},
        ),
        (
            'files = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})',
            'files["train"]',
            'files["test"]',
            {f"{SET}.path": "b.jsonl", "task.path": "a.jsonl"},
        ),
        # A set has the split of training where it says no other.
        (
            "",
            'load_dataset("org/set", "main", split="train")',
            'load_dataset("json", data_files="test.jsonl", split="train")',
            {f"{SET}.path": "test.jsonl", f"{SET}.split": "null", f"{SET}.config": "null"},
        ),
        (
            'rows = load_dataset("org/set", "main")',
            'rows["train"]',
            'rows["test"]',
            {f"{SET}.path": "org/set", f"{SET}.split": "test", f"{SET}.config": "main"},
        ),
        # Other rows than those of a whole file or split.
        *(
            (
                'rows = load_dataset("org/set")',
                'rows["train"]',
                test,
                {f"{SET}.path": None, "evaluation.every": None, "eval_strategy": "left"},
            )
            for test in ('rows["test"].map(f)', 'load_dataset("org/set", split="test[:9]")')
        ),
        ("", "a", "None", {"evaluation.every": None, "eval_strategy": "left"}),
        ("", "a", '{"one": a}', {"eval_dataset": "left", "eval_strategy": "left"}),
    ],
)
def test_a_program_that_gives_a_file_or_a_split_to_evaluate_on_becomes_a_set(
    tmp_path, data, train, test, expected
):
    program = HELD_OUT.format(data=data, train=train, test=test, more="")
    if "evaluation.every" not in expected and f"{SET}.path" in expected:
        expected = expected | {"evaluation.every": 10, "evaluation.completions_per_prompt": 2}
    translation = translated(tmp_path, "t.py", program)
    assert found(translation, expected) == expected
    if expected.get("eval_strategy") == "left" and "{" not in test:
        advice = (
            "`evaluation.every=10 evaluation.sets.held_out.path=FILE "
            "evaluation.prompts_per_set=1000000 evaluation.completions_per_prompt=2`"
        )
        assert any(advice in reason for _, reason, _ in translation.left)


def test_prompts_of_this_machine_have_the_splits_that_they_have(tmp_path, monkeypatch):
    """What is typed of them is accepted: a folder with a file for each split has splits, a file
    has none, and so has a folder of files with other names."""
    monkeypatch.chdir(tmp_path)
    row = '{"prompt": "2 + 3", "solution": "5"}\n'
    for file, count in (("splits/train", 6), ("splits/test", 2), ("parts/a", 3), ("parts/b", 1)):
        place = tmp_path / f"{file}.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text(row * count)
    evaluated = {"eval_strategy": "steps", "eval_steps": 5}
    values = {"num_generations": 4, "per_device_train_batch_size": 4, "reward_funcs": ["os.getcwd"]}
    values |= {"model_name_or_path": "m", "num_train_epochs": 1}
    loads = "GRPOTrainer('m', f, GRPOConfig(num_train_epochs=1), train_dataset=load_dataset({}))"
    for name, content, expected in (
        (
            "a.json",
            values | evaluated | {"dataset_name": "splits"},
            {"task.split": "train", f"{SET}.split": "test", "trainer.max_steps": 6},
        ),
        (
            "a.json",
            values | {"dataset_name": "splits", "dataset_train_split": "test"},
            {"task.split": "test", "trainer.max_steps": 2},
        ),
        (
            "a.json",
            values | evaluated | {"dataset_name": "splits/train.jsonl"},
            {"task.split": None, f"{SET}.split": None, "evaluation.every": None}
            | {"eval_strategy": "left", "trainer.max_steps": 6},
        ),
        (
            "a.json",
            values | evaluated | {"dataset_name": "parts"},
            {"task.split": None, f"{SET}.split": None, "trainer.max_steps": 4},
        ),
        ("a.py", loads.format("'splits', split='train'"), {"task.split": "train"}),
        (
            "a.py",
            loads.format("'parts', split='train'"),
            {"task.split": None, "train_dataset.split": None, "trainer.max_steps": 4},
        ),
    ):
        translation = translated(tmp_path, name, content)
        expected = expected | {"task.answer_field": "solution"}
        assert found(translation, expected) == expected, content
        typed = {key: text(value) for key, (value, _) in translation.typed.items()}
        typed |= {"task.verifier": "exact_match"}
        config = compose([f"{key}={value}" for key, value in typed.items()])
        problems = [problem for problem in validated(config)[1].problems if "split" in problem]
        assert problems == []


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ('"json", data_files="train.jsonl", split="train[:50%]"', "solution"),
        ('"splits", split="train[:50%]"', "solution"),
        # Other rows may have other columns.
        ('"json", data_files="train.jsonl", split="train").map(f', None),
    ],
)
def test_a_part_of_a_file_has_its_columns(tmp_path, monkeypatch, rows, field):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "splits").mkdir()
    for file in ("train.jsonl", "splits/train.jsonl", "splits/test.jsonl"):
        (tmp_path / file).write_text('{"prompt": "2 + 3", "solution": "5"}\n')
    program = f"GRPOTrainer('m', f, train_dataset=load_dataset({rows}))"
    translation = translated(tmp_path, "t.py", program)
    expected = {"task.path": "PROMPTS", "task.answer_field": field, "train_dataset.path": "left"}
    assert found(translation, expected) == expected
    (reason,) = {why for shown, why, _ in translation.left if shown.startswith("train_dataset.p")}
    assert "with `task.answer_field=NAME` where" in reason


def test_arguments_of_loraconfig_have_a_reason(tmp_path):
    peft = pytest.importorskip("peft")
    program = 'GRPOTrainer("m", peft_config=LoraConfig(use_dora=True, modules_to_save=["head"]))'
    reasons = {shown: why for shown, why, _ in translated(tmp_path, "a.py", program).left}
    for shown in ("peft_config.use_dora=true", "peft_config.modules_to_save=[head]"):
        assert reasons[shown] == "LoRA itself, and no variant of it"
    rows = tables()["TRL"].rows
    for field in dataclasses.fields(peft.LoraConfig):
        assert f"peft_config.{field.name}" in rows, field.name
    # Those at their defaults are not listed.
    given = {field.name: field.default for field in dataclasses.fields(peft.LoraConfig)}
    given = {name: value for name, value in given.items() if value in (None, True, False)}
    values = {f"peft_config.{name}": value for name, value in given.items()}
    translation = Translation(TheirConfig(tables()["TRL"], {"peft_config": True} | values))
    listed = {shown.partition("=")[0] for shown, *_ in translation.left}
    assert listed & {*values} <= {"peft_config.target_modules"}


UNSLOTH = """
model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/m", {loaded})
model = FastLanguageModel.get_peft_model(model, {adapters})
GRPOTrainer(model=model, processing_class=tokenizer, args=GRPOConfig(num_generations=4))
"""


def test_what_unsloth_is_given_is_carried_or_listed(tmp_path):
    """Its defaults are those of its two functions: 16 and 16, all linear layers, four bits."""
    found_of = {}
    for name, loaded, adapters in (
        ("defaults", "max_seq_length=1024", ""),
        (
            "given",
            "load_in_4bit=False",
            'r=32, lora_alpha=2 * 32, target_modules=["q_proj"], lora_dropout=0.1, '
            'use_dora=True, random_state=1, bias="none", loftq_config=None, '
            'use_gradient_checkpointing="unsloth"',
        ),
    ):
        program = UNSLOTH.format(loaded=loaded, adapters=adapters)
        translation = translated(tmp_path, "train.py", program)
        listed = {shown.partition("=")[0] for shown, *_ in translation.left}
        typed = {key: value for key, (value, _) in translation.typed.items()}
        found_of[name] = listed
        assert typed["model.path"] == "org/m"
        sizes = (typed["model.lora_rank"], typed["model.lora_alpha"])
        assert sizes == {"defaults": (16, 16), "given": (32, 64)}[name]
        assert typed.get("model.lora_targets") == {"defaults": None, "given": ["q_proj"]}[name]
        unset = "get_peft_model has r=16, lora_alpha=16, target_modules=all-linear, as by default"
        said = any(unset in assumed for assumed in translation.theirs.assumed)
        assert said == (name == "defaults")
    dtype, epochs = "model_init_kwargs.dtype", "num_train_epochs"
    assert found_of["defaults"] == {dtype, epochs} | {
        "model_init_kwargs.load_in_4bit",
        "model_init_kwargs.max_seq_length",
    }
    assert found_of["given"] == {dtype, epochs} | {
        "peft_config.lora_dropout",
        "peft_config.use_dora",
        "peft_config.random_state",
    }


def test_no_default_of_trl_is_filled_in_where_unsloth_has_its_own(tmp_path):
    """Its models/rl.py of 2026.10.9 has 4 documents and 2 micro-batches, 5e-5, 0.001, a warm-up of
    a tenth, adamw_8bit, and bounds, masks and penalties that follow from the loss."""
    config = "\nGRPOTrainer('m', f, GRPOConfig(num_generations=4, max_steps=100{}))"
    sizes = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    own = {
        "accumulation.docs_per_step": sizes,
        "optimizer.learning_rate": ["learning_rate"],
        "optimizer.weight_decay": ["weight_decay"],
        "optimizer.warmup_steps": ["warmup_steps"],
        "model.dtype": ["bf16"],
        "rollout.truncated": ["mask_truncated_completions"],
        "kl.coefficient": ["beta", "optim"],
        "loss.epsilon_high": ["epsilon_high"],
    }
    left = dict.fromkeys([name for names in own.values() for name in names], "left")
    unset = left | dict.fromkeys(own) | {"kl": "KL", "aggregation": "AGGREGATION", "loss": "LOSS"}
    unset |= {"loss_type": "left", "epsilon": "left"}
    for imported in ("from unsloth import FastLanguageModel", "import unsloth.models as m"):
        translation = translated(tmp_path, "train.py", imported + config.format(""))
        assert found(translation, unset) == unset
        page = translate(tmp_path / "train.py", None)
        assert "learning_rate: unsloth's own default, not TRL's: set it in the program" in page
        assert "unsloth's trainer is TRL's" in page
    # What the program sets holds, and what follows from that alone: TRL's own, where it has none.
    given = (
        ", loss_type='dapo', learning_rate=5e-6, weight_decay=0.1, warmup_ratio=0.1, beta=0.02, "
        "per_device_train_batch_size=4, gradient_accumulation_steps=3, epsilon_high=0.3"
    )
    told = {"loss": "grpo", "aggregation": "token_mean", "loss.epsilon_high": 0.3, "kl": "k3_ratio"}
    told |= {"accumulation.docs_per_step": 12, "optimizer.warmup_steps": 10}
    told |= {"optimizer.weight_decay": 0.1, "rollout.prompts_per_batch": 3, "advantage": "grpo"}
    told |= {"mask_truncated_completions": "left", "optim": "left", "learning_rate": None}
    translation = translated(tmp_path, "train.py", "import unsloth" + config.format(given))
    assert found(translation, told) == told
    # Without unsloth all of it has TRL's defaults.
    translation = translated(tmp_path, "train.py", "import trl" + config.format(""))
    plain = {"optimizer.learning_rate": 1e-6, "kl": "none", "aggregation": "token_mean"}
    assert found(translation, plain) == plain


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # With dr_grpo it turns the deviation off, whatever is set but None.
        ("loss_type='dr_grpo'", {"advantage": "ADVANTAGE", "scale_rewards": "left"}),
        (
            "loss_type='dr_grpo', scale_rewards='group'",
            {"advantage": "ADVANTAGE", "scale_rewards": "left"},
        ),
        ("loss_type='dr_grpo', scale_rewards='none'", {"advantage": "dr_grpo"}),
        # Four documents are no whole group of eight: there it takes eight.
        (
            "per_device_train_batch_size=2, gradient_accumulation_steps=2",
            {"accumulation.docs_per_step": 16, "rollout.prompts_per_batch": 2}
            | {"per_device_train_batch_size": "near"},
        ),
        (
            "per_device_train_batch_size=4, gradient_accumulation_steps=2",
            {"accumulation.docs_per_step": 8, "per_device_train_batch_size": None},
        ),
    ],
)
def test_what_unsloth_changes_of_what_is_set_is_carried_or_left_out(tmp_path, given, expected):
    program = f"import unsloth\nGRPOTrainer('m', f, GRPOConfig(num_generations=8, {given}))"
    assert found(translated(tmp_path, "train.py", program), expected) == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # A configuration that is not read is named, and is never LoRA of other sizes.
        ('GRPOTrainer("m", peft_config=own)', {"peft_config": "left", "model.lora_rank": None}),
        ('GRPOTrainer("m", peft_config=None)', {"peft_config": None, "model.lora_rank": None}),
        (
            'm = get_peft_model(A.from_pretrained("m"), IA3Config())\nGRPOTrainer(m)',
            {"peft_config": "left", "model.lora_rank": None, "model.path": "m"},
        ),
        (
            'm = get_peft_model(A.from_pretrained("m"), LoraConfig(r=4))\nGRPOTrainer(m)',
            {"peft_config": None, "model.lora_rank": 4, "model.path": "m"},
        ),
        # What is made of itself is not followed for ever.
        (
            "from mine import m\nm = get_peft_model(m.to(0), own)\nGRPOTrainer(m)",
            {"peft_config": "left", "model": "left", "model.path": "MODEL"},
        ),
        # Adapters that are loaded are another model than the one below them.
        (
            'm = PeftModel.from_pretrained(A.from_pretrained("m"), "out")\nGRPOTrainer(m)',
            {"peft_config.model_id": "left", "model.path": "MODEL"},
        ),
        # A tokenizer is listed where it is not the model's, or has another template.
        (
            'GRPOTrainer("m", processing_class=T.from_pretrained("m", padding_side="left"))',
            {"processing_class": None},
        ),
        ('GRPOTrainer("m", processing_class=T.from_pretrained("t"))', {"processing_class": "left"}),
        (
            't = T.from_pretrained("m")\nt.chat_template = "x"\n'
            'GRPOTrainer("m", processing_class=t)',
            {"processing_class": None, "processing_class.chat_template": "left"},
        ),
    ],
)
def test_adapters_and_tokenizers_of_a_program(tmp_path, program, expected):
    assert found(translated(tmp_path, "train.py", program), expected) == expected


def test_a_program_with_a_parser_of_trl_has_the_values_of_the_command_in_its_docstring(tmp_path):
    command = "accelerate launch grpo.py --num_generations 4 --dataset_name org/set"
    program = (
        f'"""\n{command}\n"""\nfrom trl.rewards import accuracy_reward\n'
        "s, c, m = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "data = load_dataset(s.dataset_name, split=s.dataset_train_split)\n"
    )
    trained = "GRPOTrainer(args=c, reward_funcs=accuracy_reward, train_dataset=data)\n"
    expected = {"rollout.group_size": 4, "task.path": "org/set"}
    expected |= {"task.verifier": "trl.rewards.accuracy_reward"}
    assert found(translated(tmp_path, "grpo.py", program + trained), expected) == expected
    # What it sets on them before they are used counts.
    program += "c.num_generations = 2\nc.beta = read()\nif quick:\n    c.temperature = 0.5\n"
    expected |= {"rollout.group_size": 2, "beta": "left", "temperature": "left"}
    assert found(translated(tmp_path, "grpo.py", program + trained), expected) == expected
    # Of use_peft nothing is made where the trainer is given no peft_config.
    for given, rank in (("", None), (", peft_config=get_peft_config(m)", 4)):
        written = program.replace("org/set\n", "org/set --use_peft --lora_r 4\n")
        written += trained.replace(", train_dataset", f"{given}, train_dataset")
        translation = translated(tmp_path, "grpo.py", written)
        assert found(translation, {"model.lora_rank": rank}) == {"model.lora_rank": rank}
        said = "use_peft does nothing: GRPOTrainer is given no peft_config"
        assert (said in translation.theirs.assumed) == (rank is None)


STARTED = """
from rewards import digits, short
class Own(ScriptArguments):
    share: float = field(default=0.5)
if __name__ == "__main__":
    s, c, m = TrlParser((Own, GRPOConfig, ModelConfig)).parse_args_and_config()
    c.epsilon_high = 0.28
    data = load_dataset(s.dataset_name, split=s.dataset_train_split)CHANGED
    GRPOTrainer(m.model_name_or_path, [digits, short], c, data, beta=s.share)
"""
OPTIONS = "--model_name_or_path m --dataset_name org/set --epsilon_high 0.3 --num_generations 4"


def test_a_program_that_a_command_starts_is_read_with_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    command = f"accelerate launch --num_processes 2 train.py {OPTIONS}\n"
    expected = {"loss.epsilon_high": 0.28, "rollout.group_size": 4, "task.path": "org/set"}
    expected |= {"model.path": "m", "kl.coefficient": 0.5, "train_dataset.path": "near"}
    expected |= {"accumulation.docs_per_step": 16}
    rewards = {name: {"verifier": f"rewards.{name}", "weight": 1} for name in ("digits", "short")}
    for place in ("train.py", "scripts/train.py"):  # of the current folder, and of the script's
        (tmp_path / place).write_text(STARTED.replace("CHANGED", ""))
        translation = translated(tmp_path, "scripts/run.sh", command)
        assert found(translation, expected) == expected
        assert translation.typed["task.verifiers"][0] == rewards
        said = f"{place}, which the command starts, is read with its options"
        assert sum(said in line for line in translation.theirs.assumed) == 1
        (tmp_path / place).unlink()
    # Rows that the program makes of the data set are not those of the data set.
    (tmp_path / "train.py").write_text(STARTED.replace("CHANGED", ".map(f)"))
    expected |= {"task.path": "PROMPTS", "train_dataset.path": "left"}
    assert found(translated(tmp_path, "run.sh", command), expected) == expected


def test_options_of_a_program_with_a_parser_of_its_own_are_no_keys_of_trl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = 'p.add_argument("--lr", type=float, default=1.0)\np.add_argument("--beta")\n'
    program += "GRPOTrainer('m', f, GRPOConfig(learning_rate=a.lr, temperature=0.7))\n"
    (tmp_path / "train.py").write_text(program)
    translation = translated(tmp_path, "run.sh", "python train.py --num_iterations 2 --lr 3e-5")
    expected = {"optimizer.learning_rate": 3e-5, "rollout.temperature": 0.7, "rollout.passes": None}
    assert found(translation, expected) == expected


OWN = """
p.add_argument("--lr", "--rate", type=float, default=1.0)
p.add_argument("--no_kl", action="store_true")
p.add_argument("--unscaled", action="store_false", dest="scaled")
config = GRPOConfig(learning_rate=a.lr, beta=0.0 if a.no_kl else 0.3, scale_rewards=a.scaled)
GRPOTrainer("m", f, config)
"""


@pytest.mark.parametrize(
    ("command", "expected", "said"),
    [
        ("python own.py", {"optimizer.learning_rate": 1.0, "kl.coefficient": 0.3}, "a.lr=1, the"),
        ("CUDA_VISIBLE_DEVICES=0 python3.11 -u own.py", {"accumulation.docs_per_step": 8}, ""),
        ("accelerate launch own.py", {"accumulation.docs_per_step": 8}, "1 process trains"),
        (
            "CUDA_VISIBLE_DEVICES=4,5,6 accelerate launch own.py",
            {"accumulation.docs_per_step": 8},
            "1 process trains: --processes 3 says one for each GPU of CUDA_VISIBLE_DEVICES=4,5,6",
        ),
        (
            "export CUDA_VISIBLE_DEVICES=0,7\nTOKENIZERS_PARALLELISM=false python own.py",
            {"accumulation.docs_per_step": 8},
            "1 process trains: --processes 2 says one for each GPU of CUDA_VISIBLE_DEVICES=0,7",
        ),
        ("accelerate launch --num_processes 4 own.py", {"accumulation.docs_per_step": 32}, ""),
        ("torchrun --nproc-per-node 2 own.py --lr 9e-6", {"accumulation.docs_per_step": 16}, ""),
        (
            "python -m accelerate.commands.launch --num_processes=3 own.py --rate 9e-6",
            {"accumulation.docs_per_step": 24, "optimizer.learning_rate": 9e-6},
            "",
        ),
        ("python -m torch.distributed.run --nproc_per_node=2 own.py", {"kl.coefficient": 0.3}, ""),
        ("python own.py --no_kl --unscaled", {"kl": "none", "advantage": "dr_grpo"}, ""),
        # Its parser has neither option, nor is anything else read of them.
        ("python own.py --size 3 --no_log", {"kl.coefficient": 0.3}, "--size=3, --no_log sets"),
        ("python own.py run -l 3 --lr 2", {"optimizer.learning_rate": 2}, "run -l behind the"),
    ],
)
def test_a_program_is_read_however_it_is_started(tmp_path, monkeypatch, command, expected, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "prepare.py").write_text("print(1)")
    translation = translated(tmp_path, "run.sh", f"python prepare.py x\n{command}\n")
    assert found(translation, expected) == expected
    assumed = translation.theirs.assumed
    assert any(line.startswith("own.py, which the command starts, is read") for line in assumed)
    assert any(line.startswith(said) for line in assumed)
    is_unplaced = any("sets nothing" in line for line in assumed)
    assert is_unplaced == said.startswith(("--", "run"))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python missing.py", "missing.py, which is not read, since there is no such file here"),
        ("accelerate launch sft.py", "sft.py, which is not read: it is a program with SFTConfig"),
        ("cat grpo.py", "a script that starts neither"),
    ],
)
def test_a_script_that_starts_no_program_with_grpo_is_refused_by_what_it_starts(
    tmp_path, capsys, command, says
):
    (tmp_path / "sft.py").write_text("SFTConfig()")
    (tmp_path / "grpo.py").write_text(OWN)
    (tmp_path / "run.sh").write_text(command)
    assert says in refusal(capsys, "translate", tmp_path / "run.sh")


def test_a_yaml_of_trl_has_options_of_accelerate_too(tmp_path):
    values = "num_generations: 8\nper_device_train_batch_size: 4\nmixed_precision: fp16\n"
    values += "gradient_accumulation_steps: 2\nbf16: false\nnum_processes: 4\n"
    values += "accelerate_config: zero3\n"
    translation = translated(tmp_path, "grpo.yaml", values)
    expected = {"accumulation.docs_per_step": 32, "model.dtype": "float16"}
    assert found(translation, expected) == expected
    assert {"launch.num_processes", "launch.mixed_precision"} <= {*translation.theirs.values}


@pytest.mark.parametrize("name", ["t.py", "run.sh"])
def test_arguments_that_are_not_read_change_what_is_learned(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    program = "kw = {}\nkw['beta'] = 1\nGRPOTrainer('m', f, GRPOConfig(max_steps=3, **kw))"
    Path("t.py").write_text(program)
    Path("run.sh").write_text("python t.py\n")
    page = translate(Path(name), None)
    learned = page.partition("What changes what is learned")[2].partition("\n\n")[0]
    assert "GRPOConfig gets nothing by **kw, known when it runs" in learned


def test_arguments_of_the_trainer_without_a_name_are_read(tmp_path):
    data = 'ds = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})\n'
    made = 'GRPOConfig(eval_strategy="steps", eval_steps=5)'
    program = f'{data}GRPOTrainer("m", f, {made}, ds["train"], ds["test"], None, None, [Stop()])'
    expected = {"task.path": "a.jsonl", "evaluation.sets.held_out.path": "b.jsonl"}
    expected |= {"callbacks": "left"}
    assert found(translated(tmp_path, "t.py", program), expected) == expected


def test_parameters_of_vllm_that_unsloth_takes_are_listed_by_their_names(tmp_path):
    program = "import unsloth\np = SamplingParams(min_p=0.1, top_p=1.0, stop=['x'])\n"
    program += "GRPOTrainer('m', f, GRPOConfig(vllm_sampling_params=p))"
    names = ("min_p", "top_p", "stop")
    expected = {f"vllm_sampling_params.{name}": "left" for name in names}
    expected["vllm_sampling_params.top_p"] = None  # which changes nothing
    translation = translated(tmp_path, "t.py", program)
    assert found(translation, expected) == expected


def test_another_number_of_processes_than_a_file_has_is_said(tmp_path):
    (tmp_path / "t.yaml").write_text("loss_type: grpo\nnum_processes: 2\n")
    said = "--processes 4 is meant, in place of its 2"
    assert said in translate(tmp_path / "t.yaml", 4)
    assert "is meant, in place" not in translate(tmp_path / "t.yaml", 2)


OF_RLOO = "num_generations: 4\nmax_steps: 100\n"


@pytest.mark.parametrize(
    ("name", "content", "is_rloo", "said"),
    [
        ("theirs.yaml", OF_RLOO, False, "# trl rloo in it"),
        ("theirs.yaml", f"{OF_RLOO}scale_rewards: none\n", False, ""),
        ("theirs.yaml", f"# trl grpo --config theirs.yaml\n{OF_RLOO}", False, ""),
        ("theirs.yaml", f"# trl rloo --config theirs.yaml\n{OF_RLOO}", True, "as it says"),
        ("my_rloo.yaml", OF_RLOO, True, "as its name says"),
        ("my_rloo.yaml", f"{OF_RLOO}loss_type: grpo\n", False, ""),
        ("theirs.json", {"num_generations": 4, "normalize_advantages": False}, True, ""),
        ("run.sh", "trl rloo --num_generations 4\n", True, ""),
        ("run.sh", "accelerate launch -m trl.scripts.rloo --num_generations 4\n", True, ""),
        ("run.sh", "python trl/scripts/rloo.py --num_generations 4\n", True, ""),
        ("run.sh", "torchrun rloo_main.py --num_generations 4\n", True, "as its name says"),
        ("t.py", "RLOOTrainer('m', f, RLOOConfig(num_generations=4))", True, ""),
        ("t.py", "from trl import RLOOConfig\nGRPOTrainer('m', f, GRPOConfig('o'))", False, ""),
    ],
)
def test_what_is_of_rloo_is_read_as_rloo(tmp_path, name, content, is_rloo, said):
    translation = translated(tmp_path, name, content)
    expected = {
        True: {"advantage": "rloo", "kl": "k1", "kl.place": "reward", "kl.coefficient": 0.05},
        False: {"kl": "none", "kl.place": None, "kl.coefficient": None},
    }
    assert found(translation, expected[is_rloo]) == expected[is_rloo]
    told = [line for line in translation.theirs.assumed if "rloo" in line or "RLOO" in line]
    assert (said in "".join(told)) if said else not told


def test_rloo_has_the_defaults_and_the_keys_of_its_own_configuration(tmp_path):
    given = "# trl rloo\nper_device_train_batch_size: 8\nuse_vllm: true\nmax_steps: 4\n"
    given += "reward_clip_range: [-1, 2]\nnormalize_advantages: true\nmax_completion_length: 99\n"
    expected = {"rollout.group_size": 2, "rollout.prompts_per_batch": 4, "correction": None}
    expected |= {"aggregation": "constant", "aggregation.divisor": 1, "loss": "grpo"}
    expected |= {"advantage": "reinforce_plus_plus_baseline", "normalize_advantages": "near"}
    # Rewards from -1 to 2 are those from -1.5 to 1.5, half a point higher.
    expected |= {"advantage.reward_shift": -0.5, "advantage.reward_clip": 1.5}
    translation = translated(tmp_path, "r.yaml", given)
    assert found(translation, expected) == expected
    assert translation.apart == []
    translation = translated(tmp_path, "r.yaml", f"{given}num_iterations: 2\ndelta: 2\n")
    assert ["loss=rloo.rloo" in line for line in translation.apart] == [True]
    page = translate(tmp_path / "r.yaml", 1)
    assert "r.yaml, a configuration of RLOO of TRL 1.16.0, is here" in page
    assert "is not known to have:\n  delta" in page


def test_rloo_of_earlier_versions_is_refused_as_another_trainer(tmp_path):
    for given in ("rloo_k: 4\n", f"# trl rloo, trl==0.15.2\n{OF_RLOO}"):
        with pytest.raises(ConfigError, match="another trainer"):
            translated(tmp_path, "rloo.yaml", given)
    (tmp_path / "rloo.yaml").write_text(f"# trl==0.25.0\n{OF_RLOO}")
    page = translate(tmp_path / "rloo.yaml", None)
    assert "the defaults of its own version: max_completion_length=256.\n" in page


@pytest.mark.parametrize(
    ("given", "trained"),
    [
        # 37 prompts: 18 batches of 2 x 8 of an epoch are 4.5 steps of 64.
        ("num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4, "
         "steps_per_generation=1, num_train_epochs=2", (32, 64, 576, 640)),
        # 18 batches of 2 x 4 are 7.2 steps of 20.
        ("num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=5, "
         "steps_per_generation=2, num_train_epochs=1", (4, 20, 144, 160)),
        ("num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4, "
         "steps_per_generation=1, max_steps=6", (32, 64, 352, 384)),
        ("num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4, "
         "steps_per_generation=1, max_steps=4", None),
        ("num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=3, "
         "steps_per_generation=1", None),
    ],
)  # fmt: skip
def test_a_short_last_step_of_an_epoch_is_said_with_both_numbers(
    tmp_path, monkeypatch, given, trained
):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 37)
    data = 'load_dataset("json", data_files="p.jsonl", split="train")'
    program = f"GRPOTrainer('m', f, GRPOConfig({given}), train_dataset={data})"
    lines = translated(tmp_path, "t.py", program).differing
    numbers = [re.findall(r" (\d+)", line) for line in lines if "the last step" in line]
    expected = [] if trained is None else [[trained[0], trained[1], trained[2], *trained[1::2]]]
    assert numbers == [[*map(str, row)] for row in expected]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model.requires_grad_(False)", "model.requires_grad_(False)"),
        ("model.embed.requires_grad_(requires_grad=False)", "requires_grad=False"),
        ("for p in model.parameters():\n    p.requires_grad = False", "p.requires_grad = False"),
        ("model.requires_grad_()", ""),
        ("model.requires_grad_(True)", ""),
    ],
)
def test_weights_that_a_program_does_not_train_are_said(tmp_path, capsys, line, said):
    program = f"model = Auto.from_pretrained('m')\n{line}\nGRPOTrainer(model, f, GRPOConfig())\n"
    (tmp_path / "train.py").write_text(program)
    assert main(["translate", str(tmp_path / "train.py")]) == 0
    learned = capsys.readouterr().out.partition("What changes what is learned")[2]
    learned = learned.partition("\n\n")[0]
    assert ("requires_grad" in learned) == bool(said)
    assert said in learned


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "train.py, which the command starts, is not read, since there is no such file here"),
        ("x = 1", "train.py, which the command starts, is not read: it is a program with no GRPO"),
        ("def", "train.py, which the command starts, is not read: it is "),
    ],
)
def test_a_program_that_a_command_starts_and_that_is_not_read_is_named(
    tmp_path, monkeypatch, content, says
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "train.py").write_text(content)
    translation = translated(tmp_path, "run.sh", f"python train.py {OPTIONS}")
    assert found(translation, {"loss.epsilon_high": 0.3}) == {"loss.epsilon_high": 0.3}
    assert any(line.startswith(says) for line in translation.theirs.assumed)


# What trl/trainer/grpo_config.py and grpo_trainer.py have at these tags.
OF_0_14 = {"beta": 0.04, "temperature": 0.9, "max_completion_length": 256, "loss_type": "grpo"}
OF_0_14 |= {"top_k": 50, "use_bias_correction_kl": False, "bf16": False}
OF_0_14 |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
OF_0_20 = {"max_completion_length": 256, "loss_type": "bnpo"}


@pytest.mark.parametrize(
    ("line", "of_version"),
    [
        ("# pip install trl==0.14.0", OF_0_14),
        ('# "trl[vllm] == 0.14.0"', OF_0_14),
        ("# trl @ git+https://github.com/huggingface/trl.git@v0.20.0", OF_0_20),
        ("# TRL 1.16.0, of pip install trl>=0.14", None),
        ("# any trl", None),
        ("max_prompt_length: 256", {"max_completion_length": 256}),
        ("vllm_device: auto", OF_0_20 | {"beta": 0.04, "temperature": 0.9, "top_k": 50}
         | {"use_bias_correction_kl": False, "bf16": False}),
    ],
)  # fmt: skip
def test_a_file_of_an_earlier_version_has_its_defaults_or_is_told_what_to_type_for_them(
    tmp_path, line, of_version
):
    """The command of a file that names its version is that of a file that sets its defaults. Where
    a key dates a file, what is named to type, in the place of what is named, makes it so."""
    values = {"num_generations": 8, "max_steps": 10}
    file = tmp_path / "file.yaml"
    file.write_text("\n".join([line, *(f"{key}: {value}" for key, value in values.items())]))
    page = translate(file, 1).split("\n\n")
    if of_version is None:
        assert page[1].lstrip().startswith("pgtk ")
        return
    in_full = translated(tmp_path, "full.json", of_version | values)
    in_full.check()
    command = shlex.split(page[2])[1:]
    if line.startswith("#"):
        assert page[1].startswith("It names TRL 0.")
        assert sorted(command) == sorted(in_full.overrides)
        return
    assert page[1].startswith(f"It has {line.partition(':')[0]}, which TRL")
    typed, _, dropped = page[1].partition(" For these type ")[2].partition(" in the place of ")
    dropped = shlex.split(re.split(r"\.(?= |$)", dropped)[0])
    assert {*dropped} <= {*command}
    made = [*(word for word in command if word not in dropped), *shlex.split(typed)]
    assert sorted(made) == sorted(in_full.overrides)


def test_a_ratio_of_warm_up_that_a_yaml_has_is_ignored_by_transformers_5(tmp_path):
    """Its TrainingArguments has no such field: TRL's own scripts drop what a YAML has for none. Its
    parser refuses it elsewhere, and in a program of one's own that does not say otherwise, so that
    such a job was of transformers 4."""
    kept = {"optimizer.warmup_steps": 10, "warmup_ratio": "near"}
    ignored = {"optimizer.warmup_steps": 0, "warmup_ratio": "apart"}
    values = "warmup_ratio: 0.1\nmax_steps: 100\nnum_generations: 4\n"
    (tmp_path / "r.yaml").write_text(values)
    own = "args, = TrlParser((GRPOConfig,)).parse_args_and_config(%s)\nGRPOTrainer('m', f, args)\n"
    (tmp_path / "own.py").write_text(own % "")
    (tmp_path / "lax.py").write_text(own % "fail_with_unknown_args=False")
    for name, content, expected in (
        ("file.yaml", values, ignored),
        ("run.sh", f"trl grpo --config {tmp_path}/r.yaml --beta 0.1", ignored),
        ("gpu.sh", f"CUDA_VISIBLE_DEVICES=1 trl grpo --config {tmp_path}/r.yaml", ignored),
        ("m.sh", f"python -m trl.scripts.grpo --config {tmp_path}/r.yaml --beta 0.1", ignored),
        ("s.sh", f"accelerate launch trl/scripts/grpo.py --config {tmp_path}/r.yaml", ignored),
        ("lax.sh", f"accelerate launch lax.py --config {tmp_path}/r.yaml", ignored),
        ("own.sh", f"accelerate launch own.py --config {tmp_path}/r.yaml", kept),
        ("away.sh", f"python -m my.grpo --config {tmp_path}/r.yaml --num_generations 4", kept),
        ("old.yaml", f"# trl==0.20.0\n{values}", kept),
        ("dated.yaml", f"{values}max_prompt_length: 9\n", kept),
        ("dump.json", f"{values}hub_token: <HUB_TOKEN>\n", kept),
        ("more.sh", f"trl grpo --config {tmp_path}/r.yaml --warmup_ratio 0.1", kept),
        ("train.py", "GRPOConfig('o', warmup_ratio=0.1, max_steps=100)", kept),
    ):
        translation = translated(tmp_path, name, content)
        assert found(translation, expected) == expected, name
        said = [
            line for line in translation.apart if line.startswith("warmup_ratio=0.1: transform")
        ]
        assert len(said) == (expected is ignored)


@pytest.mark.parametrize(
    ("mode", "aggregation", "is_said"),
    [
        ("gspo", "token-mean", True),
        ("gspo", "seq-mean-token-mean", False),
        ("vanilla", "token-mean", False),
    ],
)
def test_of_gspo_it_is_said_what_verl_before_0_9_1_averages_over(
    tmp_path, mode, aggregation, is_said
):
    values = {f"{ACTOR}.policy_loss.loss_mode": mode, f"{ACTOR}.loss_agg_mode": aggregation}
    translation = translated(tmp_path, "file.json", values)
    said = [line for line in translation.differing if "loss_mode=gspo: verl 0.9.0 and be" in line]
    assert len(said) == is_said


def test_what_is_said_stands_by_itself(tmp_path):
    """An own server's program, a rate of an optimizer, and reasons that name no other reason."""
    given = {"use_vllm": True, "vllm_mode": "server", "repetition_penalty": 1.05}
    translation = translated(tmp_path, "file.json", given | {"dataset_name": "org/set"})
    said = "\n".join(translation.differing)
    assert "vllm_mode=server: `trl vllm-serve` cannot be joined" in said
    assert "dataset_name=org/set: its rows are not read here" in said
    program = "sgd = torch.optim.SGD(p, lr=0.1)\nGRPOTrainer('m', f, optimizers=(sgd, None))\n"
    ((shown, reason),) = [
        (shown, reason)
        for shown, reason, _ in translated(tmp_path, "train.py", program).left
        if shown.startswith("optimizers=")
    ]
    assert "torch.optim.SGD(p, lr=0.1)" in shown
    assert "`optimizer.learning_rate` takes its own" in reason
    for table in tables().values():
        for row in table.rows.values():
            assert not re.search(r"(?m)^as `", "\n".join(row.reasons.values())), row.name


def test_options_of_a_command_lie_over_the_file_that_it_names(tmp_path, monkeypatch):
    """As TRL's parser has them; what starts the processes may stand in the file, too."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = "trl grpo --config d.yaml --beta 0.0 --loss_type cispo --epsilon_high 5\n"
    assert found(translated(tmp_path, "run.sh", command), {"config": "left"}) == {"config": "left"}
    file = "beta: 0.1\nnum_generations: 4\nnum_processes: 3\nscale_rewards: false\n"
    file += "datasets: [{path: json, data_files: a.jsonl}]\n"
    expected = {"kl": "none", "loss": "cispo", "rollout.group_size": 4, "advantage": "dr_grpo"}
    expected |= {"accumulation.docs_per_step": 24, "config": None, "task.path": "a.jsonl"}
    for place in (tmp_path / "d.yaml", Path("d.yaml")):  # the script's folder, the current one
        place.write_text(file)
        translation = translated(tmp_path, "run.sh", command)
        assert found(translation, expected) == expected
        assert f"{place} is the file that --config names" in translation.theirs.assumed
        file = file.replace("4", "2")
        expected |= {"rollout.group_size": 2}


def test_a_file_that_a_command_names_and_that_is_none_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("trl grpo --config d.yaml\n")
    for content, says in (("a: [1", "no YAML, line"), ("- 1\n", "a list")):
        Path("d.yaml").write_text(content)
        words = refusal(capsys, "translate", "run.sh")
        assert f"It is none: d.yaml, which it names: {says}" in words


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2 grpo.py", {"accumulation.docs_per_step": 64}),
        ("deepspeed --num_gpus 2 --num_nodes 3 grpo.py", {"accumulation.docs_per_step": 48}),
        (
            "torchrun --nproc-per-node $GPUS --master_port 29500 grpo.py",
            {"accumulation.docs_per_step": None, "launch.nproc_per_node": "left"}
            | {"launch.master_port": "left"},
        ),
        ("torchrun --nproc_per_node gpu grpo.py", {"launch.nproc_per_node": "left"}),
        # One process a node by torchrun's default, one a GPU by DeepSpeed's.
        ("torchrun --nnodes 2 grpo.py", {"accumulation.docs_per_step": 16}),
        (
            "deepspeed --num_nodes 2 grpo.py",
            {"accumulation.docs_per_step": None, "launch.num_nodes": "left"},
        ),
        # A number type of the launcher's holds where TRL's own two are off.
        (
            "accelerate launch --mixed_precision fp16 grpo.py --bf16 false",
            {"model.dtype": "float16", "launch.mixed_precision": None},
        ),
        (
            "accelerate launch --mixed_precision fp16 --config_file zero3.yaml grpo.py",
            {"model.dtype": "bfloat16", "launch.mixed_precision": "left"}
            | {"launch.config_file": "left"},
        ),
        # A file of accelerate's says nothing more where the command says how many train.
        (
            "accelerate launch --config_file zero3.yaml --num_processes 4 grpo.py",
            {"launch.config_file": "near", "accumulation.docs_per_step": 32},
        ),
        (
            "accelerate launch --config_file zero3.yaml --num_processes 4 grpo.py --bf16 false",
            {"launch.config_file": "left"},
        ),
        (
            "accelerate launch --gradient_accumulation_steps 4 grpo.py",
            {"accumulation.docs_per_step": 8, "launch.gradient_accumulation_steps": "left"},
        ),
        (
            "trl grpo --scale_rewards False",
            {"advantage": "ADVANTAGE", "scale_rewards": "left"},
        ),
        ("trl grpo --scale_rewards none", {"advantage": "dr_grpo", "scale_rewards": None}),
        (
            "trl grpo --num_processes 4 --accelerate_config zero3",
            {"accumulation.docs_per_step": 32, "launch.accelerate_config": None},
        ),
        (
            "trl grpo --accelerate_config zero3",
            {"accumulation.docs_per_step": 64, "launch.accelerate_config": None},
        ),
        (
            "trl grpo --accelerate_config mine",
            {"accumulation.docs_per_step": 8, "launch.accelerate_config": "left"},
        ),
    ],
)
def test_options_of_what_starts_the_processes_are_read_or_left_out(tmp_path, command, expected):
    translation = translated(tmp_path, "run.sh", f"{command} --num_generations 8\n")
    assert found(translation, expected) == expected


LAUNCHED = "accelerate launch --config_file own.yaml {} grpo.py --num_generations 8 {}\n"


@pytest.mark.parametrize(
    ("options", "file", "expected"),
    [
        (("", ""), {"distributed_type": "FSDP", "num_processes": 4}, {"docs": 32}),
        # An option comes before the file; one process trains where no kind of several is said.
        (("--num_processes 2", ""), {"distributed_type": "FSDP", "num_processes": 4}, {"docs": 16}),
        (("", ""), {"distributed_type": "NO", "num_processes": 4}, {"docs": 8}),
        (("--multi_gpu", ""), {"distributed_type": "NO", "num_processes": 4}, {"docs": 32}),
        # As many as the machine has, or with parts of one model, are not known.
        (("", ""), {"distributed_type": "MULTI_GPU"}, {"docs": None}),
        (
            ("", ""),
            {"distributed_type": "FSDP", "num_processes": 4}
            | {"parallelism_config": {"parallelism_config_tp_size": 2}},
            {"docs": None},
        ),
        # The number type counts where TRL's own keys are off.
        (
            ("", "--bf16 false"),
            {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16"},
            {"docs": 16, "dtype": "float16"},
        ),
    ],
)
def test_the_file_of_accelerate_that_a_command_names_is_read(tmp_path, options, file, expected):
    (tmp_path / "own.yaml").write_text(json.dumps(file))
    typed = translated(tmp_path, "run.sh", LAUNCHED.format(*options)).typed
    found_values = {"docs": typed.get("accumulation.docs_per_step", (None,))[0]}
    found_values["dtype"] = typed["model.dtype"][0]
    assert found_values | expected == found_values


DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 2}


@pytest.mark.parametrize(
    ("options", "of_deepspeed", "said"),
    [
        ("", {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}, ""),
        ("--gradient_accumulation_steps 4", {"gradient_accumulation_steps": "auto"}, ""),
        (
            "--gradient_accumulation_steps 4",
            {"gradient_accumulation_steps": 1},
            "gradient_accumulation_steps in own.yaml needs 4",
        ),
        ("--max_grad_norm 0.2", {"gradient_clipping": 1.0}, "needs 0.2, as max_grad_norm is"),
        # Without a word of it accelerate takes 1 for DeepSpeed's own file.
        ("--gradient_accumulation_steps 4", {"deepspeed_config_file": "ds.json"}, "needs 4"),
        ("--learning_rate 1e-5", {"deepspeed_config_file": "ds.json"}, "needs 1e-05"),
        ("--learning_rate 2e-6", {"deepspeed_config_file": "ds.json"}, ""),
    ],
)
def test_what_deepspeed_and_trl_say_of_one_number_is_compared(
    tmp_path, capsys, monkeypatch, options, of_deepspeed, said
):
    monkeypatch.chdir(tmp_path)
    optimizer = {"type": "Lion", "params": {"lr": 2e-6}}
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": optimizer}))
    (tmp_path / "own.yaml").write_text(json.dumps(DEEPSPEED | {"deepspeed_config": of_deepspeed}))
    (tmp_path / "run.sh").write_text(LAUNCHED.format("", options))
    if said:
        assert said in refusal(capsys, "translate", "run.sh")
    else:
        page = translate(Path("run.sh"), None)
        assert ("deepspeed.optimizer=Lion" in page) == ("deepspeed_config_file" in of_deepspeed)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("grpo.py", "# trl==0.15.2\n" + "GRPOTrainer('m', f, args=GRPOConfig(num_generations=4))"),
        ("grpo.yaml", "# for trl==0.15.2\nnum_generations: 4\n"),
        ("requirements.txt", "torch\ntrl==0.15.2\n"),
    ],
)
def test_a_file_that_is_read_or_lists_packages_names_the_version(
    tmp_path, monkeypatch, file, content
):
    monkeypatch.chdir(tmp_path)
    Path("grpo.py").write_text("GRPOTrainer('m', f, args=GRPOConfig(num_generations=4))\n")
    Path("grpo.yaml").write_text("num_generations: 4\n")
    started = "trl grpo --config grpo.yaml\n" if file == "grpo.yaml" else "python grpo.py\n"
    Path("run.sh").write_text(started)
    Path(file).write_text(content)
    assert f"{file} names TRL 0.15.2" in translate(Path("run.sh"), None)


def test_a_page_says_nothing_twice(tmp_path, monkeypatch):
    """Two remarks on one key are a line, as are two files that are not here."""
    monkeypatch.chdir(tmp_path)
    names = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    values = SIZES | GRPO | names | {"trainer.test_freq": 5}
    values |= {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}
    Path("theirs.json").write_text(json.dumps(values | {"trainer.logger": ["wandb", "x"]}))
    page = translate(Path("theirs.json"), None)
    settings = [line.partition(": ")[0] for line in page.splitlines() if ": " in line]
    assert len({*settings}) == len(settings)
    assert page.count("nothing lies there") == 1
    files = "task.path=train.parquet, evaluation.sets.held_out.path=test.parquet: nothing lies"
    assert files in page
    # A version is asked for where TRL's file names none and has few keys.
    Path("theirs.yaml").write_text("num_generations: 4\ndataset_name: org/set\n")
    page = translate(Path("theirs.yaml"), None)
    assert "# trl==0.15.2 in the file says another" in page
    assert page.count("dataset_name=org/set: ") == 1
    Path("theirs.yaml").write_text("# trl==1.16.0\nnum_generations: 4\n")
    assert "trl==" not in translate(Path("theirs.yaml"), None)


LATER = """
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl import GRPOConfig, GRPOTrainer
shape = AutoConfig.from_pretrained("m")
policy = AutoModelForCausalLM.from_pretrained("m", config=shape)
words = AutoTokenizer.from_pretrained("m")
sampled = GenerationConfig()
other.config.attention_dropout = 0.3
args = GRPOConfig(num_generations=4)
trainer = GRPOTrainer(policy, f, args, processing_class=words)
{}
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("policy.config.attention_dropout = 0.1", "model.config.attention_dropout=0.1 (line 11)"),
        ("shape.attention_dropout = 0.1", "model.config.attention_dropout=0.1 (line 11)"),
        ("setattr(policy.config, 'x', 2)", "model.config.x=2 (line 11)"),
        ("policy.config.update({'x': 2})", "model.config.update="),
        ("policy.generation_config.eos_token_id = 7", "model.generation_config.eos_token_id=7"),
        ("policy.lm_head = other", "model.lm_head=other (line 11)"),
        ("trainer.model.config.x = 2", "model.config.x=2 (line 11)"),
        ("trainer.generation_config.top_k = 2", "GRPOTrainer.generation_config.top_k=2 (line 11)"),
        ("words.model_max_length = 2", "processing_class.model_max_length=2 (line 11)"),
        # What does nothing there is not said to change what is learned.
        ("policy.config.use_cache = False", ""),
        ("policy.generation_config.temperature = 0.6", ""),
        ("words.pad_token = words.eos_token", ""),
        ("args.beta = 0.04", ""),
    ],
)
def test_what_a_program_sets_on_its_model_or_its_trainer_is_named_with_its_line(
    tmp_path, line, said
):
    (tmp_path / "train.py").write_text(LATER.format(line))
    page = translate(tmp_path / "train.py", None)
    learned = page.partition("What changes what is learned")[2].partition("\n\n")[0]
    later = re.findall(r"\n  ((?:model\.|GRPOTrainer|processing_class\.).*)", learned)
    later = [words for words in later if not words.startswith("model_init_kwargs")]
    assert [words[: len(said)] for words in later] == ([said] if said else [])
    assert "other arguments" not in page


def test_what_was_assumed_of_a_program_or_a_script_is_said(tmp_path):
    program = (
        "GRPOConfig(num_generations=4, **more)\nGRPOConfig(beta=1)\n"
        "GRPOTrainer('m', my.reward, args=made())\n"
    )
    translation = translated(tmp_path, "train.py", program)
    assert translation.theirs.unread == ["GRPOConfig gets nothing by **more, known when it runs"]
    assert translation.theirs.assumed == [
        "the first GRPOConfig of 2 is meant",
        "made() is what GRPOConfig(...) makes, and nothing else",
        "1 process trains: --processes N says another number",
    ]
    expected = {"rollout.group_size": 4, "model.path": "m", "reward_funcs": "left", "kl": "none"}
    assert found(translation, expected) == expected
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n={}\n"
    translation = translated(tmp_path, "run.sh", command.format(3) + command.format(4))
    assert translation.theirs.assumed == ["the first of its 2 commands is meant"]
    assert found(translation, {"rollout.group_size": 3}) == {"rollout.group_size": 3}


def test_a_dump_of_verl_lists_none_of_its_defaults(tmp_path):
    dump = """
actor_rollout_ref:
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    ppo_mini_batch_size: 256
    use_torch_compile: true
    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
    checkpoint: {save_contents: [model, optimizer, extra], load_contents: "${.save_contents}"}
    profiler: {save_path: "${oc.select:global_profiler.save_path,null}"}
  ref:
    use_torch_compile: true
    log_prob_max_token_len_per_gpu: 16384
  rollout: {n: 4, name: vllm, max_num_seqs: 256}
critic: {ppo_mini_batch_size: 256, rollout_n: 4, ppo_micro_batch_size_per_gpu: null}
algorithm: {adv_estimator: grpo}
"""
    translation = translated(tmp_path, "job.yaml", dump)
    assert [shown for shown, *_ in translation.left] == ["trainer.total_epochs=30 (their default)"]
    assert found(translation, {"rollout.group_size": 4}) == {"rollout.group_size": 4}


def test_of_a_length_that_is_not_known_its_copies_say_nothing(tmp_path):
    script = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$FILE "
    script += "data.max_response_length=$LENGTH actor_rollout_ref.actor.optim.warmup_style=cosine"
    translation = translated(tmp_path, "run.sh", script)
    said = " ".join([*(shown for shown, *_ in translation.left), *translation.differing])
    assert "data.max_response_length=" in said
    assert "rollout.response_length" not in said
    assert "before which the prompts end" not in said


def test_an_interpolation_whose_value_is_not_in_the_file_is_not_known(tmp_path):
    values = {
        f"{ACTOR}.optim.lr": "${oc.env:LR,1e-6}",
        f"{ACTOR}.optim.weight_decay": "${decay}",
        "actor_rollout_ref.rollout.top_p": "${oc.decode:${oc.env:P}}",
        "data.train_files": "${oc.env:DATA}/train.parquet",
        "data.max_response_length": "${data.max_prompt_length}",
        f"{ACTOR}.optim.clip_grad": "${oc.select:clip,0.5}",
    }
    expected = {**dict.fromkeys([*values][:4], "left"), "task.path": "PROMPTS"}
    expected |= {"rollout.max_completion_length": 512, "optimizer.max_grad_norm": 0.5}
    expected |= {"optimizer.learning_rate": None, "sampler.keep_top": None}
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
    assert found(translation, expected) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Our default of a bound of the divergence is another one under binary_kl.
        (
            {f"{ACTOR}.policy_loss.loss_mode": "dppo_kl"},
            {"loss.delta_low": 0.2, "loss.delta_high": 0.2, "loss.ratio_cap": 3},
        ),
        ({f"{ACTOR}.policy_loss.loss_mode": "dppo_tv"}, {"loss.delta_low": None}),
        # One completion has no group: 8 are sampled, of each of the 256 prompts of a step.
        (
            {"actor_rollout_ref.rollout.n": 1},
            {"advantage": "grpo", "rollout.group_size": 8, "accumulation.docs_per_step": 2048}
            | {"actor_rollout_ref.rollout.n": "near", "optimizer.beta2": 0.999},
        ),
        ({f"{ACTOR}.clip_ratio_low": 10}, {f"{ACTOR}.clip_ratio_low": "left"}),
        ({"trainer.save_freq": 5}, {"trainer.checkpoint_every": 10, "tracking": None}),
        # A bound of a micro-batch that is known when their program runs is none of the longest
        # document's, which has to fit.
        (
            {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": "$N"}
            | {"data.max_prompt_length": 8192},
            {"accumulation.max_tokens": 8704, f"{ACTOR}.ppo_max_token_len_per_gpu": "left"},
        ),
        ({"trainer.test_freq": 0.3}, {"trainer.test_freq": "left"}),
        ({"data.apply_chat_template_kwargs": 5}, {"data.apply_chat_template_kwargs": "left"}),
        # Prompts of validation that are those of training are refused by the name of their set.
        (
            {"data.train_files": "a.parquet", "data.val_files": "a.parquet"}
            | {"trainer.test_freq": 5},
            {"trainer.test_freq": "left", "task.path": "a.parquet"},
        ),
    ],
)
def test_the_command_leaves_out_our_defaults_and_what_is_refused(tmp_path, values, expected):
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
    translation.check()
    assert found(translation, expected) == expected
    refused = [shown for shown, reason, _ in translation.left if "is refused here" in reason]
    assert len(refused) == len({*refused})  # the rest of a key's overrides go without a line


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.yaml", "", "none: empty"),
        ("list.yaml", "- 1\n- 2\n", "none: a list"),
        ("sft.yaml", "packing: true\nlearning_rate: 1e-5\n", "a configuration of SFT"),
        ("dpo.yaml", "precompute_ref_log_probs: true\nbeta: 0.1\n", "a configuration of DPO"),
        ("none.yaml", "learning_rate: 1e-5\n", "it has no key of GRPO"),
        ("other.yaml", "beta: 0.1\nloss_type: sigmoid\n", "it has no key of GRPO"),
        ("acc.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\n", "accelerate's own"),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "DeepSpeed's own"),
        ("config.yaml", "aggregation: {mode: x}\nloss: {name: grpo}\n", "pgtoolkit's own"),
        ("sft_trainer.yaml", "optim: {lr: 1}\ntrainer: {nnodes: 1}\n", "another trainer of verl"),
        ("bad.yaml", "a: [1\n", "none: no YAML, line"),
        ("sft.sh", "torchrun -m verl.trainer.sft_trainer x=1\n", "starts verl.trainer.sft_trainer"),
        ("sft2.sh", "trl sft --config x.yaml\n", "a script that starts trl sft"),
        ("other.sh", "echo hello\n", "a script that starts neither"),
        ("async.sh", "python3 -m verl.experimental.one_step_off_policy.main_ppo a=1\n", "one_step"),
        ("sft.py", "SFTTrainer(args=SFTConfig(max_length=3))\n", "SFTConfig, SFTTrainer"),
        ("bad.py", "GRPOConfig(\n", "was never closed"),
        ("nothing.py", "print(1)\n", "no GRPOConfig"),
        ("parser.py", "TrlParser((GRPOConfig,))\n", "its options come from a command or a YAML"),
    ],
)
def test_what_is_no_configuration_of_theirs_is_refused(tmp_path, capsys, name, content, says):
    (tmp_path / name).write_text(content)
    assert says in refusal(capsys, "translate", tmp_path / name)
    assert "there is no file at this path" in refusal(
        capsys, "translate", tmp_path / "missing.yaml"
    )


@pytest.mark.parametrize("trainer", tables())
def test_no_key_with_another_value_than_its_default_vanishes(trainer):
    """Each changes the command, or is listed; but for values that are exactly what happens here."""
    table = tables()[trainer]
    given = SIZES | GRPO if trainer == "verl" else {"num_generations": 8}
    usual = Translation(TheirConfig(table, given)).typed
    usual = {key: text(value) for key, (value, _) in usual.items()}
    vanished = []
    for name, row in [*table.rows.items()][::8]:
        value = another(row.default)
        nothing_to_type = any(here == "" for _, here in row.cases)
        if name in given or text(value) in row.named or nothing_to_type:
            continue
        translation = Translation(TheirConfig(table, given | {name: value}))
        typed = {key: text(value) for key, (value, _) in translation.typed.items()}
        listed = [*(shown for shown, *_ in translation.left), *translation.differing]
        if typed == usual and not any(line.startswith(f"{name}=") for line in listed):
            vanished.append(f"{name}={text(value)}")
    assert vanished == []


def another(default: object) -> object:
    """Return another value than a default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 3
    return {"x": 1} if isinstance(default, dict) else "something"


def test_a_value_is_no_secret_before_a_colon_and_a_secret_is_never_shown(tmp_path, capsys):
    secret = "abcdefgh"
    file = tmp_path / "theirs.json"
    values = {"num_generations": 8, "loss_type": "cispo", "importance_sampling_level": "token"}
    file.write_text(json.dumps(values | {"hub_token": secret, "other_token": secret}))
    assert main(["translate", str(file)]) == 0
    page = capsys.readouterr().out
    assert "hub_token=***" in page
    assert secret not in page
    script = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.loss_agg_mode=token \\\n"
    script += f" trainer.project_name=password={secret}"
    (tmp_path / "run.sh").write_text(script)
    assert main(["translate", str(tmp_path / "run.sh")]) == 0
    page = capsys.readouterr().out
    assert re.search(r"loss_agg_mode=token: (?!\*)", page)
    assert secret not in page


def test_a_word_in_the_place_of_a_number_is_named_and_no_default_is_taken_for_it(tmp_path):
    """`Flase` is no false, and 256 times `eight` no number; what follows from them is not known."""
    values = {
        f"{ACTOR}.use_kl_loss": "Flase",
        f"{ROLLOUT}.n": "eight",
        f"{ACTOR}.optim.lr": "1e-6x",
    }
    values |= {"data.max_prompt_length": "512,", f"{ACTOR}.clip_ratio_low": "0.3"}
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
    reasons = {shown: reason for shown, reason, _ in translation.left}
    assert reasons[f"{ACTOR}.use_kl_loss=Flase"] == "it is neither true nor false"
    for setting in (f"{ROLLOUT}.n=eight", f"{ACTOR}.optim.lr=1e-6x", "data.max_prompt_length=512,"):
        assert reasons[setting] == "it is no number"
    assert reasons[f"{MINI}=256 (their default)"] == (
        f"what it follows from is not known: {ROLLOUT}.n=eight"
    )
    assert translation.typed["kl"] == ("KL", None)
    typed = {"rollout.group_size", "accumulation.docs_per_step", "optimizer.learning_rate"}
    assert not typed & {*translation.typed}
    assert text(translation.typed["loss.epsilon_low"][0]) == "0.3"  # a number in quotes


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{ACTOR}.loss_agg_mode", "token_mean", "token-mean is nearest"),
        ("algorithm.adv_estimator", "grpoo", "grpo is nearest"),
        # A value that is known has a reason of its own.
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm", "without loss_scale_factor"),
        (f"{ACTOR}.policy_loss.loss_mode", "clip_cov", "the losses by covariance, have no equal"),
        (f"{CORRECTION}.rollout_rs", "token_k1", "The band of `k1`"),
        (f"{ACTOR}.kl_loss_type", "abs", "`abs` and `full` have no equal"),
    ],
)
def test_a_value_that_is_mistyped_is_answered_by_the_nearest_one(tmp_path, key, value, expected):
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | KL_LOSS | {key: value})
    (reason,) = [reason for shown, reason, _ in translation.left if shown == f"{key}={value}"]
    assert expected in reason
    assert ("nearest" in reason) == ("nearest" in expected)


@pytest.mark.parametrize(
    ("trainer", "key", "near"),
    [
        ("verl", f"{ACTOR}.clip_ratio_hgih", f"{ACTOR}.clip_ratio_high"),
        ("verl", "algoritm.gamma", "algorithm.gamma"),
        ("verl", f"{ACTOR}.nothing_like_it", None),
        ("TRL", "num_generation", "num_generations"),
        ("TRL", "zzz", None),
    ],
)
def test_a_key_that_is_mistyped_is_answered_by_the_one_that_is_meant(trainer, key, near):
    assert tables()[trainer].near(key) == near


@pytest.mark.parametrize("before", ["\\ \n", "\\\n # a comment\n"], ids=["blank", "comment"])
def test_settings_that_bash_hands_to_no_command_are_named(tmp_path, capsys, before):
    """A backslash before a blank goes on in no line, and a comment ends a command."""
    file = tmp_path / "run.sh"
    start = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    file.write_text(
        f"python3.11 -V\nrun.sh\n{start}{before} {ROLLOUT}.n=8 \\\n +{ACTOR}.optim.lr=1e-5\n"
    )
    assert main(["translate", str(file)]) == 0
    page = capsys.readouterr().out
    lost = page.partition("What changes what is learned, and is left out:\n")[2].splitlines()[0]
    assert lost.startswith(f"  {ROLLOUT}.n=8 +{ACTOR}.optim.lr=1e-5: bash hands them to no command")
    bash = subprocess.run(["bash", file], capture_output=True, text=True, check=False).stderr
    assert f"{ROLLOUT}.n=8: command not found" in bash
    file.write_text(f"{start} \\\n {ROLLOUT}.n=8 \\\n\n")
    assert main(["translate", str(file)]) == 0
    assert "hands them" not in capsys.readouterr().out


def test_our_defaults_are_not_said_to_stand_in_the_command(tmp_path, capsys):
    """What is refused is listed by the key that the file sets."""
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(SIZES | GRPO | {f"{ACTOR}.clip_ratio_c": 0.5}))
    assert main(["translate", str(file)]) == 0
    page = capsys.readouterr().out
    assert "trainer.max_steps=" not in page.partition("\n\nFor a try")[0]
    assert "; the default here is trainer.max_steps=300\n" in page
    assert f"\n  {ACTOR}.clip_ratio_c=0.5: loss.dual_clip=0.5 is refused here" in page


def test_a_bound_of_batches_that_v1_ignores_is_said_to_be(tmp_path):
    filters = {"algorithm.filter_groups.enable": True, "data.gen_batch_size": 1}
    filters |= {"algorithm.filter_groups.max_num_gen_batches": 10}
    said = translated(tmp_path, "theirs.json", SIZES | GRPO | filters).differing
    assert [line for line in said if "v1 ignores max_num_gen_batches" in line]


@pytest.mark.parametrize(
    ("words", "kl", "left"),
    [
        # A coefficient that is not known leaves the kind of penalty known, and no zero.
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=$C",
            "kl=k3",
            f"{ACTOR}.kl_loss_coef=$C",
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=$C",
            "kl=k1 kl.place=reward",
            "algorithm.kl_ctrl.kl_coef=$C",
        ),
        # A penalty that may be there: its keys are ours once it is filled in.
        (
            f"{ACTOR}.use_kl_loss=$USE {ACTOR}.kl_loss_coef=0.01",
            "kl=KL",
            f"{ACTOR}.kl_loss_coef=0.01",
        ),
    ],
)
def test_a_penalty_that_is_not_known_is_said_to_have_our_coefficient(words, kl, left, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {words}")
    page = translate(path, None)
    command = next(line for line in page.splitlines() if line.startswith("  pgtk "))
    assert {word for word in command.split() if word.startswith("kl")} == {*kl.split()}
    unknown = "what it follows from is known when their program runs"
    assert f"\n  {left}: {unknown}; the default here is kl.coefficient=0.04\n" in page
    assert "use_kl_loss=true" not in page  # which is known, and typed as kl
    assert ("\nKeys of kl that are not typed have our defaults then.\n" in page) == (kl == "kl=KL")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "python3 -m verl.trainer.main_ppo",
            [
                f"${{CLIP:+{ACTOR}.clip_ratio_high=$CLIP}}",
                "actor_rollout_ref.${PART}.clip_ratio=0.3",
                "+$KEY=3",
                "`cat more`",
            ],
        ),
        ("trl grpo", ["${BETA:+--beta=$BETA}", "--$NAME=5", "`cat more`"]),
    ],
)
def test_a_setting_whose_name_is_not_known_sets_nothing_and_is_no_unknown_key(
    command, words, tmp_path
):
    path = tmp_path / "run.sh"
    path.write_text(f"{command} {' '.join(words)}")
    page = translate(path, None)
    assumed = [line[2:-13] for line in page.splitlines() if line.endswith(" sets nothing")]
    assert assumed == [*words[:-1], "$(cat more)"]
    assert "is not known to have" not in page


MADE = "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(num_generations=4, beta=0.04)\n"
"""A program that has a configuration, and no trainer yet."""


@pytest.mark.parametrize(
    ("lines", "rank", "alpha"),
    [
        # What TRL's get_peft_config makes has the sizes of ModelConfig; 16 and 32 by default.
        ("T(peft_config=get_peft_config(ModelConfig(use_peft=True, lora_r=4)))", 4, 32),
        (
            "o = ModelConfig(use_peft=True)\no.lora_alpha = 8\nT(peft_config=get_peft_config(o))",
            16,
            8,
        ),
        ("T(peft_config=get_peft_config(ModelConfig(lora_r=4)))", None, None),
        # The one that the trainer names is read, with what is set on it, however it is handed over.
        ("a = LoraConfig(r=3)\nb = LoraConfig(r=5)\nb.lora_alpha = 7\nT(peft_config=b)", 5, 7),
        ("T(**{'peft_config': LoraConfig(r=3, lora_alpha=5)})", 3, 5),
        ("more = dict(peft_config=LoraConfig(r=3, lora_alpha=5))\nT(**more)", 3, 5),
        ("T(None, None, None, None, None, None, None, LoraConfig(r=3, lora_alpha=5))", 3, 5),
        ("T(peft_config=LoraConfig(r=3, lora_alpha=5) if True else None)", 3, 5),
        ("def made():\n    return LoraConfig(r=3, lora_alpha=5)\nT(peft_config=made())", 3, 5),
        ("m.add_adapter(LoraConfig(r=3, lora_alpha=5))\nT()", 3, 5),
        ("lora = LoraConfig(r=3)\nT(peft_config=copy.deepcopy(lora))", 3, 8),
        # One that nothing is given is none of the job.
        ("LoraConfig(r=64)\nT()", None, None),
    ],
)
def test_the_adapters_of_a_program_are_those_that_its_trainer_is_given(
    tmp_path, lines, rank, alpha
):
    lines = lines.replace("T(None", "GRPOTrainer('m', f, args, None").replace(
        "T(", "GRPOTrainer('m', f, args, "
    )
    translation = translated(tmp_path, "train.py", MADE + lines)
    expected = {"model.lora_rank": rank, "model.lora_alpha": alpha, "rollout.group_size": 4}
    assert found(translation, expected) == expected
    unused = "LoraConfig(r=64) is given to no trainer"
    assert (unused in translation.theirs.assumed) == ("64" in lines)


@pytest.mark.parametrize(
    "given",
    [
        "get_peft_config(read())",
        "make_lora(4)",
        "lora",
        "LoraConfig(r=4) if small else None",
        "mine(ModelConfig(use_peft=True))",
    ],
)
def test_adapters_that_are_not_read_are_said_to_make_another_run(tmp_path, given):
    program = MADE + f"from mine import lora\nGRPOTrainer('m', f, args, peft_config={given})"
    (tmp_path / "train.py").write_text(program)
    page = translate(tmp_path / "train.py", None)
    learned = page.partition("What changes what is learned")[2].partition("\n\n")[0]
    (line,) = [line for line in learned.splitlines() if line.startswith("  peft_config=")]
    assert line.startswith(
        f"  peft_config={given}: it is not read, so that this command trains all"
    )
    assert "type model.lora_rank=R model.lora_alpha=ALPHA" in line
    assert "model.lora_rank=" not in page.partition("\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "t.py",
            "m = PeftModel.from_pretrained(A.from_pretrained('m'), 'out', is_trainable=True)",
            "",
        ),
        (
            "t.py",
            "m = peft.PeftModelForCausalLM.from_pretrained(base, 'out', is_trainable=True)",
            "",
        ),
        ("t.py", "m = AutoPeftModelForCausalLM.from_pretrained('out', is_trainable=True)", ""),
        ("t.py", "m = AutoPeftModelForCausalLM.from_pretrained('out')", "none of its weights are"),
        ("t.py", "m = A.from_pretrained('m')\nm.load_adapter('out', is_trainable=True)", ""),
        ("t.py", "m = A.from_pretrained('out')", "PeftModel.from_pretrained(base, folder"),
        ("t.py", "m = 'out'", "PeftModel.from_pretrained(base, folder"),
        ("t.yaml", "model_name_or_path: out\nnum_generations: 4", "PeftModel.from_pretrained(base"),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_folder_of_adapters_is_no_model_that_is_trained_whole(
    tmp_path, monkeypatch, name, content, said, is_here
):
    """TRL trains the adapters alone: a merged model with new ones of their sizes is nearest."""
    monkeypatch.chdir(tmp_path)
    if is_here:
        Path("out").mkdir()
        settings = {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["v", "q"]}
        Path("out/adapter_config.json").write_text(json.dumps(settings))
    elif not content.startswith("m = ") or content[4:] == "'out'" or "= A." in content[:6]:
        return  # a folder that is not here may be a whole model
    trained = "\nGRPOTrainer(m, f, GRPOConfig(num_generations=4))" if name == "t.py" else ""
    Path(name).write_text(content + trained)
    page = translate(Path(name), None)
    command = shlex.split(page.partition("\n\n")[2].partition("\n\n")[0])
    assert "model.path=MODEL" in command
    sizes = [word for word in command if word.startswith("model.lora")]
    expected = ["model.lora_rank=4", "model.lora_alpha=12", "model.lora_targets=[q,v]"]
    assert sizes == (expected if is_here else [])
    learned = page.partition("What changes what is learned")[2].partition("\n\n")[0]
    assert "pgtk export ADAPTERS MERGED" in learned
    assert "for model.path=MERGED" in learned
    assert said in learned
    if not is_here:
        assert "model.lora_rank=R model.lora_alpha=ALPHA belong beside it" in learned


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # The one that the trainer names, with what is set on it before that, in whatever way.
        ("big = GRPOConfig(num_generations=2)\nT(big)", {"rollout.group_size": 2}),
        ("big = GRPOConfig(num_generations=2)\nbig.beta = 0.3\nT(args)", {"kl.coefficient": 0.04}),
        ("setattr(args, 'beta', 0.3)\nT(args)", {"kl.coefficient": 0.3}),
        (
            "args = dataclasses.replace(args, beta=0.2, num_iterations=2)\nT(args)",
            {"kl.coefficient": 0.2, "rollout.passes": 2, "rollout.group_size": 4},
        ),
        ("b = replace(args, seed=2)\nargs.beta = 0.7\nT(b)", {"kl.coefficient": 0.04}),
        ("args.beta = 0.7\nb = copy.deepcopy(args)\nT(b)", {"kl.coefficient": 0.7}),
        ("b = args\nb.beta = 0.7\nT(args=b)", {"kl.coefficient": 0.7}),
        ("def made():\n    return GRPOConfig(beta=0.3)\nT(made())", {"kl.coefficient": 0.3}),
        ("S = GRPOConfig\nb = S(beta=0.3)\nT(b)", {"kl.coefficient": 0.3}),
        ("T()", {"kl": "none", "rollout.group_size": 8}),
        # What is made of itself is not followed for ever.
        ("from mine import b\nb = copy.copy(b)\nT(b)", {"rollout.group_size": 4}),
        ("def made():\n    return made()\nT(made())", {"rollout.group_size": 4}),
        ("T(**{'args': args})", {"kl.coefficient": 0.04}),
        # The sizes of a generated batch are those with which it was made: 8 completions.
        (
            "args.gradient_accumulation_steps = 3\nT(args)",
            {"accumulation.docs_per_step": 24, "rollout.prompts_per_batch": 2},
        ),
        (
            "args.scale_rewards = False\nT(args)",
            {"scale_rewards": "left", "advantage": "ADVANTAGE"},
        ),
    ],
)
def test_the_configuration_is_the_one_that_the_trainer_is_given(tmp_path, lines, expected):
    lines = lines.replace("T()", "GRPOTrainer('m', f)").replace("T(", "GRPOTrainer('m', f, ")
    assert found(translated(tmp_path, "train.py", MADE + lines), expected) == expected


def test_of_a_configuration_what_is_not_read_is_named(tmp_path):
    lines = (
        "for key, value in more.items():\n    setattr(args, key, value)\n"
        "args.set_training(learning_rate=1e-3)\nvars(args)['beta'] = 0.5\n"
        "args.__dict__.update(beta=0.5)\nargs.per_device_train_batch_size = 4\n"
        "GRPOTrainer('m', f, args, *others)\n"
    )
    translation = translated(tmp_path, "train.py", MADE + lines)
    assert [line.partition(" (line")[0] for line in translation.theirs.unread] == [
        "GRPOTrainer gets nothing by *others, known when it runs",
        "setattr(args, key, value)",
        "args.set_training(learning_rate=0.001)",
        "args.__dict__.update(beta=0.5)",
        "vars(args)['beta'] = 0.5",
        "per_device_train_batch_size is set on a GRPOConfig that exists: its generation_batch_size "
        "stays what it was there, and follows from it here",
    ]
    line = "args = replace(args, beta=0.2{})\nGRPOTrainer('m', f, args)"
    for more, is_refused in (("", True), (", generation_batch_size=None", False)):
        assumed = translated(tmp_path, "t.py", MADE + line.format(more)).theirs.assumed
        assert any("TRL stops there" in sentence for sentence in assumed) == is_refused


IDLE_LATER = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "epsilon": 0.3}
IDLE_LATER |= {"max_completion_length": 7, "entropy_coef": 0.1, "delta": 3.0, "learning_rate": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("beta", 0.1, {"kl.coefficient": 0.1}),
        ("epsilon_high", 0.3, {"loss.epsilon_low": 0.2, "loss.epsilon_high": 0.3}),
        ("epsilon_low", 0.1, {"loss.epsilon_low": 0.1, "loss.epsilon_high": 0.2}),
        ("loss_type", "grpo", {"aggregation": "sample_mean"}),
        ("scale_rewards", "none", {"advantage": "dr_grpo"}),
        ("num_generations", 2, {"rollout.group_size": 2}),
        ("num_iterations", 2, {"rollout.passes": 2}),
        *((name, value, {}) for name, value in IDLE_LATER.items()),
    ],
)
@pytest.mark.parametrize("line", ["tr.{} = {!r}", "setattr(tr, {!r}, {!r})"])
def test_of_a_key_that_is_set_on_the_trainer_page_and_command_say_one_thing(
    tmp_path, name, value, expected, line
):
    made = MADE + "tr = GRPOTrainer('m', f, args)\n"
    (tmp_path / "train.py").write_text(made)
    before = translate(tmp_path / "train.py", None)
    (tmp_path / "train.py").write_text(made + line.format(name, value))
    translation = Translation(read(tmp_path / "train.py"))
    assert found(translation, expected) == expected
    page = translate(tmp_path / "train.py", None)
    assert "not carried" not in page
    idle = f"tr.{name} = {value!r} (line 4) does nothing there: GRPOTrainer reads this key"
    assert (idle in page) == (not expected)
    commands = [text.partition("\n\n")[2].partition("\n\n")[0] for text in (before, page)]
    assert (commands[0] == commands[1]) == (not expected)
    # Its args are read when it is made, but for the keys of transformers' trainer.
    (tmp_path / "train.py").write_text(made + f"tr.args.{name} = {value!r}\n")
    page = translate(tmp_path / "train.py", None)
    idle = f"tr.args.{name} = {value!r} (line 4) does nothing there"
    assert (idle in page) == (name in tables()["TRL"].content["taken"])
    assert ("optimizer.learning_rate=1 " in page) == (name == "learning_rate")


def test_a_key_with_which_the_first_step_fails_is_not_carried(tmp_path):
    for given, line, said in (
        ("", "tr.beta = 0.1", "GRPOTrainer has no reference when it is made with beta=0"),
        ("", "tr.scale_rewards = False", "GRPOTrainer takes group, batch and none there"),
        ("loss_type='dr_grpo'", "tr.max_completion_length = 7", "aggregation.divisor=7"),
    ):
        program = f"tr = GRPOTrainer('m', f, GRPOConfig({given}))\n{line}"
        translation = translated(tmp_path, "train.py", program)
        (sentence,) = translation.theirs.unread
        assert sentence.startswith(f"{line} (line 2): ")
        assert said in sentence
        expected = {"kl": "none", "advantage": "grpo", "rollout.max_completion_length": 512}
        assert found(translation, expected) == expected
    program = "tr = {0}Trainer('m', f, {0}Config(){1})\ntr.beta = 0.1"
    for trainer, given in (("GRPO", ", peft_config=LoraConfig()"), ("RLOO", "")):
        translation = translated(tmp_path, "train.py", program.format(trainer, given))
        assert found(translation, {"kl.coefficient": 0.1}) == {"kl.coefficient": 0.1}


def test_whether_a_step_has_whole_groups_is_said_as_it_is(tmp_path):
    sizes = {"gradient_accumulation_steps": 2, "generation_batch_size": 24, "num_generations": 4}
    for batch, documents, is_whole in ((3, 6, False), (2, 4, True), (6, 12, True)):
        values = sizes | {"per_device_train_batch_size": batch}
        translation = translated(tmp_path, "theirs.json", values)
        assert translation.typed["accumulation.docs_per_step"][0] == documents
        remarks = [line for line in translation.apart if "are shuffled there" in line]
        assert len(remarks) == (documents < 24)
        assert all(("here it has whole groups" in line) == is_whole for line in remarks)
        assert all(("6 are no whole groups of 4" in line) != is_whole for line in remarks)


def test_what_trl_does_not_start_with_is_said_first_and_has_no_number_of_steps(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 100)
    data = {"train_dataset": {"path": "json", "data_files": str(tmp_path / "p.jsonl")}}
    refused = {"steps_per_generation": 4, "per_device_train_batch_size": 1}
    for generations, steps in ((4, 1200), (8, None)):
        translation = translated(
            tmp_path, "theirs.json", data | refused | {"num_generations": generations}
        )
        assert found(translation, {"trainer.max_steps": steps}) == {"trainer.max_steps": steps}
        assert bool(translation.refused) == (steps is None)
    page = translate(tmp_path / "theirs.json", None)
    title = "What TRL 1.16.0 does not start with:\n  the 4 completions of a generated batch"
    assert title in page
    for values in ({"beta": 0.0}, {"beta": 0.1, "use_peft": True}):
        values |= {"sync_ref_model": True, "num_generations": 8}
        translation = translated(tmp_path, "theirs.json", values)
        assert len(translation.refused) == 1
        assert found(translation, {"sync_ref_model": "left"}) == {"sync_ref_model": "left"}
        # Another version may start with it.
        (tmp_path / "t.yaml").write_text("# trl==0.20.0\n" + json.dumps(values))
        assert Translation(read(tmp_path / "t.yaml")).refused == []


@pytest.mark.parametrize("frequency", [-1, 5])
def test_a_job_of_verl_that_only_validates_becomes_an_evaluation(frequency, tmp_path):
    path = tmp_path / "run.sh"
    validation = f"{ROLLOUT}.val_kwargs.n=4 {ROLLOUT}.val_kwargs.temperature=0.6"
    path.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.val_only=True "
        "data.train_files=train.parquet data.val_files=[d/a.parquet,d/b.parquet] "
        f"actor_rollout_ref.model.path=model {validation} {ROLLOUT}.n=8 "
        f"algorithm.use_kl_in_reward=True trainer.test_freq={frequency}"
    )
    page = translate(path, None)
    (command,) = [line for line in page.splitlines() if line.startswith("  pgtk ")]
    program, name, *overrides = shlex.split(command)
    assert [program, name] == ["pgtk", "evaluate"]
    composed = compose(overrides, evaluate="model")
    assert not composed.problems
    evaluation = composed.config.evaluation
    assert (evaluation.completions_per_prompt, evaluation.temperature) == (4, 0.6)
    assert evaluation.sets == {name: {"path": f"d/{name}.parquet"} for name in ("a", "b")}
    assert "For a try" not in page
    assert "kl" not in page


def test_a_job_of_verl_that_validates_nothing_trains_whatever_val_only_says(tmp_path):
    values = GRPO | SIZES | {"trainer.val_only": True, "trainer.val_before_train": False}
    translation = translated(tmp_path, "theirs.json", values)
    assert translation.trains
    assert "loss" in translation.typed
    # No validation data that is read: prompts of training are none.
    values = GRPO | SIZES | {"trainer.val_only": True, "data.train_files": "a.parquet"}
    values |= {"data.val_files": ["a.parquet", "a.parquet"]}
    translation = translated(tmp_path, "theirs.json", values)
    translation.check()
    assert not translation.trains
    assert translation.to_fill == ["task.path"]


def test_of_several_files_of_validation_the_one_of_training_alone_is_left_out(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("test", "train"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    values = {"data.train_files": "train.jsonl", "data.val_files": ["test.jsonl", "train.jsonl"]}
    translation = translated(tmp_path, "theirs.json", GRPO | VALIDATION | values)
    translation.check()
    config = translation.composed.config
    assert config.evaluation.sets == {"test": {"path": "test.jsonl"}}
    assert config.evaluation.every == 20  # 5 batches of 1024 prompts in steps of 256
    refused = [shown for shown, reason, _ in translation.left if "is refused here" in reason]
    assert refused == ["train.jsonl of data.val_files"]


@pytest.mark.parametrize(
    ("bounds", "is_said"),
    [({}, True), ({f"{ACTOR}.clip_ratio_low": 0.1}, True), ({f"{ACTOR}.clip_ratio_low": None}, 0)],
)
def test_a_clip_ratio_that_defaults_take_the_place_of_is_said_where_it_is_seen(
    bounds, is_said, tmp_path
):
    values = {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio": 0.0003}
    (tmp_path / "theirs.json").write_text(json.dumps(SIZES | GRPO | values | bounds))
    page = translate(tmp_path / "theirs.json", None)
    learned = page.partition("What changes what is learned")[2].partition("\n\n")[0]
    reason = "it does nothing there, as here: the bounds are clip_ratio_low="
    assert (f"{ACTOR}.clip_ratio=0.0003: {reason}" in learned) == is_said
    assert f" loss.epsilon_low={bounds.get(f'{ACTOR}.clip_ratio_low', 0.2) or 0.0003} " in page


@pytest.mark.parametrize(("kl", "rounds"), [(False, 1000), (True, None)])
def test_a_filter_by_final_rewards_is_one_by_rewards_without_penalties(kl, rounds, tmp_path):
    """recipe/dapo/dapo_ray_trainer.py: sums of token_level_rewards, which are the scores then."""
    values = {"launch.module": "recipe.dapo.main_dapo", "algorithm.use_kl_in_reward": kl}
    values |= {f"algorithm.filter_groups.{key}": value for key, value in FINAL.items()}
    translation = translated(tmp_path, "theirs.json", SIZES | GRPO | values)
    assert found(translation, {"rollout.max_sampling_rounds": rounds}) == {
        "rollout.max_sampling_rounds": rounds
    }


FINAL = {"enable": True, "metric": "seq_final_reward"}


def test_the_rates_of_a_warm_up_are_those_of_a_batch_there(tmp_path):
    """The first of two batches, of four steps each, has rate 0 there, the other half the rate."""
    values = {"data.train_batch_size": 32, MINI: 8, f"{OPTIM}.lr_warmup_steps": 2}
    translation = translated(tmp_path, "theirs.json", GRPO | values)
    (said,) = [line for line in translation.differing if "lr_warmup_steps" in line]
    assert "(b - 1) / 2 of the full one in batch b of the 2 that warm up" in said
    assert said.endswith("here step s of the first 8 has s / 8")
    # A share of the batches that is less than one is none.
    values = {f"{OPTIM}.lr_warmup_steps_ratio": 0.05, "trainer.total_training_steps": 10}
    differing = translated(tmp_path, "theirs.json", SIZES | GRPO | values).differing
    assert not any("warm" in line for line in differing)


IN_PLACE = {
    "fs = [low]; fs.append(short)": "fs after fs.append(short)",
    "fs = [low, short]; fs.remove(short)": "fs after fs.remove(short)",
    "fs = [low]; fs[0] = short": "fs after fs[0] = short",
    "fs = [low, short]; del fs[1]": "fs after del fs[1]",
    "fs = [low]\nfor f in [short]:\n    fs.append(f)": "fs after fs.append(f)",
    "fs = [low]\ndef more(to): to.append(short)\nmore(fs)": "fs after to.append(short)",
    "fs = [low]; other = fs; list.append(other, short)": "fs after list.append(other, short)",
    "fs = [low]; print(fs)": "m.low",
}


@pytest.mark.parametrize("code", IN_PLACE)
def test_reward_functions_in_a_list_that_is_changed_in_place_are_not_known(tmp_path, code):
    content = f"from m import low, short\n{code}\nGRPOTrainer('base', reward_funcs=fs)\n"
    translation = translated(tmp_path, "train.py", content)
    functions = translation.theirs.values["reward_funcs"]
    assert functions == [IN_PLACE[code]]
    expected = "m.low" if IN_PLACE[code] == "m.low" else "VERIFIER"
    assert translation.typed["task.verifier"][0] == expected


def test_what_is_changed_in_place_is_said_wherever_it_is_read(tmp_path):
    """A data set of a dictionary of them, a dictionary in one, and lists that objects have."""
    content = (
        "rows = load_dataset('json', data_files='p.jsonl')\n"
        "rows['train'] = rows['train'].map(f)\n"
        "settings = {'inner': {'learning_rate': 1e-5}}\n"
        "settings['inner']['learning_rate'] = 2e-5\n"
        "args = GRPOConfig(reward_weights=[1.0], **settings['inner'])\n"
        "args.reward_weights.append(2.0)\n"
        "of_lora = LoraConfig(r=4, target_modules=['q_proj'])\n"
        "of_lora.target_modules.append('k_proj')\n"
        "trainer = GRPOTrainer('base', [m.low], args, train_dataset=rows['train'],\n"
        "                      peft_config=of_lora)\n"
        "trainer.reward_funcs.append(m.short)\n"
    )
    translation = translated(tmp_path, "train.py", content)
    assert "task.path" in translation.to_fill
    assert sorted(translation.theirs.unread) == [
        "GRPOConfig gets nothing by **settings['inner'], known when it runs",
        "args.reward_weights.append(2.0) (line 6) is not read",
        "of_lora.target_modules.append('k_proj') (line 8) is not read",
        "trainer.reward_funcs.append(m.short) (line 11) is not read",
    ]


OTHERS = "of = LoraConfig(r=24, lora_alpha=48, target_modules=['q_proj'])\n"


@pytest.mark.parametrize(
    ("model", "beside"),
    [
        ("PeftModel.from_pretrained(base, 'adapters', is_trainable=True)", "PeftModel"),
        ("PeftModel.from_pretrained(base, 'adapters').to('cuda')", "PeftModel"),
        ("get_peft_model(base, of)", "PeftModel"),
        ("AutoModel.from_pretrained('base')\nmodel.load_adapter('adapters')", "load_adapter"),
        ("'adapters'", "folder"),
        ("PeftModel.from_pretrained(base, 'adapters').merge_and_unload()", None),
    ],
)
def test_adapters_of_a_model_beside_a_configuration_of_others_are_not_mixed(
    tmp_path, monkeypatch, model, beside
):
    """TRL 1.16.0 raises a ValueError for a PeftModel beside peft_config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["v_proj"]}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(settings))
    content = f"{OTHERS}model = {model}\nGRPOTrainer(model, [f.g], peft_config=of)\n"
    translation = translated(tmp_path, "train.py", content)
    assert translation.theirs.values.get("peft_config.beside") == beside
    sizes = {"model.lora_rank": 24, "model.lora_alpha": 48, "model.lora_targets": ["q_proj"]}
    expected = sizes | {"peft_config.beside": None}
    if beside:
        expected = dict.fromkeys(sizes, None) | {"peft_config.beside": "left"}
    assert found(translation, expected) == expected
    assert any("a PeftModel as model" in line for line in translation.refused) == (
        beside == "PeftModel"
    )


@pytest.mark.parametrize("given", [r"r'.*\.(q|k)_proj'", r"[r'.*\.(q|k)_proj']", "'q_proj|k_proj'"])
def test_a_regular_expression_of_layers_is_said_not_to_be_read(tmp_path, capsys, given):
    content = f"of = LoraConfig(r=4, target_modules={given})\n"
    content += "GRPOTrainer('base', [f.g], peft_config=of)\n"
    expected = {"model.lora_rank": 4, "model.lora_targets": None}
    expected |= {"peft_config.target_modules": "left"}
    assert found(translated(tmp_path, "train.py", content), expected) == expected
    page = translate(tmp_path / "train.py", None)
    assert "it is a regular expression, which is not read" in page
    assert main(["check", r"model.lora_targets=.*\.(q|k)_proj"]) == 2
    assert 'k)_proj"]' not in capsys.readouterr().err


def test_the_file_that_rows_are_to_be_written_to_is_none_that_the_program_reads(tmp_path):
    for name, advised in {
        "prompts.jsonl": "rows_for_pgtk.jsonl",
        "rows_for_pgtk.jsonl": "rows_2_for_pgtk.jsonl",
    }.items():
        rows = f"load_dataset('json', data_files='{name}')['train'].train_test_split(0.1)['train']"
        content = f"GRPOTrainer('base', [f.g], train_dataset={rows})\n"
        (tmp_path / "train.py").write_text(content)
        page = translate(tmp_path / "train.py", None)
        assert f'to_json("{advised}")' in page
        assert f"task.path={advised}" in page


@pytest.mark.parametrize(
    ("version", "loss_type", "leaves"),
    [("0.24.0", "dapo", False), ("0.24.0", "bnpo", True), ("1.9.0", "dapo", True)],
)
def test_where_the_tokens_of_masked_completions_leave_the_denominator(
    tmp_path, version, loss_type, leaves
):
    """From 1.9.0 on TRL counts the tokens of dapo's denominator after masking."""
    content = f"# trl=={version}\nnum_generations: 8\nmask_truncated_completions: true\n"
    translation = translated(tmp_path, "trl.yaml", f"{content}loss_type: {loss_type}\n")
    said = any(line.startswith("mask_truncated_completions") for line in translation.apart)
    assert said == leaves
