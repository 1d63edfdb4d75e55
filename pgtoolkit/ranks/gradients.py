"""Adds gradients up over ranks: once per step, in an order that never changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 * 2**20
"""Gradients that travel at once; a copy of that many exists meanwhile."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Replace the gradients (of sharded parameters: this rank's part) by their sums over the group, in place.

    Every rank must have gradients of the same parameters. The result is bitwise the same on all of them, and after a
    resume the same as without one: neighbours in `parameters` travel together, whatever came first in the backward.
    """
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    bucket, size = [], 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
