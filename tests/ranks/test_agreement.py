"""Ranks that fail together, also where one of them leaves a block that others have gone deeper
into."""

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
        # whose calls still meet
        return str(error), error.on_all_ranks, gather_objects(rank, layout.world_group)
    return None


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("depth", ["before", "inside"])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_blocks_inside_each_other(failing, depth):
    expected = (
        None if failing is None else (f"rank {failing}: rollouts.parquet is torn", True, [0, 1])
    )
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
def test_tensors_arrive_as_they_were():
    """Views too, those of a type that NumPy lacks, and as tensors that can be written to."""
    for of_ranks in on_ranks(2, gathered):
        for rank, found in enumerate(of_ranks):
            wide = torch.arange(12.0).view(3, 4) + rank
            assert found.pop("name") == f"rank {rank}"
            for name, expected in zip(
                found, (wide[1], wide.t(), wide.bfloat16(), wide.sum()), strict=True
            ):
                assert found[name].dtype == expected.dtype
                assert torch.equal(found[name], expected)
                found[name].zero_()
