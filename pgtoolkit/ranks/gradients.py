"""The gradient over ranks: summed once per step, in an order that never changes; its norm, and
clipping."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.ranks.collectives import local
from pgtoolkit.ranks.layout import Layout

BUCKET_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Gradients that travel at once; a copy of that many exists meanwhile.

NCCL has reached an eighth of two GPUs' rate with 64 MiB, and all of it with 1 GiB.
"""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Replace the gradients (of sharded parameters: this rank's part) by their sums over the group,
    in place.

    Every rank must have gradients of the same parameters. The result is bitwise the same on all of
    them, and after a
    resume the same as without one: neighbours in `parameters` travel together, whatever came first
        in the backward.
    """
    for bucket in _buckets([local(p.grad) for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(
            bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    bucket, size = [], 0
    for gradient in gradients:
        if bucket and (
            size + gradient.nbytes > BUCKET_BYTES[gradient.device.type]
            or gradient.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients (of sharded parameters: this rank's part) by a number, in place."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], layout: Layout, limit: float) -> Tensor:
    """The norm of the whole gradient, 0-dim and the same on all ranks; scales it in place down to
    `limit`.

    An element counts once, however many ranks hold it. Parameters without a gradient count nothing.
    """
    parameters = list(parameters)
    if layout.world_size == 1:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    # By what they are divided over: nothing, the ranks of the loss, those of the tensors, or both.
    parts: dict[tuple[int, int], list[Tensor]] = {
        kind: [] for kind in itertools.product((0, 1), (0, 1))
    }
    for parameter in parameters:
        if parameter.grad is not None:
            axes = _divided_over(parameter.grad)
            parts[int("loss" in axes), int("tensor_parallel" in axes)].append(local(parameter.grad))
    squares = torch.zeros(2, 2, dtype=torch.float64, device=parameters[0].device)
    for kind, gradients in parts.items():
        if gradients:
            norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
            squares[kind] = torch.stack(norms).double().square().sum()
    for group, part in (
        (layout.group("tensor_parallel"), squares[:, 1]),
        (layout.loss_group, squares[1]),
    ):
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
            factor = scale.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
    return norm


def _divided_over(gradient: Tensor) -> set[str]:
    """The axes of the mesh over which a gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return set()
    names = gradient.device_mesh.mesh_dim_names or ()
    return {
        name for name, how in zip(names, gradient.placements, strict=True) if not how.is_replicate()
    }
