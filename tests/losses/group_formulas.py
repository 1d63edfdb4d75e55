"""The families over groups by plain loops over documents."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    return [power / sum(powers) for power in powers]


def tpo(
    new: list[Tensor],
    old: list[Tensor],
    sampled: list[Tensor],
    rewards: list[float],
    temperature: float = 1.0,
    log_prob: str = "sum",
) -> Tensor:
    """Return l_g of one group. new, old, sampled: the log-probs of each document's tokens."""

    def score(tokens: Tensor) -> Tensor:
        total = sum(tokens, torch.zeros((), dtype=tokens.dtype))
        return total / len(tokens) if log_prob == "mean" else total

    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    has_signal = any(reward != rewards[0] for reward in rewards)
    tilts = [(reward - mean) / deviation if has_signal else 0.0 for reward in rewards]
    target = softmax(
        [float(score(tokens)) + tilt / temperature for tokens, tilt in zip(old, tilts, strict=True)]
    )
    scores = [score(tokens) for tokens in new]
    norm = sum(score.exp() for score in scores).log()
    return -sum(share * (score - norm) for share, score in zip(target, scores, strict=True))


def lpo(
    new: list[Tensor],
    old: list[Tensor],
    sampled: list[Tensor],
    rewards: list[float],
    divergence: str = "forward",
    scale: str = "deviation",
    temperature: float | None = None,
) -> Tensor:
    """Return l_g of one group, as `tpo` does."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    divisors = {"deviation": deviation, "mean": mean, "none": 1.0}
    divisor = divisors[scale] if temperature is None else temperature
    if temperature is None and scale == "deviation" and len(set(rewards)) == 1:
        divisor = 0.0
    tilts = [reward / divisor if divisor > 0 else 0.0 for reward in rewards]
    target = softmax(
        [
            tilt + float(sum(anchor - of_sampler))
            for tilt, anchor, of_sampler in zip(tilts, old, sampled, strict=True)
        ]
    )
    scores = [sum(tokens - of_sampler) for tokens, of_sampler in zip(new, sampled, strict=True)]
    norm = sum(score.exp() for score in scores).log()
    shares = [(score - norm).exp() for score in scores]
    pairs = list(zip(target, shares, strict=True))
    if divergence == "reverse":
        return sum(share * (share.log() - math.log(wanted)) for wanted, share in pairs)
    return sum(wanted * (math.log(wanted) - share.log()) for wanted, share in pairs)
