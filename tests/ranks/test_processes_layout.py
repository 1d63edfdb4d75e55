"""The layout of ranks: their places, their groups and the timeouts of these."""

import time

import pytest
import torch
import torch.distributed as dist
from builders.processes import layout, world

from pgtoolkit.ranks.layout import AXES, Layout


def place():
    ranks = layout(data_parallel=2, tensor_parallel=2)
    groups = {axis: ranks.group(axis) for axis in AXES} | {"loss": ranks.loss_group}
    sums = {}
    for name, group in groups.items():
        value = torch.tensor(10**ranks.rank)
        if group is not None:
            dist.all_reduce(value, group=group)
        sums[name] = value.item()
    return [ranks.size(axis) for axis in AXES], [ranks.rank_in(axis) for axis in AXES], sums


def test_neighbouring_ranks_are_neighbours_in_the_last_axis():
    places = world(4).run(place)
    assert [sizes for sizes, _, _ in places] == [[1, 2, 1, 2]] * 4
    assert [ranks for _, ranks, _ in places] == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 1, 0, 0],
        [0, 1, 0, 1],
    ]
    assert [sums["tensor_parallel"] for _, _, sums in places] == [11, 11, 1100, 1100]
    assert [sums["data_parallel"] for _, _, sums in places] == [101, 1010, 101, 1010]
    assert [sums["loss"] for _, _, sums in places] == [101, 1010, 101, 1010]
    assert [sums["pipeline_parallel"] for _, _, sums in places] == [1, 10, 100, 1000]


def wrong_sizes():
    with pytest.raises(ValueError, match=r"needs 3 processes \(got 2\)"):
        Layout.of_world(data_parallel=3)


def test_sizes_whose_product_is_not_the_number_of_processes_are_refused():
    world(2).run(wrong_sizes)


def wait_for_a_late_rank():
    """Return the seconds until this rank gives up waiting for the last one, for each group that
    has both."""
    # These groups wait for a second; the default group that they are made from waits for a minute.
    ranks = Layout.of_world("cpu", 1, data_parallel=2, tensor_parallel=2)
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(3)
    groups_with_the_last = {
        1: {"data": ranks.group("data_parallel"), "loss": ranks.loss_group},
        2: {"tensor": ranks.group("tensor_parallel")},
    }
    waited = {}
    for name, group in groups_with_the_last.get(dist.get_rank(), {}).items():
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
        waited[name] = time.monotonic() - started
    return waited


def test_every_group_has_the_timeout():
    try:
        by_rank = world(4).run(wait_for_a_late_rank, seconds=20)
    finally:
        world(4).stop()  # a group that has given up cannot be used again
    waited = by_rank[0] | by_rank[1] | by_rank[2] | by_rank[3]
    assert waited.keys() == {"data", "loss", "tensor"}
    assert all(0.9 < seconds < 2 for seconds in waited.values()), waited
