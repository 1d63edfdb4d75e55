"""Collectives with a derivative.

Each is named by its forward pass, and its docstring says what its backward pass does. All ranks of
`group` call them in the same order, with tensors of equal shapes. A tensor is called *partial*
where the sum over the ranks is meant, *complete* where each rank holds that sum already.

On CPUs sharded tensors are gathered by an operation of this file, not by PyTorch's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.losses.exchange import LinearMap, all_sum, copy

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

__all__ = ["copy", "join", "local", "piece", "sum_over", "sum_piece", "whole"]

# Their names since torch 2.13, which warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gatherable(Protocol):
    """Stands for a tensor that other ranks hold, as `model.pipeline.OfStage` does."""

    def whole(self, dtype: torch.dtype) -> Tensor: ...


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, differentiable; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor | Gatherable, dtype: torch.dtype) -> Tensor:
    """Return all of a tensor that may be sharded, floating-point numbers in `dtype`.

    Every rank calls this with its part.
    """
    if not isinstance(tensor, Tensor):
        return tensor.whole(dtype)
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)  # before it is sent
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' partial x; backward hands the complete gradient on unchanged."""
    return LinearMap.apply(x, lambda x: all_sum(x.contiguous(), group), lambda x: x.view_as(x))


def join(x: Tensor, group: ProcessGroup, axis: int, partial_gradient: bool) -> Tensor:
    """Concatenate the ranks' x along `axis`; backward takes this rank's piece of the gradient.

    partial_gradient: the ranks hold different gradients of the result, which are summed first.
    """
    of_gradient = _summed_piece if partial_gradient else _piece
    return LinearMap.apply(
        x,
        partial(_gathered, group=group, axis=axis),
        partial(of_gradient, group=group, axis=axis),
    )


def piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    """Return this rank's equal piece along `axis` of x, which is the same on all ranks; backward
    gathers the pieces' gradients."""
    return LinearMap.apply(
        x, partial(_piece, group=group, axis=axis), partial(_gathered, group=group, axis=axis)
    )


def sum_piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    """Return this rank's equal piece along `axis` of the sum of the partial x; backward gathers the
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


def _gather_parts(part: Tensor, num_parts: int, group: GroupName) -> Tensor:
    """Return the ranks' equal parts, one below the other. `full_tensor` calls this on a CPU.

    PyTorch's own operation damages the memory of the process now and then. The two threads of a
    group of gloo write the name of each operation that is done into one string, without a lock
    (`lastCompletedWorkName` in ProcessGroupGloo.cpp of PyTorch 2.13). A string has room for 15
    characters. For a longer name, as ALLGATHER_COALESCED, it takes memory, which both threads may
    give back. The name of this operation is ALLGATHER.
    """
    numbers = torch.view_as_real(part) if part.is_complex() else part
    out = numbers.new_empty(num_parts * len(numbers), *numbers.shape[1:])
    _all_gather(out, numbers.contiguous(), group=_distributed_c10d._resolve_process_group(group))
    return torch.view_as_complex(out) if part.is_complex() else out


_replaced = torch.library.Library("_c10d_functional", "IMPL")  # acts as long as it exists
_replaced.impl("all_gather_into_tensor", _gather_parts, "CPU")


def _piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    return x.chunk(group.size(), axis)[group.rank()].contiguous()


def _summed_piece(x: Tensor, group: ProcessGroup, axis: int) -> Tensor:
    rows = x.movedim(axis, 0).contiguous()
    out = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    _reduce_scatter(out, rows, group=group)
    return out.movedim(0, axis)
