"""Agreement among ranks, so that none waits for another that has taken another way."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.errors import PgtoolkitError, RankLost, as_storage_error, first_line
from pgtoolkit.ranks.layout import Layout

_LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
)
"""Words in the messages of torch about a connection to another process that is gone or silent."""

T = TypeVar("T")


def gather_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """Return every rank's value, by rank in the group.

    The values are pickled, so they should be small or rare.
    """
    if group is None:
        return [value]
    parts = [b""] * group.size()
    dist.all_gather_object(parts, pickled(value), group=group)
    return [pickle.loads(part) for part in parts]


def pickled(value: object) -> bytes:
    """Return a value as bytes for `pickle.loads` of another process.

    Small tensors in it take less time than by PyTorch's own way.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles small tensors ten times as fast as PyTorch's own way; of a view only the numbers that
    it shows."""

    def reducer_override(self, value: object) -> object:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.dtype == torch.bfloat16:  # NumPy does not have this type
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def of_rank_0(value: T | None, layout: Layout) -> T:
    """Return the value of rank 0, on every rank; those of the others do not matter."""
    values = [value]
    if layout.world_size > 1:
        dist.broadcast_object_list(values, src=0, group=layout.world_group)
    return cast("T", values[0])


def largest(value: int, layout: Layout) -> int:
    """Return the largest of all ranks' values."""
    return max(_of_all(layout, value))


def read_once(
    layout: Layout, read: Callable[[], T], outline: Callable[[T], T] = lambda value: value
) -> T:
    """Have one rank of each node call `read`, and return its result on all ranks.

    outline: makes of the result what the other ranks of the node get, pickled. An error that `read`
        raises is raised by all ranks.
    """
    value: T | None = None
    with failing_together(layout, layout.readers):
        if layout.rank == layout.reader:
            value = read()
    if layout.node_group is None:
        return cast("T", value)
    is_reader = layout.rank == layout.reader
    sent = [outline(cast("T", value)) if is_reader else None]
    dist.broadcast_object_list(sent, layout.reader, layout.node_group)
    return cast("T", value if is_reader else sent[0])


@contextlib.contextmanager
def failing_together(layout: Layout, busy: tuple[int, ...] | None = None) -> Iterator[None]:
    """Raise an error that a user can mend on all ranks, when any rank raises it in the block.

    busy: the ranks that have something to do there; None: all. The message says which rank failed,
        unless all of these failed alike.
    Blocks may be nested: an error that an inner one has raised on all ranks is not exchanged again.
    """
    error = None
    try:
        yield
    except (PgtoolkitError, OSError) as raised:
        mendable = as_storage_error(raised) if isinstance(raised, OSError) else raised
        if layout.world_size == 1 or mendable.agreed:
            raise
        error = mendable
    if any(_of_all(layout, error is not None)):
        errors = gather_objects(error, layout.world_group)
        rank, first = next((rank, other) for rank, other in enumerate(errors) if other is not None)
        is_everywhere = all(
            str(errors[rank]) == str(first) for rank in busy or range(layout.world_size)
        )
        shared = type(first)(str(first) if is_everywhere else f"rank {rank}: {first}")
        shared.on_all_ranks = True
        shared.agreed = True
        raise shared from error


def check_same(layout: Layout, name: str, digest: int) -> None:
    """Raise RankLost if the digests of the ranks, non-negative and below 2^63, are not equal.

    name: of the data, in the plural, for the message.
    """
    digests = _of_all(layout, digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise RankLost(
            f"{name} on rank {', '.join(map(str, odd))} differ from those on rank 0. Every process "
            "must read the same files with the same version of pgtoolkit; what they computed "
            "together so far is right."
        )


@contextlib.contextmanager
def losing_ranks(layout: Layout, timeout_seconds: float) -> Iterator[None]:
    """Raise RankLost in place of torch's errors about a process that ended or is silent."""
    try:
        yield
    except RuntimeError as error:  # gloo has no type for a lost connection
        is_lost = isinstance(error, dist.DistError) or any(
            word in str(error).lower() for word in _LOST
        )
        if layout.world_size == 1 or not is_lost:
            raise
        # gloo puts a line of its source before the reason, and advice after it.
        reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first_line(error)).partition(". ")[0]
        raise RankLost(
            f"rank {layout.rank} waited for another process, which ended or did not answer within "
            f"parallelism.timeout_seconds={timeout_seconds:g}: {reason}"
        ) from error


def _of_all(layout: Layout, number: int) -> list[int]:
    """Return each rank's number, by rank."""
    return [of_rank[0] for of_rank in gather_numbers(layout, [int(number)])]


def gather_numbers(layout: Layout, numbers: list[int]) -> list[list[int]]:
    """Return each rank's whole numbers, equally many on all of them, by rank.

    They are on the CPU, so that no rank waits for a GPU.
    """
    if layout.world_size == 1:
        return [numbers]
    row = torch.tensor(numbers)
    rows = [torch.empty_like(row) for _ in range(layout.world_size)]
    dist.all_gather(rows, row, group=layout.world_group)
    return torch.stack(rows).tolist()
