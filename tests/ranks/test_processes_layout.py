"""The layout of ranks: their places on each axis, the groups that they sum over, and timeouts.

Each rank sums 10^rank over a group, so that the digits of a sum name its ranks.
"""

import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from builders.processes import layout, world

from pgtoolkit.ranks.layout import AXES, Layout


class Place(NamedTuple):
    sizes: list[int]
    places: list[int]
    sums: dict[str, int]


def place_of_rank() -> Place:
    """Return the size of each axis, this rank's place on it, and the sum over each group."""
    ranks = layout(data_parallel=2, tensor_parallel=2)
    groups = {axis: ranks.group(axis) for axis in AXES} | {"loss": ranks.loss_group}
    sums = {}
    for name, group in groups.items():
        value = torch.tensor(10**ranks.rank)
        if group is not None:
            dist.all_reduce(value, group=group)
        sums[name] = value.item()
    sizes = [ranks.size(axis) for axis in AXES]
    places = [ranks.rank_in(axis) for axis in AXES]
    return Place(sizes, places, sums)


def test_neighbouring_ranks_are_neighbours_in_the_last_axis():
    ranks = world(4).run(place_of_rank)
    assert [rank.sizes for rank in ranks] == [[1, 2, 1, 2]] * 4
    assert [rank.places for rank in ranks] == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 1, 0, 0],
        [0, 1, 0, 1],
    ]
    assert [rank.sums["tensor_parallel"] for rank in ranks] == [11, 11, 1100, 1100]
    assert [rank.sums["data_parallel"] for rank in ranks] == [101, 1010, 101, 1010]
    assert [rank.sums["loss"] for rank in ranks] == [101, 1010, 101, 1010]
    assert [rank.sums["pipeline_parallel"] for rank in ranks] == [1, 10, 100, 1000]


def refuse_wrong_sizes() -> None:
    with pytest.raises(ValueError, match=r"needs 3 processes \(got 2\)"):
        Layout.of_world(data_parallel=3)


def test_sizes_whose_product_is_not_the_number_of_processes_are_refused():
    world(2).run(refuse_wrong_sizes)


def wait_for_last_rank() -> dict[str, float]:
    """Return the seconds until this rank gives up waiting for the last one, for each group that
    has both."""
    # These groups wait for a second; the default group that they are made from waits for a minute.
    ranks = Layout.of_world("cpu", 1, data_parallel=2, tensor_parallel=2)
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(3)
    groups_with_last_rank = {
        1: {"data": ranks.group("data_parallel"), "loss": ranks.loss_group},
        2: {"tensor": ranks.group("tensor_parallel")},
    }
    waited = {}
    for name, group in groups_with_last_rank.get(dist.get_rank(), {}).items():
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
        waited[name] = time.monotonic() - started
    return waited


def test_every_group_has_the_timeout_of_the_layout():
    try:
        ranks = world(4).run(wait_for_last_rank, seconds=20)
    finally:
        world(4).stop()  # a group that has given up cannot be used again
    waited = ranks[0] | ranks[1] | ranks[2] | ranks[3]
    assert waited.keys() == {"data", "loss", "tensor"}
    assert all(0.9 < seconds < 2 for seconds in waited.values()), waited
