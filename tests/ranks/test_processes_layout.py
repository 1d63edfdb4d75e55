"""The layout of ranks, and the worlds that the tests of parallel parts run in."""

import time

import pytest
import torch
import torch.distributed as dist
from builders.processes import layout, world

from pgtoolkit.ranks.layout import AXES, Layout


def place():
    found = layout(data_parallel=2, tensor_parallel=2)
    sums = {}
    for name, group in [(axis, found.group(axis)) for axis in AXES] + [("loss", found.loss_group)]:
        value = torch.tensor(10**found.rank)
        if group is not None:
            dist.all_reduce(value, group=group)
        sums[name] = value.item()
    return [found.size(axis) for axis in AXES], [found.rank_in(axis) for axis in AXES], sums


def test_neighbours_are_neighbours_in_the_last_axis():
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


def test_sizes_that_do_not_fit_are_refused():
    world(2).run(wrong_sizes)


def wait_for_a_late_rank():
    """Seconds until this rank gives up waiting for the last one, for each group that has both."""
    # Groups of one second, in a default group that waits a minute.
    found = Layout.of_world("cpu", 1, data_parallel=2, tensor_parallel=2)
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(3)
    groups = {1: {"data": found.group("data_parallel"), "loss": found.loss_group}}
    groups[2] = {"tensor": found.group("tensor_parallel")}
    waited = {}
    for name, group in groups.get(dist.get_rank(), {}).items():
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
        waited[name] = time.monotonic() - started
    return waited


def test_every_group_has_the_timeout():
    try:
        found = world(4).run(wait_for_a_late_rank, seconds=20)
    finally:
        world(4).stop()  # a group that gave up is of no use any more
    waited = found[0] | found[1] | found[2] | found[3]
    assert waited.keys() == {"data", "loss", "tensor"}
    assert all(0.9 < seconds < 2 for seconds in waited.values()), waited
