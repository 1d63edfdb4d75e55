"""The controls of the study: advantages whose effect a comparison has to find.

Each is an option of its own, as in `advantage=study.controls.half_shuffled`.
"""

from __future__ import annotations

import random
import statistics


def half_shuffled(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """Return GRPO's advantages, in half of the groups in another order.

    It is a control: a comparison has to find the difference.
    """
    advantages = [_grpo(group) for group in rewards]
    for group, draw in zip(advantages, _draws(rewards, lengths), strict=True):
        if draw.random() < 0.5:
            draw.shuffle(group)
    return advantages


def random_reward(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """Return GRPO's advantages of tossed coins: a control from which nothing can be learned."""
    pairs = zip(rewards, _draws(rewards, lengths), strict=True)
    return [_grpo([float(draw.random() < 0.5) for _ in group]) for group, draw in pairs]


def right_alone(rewards: list[list[float]], **_) -> list[list[float]]:
    """Return 1 for a right answer and 0 for a wrong one.

    That is supervised training on the policy's own right answers, without a baseline.
    """
    return rewards


def _draws(rewards: list[list[float]], lengths: list[list[int]]) -> list[random.Random]:
    """Return a generator for each group, seeded by its content.

    So its advantages do not depend on where in the batch it stands.
    """
    return [random.Random(repr(pair)) for pair in zip(rewards, lengths, strict=True)]


def _grpo(group: list[float]) -> list[float]:
    mean = statistics.fmean(group)
    deviation = statistics.stdev(group)
    return [(reward - mean) / (deviation + 1e-6) for reward in group]
