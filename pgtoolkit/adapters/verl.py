"""Policy losses for verl, pgtk_<family>_<aggregation>.

VERL_USE_EXTERNAL_MODULES=pgtoolkit.adapters.verl registers them. A module of your own that calls
`register_function` adds functions of your own.

verl counts a mini-batch's totals over all ranks, averages gradients over ranks, and adds up
micro-batches. So a loss divides by these totals and multiplies by the number of ranks, and a step
does not depend on how it was cut.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from pgtoolkit.api import log_prob_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.aggregation import AGGREGATIONS, AggregationName
from pgtoolkit.losses.families import FAMILIES, Divergence, Dppo, Family
from pgtoolkit.losses.function import FunctionFamily, FunctionLoss
from pgtoolkit.losses.group_families import Lpo, Tpo
from pgtoolkit.losses.trial import check_function

_ACTOR = "actor_rollout_ref.actor"
_CLIP = {"clip_ratio_low": "epsilon_low", "clip_ratio_high": "epsilon_high"}
_DPPO = {
    "clip_ratio_low": "delta_low",
    "clip_ratio_high": "delta_high",
    "clip_ratio_c": "ratio_cap",
}
PARAMETERS: dict[str, dict[str, str]] = {
    "grpo": {**_CLIP, "clip_ratio_c": "dual_clip"},
    "gspo": _CLIP,
    "cispo": _CLIP,
    "sapo": {"tau_pos": "temperature_positive", "tau_neg": "temperature_negative"},
    "gmpo": _CLIP,
    "dppo": _DPPO,
    "dppo_kl": _DPPO,
    "vespo": {},
    "kimi": {"policy_loss.dro_beta": "tau"},
    "reinforce": {},
}
"""Family -> key of verl's actor configuration -> parameter of the family.

dppo_kl, after verl's name, is dppo with divergence=binary_kl, which no key of verl's says.
"""

DEFAULTS = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "policy_loss.dro_beta": None,
}
"""verl's defaults. A key that the family does not read must have its default."""

MODES = {
    "sample_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "constant": "seq-mean-token-sum-norm",
}
"""Aggregation -> the loss_agg_mode that means the same."""

METRICS = (
    "ratio_new_old",
    "kl_new_old",
    "clipped_ratio_fraction",
    "clipped_low_fraction",
    "clipped_high_fraction",
    "clamped_log_ratio_fraction",
)
"""Metrics that are means over documents, since verl averages metrics over micro-batches."""

_NO_PROMPT = "verl does not tell a policy loss which prompt a document belongs to"
_NOT_GIVEN = ("sampling_log_probs", "ref_log_probs", "rewards", "group_rewards")

_log = logging.getLogger(__name__)


class ActorConfig(Protocol):
    """The parts of verl's ActorConfig that a loss reads.

    global_batch_info: global_batch_size, batch_num_tokens and dp_size.
    """

    global_batch_info: dict[str, int]

    def get(self, key: str) -> Any:
        """Return the value of a key, or a group of keys; None if it is not set."""


@dataclass(frozen=True)
class VerlLoss:
    """A policy loss with verl's interface, of a family and an aggregation by their names.

    function: a loss of the user's own in the place of the family, which then is its name alone.
    """

    family: str
    aggregation: str
    function: FunctionFamily | None = None

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: ActorConfig | None = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return (the micro-batch's share of the loss times the number of ranks, metrics).

        Tensors are (documents, length); positions outside of response_mask are not read.
        rollout_is_weights: verl's correction, a factor without gradient on each token.
        Raises ValueError for a configuration that this loss cannot honour, with all problems.
        """
        assert config is not None  # verl always gives it
        problems = self._problems(config, loss_agg_mode)
        if problems:
            name = f"policy_loss.loss_mode=pgtk_{self.family}_{self.aggregation}"
            raise ValueError("\n".join([name, *problems]))
        info = config.global_batch_info
        num_documents = len(log_prob)
        numbers = torch.arange(num_documents, device=log_prob.device)
        document_index = numbers[:, None].expand_as(log_prob)
        vectors = (log_prob, old_log_prob, advantages, document_index, response_mask.bool())
        family = self.function
        if family is None:
            parameters = [_value(config, key) for key in PARAMETERS[self.family]]
            family = _family(self.family, *parameters)
        out = log_prob_loss(
            *(vector.reshape(-1) for vector in vectors),
            loss=family,
            aggregation=cast("AggregationName", self.aggregation),
            divisor=config.get("loss_scale_factor"),
            num_documents=num_documents,
            # verl does not say how many documents have no token; no weight depends on it.
            totals=StepTotals(
                int(info["global_batch_size"]), int(info["batch_num_tokens"]), num_empty_documents=0
            ),
            factors=None if rollout_is_weights is None else rollout_is_weights.reshape(-1),
            metrics="basic",
        )
        return out.loss * info["dp_size"], _means_over_documents(out, num_documents)

    def _problems(self, config: ActorConfig, mode: str) -> list[str]:
        """Return the problems of verl's configuration for this loss, a sentence each.

        mode: verl's loss_agg_mode.
        """
        if self.aggregation not in MODES:
            return [
                f"aggregation={self.aggregation} needs each document's prompt: {_NO_PROMPT}. Use "
                "another aggregation."
            ]
        asked = self.function.asked if self.function else frozenset()
        if self.function and self.function.level == "step":
            part = "each document's prompt" if "groups" in asked else "the whole step"
            return [
                f"loss={self.family} needs {part}: {_NO_PROMPT}, and calls it with one micro-batch "
                "at a time. Use a loss of tokens or documents."
            ]
        missing = sorted(asked & {*_NOT_GIVEN} - self.function.may_lack) if self.function else []
        if missing:
            return [
                f"loss={self.family} asks for {', '.join(missing)}, which verl does not give a "
                "policy loss. Use a loss that does not ask for it."
            ]
        problems = self._aggregation_problems(config, mode)
        problems += self._unread_keys(config)
        info = config.get("global_batch_info") or {}
        for key in ("batch_num_tokens", "global_batch_size", "dp_size"):
            if info.get(key) is None:
                problems.append(
                    f"{key} needs the number of the whole mini-batch (got none): without it a step "
                    "would depend on how it was cut. Use a worker of verl that counts it."
                )
        return problems

    def _aggregation_problems(self, config: ActorConfig, mode: str) -> list[str]:
        """Return the problems of loss_agg_mode and its divisor."""
        problems = []
        needed = MODES[self.aggregation]
        scale = config.get("loss_scale_factor")
        if mode != needed:
            problems.append(
                f"{_ACTOR}.loss_agg_mode={mode} needs {needed}: it means {self.aggregation}, and "
                "verl weights its KL and entropy terms by it, too. Use "
                f"{_ACTOR}.loss_agg_mode={needed}."
            )
        if self.aggregation == "constant" and scale is None:
            problems.append(
                f"{_ACTOR}.loss_scale_factor=null needs a number, the divisor: verl's default is "
                "the width that a micro-batch was padded to, which depends on the cut. Use "
                f"{_ACTOR}.loss_scale_factor=1024, or another."
            )
        if self.aggregation != "constant" and scale is not None:
            problems.append(
                f"{_ACTOR}.loss_scale_factor={scale} has no effect: it is the divisor of "
                f"pgtk_..._constant. Use {_ACTOR}.loss_scale_factor=null."
            )
        return problems

    def _unread_keys(self, config: ActorConfig) -> list[str]:
        """Return a problem for each key that the user has set and the family does not read."""
        problems = []
        read = set(PARAMETERS.get(self.family, {}) if self.function is None else {})
        bounds = [config.get(key) for key in _CLIP]
        if read & set(_CLIP) and None in bounds:
            read.add("clip_ratio")
        for key, default in DEFAULTS.items():
            value = _value(config, key)
            if key not in read and value != default:
                reads = f"{self.family} reads {', '.join(sorted(read)) or 'none of its keys'}"
                use = "null" if default is None else default
                problems.append(
                    f"{_ACTOR}.{key}={value} has no effect: {reads}. Use {_ACTOR}.{key}={use}."
                )
        return problems


def _means_over_documents(out: PolicyLoss, num_documents: int) -> dict[str, float]:
    """Return METRICS of a micro-batch, under the names that verl shows."""
    metrics = out.metric_sums.finalize(StepTotals(num_documents, 0, 0))
    # A function has metrics of its own, and those of clips only if it names bounds.
    names = [name for name in (*METRICS, *out.metric_sums.own_metrics) if name in metrics]
    # Stacked, so that there is a single wait for the device.
    values = torch.stack([metrics[name] for name in names]).tolist()
    return {f"pgtk/{name}": value for name, value in zip(names, values, strict=True)}


@cache
def _family(name: str, *values: float | None) -> Family:
    """Return the family with these values, and log its notes; the cache keeps them from being
    logged again.

    values: in the order of PARAMETERS[name], None for the paper's.
    """
    pairs = zip(PARAMETERS[name].values(), values, strict=True)
    parameters: dict[str, Any] = {
        parameter: value for parameter, value in pairs if value is not None
    }
    if name == "dppo_kl":
        family = Dppo(**parameters, divergence=Divergence.binary_kl)
    else:
        family = FAMILIES[name](**parameters)
    for note in family.notes():
        _log.warning("%s", note)
    return family


def _value(config: ActorConfig, key: str) -> float | None:
    """Return the value of a key of DEFAULTS; clip_ratio stands in for a bound of None."""
    group, _, name = key.rpartition(".")
    section = config.get(group) if group else config
    value = section.get(name)
    if value is None and key in _CLIP:
        return config.get("clip_ratio")
    return value


def register_function(function: Callable, **parameters: object) -> None:
    """Register a loss function of your own with each aggregation, pgtk_<its name>_<aggregation>.

    function: as in `pgtoolkit.policy_loss`, at the level of tokens or documents. parameters: those
        of its own. Raises ValueError for a function whose numbers depend on the cut of a step.
    """
    from verl.trainer.ppo.core_algos import register_policy_loss  # pyright: ignore[reportMissingImports]  (an extra)

    family = FunctionLoss(function, parameters)
    check_function(family)
    for aggregation in AGGREGATIONS:
        name = f"pgtk_{family.name}_{aggregation}"
        register_policy_loss(name)(VerlLoss(family.name, aggregation, family))


def register() -> None:
    """Register a policy loss for each family and aggregation.

    Those that verl cannot compute raise an error with the reason when used.
    """
    from verl.trainer.ppo.core_algos import register_policy_loss  # pyright: ignore[reportMissingImports]  (an extra)

    families: dict[str, FunctionFamily | None] = dict.fromkeys(PARAMETERS)
    families |= {"tpo": Tpo(), "lpo": Lpo()}  # so that choosing them is refused with the reason
    for family, function in families.items():
        for aggregation in AGGREGATIONS:
            loss = VerlLoss(family, aggregation, function)
            register_policy_loss(f"pgtk_{family}_{aggregation}")(loss)


if importlib.util.find_spec("verl") is not None:
    register()
