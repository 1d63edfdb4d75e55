"""Calls TRL's or verl's own functions on a batch in a file: `python parity_script.py IN OUT`.

It runs in their environment, which has no pgtoolkit: it imports them, torch and the standard
library alone. IN and OUT are JSON. Rows have an entry for each document, padded on the right.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib import metadata
from types import SimpleNamespace

import torch


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        request = json.load(file)
    made = made_of(request)  # where it fails there is no file
    with open(target, "w", encoding="utf-8") as file:
        json.dump(made, file)


def made_of(request: dict) -> dict:
    """Return the quantities that their functions give, by name, and their version.

    request: rows (B, T) by name, with the values of their keys; see `parity_run.request`.
    """
    dtype = getattr(torch, request["dtype"])
    rows = {name: torch.tensor(value, dtype=dtype) for name, value in request["rows"].items()}
    step = {"TRL": trl_step, "verl": verl_step}[request["trainer"]]
    made = step(request["values"], rows, request)
    result = {name: value.tolist() for name, value in made.items()}
    return result | {"version": metadata.version(request["trainer"].lower())}


TRL_ATTRIBUTES = (
    "loss_type",
    "entropy_coef",
    "use_adaptive_entropy",
    "importance_sampling_level",
    "beta",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "max_completion_length",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
)
"""Attributes of GRPOTrainer that are fields of its configuration."""


def trl_step(v: dict, rows: dict[str, torch.Tensor], request: dict) -> dict[str, torch.Tensor]:
    """Return loss and gradient of GRPOTrainer._compute_loss, a method of an object without a model.

    Its advantages are made where completions are sampled, and cannot be called alone.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    parts = request["micro_batches"]
    batches = request["generated_batches"]
    accumulation = len(parts) / request["ranks"]
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    attributes = {name: v[name] for name in TRL_ATTRIBUTES if name in v} | {
        "args": SimpleNamespace(**(v | {"steps_per_generation": accumulation / len(batches)})),
        "accelerator": SimpleNamespace(
            gather=lambda tensor: tensor.reshape(-1),
            reduce=lambda tensor, reduction: tensor,
            num_processes=request["ranks"],
            sync_gradients=True,
        ),
        "model": torch.nn.Identity(),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "current_gradient_accumulation_steps": accumulation,
        "epsilon_low": v["epsilon"],
        "epsilon_high": v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"],
        "_entropy_bonus_enabled": v["entropy_coef"] != 0,
        "aux_loss_enabled": False,
    }
    vars(trainer).update(attributes)
    leaf = rows["new"].clone().requires_grad_()
    entropy = rows.get("entropy", torch.zeros_like(leaf))
    total = torch.zeros((), dtype=leaf.dtype)
    for part in parts:
        (generated,) = [batch for batch in batches if part[0] in batch]
        new = leaf[part]
        of_model = (new, entropy[part], None)
        vars(trainer)["_get_per_token_logps_and_entropies"] = lambda *_, result=of_model, **__: (
            result
        )
        ids = torch.zeros(new.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": rows["mask"][part].long(),
            "advantages": rows["advantages"][part],
            "num_items_in_batch": rows["mask"][generated].sum(),
            "importance_sampling_ratio": rows["correction"][part],
            "old_per_token_logps": rows["old"][part],
        }
        if "ref" in rows:
            inputs["ref_per_token_logps"] = rows["ref"][part]
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs) / request["ranks"]
        loss.backward()
        total = total + loss.detach()
    assert leaf.grad is not None
    return {"loss": total.reshape(1), "gradient": leaf.grad}


def verl_step(v: dict, rows: dict[str, torch.Tensor], request: dict) -> dict[str, torch.Tensor]:
    """Return advantages, correction, penalty, loss and gradient of verl's functions."""
    import numpy
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]  (an extra)
        agg_loss,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        kl_penalty,
    )
    from verl.workers.config import (  # pyright: ignore[reportMissingImports]  (an extra)
        FSDPActorConfig,
        PolicyLossConfig,
    )

    prefix = "actor_rollout_ref.actor."
    actor = {name[len(prefix) :]: v[name] for name in v if name.startswith(prefix)}
    made = {}
    mask = rows["mask"]
    advantages = rows["advantages"]
    if request["rewards"] is not None:
        scores = torch.zeros_like(mask)
        scores[:, 0] = torch.tensor(request["rewards"], dtype=mask.dtype)
        options = {}
        if v["algorithm.adv_estimator"].startswith("grpo"):
            options["norm_adv_by_std_in_grpo"] = v["algorithm.norm_adv_by_std_in_grpo"]
        estimator = get_adv_estimator_fn(v["algorithm.adv_estimator"])
        advantages = estimator(
            token_level_rewards=scores,
            response_mask=mask,
            index=numpy.array(request["groups"]),
            **options,
        )[0]
        made["advantages"] = advantages
    names = (
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "tau_pos",
        "tau_neg",
    )
    flags = {name: actor[name] for name in names if name in actor}
    config = FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=2,
        policy_loss=PolicyLossConfig(loss_mode=actor["policy_loss.loss_mode"]),
        **flags,
    )
    ranks = request["ranks"]
    totals = {
        "dp_size": ranks,
        "batch_num_tokens": mask.sum(),
        "global_batch_size": len(mask),
        "loss_scale_factor": actor.get("loss_scale_factor"),
    }
    config.global_batch_info.update(totals)
    weights = None
    if request["corrects"]:
        weights = made["correction"] = _verl_correction(v, rows)
    policy_loss = get_policy_loss_fn(actor["policy_loss.loss_mode"])
    leaf = rows["new"].clone().requires_grad_()
    total = torch.zeros((), dtype=leaf.dtype)
    kl = torch.zeros_like(mask)
    for part in request["micro_batches"]:
        loss, _ = policy_loss(
            old_log_prob=rows["old"][part],
            log_prob=leaf[part],
            advantages=advantages[part],
            response_mask=mask[part],
            loss_agg_mode=actor["loss_agg_mode"],
            config=config,
            rollout_is_weights=None if weights is None else weights[part],
        )
        if actor["use_kl_loss"] and actor["kl_loss_coef"]:
            terms = kl_penalty(leaf[part], rows["ref"][part], actor["kl_loss_type"])
            kl[part] = actor["kl_loss_coef"] * terms.detach()
            penalty = agg_loss(terms, mask[part], actor["loss_agg_mode"], **totals)
            loss = loss + actor["kl_loss_coef"] * penalty
        if "entropy" in rows:
            bonus = agg_loss(rows["entropy"][part], mask[part], actor["loss_agg_mode"], **totals)
            loss = loss - actor["entropy_coeff"] * bonus
        loss = loss / ranks
        loss.backward()
        total = total + loss.detach()
    assert leaf.grad is not None
    return made | {"loss": total.reshape(1), "gradient": leaf.grad, "kl": kl * mask}


def _verl_correction(v: dict, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    from verl.trainer.ppo.rollout_corr_helper import (  # pyright: ignore[reportMissingImports]  (an extra)
        compute_rollout_correction_weights,
    )

    prefix = "algorithm.rollout_correction."
    weights, _ = compute_rollout_correction_weights(
        log_ratio=rows["old"] - rows["sampling"],
        response_mask=rows["mask"],
        rollout_is=v[f"{prefix}rollout_is"],
        rollout_is_threshold=v[f"{prefix}rollout_is_threshold"],
    )
    return weights


if __name__ == "__main__":
    main(*sys.argv[1:])
