"""Overrides that say the same as a configuration of verl's PPO trainer, its defaults included."""

from __future__ import annotations

from collections.abc import Iterator

from pgtoolkit.config.translate_file import (
    Setting,
    TheirConfig,
    Value,
    model_and_prompts,
    optimizer,
    run_name_and_trackers,
)

_LOSSES = {
    "vanilla": "grpo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "dro": "kimi",
    "gpg": "reinforce",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
}
"""loss_mode -> loss."""

_AGGREGATIONS = {"seq-mean-token-mean": "sample_mean", "token-mean": "token_mean"}
"""loss_agg_mode -> aggregation, where that is not constant."""

_EPSILON = ("epsilon_low", "epsilon_high")
_BOUNDS = {
    "grpo": _EPSILON,
    "gspo": _EPSILON,
    "cispo": _EPSILON,
    "gmpo": _EPSILON,
    "dppo": ("delta_low", "delta_high"),
}
"""Family -> the keys of its lower and upper bound."""

_ADVANTAGES = {
    "rloo": "rloo",
    "opo": "opo",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "grpo_passk": "pass_at_k",
}
"""adv_estimator -> advantage, where that does not depend on another key."""

_KL_IN_LOSS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
"""kl_loss_type -> kl, where that is not k3."""

_KL_IN_REWARD = {"mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""kl_penalty -> kl, where that is not k1."""

_CORRECTIONS = {"token": "token_truncate", "sequence": "sequence_truncate"}
"""rollout_is -> correction."""


def settings_of_verl(theirs: TheirConfig) -> Iterator[Setting]:
    """Yield the overrides."""
    yield from model_and_prompts(theirs, ("actor_rollout_ref.model.path",), ("data.train_files",))
    yield from _loss(theirs)
    yield from _advantage(theirs)
    yield from _penalties(theirs)
    yield from _step(theirs)
    yield from _prompts(theirs)
    yield from _sampling(theirs)
    yield from optimizer(
        theirs,
        learning_rate="optim.lr",
        schedule="optim.lr_scheduler_type",
        warmup_steps="optim.lr_warmup_steps",
        weight_decay="optim.weight_decay",
        max_grad_norm="grad_clip" if theirs.has("grad_clip") else "optim.clip_grad",
    )
    yield from _betas_and_length(theirs)
    yield from _model(theirs)
    correction = _CORRECTIONS.get(str(theirs["rollout_is"])) if theirs.has("rollout_is") else None
    if correction is not None:
        yield Setting("correction", correction, ("rollout_is",))
        yield theirs.setting("correction.high", "rollout_is_threshold")
    yield from run_name_and_trackers(
        theirs, run_name="trainer.experiment_name", trackers="trainer.logger"
    )


def _loss(theirs: TheirConfig) -> Iterator[Setting]:
    mode = str(theirs["loss_mode"])
    loss = _LOSSES.get(mode, "grpo")
    yield Setting("loss", loss, ("loss_mode",))
    if mode == "dppo_kl":
        yield Setting("loss.divergence", "binary_kl", ("loss_mode",))
    if mode not in _LOSSES:
        theirs.leave("loss_mode")
    aggregation = _AGGREGATIONS.get(str(theirs["loss_agg_mode"]), "constant")
    yield Setting("aggregation", aggregation, ("loss_agg_mode",))
    if aggregation == "constant":
        divisor: Value = 1
        length = theirs["loss_scale_factor"] or theirs["data.max_response_length"]
        if theirs["loss_agg_mode"] != "seq-mean-token-sum":
            divisor = length
        yield Setting("aggregation.divisor", divisor, ("loss_scale_factor", "loss_agg_mode"))
    bounds = zip(_BOUNDS.get(loss, ()), ("clip_ratio_low", "clip_ratio_high"), strict=False)
    for key, name in bounds:
        is_common = theirs.has("clip_ratio") and not theirs.has(name)
        value = theirs["clip_ratio"] if is_common else theirs[name]
        yield Setting(f"loss.{key}", value, (name, "clip_ratio"))
    if loss == "grpo":
        yield theirs.setting("loss.dual_clip", "clip_ratio_c")
    if loss == "sapo":
        yield theirs.setting("loss.temperature_positive", "tau_pos")
        yield theirs.setting("loss.temperature_negative", "tau_neg")


def _advantage(theirs: TheirConfig) -> Iterator[Setting]:
    estimator = str(theirs["adv_estimator"])
    by_deviation = theirs["norm_adv_by_std_in_grpo"]
    names = ("adv_estimator", "norm_adv_by_std_in_grpo")
    if estimator == "gae":
        yield from _critic(theirs)
    elif estimator == "grpo":
        yield Setting("advantage", "grpo" if by_deviation else "dr_grpo", names)
    elif estimator in _ADVANTAGES:
        yield Setting("advantage", _ADVANTAGES[estimator], names)
    else:
        theirs.leave("adv_estimator")


def _critic(theirs: TheirConfig) -> Iterator[Setting]:
    """Yield the keys of PPO's advantages and critic."""
    yield Setting("advantage", "gae", ("adv_estimator",))
    yield theirs.setting("advantage.gamma", "gamma")
    yield theirs.setting("advantage.gae_lambda", "lam")
    yield Setting("critic.learning_rate", theirs.number("critic.optim.lr"), ("critic.optim.lr",))
    yield Setting("critic.clip", theirs.number("cliprange_value"), ("cliprange_value",))
    if theirs["critic.model.path"]:
        yield theirs.setting("critic.path", "critic.model.path")
    batches = int(theirs.number("critic_warmup"))
    if batches:
        steps = int(batches * _steps_per_batch(theirs))
        yield Setting("critic.steps_before_policy", steps, ("critic_warmup",))


def _penalties(theirs: TheirConfig) -> Iterator[Setting]:
    if theirs["use_kl_loss"]:
        kind = _KL_IN_LOSS.get(str(theirs["kl_loss_type"]), "k3")
        yield Setting("kl", kind, ("kl_loss_type", "use_kl_loss"))
        yield theirs.setting("kl.coefficient", "kl_loss_coef")
    elif theirs["use_kl_in_reward"]:
        kind = _KL_IN_REWARD.get(str(theirs["kl_penalty"]), "k1")
        yield Setting("kl", kind, ("kl_penalty",))
        yield theirs.setting("kl.coefficient", "kl_ctrl.kl_coef")
        yield Setting("kl.place", "reward", ("use_kl_in_reward",))
    if theirs.number("entropy_coeff"):
        yield theirs.setting("entropy.coefficient", "entropy_coeff")


def _step(theirs: TheirConfig) -> Iterator[Setting]:
    """Yield the sizes of groups, batches, steps and micro-batches."""
    group_size = int(theirs.number("rollout.n"))
    yield Setting("rollout.group_size", group_size, ("rollout.n",))
    yield theirs.setting("rollout.prompts_per_batch", "data.train_batch_size")
    docs_per_step = int(theirs.number("ppo_mini_batch_size")) * group_size
    yield Setting("accumulation.docs_per_step", docs_per_step, ("ppo_mini_batch_size", "rollout.n"))
    if theirs.has("ppo_max_token_len_per_gpu"):
        yield theirs.setting("accumulation.max_tokens", "ppo_max_token_len_per_gpu")


def _prompts(theirs: TheirConfig) -> Iterator[Setting]:
    yield theirs.setting("rollout.max_completion_length", "data.max_response_length")
    yield theirs.setting("task.max_prompt_length", "data.max_prompt_length")
    if theirs["data.filter_overlong_prompts"]:
        yield Setting("task.too_long", "skip", ("data.filter_overlong_prompts",))
    if theirs.has("data.prompt_key"):
        yield theirs.setting("task.prompt_field", "data.prompt_key")


def _sampling(theirs: TheirConfig) -> Iterator[Setting]:
    yield theirs.setting("rollout.temperature", "rollout.temperature")
    if theirs.number("rollout.top_p") != 1:
        yield theirs.setting("rollout.top_p", "rollout.top_p")
    if theirs.has("rollout.name") and theirs["rollout.name"] == "vllm":
        yield Setting("sampler", "vllm", ("rollout.name",))
        yield theirs.setting("sampler.gpu_memory_share", "gpu_memory_utilization")
        yield theirs.setting("sampler.tensor_parallel", "tensor_model_parallel_size")


def _betas_and_length(theirs: TheirConfig) -> Iterator[Setting]:
    betas = theirs["optim.betas"]
    if isinstance(betas, list):
        for key, beta in zip(("beta1", "beta2"), betas, strict=False):
            yield Setting(f"optimizer.{key}", beta, ("optim.betas",))
    # There, a step is a batch of rollouts with all of its updates.
    batches = "trainer.total_training_steps"
    if theirs.has(batches) and theirs[batches]:
        updates_per_batch = _steps_per_batch(theirs)
        steps = int(theirs.number(batches) * updates_per_batch)
        yield Setting("trainer.max_steps", steps, (batches,))


def _steps_per_batch(theirs: TheirConfig) -> float:
    return theirs.number("data.train_batch_size") / theirs.number("ppo_mini_batch_size")


def _model(theirs: TheirConfig) -> Iterator[Setting]:
    yield theirs.setting("model.gradient_checkpointing", "enable_gradient_checkpointing")
    if theirs.has("model.lora_rank") and theirs["model.lora_rank"]:
        yield theirs.setting("model.lora_rank", "model.lora_rank")
        yield theirs.setting("model.lora_alpha", "model.lora_alpha")
