"""Runs with servers: each pair of the options that they may be combined with, against the small
server of the tests."""

from __future__ import annotations

import pytest
from sampling.server_combinations import ROWS, Combination, all_pairs, pairs_of


def test_each_pair_of_choices_is_in_a_row():
    covered = set().union(*(pairs_of(row) for row in ROWS))
    assert covered == all_pairs()
    assert len(covered) == 4 * 36 + 2 * 8  # nine choices; one has three options


@pytest.mark.slow  # servers are processes
@pytest.mark.parametrize("row", ROWS)
def test_a_run_with_servers_learns_from_completions_of_its_own_weights(tmp_path, row):
    print(Combination(row, tmp_path / "row", gpus=[]).run())
