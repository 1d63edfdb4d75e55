"""What runs with servers may be combined with, pairwise, against the tests' small server."""

from __future__ import annotations

import pytest
from sampling.server_combinations import ROWS, Combination, all_pairs, pairs


def test_each_pair_of_choices_is_in_the_table():
    covered = set().union(*map(pairs, ROWS))
    assert covered == all_pairs()
    assert len(covered) == 4 * 36 + 2 * 8  # of nine choices, of which one is of three


@pytest.mark.slow  # servers are processes
@pytest.mark.parametrize("row", ROWS)
def test_a_run_with_servers_learns_from_what_its_own_weights_wrote(tmp_path, row):
    print(Combination(row, tmp_path / "row", gpus=[]).run())
