"""The state of a run at the end of a step, taken from a module and restored into one."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.model import flash_attention, lora
from pgtoolkit.model.policy import Policy, named_weights
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.collectives import local
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.generation_settings import generation_settings
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
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.optimizer import fields_of
from pgtoolkit.training.own_optimizer import kept_of, load_fields

Fields = dict[str, tuple[str, ...] | None]
"""Weight -> the names of its tensors in the optimizer, None where only the optimizer knows."""


def snapshot(
    module: PolicyGradientModule, data_state: dict
) -> tuple[dict, dict[str, dict[str, Tensor]]]:
    """Return the state, and the weights and moments by kind and name, for `save_checkpoint`.

    The tensors are those of the module, not copies. Called by every rank.
    """
    state = {
        "step": data_state["num_steps"],
        "num_updates": module.num_updates,
        "num_skipped_steps": module.num_skipped_steps,
        "documents_seen": module.documents_seen,
        "data": data_state,
        "config": json.dumps(module.record),
    }
    if module.documents_trained is not None:
        state["documents_trained"] = module.documents_trained
    if module.reference_is_due:
        state["reference_is_due"] = True
    if module.adaptive_kl is not None:
        state["adaptive_kl"] = module.adaptive_kl.state_dict()
    if module.loss_scale is not None:
        state["loss_scale"] = module.loss_scale.state_dict()
    if module.keeps_layers is not None and module.keeps_layers.kept is not None:
        state["kept_layers"] = module.keeps_layers.state_dict()
    if module.policy.base_digest is not None:
        state["base_digest"] = module.policy.base_digest
    if flash_attention.version() is not None:
        state["flash_attention"] = flash_attention.version()
    kind, weights = stored_weights(module.policy)
    moments, without_moments = _moments(module.optimizer, weights, module.layout)
    state["without_moments"] = without_moments
    tensors = {kind: weights, MOMENTS: moments}
    if module.reference_every is not None:
        assert module.reference is not None
        tensors[REFERENCE] = named_weights(module.reference.model)
    critic = module.critic
    if critic is not None:
        tensors[CRITIC] = named_weights(critic.body.model)
        moments, without_moments = _moments(critic.optimizer, tensors[CRITIC], module.layout)
        tensors[CRITIC_MOMENTS] = moments
        state["critic_updates"] = critic.num_updates
        state["critic_without_moments"] = without_moments
    return state, tensors


def _moments(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], layout: Layout
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the moments of weights, and the names of the weights without moments on any rank.

    A weight has none if no step gave it a gradient.
    """
    moments = {}
    without_moments = []
    for name, weight in weights.items():
        fields = kept_of(optimizer, weight)
        moments |= {f"{name}.{field}": value for field, value in fields.items()}
        if not fields:
            without_moments.append(name)
    return moments, sorted(_union_over_ranks(without_moments, layout))


def _union_over_ranks(names: Iterable[str], layout: Layout) -> set[str]:
    return set().union(*gather_objects(set(names), layout.world_group))


def write_settings(module: PolicyGradientModule, folder: Path, merged: bool = False) -> None:
    """Write the files that transformers needs beside the weights. Raises OSError if that fails.

    They are the model's configuration, the settings of sampling, and the tokenizer. The
    configuration's `dtype` is the number type that training began with, though it keeps the weights
    in float32.

    merged: the folder has the weights of the whole model. Otherwise a folder of LoRA's adapters
        gets their configuration alone: with the model's, transformers would read it as a model.
    """
    assert module.sampling is not None
    sampling = generation_settings(module.policy, module.sampling)
    pretrained = module.policy.pretrained
    if module.policy.base_digest is not None and not merged:
        assert pretrained is not None
        config = lora.settings(module.model, pretrained)
    else:
        config = copy.deepcopy(module.model.config)
        config.architectures = [type(module.model).__name__.removeprefix("FSDP")]
        config.use_cache = True
        config.dtype = torch.float32
        if pretrained is not None:
            config.dtype = load_config(pretrained).dtype or torch.float32
    try:
        for part in (config, sampling, module.policy.tokenizer):
            part.save_pretrained(str(folder))
    except Exception as error:  # tokenizers raises a bare Exception for a full disk
        raise OSError(first_line(error)) from error


def restore(module: PolicyGradientModule, state: dict) -> None:
    """Restore a module from a checkpoint of any number of ranks. Called by every rank.

    The step loader restores the data. Of the optimizer only the moments are restored: its settings
    are those of the configuration, which a resume may change.

    state: as `load_newest` returns it. Raises ConfigError for a checkpoint of another model, and
    StorageError for a damaged one.
    """
    flash_attention.go_on(state.get("flash_attention"))
    _, weights = stored_weights(module.policy)
    names = _union_over_ranks(weights, module.layout)
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
        module.documents_trained = state.get("documents_trained")
        module.reference_is_due = state.get("reference_is_due", False)
        if module.critic is not None:
            module.critic.num_updates = state["critic_updates"]
        if module.adaptive_kl is not None and "adaptive_kl" in state:
            module.adaptive_kl.load_state_dict(state["adaptive_kl"])
            module.take_kl_coefficient()
        # A run that had another number type before has no scale to restore.
        if module.loss_scale is not None and "loss_scale" in state:
            module.loss_scale.load_state_dict(state["loss_scale"])
    if module.keeps_layers is not None and "kept_layers" in state:
        module.keeps_layers.load_state_dict(state["kept_layers"])


@torch.no_grad()
def _restore_tensors(module: PolicyGradientModule, state: dict, names: set[str]) -> None:
    """Restore this rank's part of weights and moments. names: of the whole model's weights."""
    path = state["path"]
    load_weights(module.policy, state, names)
    if module.reference_every is not None:
        assert module.reference is not None
        _fill_all(named_weights(module.reference.model), path, REFERENCE)
    _, weights = stored_weights(module.policy)
    fields: Fields = {}
    of_rank = {name: fields_of(module.optimizer, weight) for name, weight in weights.items()}
    for of_one in gather_objects(of_rank, module.layout.world_group):
        fields |= of_one
    _restore_moments(
        path,
        MOMENTS,
        module.optimizer,
        weights,
        fields,
        state["num_updates"],
        state.get("without_moments"),
    )
    critic = module.critic
    if critic is None:
        return
    if "critic_updates" not in state:
        raise ValueError("it holds no critic")
    weights = named_weights(critic.body.model)
    _fill_all(weights, path, CRITIC)
    _restore_moments(
        path,
        CRITIC_MOMENTS,
        critic.optimizer,
        weights,
        {name: fields_of(critic.optimizer, weight) for name, weight in weights.items()},
        state["critic_updates"],
        state["critic_without_moments"],
    )


def _fill_all(weights: Mapping[str, Tensor], path: Path, kind: str) -> None:
    with open_tensors(path, kind) as files:
        for name, weight in weights.items():
            _fill(weight, name, files)


def _restore_moments(
    path: Path,
    kind: str,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    fields: Fields,
    updates: int,
    without_moments: list[str] | None,
) -> None:
    """Restore this rank's part of the moments of weights.

    fields, updates, without_moments: see `_check_moments`. Raises StorageError for a damaged
    checkpoint.
    """
    with open_tensors(path, kind) as files:
        if updates and not files and {*fields} - {*(without_moments or ())}:
            raise StorageError(damaged(path, "the optimizer's moments are missing"))
        of_torch = [name for name, names in fields.items() if names is None]
        fields = fields | _stored_fields(of_torch, files)
        if of_torch:
            _check_moments(files.keys(), fields, path, updates, without_moments)
            load_fields(
                optimizer,
                {
                    cast("nn.Parameter", weight): {
                        field: files[f"{name}.{field}"].get_tensor(f"{name}.{field}")
                        for field in fields[name] or ()
                    }
                    for name, weight in weights.items()
                },
            )
            return
        _check_moments(files.keys(), fields, path, updates, without_moments)
        for name, parameter in weights.items():
            of_weight = fields[name] or ()
            if not all(f"{name}.{field}" in files for field in of_weight):
                continue
            moments = {field: torch.zeros_like(parameter) for field in of_weight}
            if "step" in moments:
                # Fused AdamW has the count of steps on the device, too.
                moments["step"] = torch.zeros((), device=parameter.device)
            optimizer.state[parameter] = moments
            for field, target in moments.items():
                _fill(target, f"{name}.{field}", files)
                values = local(target)
                is_negative = field in ("step", "exp_avg_sq") and (values < 0).any()
                if not values.isfinite().all() or is_negative:
                    problem = f"{name}.{field} of the optimizer holds negative numbers or NaN"
                    raise StorageError(damaged(path, problem))


def _stored_fields(names: Collection[str], stored: Iterable[str]) -> Fields:
    """Return the fields that a checkpoint has of these weights, in its order."""
    fields: dict[str, list[str]] = {name: [] for name in names}
    for tensor in stored:
        parts = tensor.split(".")
        splits = ((".".join(parts[:end]), ".".join(parts[end:])) for end in range(1, len(parts)))
        for name, field in splits:
            if name in fields:
                fields[name].append(field)
    return {name: tuple(of_weight) for name, of_weight in fields.items()}


def _check_moments(
    stored_names: Collection[str],
    fields: Fields,
    path: Path,
    updates: int,
    without_moments: list[str] | None,
) -> None:
    """Raise an error where moments are missing, or belong to no weight.

    fields: by the names of the whole model's weights.
    updates: the number that was made of them.
    without_moments: names of the weights that have none, as the checkpoint says. One that does not
        say it may lack all moments of any weight, but not some of them.
    """
    expected = {
        f"{name}.{field}" for name, of_weight in fields.items() for field in of_weight or ()
    }
    unknown = sorted({*stored_names} - expected)
    if unknown:
        raise ValueError(f"{unknown[0]} is none of the optimizer's moments")
    if not updates:
        return
    for name, of_weight in sorted(fields.items()):
        if not of_weight and name not in (without_moments or ()):
            raise StorageError(damaged(path, f"{name} of the optimizer is missing"))
        missing = [field for field in of_weight or () if f"{name}.{field}" not in stored_names]
        may_lack_all = without_moments is None or name in without_moments
        if missing and not (may_lack_all and len(missing) == len(of_weight or ())):
            raise StorageError(damaged(path, f"{name}.{missing[0]} of the optimizer is missing"))


def stored_weights(policy: Policy) -> tuple[str, Mapping[str, Tensor]]:
    """Return the kind of the weights that a checkpoint holds of a policy, and these by name.

    They are the policy's tensors themselves: all weights, or LoRA's adapters.
    """
    if policy.base_digest is None:
        return WEIGHTS, named_weights(policy.model)
    return ADAPTERS, lora.adapter_weights(policy.model)


@torch.no_grad()
def load_weights(policy: Policy, state: dict, names: set[str] | None = None) -> None:
    """Load this rank's part of a checkpoint's weights, or adapters, into a policy.

    names: of the whole model's weights; None where this rank has all.
    Raises ValueError or SafetensorError where the checkpoint has other weights than the policy, and
    ConfigError for adapters that do not fit it.
    """
    saved_digest = state.get("base_digest")
    if saved_digest != policy.base_digest:
        if saved_digest is None:
            reason = "it holds all weights. Use model.lora_rank=null."
        elif policy.base_digest is None:
            reason = "it holds LoRA's adapters alone. Use model.lora_rank as it was."
        else:
            reason = (
                "its adapters were trained on other weights than model.path has now. Use the "
                "model as it was."
            )
        raise ConfigError(f"the checkpoint does not fit the configured model: {reason}")
    kind, weights = stored_weights(policy)
    names = {*weights} if names is None else names
    with open_tensors(state["path"], kind) as files:
        differing = sorted(names ^ files.keys())
        if differing:
            name = differing[0]
            problem = "missing" if name in names else "none of its weights"
            raise ValueError(f"{name} is {problem}")
        for name, weight in weights.items():
            _fill(weight, name, files)


def _fill(target: Tensor, name: str, files: Mapping[str, safe_open]) -> None:
    """Copy a stored tensor, or this rank's part of it, into `target`.

    files: as `open_tensors` gives them. Raises ValueError where it is missing or does not fit.
    """
    if name not in files:
        raise ValueError(f"{name} is missing")
    tensor = files[name].get_tensor(name)
    if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
        got = [*tensor.shape, tensor.dtype]
        needed = [*target.shape, target.dtype]
        raise ValueError(f"{name} is of {got}, not of {needed}")
    if isinstance(target, DTensor):
        # Every rank reads the file itself, so none has to send parts of the tensor.
        tensor = distribute_tensor(
            tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(tensor)
