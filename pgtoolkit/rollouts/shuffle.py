"""Seeded orders that stay the same between machines and library versions."""

from __future__ import annotations

import numpy as np


def shuffled(count: int, seed: int, number: int) -> np.ndarray:
    """A permutation of range(count), (count,) int64: a pure function of the seed and the number of the pass.

    It sorts the raw words of PCG64, which NumPy guarantees not to change; `Generator.permutation` may.
    """
    return np.argsort(np.random.PCG64([seed % 2**64, number]).random_raw(count), kind="stable")
