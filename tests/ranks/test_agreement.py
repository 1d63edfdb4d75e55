"""Errors that ranks raise together, and values that they exchange."""

import pytest
import torch
from builders.threads import on_ranks

from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout


def nested(rank, failing, depth):
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    try:
        with failing_together(layout), failing_together(layout):
            if rank == failing and depth == "before":
                raise DataError("rollouts.parquet is torn")
            with failing_together(layout):
                if rank == failing and depth == "inside":
                    raise DataError("rollouts.parquet is torn")
    except DataError as error:
        # Later collectives of the ranks still meet.
        return str(error), error.on_all_ranks, gather_objects(rank, layout.world_group)
    return None


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("depth", ["before", "inside"])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_all_ranks_raise_an_error_of_one_from_blocks_inside_each_other(failing, depth):
    """Also where one rank leaves a block while others have entered the next one inside it."""
    expected = None
    if failing is not None:
        expected = (f"rank {failing}: rollouts.parquet is torn", True, [0, 1])
    assert on_ranks(2, nested, failing, depth) == [expected] * 2


def gathered(rank):
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    wide = torch.arange(12.0).view(3, 4) + rank
    value = {
        "row": wide[1],
        "turned": wide.t(),
        "half": wide.bfloat16(),
        "number": wide.sum(),
        "name": f"rank {rank}",
    }
    return gather_objects(value, layout.world_group)


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_gathered_tensors_are_equal_to_those_sent_and_can_be_written_to():
    """Also views, and tensors of a type that NumPy lacks."""
    for values in on_ranks(2, gathered):
        for rank, value in enumerate(values):
            wide = torch.arange(12.0).view(3, 4) + rank
            assert value.pop("name") == f"rank {rank}"
            expected_tensors = (wide[1], wide.t(), wide.bfloat16(), wide.sum())
            for tensor, expected in zip(value.values(), expected_tensors, strict=True):
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected)
                tensor.zero_()
