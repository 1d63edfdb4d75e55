"""What a run is made of at the end of a step, taken from a module and put back into one."""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError, first_line
from pgtoolkit.ranks.agreement import gather
from pgtoolkit.training.build import seed_rank
from pgtoolkit.training.checkpoint import FORMAT, random_state, set_random_state
from pgtoolkit.training.sharded_checkpoint import read_tensors

log = logging.getLogger("pgtoolkit")


def snapshot(module, data_state: dict) -> dict:
    """All that the next step of one process depends on, in tensors and plain containers."""
    return progress(module, data_state) | {
        "model": module.model.state_dict(),
        "optimizer": module.optimizer.state_dict()["state"],
        "random": random_state(),
    }


def progress(module, data_state: dict) -> dict:
    """What is the same on all ranks, but for weights and moments."""
    return {
        "format": FORMAT,
        "step": data_state["num_steps"],
        "num_updates": module.num_updates,
        "num_skipped_steps": module.num_skipped_steps,
        "documents_seen": module.documents_seen,
        "data": data_state,
    }


def shared_snapshot(module, data_state: dict) -> tuple[dict, dict[str, Tensor]]:
    """The same of several ranks: what one of them writes, and the tensors, of which each writes its part."""
    states = gather(random_state(), module.layout.world_group)
    return progress(module, data_state) | {"random": {"ranks": states}}, tensors_of(module)


def tensors_of(module) -> dict[str, Tensor]:
    """Weights and moments by name, those of this rank; the tensors themselves, not copies."""
    tensors = {f"model.{name}": tensor for name, tensor in module.model.state_dict().items()}
    for name, parameter in module.model.named_parameters():
        for field, value in module.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{field}"] = value
    return tensors


def restore(module, state: dict) -> None:
    """Continue from a checkpoint of this or another number of ranks, but for the data, which the step loader restores.

    state: as `load_newest` gives it. Of the optimizer only its moments are taken over: its settings are the
    configuration's, which a resume may change.
    """
    try:
        if "model" not in state:
            _restore_shards(module, state["path"])
        elif module.layout.world_size > 1:
            _distribute(module, state)
        else:
            module.model.load_state_dict(state["model"])
            _check_moments(module, state)
            module.optimizer.load_state_dict(module.optimizer.state_dict() | {"state": state["optimizer"]})
    except (RuntimeError, *_OF_OTHER_SHAPE) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise ConfigError(f"the checkpoint does not fit the configured model: {reason}") from error
    module.num_updates = state["num_updates"]
    module.num_skipped_steps = state["num_skipped_steps"]
    module.documents_seen = state["documents_seen"]
    rank = module.layout.rank
    with _whole(state, "random numbers"):
        states = state["random"].get("ranks", [state["random"]])
        if rank < len(states):
            set_random_state(states[rank])
        else:
            seed_rank(module.config.seed, rank, state["step"])


def restore_data(loader, state: dict) -> None:
    """Continue at the place in the data where a checkpoint stands."""
    with _whole(state, "place in the data"):
        loader.load_state_dict(state["data"])


_OF_OTHER_SHAPE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What plain containers raise that do not hold what is looked for in them."""


@contextlib.contextmanager
def _whole(state: dict, what: str):
    try:
        yield
    except PgtoolkitError:
        raise
    except (RuntimeError, *_OF_OTHER_SHAPE) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise StorageError(
            f"the checkpoint {state['path']} is damaged: its {what} cannot be read ({reason}). The run's other files "
            "are whole. Remove it, and pgtk resume goes on from the one before."
        ) from error


def _check_moments(module, state: dict) -> None:
    """torch takes over any moments, also none; KeyError or TypeError for those that belong to no parameter."""
    parameters = [parameter for group in module.optimizer.param_groups for parameter in group["params"]]
    if state["num_updates"] and not state["optimizer"]:
        raise KeyError("the optimizer's moments are missing")
    for number, fields in state["optimizer"].items():
        if fields["exp_avg"].shape != dict(enumerate(parameters))[number].shape:
            raise KeyError(f"the optimizer's moments of parameter {number} have shape {tuple(fields['exp_avg'].shape)}")


def _restore_shards(module, folder) -> None:
    """Read this rank's part of weights and moments, however they were divided when they were written."""
    read_tensors(folder, lambda names: _targets(module, names), module.layout)


def _targets(module, names: set[str]) -> dict[str, Tensor]:
    """Where the tensors of a checkpoint go; moments get room where the checkpoint has some."""
    for name, parameter in module.model.named_parameters():
        prefix = f"optimizer.{name}."
        fields = {found.removeprefix(prefix) for found in names if found.startswith(prefix)}
        if fields:
            module.optimizer.state[parameter] = {field: _room(field, parameter) for field in sorted(fields)}
    return tensors_of(module)


def _room(field: str, parameter: Tensor) -> Tensor:
    # Where AdamW has the number of its updates: on a GPU, where it is fused, beside the parameter.
    return torch.zeros((), device=parameter.device) if field == "step" else torch.zeros_like(parameter.detach())


@torch.no_grad()
def _distribute(module, state: dict) -> None:
    """Put the checkpoint of one process into this rank's part of the model."""
    names = module.names_in_optimizer
    moments = {names[number]: fields for number, fields in state["optimizer"].items()}
    whole = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    whole |= {f"optimizer.{name}.{field}": value for name in moments for field, value in moments[name].items()}
    for name, target in _targets(module, set(whole)).items():
        found = whole[name]
        if target.shape != found.shape:
            raise RuntimeError(f"{name} has shape {tuple(found.shape)}, not {tuple(target.shape)}")
        if isinstance(target, DTensor):
            # Every rank has read the file, so none needs to send.
            found = found.to(target.device)
            found = distribute_tensor(found, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(found)
