"""What a checkpoint holds of the model: taken from a policy, and put back into one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.errors import ConfigError
from pgtoolkit.model import lora
from pgtoolkit.model.policy import Policy, named_weights
from pgtoolkit.training.checkpoint import ADAPTERS, WEIGHTS, open_tensors


def stored(policy: Policy) -> tuple[str, dict[str, Tensor]]:
    """What a checkpoint holds of the model: the kind, and the tensors themselves by their names there."""
    if policy.base_digest is None:
        return WEIGHTS, named_weights(policy.model)
    return ADAPTERS, lora.adapter_weights(policy.model)


@torch.no_grad()
def load_weights(policy: Policy, state: dict, names: set[str] | None = None) -> None:
    """This rank's part of a checkpoint's weights, or of its adapters; names: of all of them, where others hold some.

    Raises ValueError or SafetensorError where they are not those of the policy, and ConfigError for adapters that do
    not fit to it.
    """
    kind, tensors = stored(policy)
    names = tensors.keys() if names is None else names
    if (found := state.get("base_digest")) != policy.base_digest:
        raise ConfigError(f"the checkpoint does not fit the configured model: {_misfit(found, policy.base_digest)}")
    with open_tensors(state["path"], kind) as files:
        for name in sorted(names ^ files.keys()):
            raise ValueError(f"{name} is {'missing' if name in names else 'none of its weights'}")
        for name, tensor in tensors.items():
            fill(tensor, name, files)


def _misfit(found: str | None, needed: str | None) -> str:
    """How what the adapters of a checkpoint stand beside differs from what the configuration describes."""
    if found is None:
        return "it holds all weights. Use model.lora_rank=null."
    if needed is None:
        return "it holds LoRA's adapters alone. Use model.lora_rank as it was."
    return "its adapters were trained beside other weights than model.path has now. Use the model as it was."


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
