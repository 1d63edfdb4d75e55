"""The collectives of the loss between ranks.

Each call is a collective of the same size on every rank of the group; a rank without a row takes
part too. Without a group each function returns the result for a single rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ranks:
    """The groups of ranks that share a loss; None where one rank has it all.

    vocabulary: its ranks hold the columns of the logits (rows of the head) from vocabulary_start
        on; None: from rank times columns on, where all ranks have as many columns.
    sequence: its ranks hold other tokens of the same documents.
    data: its ranks hold other documents of the step; used only to count the step's totals where
        these are not given.
    """

    vocabulary: ProcessGroup | None = None
    vocabulary_start: int | None = None
    sequence: ProcessGroup | None = None
    data: ProcessGroup | None = None

    def shard(self, columns: int) -> tuple[ProcessGroup, int] | None:
        """Return (group, first column) where the vocabulary is spread over ranks, else None.

        columns: the number of columns of this rank.
        """
        if self.vocabulary is None:
            return None
        start = self.vocabulary_start
        if start is None:
            start = self.vocabulary.rank() * columns
        return self.vocabulary, start


def all_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks, the same bits on each. Not differentiable."""
    return values if group is None else all_reduce_(values.clone(), group)


def all_reduce_(
    values: Tensor,
    group: ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Tensor:
    """Replace contiguous values by their sum, or another reduction, over the ranks."""
    if group is not None:
        dist.all_reduce(values, operation, group=group)
    return values


def all_max(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the maximum over the ranks."""
    return values if group is None else all_reduce_(values.clone(), group, dist.ReduceOp.MAX)


def gather_stacked(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return (ranks, *shape): every rank's values, which have the same shape."""
    if group is None:
        return values.unsqueeze(0)
    gathered = values.new_empty(group.size(), *values.shape)
    dist.all_gather(list(gathered), values.contiguous(), group=group)
    return gathered


def largest(number: int, group: ProcessGroup | None, device: torch.device) -> int:
    """Return the largest of the ranks' numbers, read on the host."""
    return number if group is None else int(all_max(torch.tensor(number, device=device), group))


def copy(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the values, which are the same on all ranks, for work that is divided among them.

    Backward sums the ranks' gradients.
    """
    return LinearMap.apply(
        values, lambda x: x.view_as(x), lambda gradient: all_sum(gradient.contiguous(), group)
    )


class LinearMap(torch.autograd.Function):
    """A linear map of a tensor, whose backward is the transposed map."""

    @staticmethod
    def forward(ctx, values: Tensor, linear_map: Callable, transposed: Callable) -> Tensor:
        ctx.transposed = transposed
        return linear_map(values)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.transposed(gradient), None, None
