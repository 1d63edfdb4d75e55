"""Collectives with a derivative: each is named by what it does forward; the docstring says what its
backward does.

All take the ranks of `group`, of equal shapes, and are called by all of them in the same order. A
tensor is called *partial* where the sum over the ranks is meant, *complete* where each rank holds
that sum already.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.losses.exchange import LinearMap, all_sum, copy

__all__ = ["copy", "join", "local", "piece", "sum_over", "sum_piece", "whole"]

# Their names since torch 2.13, which warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, differentiable; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any, dtype: torch.dtype) -> Tensor:
    """All of a tensor that may be sharded, floating-point numbers in `dtype`; every rank calls this
    with its part.

    What is no tensor knows how it becomes one (`model.pipeline.OfStage`).
    """
    if not isinstance(tensor, Tensor):
        return tensor.whole(dtype)
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor  # before it is sent
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' partial x; backward hands on the complete gradient as it is."""
    return LinearMap.apply(x, lambda x: all_sum(x.contiguous(), group), lambda x: x.view_as(x))


def join(x: Tensor, group: ProcessGroup, axis: int, partial_gradient: bool) -> Tensor:
    """The ranks' x one after the other along `axis`; backward takes this rank's piece of the
    gradient.

    partial_gradient: the ranks hold different gradients of the whole, which are summed first.
    """
    where = {"group": group, "axis": axis}
    of_gradient = _summed_piece if partial_gradient else _piece
    return LinearMap.apply(x, partial(_gathered, **where), partial(of_gradient, **where))


def piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    """This rank's equal piece of x, the same on all ranks, along `axis`; backward gathers the
    pieces' gradients."""
    return LinearMap.apply(
        x, partial(_piece, group=group, axis=axis), partial(_gathered, group=group, axis=axis)
    )


def sum_piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    """This rank's equal piece along `axis` of the sum of the partial x; backward gathers the
    pieces' gradients."""
    return LinearMap.apply(
        x,
        partial(_summed_piece, group=group, axis=axis),
        partial(_gathered, group=group, axis=axis),
    )


def _gathered(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    rows = x.movedim(axis, 0).contiguous()
    out = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    _all_gather(out, rows, group=group)
    return out.movedim(0, axis)


def _piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    return x.chunk(group.size(), axis)[group.rank()].contiguous()


def _summed_piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    rows = x.movedim(axis, 0).contiguous()
    out = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    _reduce_scatter(out, rows, group=group)
    return out.movedim(0, axis)
