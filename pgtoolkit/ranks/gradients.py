"""The gradient over ranks: its sum, once per step and in an order that never changes, its norm, and
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
"""Bytes of gradients that travel at once, by the kind of device; a copy of them exists meanwhile.

On two GPUs NCCL has reached an eighth of their rate with 64 MiB, and all of it with 1 GiB.
"""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Replace the gradients (of sharded parameters: this rank's part) by their sums over the group,
    in place.

    Every rank must have gradients of the same parameters. The result is bitwise the same on all of
    them, and after a resume the same as without one: neighbours in `parameters` travel together,
    whichever came first in the backward pass.
    """
    for bucket in _buckets(_local_gradients(parameters)):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        totals = flat.split([gradient.numel() for gradient in bucket])
        for gradient, total in zip(bucket, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Yield consecutive gradients of one number type, of at most BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (
            size + gradient.nbytes > BUCKET_BYTES[gradient.device.type]
            or gradient.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
            size = 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients (of sharded parameters: this rank's part) by a number, in place."""
    gradients = _local_gradients(parameters)
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], layout: Layout, limit: float) -> Tensor:
    """Scale the gradient in place so that its norm is at most `limit`; return the norm from before.

    Returns a 0-dim tensor, the same on all ranks. An element counts once, on however many ranks it
    is held. Parameters without a gradient count nothing.
    """
    parameters = list(parameters)
    if layout.world_size == 1:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    parts = _by_division(parameters)
    norm = _norm(parts, layout, parameters[0].device)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradients in parts.values():
        if gradients:
            factor = scale.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
    return norm


_Parts = dict[tuple[int, int], list[Tensor]]
"""This rank's parts of gradients, by the ranks that the gradients are divided over: those of the
loss (0 or 1), and those of the tensors (0 or 1)."""


def _by_division(parameters: list[nn.Parameter]) -> _Parts:
    parts: _Parts = {divided: [] for divided in itertools.product((0, 1), (0, 1))}
    for parameter in parameters:
        if parameter.grad is not None:
            axes = _divided_over(parameter.grad)
            parts[int("loss" in axes), int("tensor_parallel" in axes)].append(local(parameter.grad))
    return parts


def _norm(parts: _Parts, layout: Layout, device: torch.device) -> Tensor:
    """Return the norm of the gradient over all ranks, 0-dim float64; every rank calls this."""
    squares = torch.zeros(2, 2, dtype=torch.float64, device=device)
    for divided, gradients in parts.items():
        if gradients:
            norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]  (torch names no other)
            squares[divided] = torch.stack(norms).double().square().sum()
    for group, part in (
        (layout.group("tensor_parallel"), squares[:, 1]),
        (layout.loss_group, squares[1]),
    ):
        if group is not None:
            total = part.contiguous()
            dist.all_reduce(total, group=group)
            part.copy_(total)
    square = squares.sum()
    stages = layout.group("pipeline_parallel")
    if stages is not None:
        dist.all_reduce(square, group=stages)
    return square.sqrt()


def _divided_over(gradient: Tensor) -> set[str]:
    """Return the axes of the mesh over which a gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return set()
    names = gradient.device_mesh.mesh_dim_names or ()
    return {
        name
        for name, placement in zip(names, gradient.placements, strict=True)
        if not placement.is_replicate()
    }
