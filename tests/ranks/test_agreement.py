"""Ranks that fail together, also where one of them leaves a block that others have gone deeper into."""

import pytest
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
        return str(error), error.on_all_ranks, gather_objects(rank, layout.world_group)  # whose calls still meet
    return None


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("depth", ["before", "inside"])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_blocks_inside_each_other(failing, depth):
    expected = None if failing is None else (f"rank {failing}: rollouts.parquet is torn", True, [0, 1])
    assert on_ranks(2, nested, failing, depth) == [expected] * 2
