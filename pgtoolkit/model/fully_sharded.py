"""FSDP2: weights, gradients and optimizer states are divided among the ranks that see different data.

A layer's weights are brought together while it computes. The gradient is the sum over the ranks, as everywhere here;
FSDP2 would average. The embedding, the last norm and the head are one unit, which stays together from the model's
forward until its backward, so that the loss can use the head in between.
"""

from __future__ import annotations

import types

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from pgtoolkit.model.architectures import architecture_of


def shard_fully(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a transformers causal LM among the ranks of `mesh` (one axis), in place; parameters become DTensors.

    Afterwards the hidden states come from `model.transformer_states(**inputs)`.
    """
    for layer in architecture_of(model).layers_of(model):
        if next(layer.parameters(), None) is not None:  # a pipeline's stage has passed others on
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.transformer_states = types.MethodType(_transformer_states, model)
    register_fsdp_forward_method(model, "transformer_states")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _transformer_states(model: nn.Module, **inputs) -> Tensor:
    # Not a view, on which FSDP2's hook for the backward pass would not be safe.
    return model.base_model(**inputs).last_hidden_state.clone()
