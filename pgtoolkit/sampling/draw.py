"""Tokens drawn from logits by random numbers that depend on nothing but a request's seed, the
number of the completion, and the token's place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
"""These three are the constants of SplitMix64."""

_LARGEST = 2.0**43
"""The integer weight of the likeliest token. The sum over a million tokens is then below 2^63."""


def uniform_numbers(rows: Sequence[tuple[int, int]], count: int) -> Tensor:
    """Return (B, count) float64 numbers from [0, 1), one for each token.

    rows: for each of B completions the seed of its request, and its number among the request's.
    The numbers of a row are the first outputs of a SplitMix64 of its own (Steele, Lea and Flood
    2014, 10.1145/2660193.2660195), 53 bits of each. They are the same on every machine and device,
    and do not depend on other rows.
    """
    seeds, completions = np.array(rows, np.uint64).reshape(-1, 2).T
    start = _mixed(_mixed(seeds) + completions)
    states = start[:, None] + _STEP * np.arange(1, count + 1, dtype=np.uint64)
    return torch.from_numpy((_mixed(states) >> np.uint64(11)) * 2.0**-53)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Replace each word of 64 bits by another one that depends on all of its bits."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def draw(scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from the softmax of each row; return tokens (B,) int64 and log-probs (B,)
    float32.

    scores: (B, V) float32. uniform: (B,) float64 from [0, 1).
    The token is the first whose cumulative probability is greater than the row's number.
    Probabilities are added up as integers, exactly and in any order, so that a token of probability
    0 (or below 1e-13 of the largest) is never drawn. Where scores are not finite, the log-prob is
    not finite either. Does not wait for the device.
    """
    largest = scores.amax(-1, keepdim=True)
    cumulative = (scores - largest).exp_().mul_(_LARGEST).long().cumsum_(-1)
    total = cumulative[:, -1:]
    target = (uniform[:, None] * total).long().minimum(total - 1)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
    log_probs = scores.gather(-1, tokens) - largest - (total / _LARGEST).log()
    return tokens[:, 0], log_probs[:, 0].float()
