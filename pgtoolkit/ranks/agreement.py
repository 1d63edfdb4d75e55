"""What ranks decide together, so that none waits for another that has taken another way."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.errors import PgtoolkitError, RankLost, first_line, unusable
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


def gather_objects(value: Any, group: ProcessGroup | None) -> list:
    """Every rank's value, by rank in the group; for what is rare or small, since it is pickled."""
    if group is None:
        return [value]
    parts = [b""] * group.size()
    dist.all_gather_object(parts, pickled(value), group=group)
    return [pickle.loads(part) for part in parts]


def pickled(value: object) -> bytes:
    """Return a value for `pickle.loads` of another process, small tensors in it faster than by
    PyTorch's own way."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Takes small tensors ten times as fast as PyTorch's own way, and of a view no more than what
    it shows."""

    def reducer_override(self, value: object) -> object:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.dtype == torch.bfloat16:  # which NumPy does not have
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)


def of_rank_0(value: Any, layout: Layout) -> Any:
    """The first rank's value, on every rank."""
    values = [value]
    if layout.world_size > 1:
        dist.broadcast_object_list(values, src=0, group=layout.world_group)
    return values[0]


def largest(value: int, layout: Layout) -> int:
    """The largest of all ranks' values."""
    return max(_of_all(layout, value))


def read_once(
    layout: Layout, read: Callable[[], Any], outline: Callable[[Any], Any] = lambda value: value
) -> Any:
    """What `read` returns, which one rank of each node calls; what it raises, all ranks raise.

    outline: what the other ranks of the node get of it, pickled.
    """
    value = None
    with failing_together(layout, layout.readers):
        if layout.rank == layout.reader:
            value = read()
    if layout.node_group is None:
        return value
    sent = [outline(value) if layout.rank == layout.reader else None]
    dist.broadcast_object_list(sent, layout.reader, layout.node_group)
    return value if layout.rank == layout.reader else sent[0]


@contextlib.contextmanager
def failing_together(layout: Layout, busy: tuple[int, ...] | None = None) -> Iterator[None]:
    """An error that a user can mend, raised in the block by any rank, is raised by all of them.

    busy: the ranks that have something to do there; None: all. The message says which rank failed
        unless all of these
    did alike. Blocks may stand inside each other: what an inner one has raised on all ranks needs
        no second agreement.
    """
    error = None
    try:
        yield
    except (PgtoolkitError, OSError) as raised:
        found = unusable(raised) if isinstance(raised, OSError) else raised
        if layout.world_size == 1 or found.agreed:
            raise
        error = found
    if any(_of_all(layout, error is not None)):
        errors = gather_objects(error, layout.world_group)
        rank, first = next((rank, found) for rank, found in enumerate(errors) if found is not None)
        everywhere = all(
            str(errors[rank]) == str(first) for rank in busy or range(layout.world_size)
        )
        shared = type(first)(str(first) if everywhere else f"rank {rank}: {first}")
        shared.on_all_ranks = shared.agreed = True
        raise shared from error


def check_same(layout: Layout, what: str, digest: int) -> None:
    """RankLost if the ranks do not hold the same, as their digests (non-negative, below 2^63)
    tell."""
    digests = _of_all(layout, digest)
    if odd := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise RankLost(
            f"{what} on rank {', '.join(map(str, odd))} differ from those on rank 0. Every process "
            "must read the same files with the same version of pgtoolkit; what they computed "
            "together so far is right."
        )


@contextlib.contextmanager
def losing_ranks(layout: Layout, timeout_seconds: float) -> Iterator[None]:
    """Turns what torch raises when another process is gone, or silent for too long, into
    RankLost."""
    try:
        yield
    except RuntimeError as error:  # gloo has no type for a lost connection
        is_lost = isinstance(error, dist.DistError) or any(
            word in str(error).lower() for word in _LOST
        )
        if layout.world_size == 1 or not is_lost:
            raise
        # Without the line of gloo's source before it and its advice after it.
        reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first_line(error)).partition(". ")[0]
        raise RankLost(
            f"rank {layout.rank} waited for another process, which ended or did not answer within "
            f"parallelism.timeout_seconds={timeout_seconds:g}: {reason}"
        ) from error


def _of_all(layout: Layout, number: int) -> list[int]:
    """Each rank's number."""
    if layout.world_size == 1:
        return [number]
    row = torch.tensor([int(number)])
    rows = [torch.empty_like(row) for _ in range(layout.world_size)]
    dist.all_gather(rows, row, group=layout.world_group)
    return torch.cat(rows).tolist()
