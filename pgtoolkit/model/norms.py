"""The gradient of a spread model: what must still be added up over which ranks, and its norm."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.layout import Layout


def gradient_groups(policy: Policy, layout: Layout) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
    """After the last backward of a step: (group, parameters whose local gradients are to be summed over it).

    In this order. What FSDP2 has summed already is not named again.
    """
    groups = []
    if partial := getattr(policy, "partial", ()):
        parameters = [p for name, p in policy.model.named_parameters() if name in partial]
        groups.append((layout.group("tensor_parallel"), parameters))
    if layout.loss_group is not None and not getattr(policy, "sharded", False):
        groups.append((layout.loss_group, [p for p in policy.model.parameters() if p.requires_grad]))
    return groups


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], layout: Layout, limit: float) -> Tensor:
    """The norm of the whole gradient, 0-dim and the same on all ranks; scales it in place down to `limit`.

    An element counts once, however many ranks hold it. Parameters without a gradient count nothing.
    """
    parameters = list(parameters)
    if layout.world_size == 1:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    # By what they are divided over: nothing, the ranks of the loss, those of the tensors, or both.
    parts = {kind: [] for kind in itertools.product((0, 1), (0, 1))}
    for parameter in parameters:
        if parameter.grad is not None:
            over = _divided_over(parameter.grad)
            parts[int("loss" in over), int("tensor_parallel" in over)].append(_own(parameter.grad))
    squares = torch.zeros(2, 2, dtype=torch.float64, device=parameters[0].device)
    for kind, gradients in parts.items():
        if gradients:
            squares[kind] = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    for group, part in ((layout.group("tensor_parallel"), squares[:, 1]), (layout.loss_group, squares[1])):
        if group is not None:
            total = part.contiguous()
            dist.all_reduce(total, group=group)
            part.copy_(total)
    square = squares.sum()
    if group := layout.group("pipeline_parallel"):
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradients in parts.values():
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    return norm


def _own(gradient: Tensor) -> Tensor:
    """All of the gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _divided_over(gradient: Tensor) -> set[str]:
    if not isinstance(gradient, DTensor):
        return set()
    mesh = gradient.device_mesh
    return {name for name, how in zip(mesh.mesh_dim_names, gradient.placements, strict=True) if not how.is_replicate()}
