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


_MOST_AT_ONCE = 2**25
"""Scores of which `likeliest_tokens` makes keys at once, of 8 bytes each."""


def likeliest_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores of each row, (B, count): ids int32, and log-probs float32.

    scores: (B, V) float32, whose softmax has the probabilities. Of equal scores the smaller ids
    come first, on every device. A vocabulary of fewer tokens fills the rest with -1 and -inf. Does
    not wait for the device.
    """
    rows = max(1, _MOST_AT_ONCE // scores.shape[1])
    blocks = [_likeliest(block, min(count, scores.shape[1])) for block in scores.split(rows)]
    ids = torch.cat([ids for ids, _ in blocks])
    log_probs = torch.cat([log_probs for _, log_probs in blocks])
    unused = (0, count - ids.shape[1])
    pad = torch.nn.functional.pad
    return pad(ids, unused, value=-1), pad(log_probs, unused, value=-torch.inf)


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    # `topk` leaves open which of equal numbers it takes. No two keys are equal: a score's bits,
    # whose order as integers is that of the scores, and then the id. -0.0 + 0.0 is 0.0.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered << 32) + (0xFFFFFFFF - ids)
    chosen = 0xFFFFFFFF - (keys.topk(count).values & 0xFFFFFFFF)
    log_probs = scores.gather(-1, chosen) - scores.logsumexp(-1, keepdim=True)
    return chosen.int(), log_probs


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
