"""Reads how TRL or verl computes a step from what a file of theirs sets."""

from __future__ import annotations

from typing import Any

from pgtoolkit.comparison.parity_theirs import Convention
from pgtoolkit.config.translate_file import TheirConfig, Unread
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import text

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."

_UNREAD: dict[str, dict[str, tuple]] = {
    "TRL": {
        "entropy_coef": (0,),
        "top_entropy_quantile": (1,),
        "off_policy_mask_threshold": (None,),
        "multi_objective_aggregation": ("sum_then_normalize",),
        "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"),
    },
    "verl": {
        f"{_ACTOR}policy_loss.loss_mode": ("vanilla", "gspo", "cispo", "sapo", "gpg"),
        f"{_ACTOR}entropy_coeff": (0,),
        f"{_ACTOR}loss_agg_mode": (
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        ),
        "algorithm.adv_estimator": ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo"),
        "algorithm.kl_ctrl.type": ("fixed",),
        f"{_CORRECTION}bypass_mode": (False,),
        f"{_CORRECTION}rollout_rs": (None,),
        f"{_CORRECTION}rollout_is_batch_normalize": (False,),
    },
}
"""Keys of a step -> the values that are read here."""

_VERL_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2"}
_VERL_KL |= {"low_var_kl": "k3", "k3": "k3"}


def values_of(theirs: TheirConfig) -> dict[str, Any]:
    """Return the value of each key, theirs by default; raises ConfigError for what is not read."""
    values = {name: row.default for name, row in theirs.table.rows.items()} | theirs.values
    trainer = theirs.table.content["trainer"]
    problems = [
        f"{name}={text(values[name])} needs one of {', '.join(map(text, read))} for pgtk parity: "
        f"what {trainer} does with it in a step is not read here."
        for name, read in _UNREAD[trainer].items()
        if values[name] not in read
    ]
    problems += [
        f"{name} needs a value that is written in the file (got {value}): it is made when the "
        "program runs."
        for name, value in theirs.values.items()
        if isinstance(value, Unread)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def trl_convention(v: dict[str, Any]) -> Convention:
    """Return how TRL computes a step. v: the values of GRPOConfig by name."""
    loss_type = v["loss_type"]
    level = "document" if v["importance_sampling_level"] == "sequence" else "token"
    high = v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"]
    of_cispo = {"family": "cispo", "low": None, "high": high - 1}
    of_clip = {"low": v["epsilon"], "high": high, "ratio_cap": v["delta"]}
    of_sapo = {
        "family": "sapo",
        "temperature_positive": v["sapo_temperature_pos"],
        "temperature_negative": v["sapo_temperature_neg"],
    }
    means = {"grpo": "document", "sapo": "document", "dr_grpo": "constant", "luspo": "constant"}
    mean = means.get(loss_type, "token")
    corrects = v["use_vllm"] and v["vllm_importance_sampling_correction"]
    cap = v["vllm_importance_sampling_cap"]
    deviations = {True: "group", False: "none", None: "none"}
    scale = v["scale_rewards"]
    return Convention(
        deviation=deviations.get(scale) or scale,
        deviation_epsilon=1e-4,
        **{"cispo": of_cispo, "sapo": of_sapo}.get(loss_type, of_clip),
        level=level,
        kl="k3_ratio" if v["use_bias_correction_kl"] else "k3",
        kl_coefficient=v["beta"],
        kl_ratio=level,
        correction=v["vllm_importance_sampling_mode"] if corrects else None,
        correction_low=v["vllm_importance_sampling_clip_min"],
        correction_high=v["vllm_importance_sampling_clip_max"] if cap is None else cap,
        mean=mean,
        divisor=v["max_completion_length"] if loss_type == "dr_grpo" else 1,
        mean_of="micro_batch" if loss_type == "bnpo" else "step",
        masks_truncated=v["mask_truncated_completions"],
        truncated_counted=mean != "token",
        temperature=v["temperature"],
        documents=v["per_device_train_batch_size"],
        ranks=v["num_processes"] or 1,
    )


def verl_convention(v: dict[str, Any]) -> Convention:
    """Return how verl computes a step. v: the values of its keys by full name."""
    actor = {name.removeprefix(_ACTOR): value for name, value in v.items() if name[:24] == _ACTOR}
    mode = actor["policy_loss.loss_mode"]
    low = actor["clip_ratio"] if actor["clip_ratio_low"] is None else actor["clip_ratio_low"]
    high = actor["clip_ratio"] if actor["clip_ratio_high"] is None else actor["clip_ratio_high"]
    families = {"cispo": "cispo", "sapo": "sapo", "gpg": "reinforce"}
    aggregation = actor["loss_agg_mode"] if mode != "sapo" else "seq-mean-token-mean"
    means = {"token-mean": "token", "seq-mean-token-mean": "document"}
    estimator = v["algorithm.adv_estimator"].removesuffix("_vectorized")
    divides = estimator == "grpo" and v["algorithm.norm_adv_by_std_in_grpo"]
    level = v[f"{_CORRECTION}rollout_is"]
    bounds = [float(bound) for bound in str(v[f"{_CORRECTION}rollout_is_threshold"]).split("_")]
    action = "mask" if bounds[1:] else "truncate"
    documents = v[f"{_ACTOR}ppo_micro_batch_size_per_gpu"]  # or an interpolation of another key
    return Convention(
        deviation="group" if divides else "none",
        baseline={"rloo": "others", "opo": "by_length"}.get(estimator, "mean"),
        alone_compared=False,
        drops_equal=v["algorithm.filter_groups.enable"],
        family=families.get(mode, "clip"),
        level="document" if mode == "gspo" else "token",
        low=low,
        high=high,
        temperature_positive=actor["tau_pos"],
        temperature_negative=actor["tau_neg"],
        dual_clip=actor["clip_ratio_c"] if mode == "vanilla" else None,
        log_ratio_cap=10.0 if mode == "gspo" else 20.0,
        **_verl_penalty(v, actor),
        correction=f"{level}_{action}" if level and v[_LOG_PROBS] else None,
        correction_low=bounds[0] if bounds[1:] else None,
        correction_high=bounds[-1],
        mean=means.get(aggregation, "constant"),
        divisor=_verl_divisor(actor) if aggregation == "seq-mean-token-sum-norm" else 1,
        temperature=v["actor_rollout_ref.rollout.temperature"],
        documents=documents if isinstance(documents, int) else None,
        ranks=v["trainer.n_gpus_per_node"] * v["trainer.nnodes"],
    )


_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


def _verl_divisor(actor: dict[str, Any]) -> float:
    if not actor["loss_scale_factor"]:
        raise ConfigError(
            f"{_ACTOR}loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor for pgtk "
            "parity (got none). Without it the divisor is the longest completion of a "
            "micro-batch there."
        )
    return actor["loss_scale_factor"]


def _verl_penalty(v: dict[str, Any], actor: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a convention on the penalty."""
    in_loss = actor["use_kl_loss"] and actor["kl_loss_coef"]
    in_reward = v["algorithm.use_kl_in_reward"] and v["algorithm.kl_ctrl.kl_coef"]
    if in_loss and in_reward:
        raise ConfigError(
            f"algorithm.use_kl_in_reward=true beside {_ACTOR}use_kl_loss=true needs one of them "
            "for pgtk parity (got both)"
        )
    if not in_loss and not in_reward:
        return {}
    is_mean = actor["loss_agg_mode"] == "seq-mean-token-mean"
    if in_loss and actor["policy_loss.loss_mode"] == "sapo" and not is_mean:
        raise ConfigError(
            f"{_ACTOR}policy_loss.loss_mode=sapo beside use_kl_loss=true needs "
            "loss_agg_mode=seq-mean-token-mean for pgtk parity: with another one loss and penalty "
            "have different weights there."
        )
    kind = actor["kl_loss_type"] if in_loss else v["algorithm.kl_penalty"]
    read = _VERL_KL.get(kind.removesuffix("+"))
    if read is None:
        raise ConfigError(f"{kind!r} as a KL of verl needs one of {', '.join(_VERL_KL)}")
    straight_through = in_loss and kind.endswith("+") and read != "k2"
    return {
        "kl": read,
        "kl_coefficient": float(in_loss or in_reward),
        "kl_clamp": 10.0 if read == "k3" else None,
        "kl_gradient": "k2" if straight_through else None,
        "kl_place": "loss" if in_loss else "reward",
    }
