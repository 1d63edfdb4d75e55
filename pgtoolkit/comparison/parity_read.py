"""Reads how TRL or verl computes a step from the settings in a file of theirs."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from pgtoolkit.comparison.parity_theirs import Convention, Fields
from pgtoolkit.config.their_values import TheirValues
from pgtoolkit.config.translate_file import TheirConfig, Unread
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import text

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."

_UNREAD: dict[str, dict[str, tuple]] = {
    "TRL": {
        "use_adaptive_entropy": (False,),
        "top_entropy_quantile": (1,),
        "off_policy_mask_threshold": (None,),
        "multi_objective_aggregation": ("sum_then_normalize",),
        "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"),
    },
    "verl": {
        f"{_ACTOR}policy_loss.loss_mode": ("vanilla", "gspo", "cispo", "sapo", "gpg"),
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
"""Keys of a step -> the values whose effect is read here."""

_VERL_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2"}
_VERL_KL |= {"low_var_kl": "k3", "k3": "k3"}


class StepValues(dict[str, Any]):
    """The values of a file's keys by name, theirs by default.

    unread: name -> the text of a value that is made when their program runs. Asking for one of
        these raises ConfigError.
    generated, documents: of TRL, how many a generated batch and a step have; None where not known.
    """

    def __init__(self, theirs: TheirConfig):
        values = TheirValues(theirs)
        unread = {name: of for name, of in theirs.values.items() if isinstance(of, Unread)}
        super().__init__({name: values.of[name] for name in values.of.keys() - unread.keys()})
        self.unread = unread
        trainer = theirs.table.content["trainer"]
        if theirs.values.get("launch.rloo"):
            raise ConfigError(
                "pgtk parity needs a configuration of GRPO (got one of TRL's RLOO): what RLOO does "
                "in a step is not read here."
            )
        sizes = [values.names.get(name) for name in ("generated", "documents")]
        self.generated, self.documents = (of if isinstance(of, int) else None for of in sizes)
        if trainer == "TRL" and "processes" in values.names:
            self["num_processes"] = values.names["processes"]
        problems = [
            f"{name}={text(self[name])} needs one of {', '.join(map(text, read))} for pgtk parity: "
            f"what {trainer} does with it in a step is not read here."
            for name, read in _UNREAD[trainer].items()
            if self[name] not in read
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{name} needs a value that is written in the file (got {self.unread[name]}): it is "
            "made when the program runs, and a step depends on it."
        )

    @property
    def note(self) -> str:
        """Return a sentence on what was not read, "" for nothing."""
        if not self.unread:
            return ""
        named = ", ".join(f"{name}={value}" for name, value in sorted(self.unread.items()))
        return f"made when the program runs, and no number of this step depends on it: {named}"


def trl_convention(v: StepValues) -> Convention:
    """Return how TRL computes a step. v: the values of GRPOConfig by name."""
    loss_type = v["loss_type"]
    level = "document" if v["importance_sampling_level"] == "sequence" else "token"
    means = {"grpo": "document", "sapo": "document", "dr_grpo": "constant", "luspo": "constant"}
    mean = means.get(loss_type, "token")
    deviations = {True: "group", False: "none", None: "none"}
    scale = v["scale_rewards"]
    depends_on_cut = loss_type == "bnpo" or v["entropy_coef"] != 0
    cut = v.__getitem__ if depends_on_cut else v.get
    mean_of = "micro_batch" if loss_type == "bnpo" else "step"
    by_items = loss_type in ("dapo", "cispo")  # by TRL's num_items_in_batch
    if by_items and v.generated and v.documents and v.documents > v.generated:
        mean_of = "step" if v.documents % v.generated else "generated_batch"
    return Convention(
        deviation=deviations.get(scale) or scale,
        deviation_epsilon=1e-4,
        **_trl_family(v),
        **_trl_correction(v),
        level=level,
        kl="k3_ratio" if v["beta"] and v["use_bias_correction_kl"] else "k3",
        kl_coefficient=v["beta"],
        kl_ratio=level,
        entropy_coefficient=v["entropy_coef"],
        entropy_weights="micro_batch",
        mean=mean,
        divisor=v["max_completion_length"] if loss_type == "dr_grpo" else 1,
        mean_of=mean_of,
        generated=v.generated if mean_of == "generated_batch" else None,
        masks_truncated=v["mask_truncated_completions"],
        truncated_counted=mean != "token",
        temperature=v["temperature"],
        documents=cut("per_device_train_batch_size"),
        ranks=cut("num_processes") or 1,
    )


def _trl_family(v: StepValues) -> Fields:
    """Return the fields of a convention on the surrogate."""
    if v["loss_type"] == "sapo":
        return {
            "family": "sapo",
            "temperature_positive": v["sapo_temperature_pos"],
            "temperature_negative": v["sapo_temperature_neg"],
        }
    high = v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"]
    if v["loss_type"] == "cispo":
        return {"family": "cispo", "low": None, "high": high - 1}
    return {"low": v["epsilon"], "high": high, "ratio_cap": v["delta"]}


def _trl_correction(v: StepValues) -> Fields:
    """Return the fields of a convention on the gap between sampler and trainer."""
    if not (v["use_vllm"] and v["vllm_importance_sampling_correction"]):
        return {}
    cap = v["vllm_importance_sampling_cap"]
    return {
        "correction": v["vllm_importance_sampling_mode"],
        "correction_low": v["vllm_importance_sampling_clip_min"],
        "correction_high": v["vllm_importance_sampling_clip_max"] if cap is None else cap,
    }


def verl_convention(v: StepValues) -> Convention:
    """Return how verl computes a step. v: the values of its keys by full name."""
    actor = _Actor(v)
    mode = actor["policy_loss.loss_mode"]
    families = {"cispo": "cispo", "sapo": "sapo", "gpg": "reinforce"}
    aggregation = actor["loss_agg_mode"] if mode != "sapo" else "seq-mean-token-mean"
    means = {"token-mean": "token", "seq-mean-token-mean": "document"}
    estimator = v["algorithm.adv_estimator"].removesuffix("_vectorized")
    divides = estimator == "grpo" and v["algorithm.norm_adv_by_std_in_grpo"]
    # The cut changes no number: every mean is of the step. It may be an interpolation.
    documents = v.get(f"{_ACTOR}ppo_micro_batch_size_per_gpu")
    ranks = [v.get("trainer.n_gpus_per_node"), v.get("trainer.nnodes")]
    bounds = {}
    if mode == "sapo":
        bounds["temperature_positive"] = actor["tau_pos"]
        bounds["temperature_negative"] = actor["tau_neg"]
    elif mode != "gpg":
        for name in ("low", "high"):
            bound = actor[f"clip_ratio_{name}"]
            bounds[name] = actor["clip_ratio"] if bound is None else bound
    return Convention(
        deviation="group" if divides else "none",
        baseline={"rloo": "others", "opo": "by_length"}.get(estimator, "mean"),
        alone_compared=False,
        drops_equal=v["algorithm.filter_groups.enable"],
        family=families.get(mode, "clip"),
        level="document" if mode == "gspo" else "token",
        **bounds,
        dual_clip=actor["clip_ratio_c"] if mode == "vanilla" else None,
        log_ratio_cap=10.0 if mode == "gspo" else 20.0,
        **_verl_penalty(v, actor),
        **_verl_correction(v),
        mean=means.get(aggregation, "constant"),
        divisor=_verl_divisor(actor) if aggregation == "seq-mean-token-sum-norm" else 1,
        temperature=v["actor_rollout_ref.rollout.temperature"],
        documents=documents if isinstance(documents, int) else None,
        ranks=math.prod(count for count in ranks if isinstance(count, int)),
    )


class _Actor:
    """The values of verl's actor by their names in its section."""

    def __init__(self, values: StepValues):
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[f"{_ACTOR}{name}"]


def _verl_correction(v: StepValues) -> Fields:
    """Return the fields of a convention on the gap between sampler and trainer."""
    level = v[f"{_CORRECTION}rollout_is"]
    if not level or not v["actor_rollout_ref.rollout.calculate_log_probs"]:
        return {}
    bounds = [float(bound) for bound in str(v[f"{_CORRECTION}rollout_is_threshold"]).split("_")]
    if not bounds[1:]:
        return {"correction": f"{level}_truncate", "correction_high": bounds[0]}
    low, high = bounds
    return {"correction": f"{level}_mask", "correction_low": low, "correction_high": high}


def _verl_divisor(actor: _Actor) -> float:
    if not actor["loss_scale_factor"]:
        raise ConfigError(
            f"{_ACTOR}loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor for pgtk "
            "parity (got none). Without it the divisor is the longest completion of a "
            "micro-batch there."
        )
    return actor["loss_scale_factor"]


def _verl_penalty(v: StepValues, actor: _Actor) -> Fields:
    """Return the fields of a convention on the penalty and the entropy bonus."""
    in_loss = actor["use_kl_loss"] and actor["kl_loss_coef"]
    in_reward = v["algorithm.use_kl_in_reward"] and v["algorithm.kl_ctrl.kl_coef"]
    if in_loss and in_reward:
        raise ConfigError(
            f"algorithm.use_kl_in_reward=true beside {_ACTOR}use_kl_loss=true needs one of them "
            "for pgtk parity (got both)"
        )
    entropy = actor["entropy_coeff"]
    is_mean = actor["loss_agg_mode"] == "seq-mean-token-mean"
    if (in_loss or entropy) and actor["policy_loss.loss_mode"] == "sapo" and not is_mean:
        setting = "use_kl_loss=true" if in_loss else f"entropy_coeff={entropy}"
        raise ConfigError(
            f"{_ACTOR}policy_loss.loss_mode=sapo beside {setting} needs "
            "loss_agg_mode=seq-mean-token-mean for pgtk parity: with another one the "
            "penalty and the bonus there have other weights than the loss."
        )
    if not in_loss and not in_reward:
        return {"entropy_coefficient": entropy}
    kind = actor["kl_loss_type"] if in_loss else v["algorithm.kl_penalty"]
    read = _VERL_KL.get(kind.removesuffix("+"))
    if read is None:
        raise ConfigError(f"{kind!r} as a KL of verl needs one of {', '.join(_VERL_KL)}")
    straight_through = in_loss and kind.endswith("+") and read != "k2"
    return {
        "entropy_coefficient": entropy,
        "kl": read,
        "kl_coefficient": float(in_loss or in_reward),
        "kl_clamp": 10.0 if read == "k3" else None,
        "kl_gradient": "k2" if straight_through else None,
        "kl_place": "loss" if in_loss else "reward",
    }
