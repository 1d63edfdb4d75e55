"""Rows of a parametrized test of which `make test` takes only some: the others are marked slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def with_slow_rest(rows: Sequence[tuple], number: int) -> list:
    """Return the first `number` rows, and the others marked as slow tests."""
    return [_row(row, place >= number) for place, row in enumerate(rows)]


def with_slow_between(rows: Sequence[tuple], number: int) -> list:
    """Return the rows, of which all but each `number`-th are marked as slow tests."""
    return [_row(row, place % number != 0) for place, row in enumerate(rows)]


def _row(row: tuple, is_slow: bool) -> object:
    return pytest.param(*row, marks=[pytest.mark.slow] if is_slow else [])
