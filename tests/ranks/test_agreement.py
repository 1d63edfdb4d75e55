"""Ranks raise an error of one together, and gather values without a change.

The ranks are threads; a collective after the error shows that none still waits in another.
"""

import pytest
import torch
from builders.threads import on_ranks

from pgtoolkit.errors import DataError, StorageError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout


def error_of_nested_blocks(
    rank: int, failing: int | None, place: str
) -> tuple[str, bool, list[int]] | None:
    """Return the error on this rank, whether it is on all ranks, and the ranks that still meet.

    Rank `failing` raises before or inside the innermost of three blocks.
    """
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    try:
        with failing_together(layout), failing_together(layout):
            if rank == failing and place == "before":
                raise DataError("rollouts.parquet is torn")
            with failing_together(layout):
                if rank == failing and place == "inside":
                    raise DataError("rollouts.parquet is torn")
    except DataError as error:
        return str(error), error.on_all_ranks, gather_objects(rank, layout.world_group)
    return None


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("place", ["before", "inside"])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_all_ranks_raise_an_error_of_one_from_nested_blocks(failing, place):
    """Also where one rank leaves a block while others have entered the next one inside it."""
    expected = None
    if failing is not None:
        expected = (f"rank {failing}: rollouts.parquet is torn", True, [0, 1])
    assert on_ranks(2, error_of_nested_blocks, failing, place) == [expected] * 2


def error_of_every_rank(rank: int) -> tuple[str, bool]:
    """Return the error on this rank where all have the same, and whether it is on all ranks."""
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    with pytest.raises(StorageError) as raised, failing_together(layout):
        raise StorageError("the disk is full")
    return str(raised.value), raised.value.on_all_ranks


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_the_message_of_an_error_that_all_ranks_have_names_no_rank():
    assert on_ranks(2, error_of_every_rank) == [("the disk is full", True)] * 2


def values_of_rank(rank: int) -> dict[str, torch.Tensor | str]:
    """Return a name, and tensors that are views, of bfloat16, or of no dimension."""
    matrix = torch.arange(12.0).view(3, 4) + rank
    return {
        "row": matrix[1],
        "transposed": matrix.t(),
        "bfloat16": matrix.bfloat16(),
        "scalar": matrix.sum(),
        "name": f"rank {rank}",
    }


def gather_values(rank: int) -> list[dict[str, torch.Tensor | str]]:
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    return gather_objects(values_of_rank(rank), layout.world_group)


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_gathered_tensors_are_equal_to_those_sent_and_can_be_written_to():
    """Also views, and tensors of a type that NumPy lacks."""
    for gathered in on_ranks(2, gather_values):
        for rank, values in enumerate(gathered):
            expected_values = values_of_rank(rank)
            assert values.pop("name") == expected_values.pop("name")
            assert values.keys() == expected_values.keys()
            for name, expected in expected_values.items():
                assert values[name].dtype == expected.dtype
                assert torch.equal(values[name], expected)
                values[name].zero_()
