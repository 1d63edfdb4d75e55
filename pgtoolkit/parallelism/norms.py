"""The gradient of a spread model: what must still be added up over which ranks, and its norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.parallelism.layout import Layout
from pgtoolkit.training.model import Policy


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
    device = parameters[0].device
    gradients = [p.grad for p in parameters if p.grad is not None]
    # By what they are divided over: nothing, the ranks of the loss, those of the tensors, or both.
    squares = torch.zeros(2, 2, dtype=torch.float64, device=device)
    for gradient in gradients:
        by_loss, by_tensor = (name in _divided_over(gradient) for name in ("loss", "tensor_parallel"))
        squares[int(by_loss), int(by_tensor)] += _whole(gradient).norm().double().square()
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
    for gradient in gradients:
        _whole(gradient).mul_(scale.to(gradient.dtype))
    return norm


def _whole(gradient: Tensor) -> Tensor:
    """All of the gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _divided_over(gradient: Tensor) -> set[str]:
    if not isinstance(gradient, DTensor):
        return set()
    mesh = gradient.device_mesh
    return {name for name, how in zip(mesh.mesh_dim_names, gradient.placements, strict=True) if not how.is_replicate()}
