"""What a run is made of at the end of a step, taken from a module and put back into one."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.config.saved import record_of
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.model import lora
from pgtoolkit.model.policy import Policy, named_weights
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.collectives import local
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.sampling_settings import sampling_settings
from pgtoolkit.system.model_folder import load_config
from pgtoolkit.training.checkpoint import (
    ADAPTERS,
    CRITIC,
    CRITIC_MOMENTS,
    MOMENTS,
    REFERENCE,
    WEIGHTS,
    damaged,
    open_tensors,
)

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, in its order: so a resumed run cuts its files as one that was
never stopped."""


def snapshot(module, data_state: dict) -> tuple[dict, dict[str, dict[str, Tensor]]]:
    """Return all that the next step depends on, for `save_checkpoint`.

    These are the state, and weights and moments themselves. Called by every rank.
    """
    state = {
        "step": data_state["num_steps"],
        "num_updates": module.num_updates,
        "num_skipped_steps": module.num_skipped_steps,
        "documents_seen": module.documents_seen,
        "data": data_state,
        "config": json.dumps(record_of(module.config)),
    }
    if module.loss_scale is not None:
        state["loss_scale"] = module.loss_scale.state_dict()
    if module.policy.base_digest is not None:
        state["base_digest"] = module.policy.base_digest
    kind, weights = stored(module.policy)
    moments, without = _moments(module.optimizer, weights, module.layout)
    state["without_moments"] = without
    tensors = {kind: weights, MOMENTS: moments}
    if module.config.kl.update_every is not None:
        tensors[REFERENCE] = named_weights(module.reference.model)
    if module.critic is not None:
        tensors[CRITIC] = named_weights(module.critic.body.model)
        moments, without = _moments(module.critic.optimizer, tensors[CRITIC], module.layout)
        tensors[CRITIC_MOMENTS] = moments
        state |= {"critic_updates": module.critic.num_updates, "critic_without_moments": without}
    return state, tensors


def _moments(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], layout: Layout
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the moments of weights, and the names of those of which no step had a gradient, on any
    rank."""
    of_each = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
    moments = {
        f"{name}.{field}": value
        for name, fields in of_each.items()
        for field, value in fields.items()
    }
    without = [name for name, fields in of_each.items() if not fields]
    return moments, sorted(set().union(*gather_objects(without, layout.world_group)))


def write_settings(module, folder: Path, merged: bool = False) -> None:
    """Write what transformers needs beside the weights; OSError if that fails.

    These are the configuration, whose `dtype` is the number type of the weights that training began
    with (it keeps them in float32 whatever they came in), how completions are sampled, and the
    tokenizer. merged: the folder's weights are those of the whole model. Otherwise a folder of
    LoRA's adapters gets their own configuration: beside the model's, transformers would take it for
    a whole model.
    """
    chosen, sampling = module.config.model, sampling_settings(module.policy, module.config.rollout)
    if module.policy.base_digest is not None and not merged:
        config = lora.settings(module.model, chosen.path)
    else:
        config = copy.deepcopy(module.model.config)
        config.architectures = [type(module.model).__name__.removeprefix("FSDP")]
        config.use_cache, config.dtype = True, torch.float32
        if isinstance(chosen, HuggingFaceModelConfig) and not chosen.random_weights:
            config.dtype = load_config(chosen.path).dtype or torch.float32
    try:
        for part in (config, sampling, module.policy.tokenizer):
            part.save_pretrained(str(folder))
    except Exception as error:  # tokenizers raises no other type, whatever the disk says
        raise OSError(first_line(error)) from error


def restore(module, state: dict) -> None:
    """Continue from a checkpoint of any number of ranks, but for the data, which the step loader
    restores.

    state: as `load_newest` gives it; called by every rank. Of the optimizer only its moments are
        taken over: its
    settings are the configuration's, which a resume may change.
    """
    names = set().union(*gather_objects(set(stored(module.policy)[1]), module.layout.world_group))
    with failing_together(module.layout):
        try:
            _restore_tensors(module, state, names)
        except (ValueError, SafetensorError) as error:
            raise ConfigError(
                f"the checkpoint does not fit the configured model: {first_line(error)}"
            ) from error
        module.num_updates = state["num_updates"]
        module.num_skipped_steps = state["num_skipped_steps"]
        module.documents_seen = state["documents_seen"]
        if module.critic is not None:
            module.critic.num_updates = state["critic_updates"]
        # not of a run in another type before
        if module.loss_scale is not None and "loss_scale" in state:
            module.loss_scale.load_state_dict(state["loss_scale"])


@torch.no_grad()
def _restore_tensors(module, state: dict, names: set[str]) -> None:
    """This rank's part of weights and moments. names: of the whole model's weights."""
    load_weights(module.policy, state, names)
    if module.config.kl.update_every is not None:
        with open_tensors(state["path"], REFERENCE) as files:
            for name, weight in named_weights(module.reference.model).items():
                fill(weight, name, files)
    weights = stored(module.policy)[1]
    without = state.get("without_moments")
    _restore_moments(
        state["path"], MOMENTS, module.optimizer, weights, names, state["num_updates"], without
    )
    if module.critic is None:
        return
    if "critic_updates" not in state:
        raise ValueError("it holds no critic")
    weights = named_weights(module.critic.body.model)
    with open_tensors(state["path"], CRITIC) as files:
        for name, weight in weights.items():
            fill(weight, name, files)
    updates, without = state["critic_updates"], state["critic_without_moments"]
    optimizer = module.critic.optimizer
    _restore_moments(
        state["path"], CRITIC_MOMENTS, optimizer, weights, set(weights), updates, without
    )


def _restore_moments(
    path: Path,
    kind: str,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    names: set[str],
    updates: int,
    without: list[str] | None,
) -> None:
    """This rank's part of the moments of weights. names, without: see `_check_moments`."""
    with open_tensors(path, kind) as files:
        if updates and not files:
            raise StorageError(damaged(path, "the optimizer's moments are missing"))
        _check_moments(files.keys(), names, path, updates, without)
        for name, parameter in weights.items():
            if f"{name}.step" in files:
                # beside the parameter, as fused AdamW has it
                count = torch.zeros((), device=parameter.device)
                rooms = {
                    field: count if field == "step" else torch.zeros_like(parameter)
                    for field in _MOMENTS
                }
                optimizer.state[parameter] = rooms
                for field, room in rooms.items():
                    fill(room, f"{name}.{field}", files)
                    part = local(room)
                    if not part.isfinite().all() or (field != "exp_avg" and (part < 0).any()):
                        problem = f"{name}.{field} of the optimizer holds negative numbers or NaN"
                        raise StorageError(damaged(path, problem))


def _check_moments(
    stored_names: Collection[str],
    names: set[str],
    path: Path,
    updates: int,
    without: list[str] | None,
) -> None:
    """Raise an error where moments are missing, or are of no weight.

    names: of the whole model's weights. updates: that were made of them. without: which of them
        have no moments, as the
    checkpoint says; one that does not say so may lack all moments of a weight, but not some of
    them.
    """
    for name in sorted(
        {*stored_names} - {f"{name}.{field}" for name in names for field in _MOMENTS}
    ):
        raise ValueError(f"{name} is none of the optimizer's moments")
    if not updates:
        return
    for name in sorted(names):
        missing = [field for field in _MOMENTS if f"{name}.{field}" not in stored_names]
        may_lack_all = without is None or name in without
        if missing and not (may_lack_all and len(missing) == len(_MOMENTS)):
            raise StorageError(damaged(path, f"{name}.{missing[0]} of the optimizer is missing"))


def stored(policy: Policy) -> tuple[str, Mapping[str, Tensor]]:
    """What a checkpoint holds of the model: the kind, and the tensors themselves by their names
    there."""
    if policy.base_digest is None:
        return WEIGHTS, named_weights(policy.model)
    return ADAPTERS, lora.adapter_weights(policy.model)


@torch.no_grad()
def load_weights(policy: Policy, state: dict, names: set[str] | None = None) -> None:
    """This rank's part of a checkpoint's weights, or of its adapters; names: of all of them, where
    others hold some.

    Raises ValueError or SafetensorError where they are not those of the policy, and ConfigError for
    adapters that do not fit to it.
    """
    kind, tensors = stored(policy)
    names = {*tensors} if names is None else names
    if (found := state.get("base_digest")) != policy.base_digest:
        why = (
            "its adapters were trained beside other weights than model.path has now. Use the "
            "model as it was."
        )
        if found is None:
            why = "it holds all weights. Use model.lora_rank=null."
        elif policy.base_digest is None:
            why = "it holds LoRA's adapters alone. Use model.lora_rank as it was."
        raise ConfigError(f"the checkpoint does not fit the configured model: {why}")
    with open_tensors(state["path"], kind) as files:
        for name in sorted(names ^ files.keys()):
            raise ValueError(f"{name} is {'missing' if name in names else 'none of its weights'}")
        for name, tensor in tensors.items():
            fill(tensor, name, files)


def fill(target: Tensor, name: str, files: dict) -> None:
    """Copy a stored tensor, or this rank's part of it, into `target`."""
    if name not in files:
        raise ValueError(f"{name} is missing")
    whole = files[name].get_tensor(name)
    if (whole.shape, whole.dtype) != (target.shape, target.dtype):
        found, needed = ([*tensor.shape, tensor.dtype] for tensor in (whole, target))
        raise ValueError(f"{name} is of {found}, not of {needed}")
    if isinstance(target, DTensor):  # every rank reads the file, so that none needs to send
        whole = whole.to(target.device)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)
