"""Seeded orders and seeds that stay the same between machines and library versions."""

from __future__ import annotations

import numpy as np


def shuffled(count: int, seed: int, number: int) -> np.ndarray:
    """Return a permutation of range(count), (count,) int64: a pure function of the seed and the
    number of the pass.

    It sorts the raw words of PCG64, which NumPy guarantees not to change; `Generator.permutation`
    may.
    """
    return np.argsort(np.random.PCG64([seed % 2**64, number]).random_raw(count), kind="stable")


def seed_of(seed: int, number: int) -> int:
    """Return a seed below 2^32 for the prompt of this number: a pure function of the run's seed and
    the number."""
    return int(np.random.PCG64([seed, number]).random_raw() >> 32)
