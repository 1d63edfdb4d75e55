"""Overrides that say the same as a configuration of TRL's GRPOTrainer, its defaults included."""

from __future__ import annotations

from collections.abc import Iterator

from pgtoolkit.config.translate_file import (
    Setting,
    TheirConfig,
    model_and_prompts,
    optimizer,
    run_name_and_trackers,
)
from pgtoolkit.system.report import text

_LOSSES = ("cispo", "sapo", "vespo")
"""Values of loss_type that are families here; others are GRPO or GSPO with an aggregation."""

_AGGREGATIONS = {
    "grpo": "sample_mean",
    "sapo": "sample_mean",
    "dr_grpo": "constant",
    "luspo": "constant",
}
"""loss_type -> aggregation, where that is not token_mean."""

_FIELDS_OF_LOSS = {
    "sapo": {
        "temperature_positive": "sapo_temperature_pos",
        "temperature_negative": "sapo_temperature_neg",
    },
    "vespo": {
        "power_positive": "vespo_k_pos",
        "decay_positive": "vespo_lambda_pos",
        "power_negative": "vespo_k_neg",
        "decay_negative": "vespo_lambda_neg",
    },
}
"""Family -> its keys, with their names in TRL."""

_ADVANTAGES = {"batch": "batch_std", "none": "dr_grpo", "false": "dr_grpo"}
"""scale_rewards -> advantage, where that is not grpo."""

_NUMBER_TYPES = {"fp16": "float16", "bf16": "bfloat16"}

_OPTIMIZER = {"beta1": "adam_beta1", "beta2": "adam_beta2", "epsilon": "adam_epsilon"}


def settings_of_trl(theirs: TheirConfig, processes: int) -> Iterator[Setting]:
    """Yield the overrides. processes: how many TRL would train on."""
    yield from model_and_prompts(
        theirs, ("model_name_or_path", "model"), ("dataset_name", "train_dataset")
    )
    if theirs.has("dataset_train_split"):
        yield theirs.setting("task.split", "dataset_train_split")
    yield from _verifier(theirs)
    yield from _loss(theirs)
    yield from _advantage_and_penalties(theirs)
    yield from _step(theirs, processes)
    yield from _sampling(theirs)
    yield from optimizer(
        theirs,
        learning_rate="learning_rate",
        schedule="lr_scheduler_type",
        warmup_steps="warmup_steps",
        weight_decay="weight_decay",
        max_grad_norm="max_grad_norm",
    )
    for key, name in _OPTIMIZER.items():
        yield theirs.setting(f"optimizer.{key}", name)
    yield from _length_and_checkpoints(theirs)
    yield from _model(theirs)
    if theirs.has("seed"):
        yield theirs.setting("seed", "seed")
    yield from run_name_and_trackers(theirs, run_name="run_name", trackers="report_to")


def _verifier(theirs: TheirConfig) -> Iterator[Setting]:
    """Yield the reward function, if it is one that can be imported."""
    if not theirs.has("reward_funcs"):
        return
    functions = theirs["reward_funcs"]
    if isinstance(functions, list) and len(functions) == 1:
        functions = functions[0]
    if isinstance(functions, str) and "." in functions:
        yield Setting("task.verifier", functions, ("reward_funcs",))
    elif isinstance(functions, str | list):
        theirs.leave("reward_funcs")


def _loss(theirs: TheirConfig) -> Iterator[Setting]:
    kind = theirs["loss_type"]
    loss = "gspo" if theirs["importance_sampling_level"] == "sequence" else "grpo"
    if kind in _LOSSES:
        loss = str(kind)
    yield Setting("loss", loss, ("loss_type", "importance_sampling_level"))
    yield Setting("aggregation", _AGGREGATIONS.get(str(kind), "token_mean"), ("loss_type",))
    if kind == "dr_grpo":
        names = ("loss_type", "max_completion_length")
        yield Setting("aggregation.divisor", theirs["max_completion_length"], names)
    if kind == "luspo":
        yield Setting("aggregation.divisor", 1, ("loss_type",))
    if loss in ("grpo", "gspo"):
        high = theirs["epsilon_high"]
        if high is None:
            high = theirs["epsilon"]
        yield theirs.setting("loss.epsilon_low", "epsilon")
        yield Setting("loss.epsilon_high", high, ("epsilon_high", "epsilon"))
    if loss == "cispo" and theirs.has("epsilon_high"):
        # There, it is the bound of the ratio itself.
        high = theirs.number("epsilon_high") - 1
        yield Setting("loss.epsilon_high", high, ("epsilon_high",))
    if loss == "grpo" and theirs.has("delta") and theirs["delta"] is not None:
        yield theirs.setting("loss.dual_clip", "delta")
    for key, name in _FIELDS_OF_LOSS.get(loss, {}).items():
        yield theirs.setting(f"loss.{key}", name)


def _advantage_and_penalties(theirs: TheirConfig) -> Iterator[Setting]:
    if theirs["multi_objective_aggregation"] == "normalize_then_sum":
        yield Setting("advantage", "gdpo", ("multi_objective_aggregation",))
    else:
        advantage = _ADVANTAGES.get(text(theirs["scale_rewards"]), "grpo")
        yield Setting("advantage", advantage, ("scale_rewards",))
    if theirs.number("beta"):
        kind = "k3_ratio" if theirs["use_bias_correction_kl"] else "k3"
        yield Setting("kl", kind, ("beta", "use_bias_correction_kl"))
        yield theirs.setting("kl.coefficient", "beta")
        if theirs["sync_ref_model"]:
            names = ("ref_model_sync_steps", "sync_ref_model")
            yield Setting("kl.update_every", theirs["ref_model_sync_steps"], names)
            yield theirs.setting("kl.update_rate", "ref_model_mixup_alpha")
    if theirs.number("entropy_coef"):
        yield theirs.setting("entropy.coefficient", "entropy_coef")


def _step(theirs: TheirConfig, processes: int) -> Iterator[Setting]:
    """Yield the sizes of groups, batches and steps."""
    group_size = int(theirs.number("num_generations"))
    names_of_step = ("per_device_train_batch_size", "gradient_accumulation_steps")
    accumulated = theirs.number("gradient_accumulation_steps")
    docs_per_step = int(theirs.number("per_device_train_batch_size") * accumulated) * processes
    if theirs.has("generation_batch_size") and theirs["generation_batch_size"]:
        documents = int(theirs.number("generation_batch_size"))
        names_of_batch = ("generation_batch_size", "num_generations")
    else:
        steps = accumulated
        if theirs["steps_per_generation"]:
            steps = theirs.number("steps_per_generation")
        documents = int(docs_per_step / accumulated * steps)
        names_of_batch = ("steps_per_generation", *names_of_step)
    yield Setting("rollout.group_size", group_size, ("num_generations",))
    yield Setting("rollout.prompts_per_batch", max(1, documents // group_size), names_of_batch)
    yield Setting("accumulation.docs_per_step", docs_per_step, names_of_step)


def _sampling(theirs: TheirConfig) -> Iterator[Setting]:
    yield theirs.setting("rollout.max_completion_length", "max_completion_length")
    yield theirs.setting("rollout.temperature", "temperature")
    if theirs.number("top_p") != 1:
        yield theirs.setting("rollout.top_p", "top_p")
    if theirs["mask_truncated_completions"]:
        yield Setting("rollout.truncated", "mask", ("mask_truncated_completions",))
    if theirs["use_vllm"]:
        yield from _vllm(theirs)
    threshold = "off_policy_mask_threshold"
    if theirs.has(threshold) and theirs[threshold] is not None:
        yield Setting("correction", "off_policy_mask", (threshold,))
        yield theirs.setting("correction.threshold", threshold)


def _vllm(theirs: TheirConfig) -> Iterator[Setting]:
    yield Setting("sampler", "vllm", ("use_vllm",))
    yield theirs.setting("sampler.gpu_memory_share", "vllm_gpu_memory_utilization")
    if theirs.has("vllm_tensor_parallel_size"):
        yield theirs.setting("sampler.tensor_parallel", "vllm_tensor_parallel_size")
    if theirs.has("vllm_server_base_url"):
        urls = [theirs["vllm_server_base_url"]]
        yield Setting("sampler.urls", urls, ("vllm_server_base_url",))
    has_other_correction = theirs.has("off_policy_mask_threshold")
    if theirs["vllm_importance_sampling_correction"] and not has_other_correction:
        names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction")
        yield Setting("correction", theirs[names[0]], names)
        yield theirs.setting("correction.high", "vllm_importance_sampling_clip_max")
        yield theirs.setting("correction.low", "vllm_importance_sampling_clip_min")


def _length_and_checkpoints(theirs: TheirConfig) -> Iterator[Setting]:
    if theirs.number("max_steps") > 0:
        yield theirs.setting("trainer.max_steps", "max_steps")
    if theirs.has("save_steps") and theirs.number("save_steps") >= 1:
        steps = int(theirs.number("save_steps"))
        yield Setting("trainer.checkpoint_every", steps, ("save_steps",))
    if theirs.has("save_total_limit") and theirs["save_total_limit"]:
        yield theirs.setting("trainer.keep_checkpoints", "save_total_limit")
    if theirs.has("eval_steps") and theirs["eval_strategy"] == "steps":
        steps = theirs.number("eval_steps")
        if steps >= 1:
            yield Setting("evaluation.every", int(steps), ("eval_steps", "eval_strategy"))


def _model(theirs: TheirConfig) -> Iterator[Setting]:
    yield theirs.setting("model.gradient_checkpointing", "gradient_checkpointing")
    names = tuple(name for name in _NUMBER_TYPES if theirs.has(name))
    if names:
        halves = [_NUMBER_TYPES[name] for name in names if theirs[name]]
        yield Setting("model.dtype", halves[0] if halves else "float32", names)
    if theirs["use_peft"]:
        yield Setting("model.lora_rank", theirs["lora_r"], ("lora_r", "use_peft"))
        yield theirs.setting("model.lora_alpha", "lora_alpha")
