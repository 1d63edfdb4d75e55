"""Advantages of one prompt group, from the rewards of its completions."""

from __future__ import annotations

import math

from pgtoolkit.errors import DataError

EPSILON = 1e-6

MAX_REWARD = 1e12
"""The largest absolute value of a reward or a given advantage. With it advantages, gradients, and the squares of these
in a norm stay far from the end of float32 at 3e38."""


def reward_problem(reward: float) -> str | None:
    """Why a number cannot be a reward or an advantage, as the end of a sentence; None if it can."""
    if not math.isfinite(reward):
        return f"is {reward}; it must be finite"
    if abs(reward) > MAX_REWARD:
        return f"is {reward:g}; it must lie within -{MAX_REWARD:g} and {MAX_REWARD:g}"
    return None


def group_advantages(estimator: str, rewards: list[float]) -> list[float]:
    """One advantage per completion of a group, in float64.

    With r the rewards of the n completions and m their mean:
        grpo     (r - m) / (s + 1e-6), s the sample standard deviation, with n - 1 (arXiv 2402.03300)
        dr_grpo  r - m (2503.20783)
        rloo     r - mean of the others = n / (n - 1) (r - m) (2402.14740)
        max_rl   (r - m) / m, for rewards that are not negative (2602.02710)
    A group of equal rewards gives exactly 0 for each, whatever the rounding of m; so does a group of one, but
    under rloo. `given` advantages come from the data and are not computed here.

    Raises DataError for a reward that `reward_problem` names, for rloo with one completion and for max_rl with a
    negative reward, ValueError for another estimator.
    """
    if estimator not in ("grpo", "dr_grpo", "rloo", "max_rl"):
        raise ValueError(f"estimator={estimator!r} is unknown here; choose one of grpo, dr_grpo, rloo, max_rl")
    for place, reward in enumerate(rewards):
        if problem := reward_problem(reward):
            raise DataError(f"the reward of completion {place} of {len(rewards)} {problem}")
    if estimator == "rloo" and len(rewards) == 1:
        raise DataError("rloo compares a completion with the others of its group; a group of one has no others")
    if estimator == "max_rl" and min(rewards, default=0) < 0:
        raise DataError(
            f"max_rl divides by the group's mean reward, which needs rewards >= 0 (got {min(rewards):g}); with a "
            "negative mean the better completions would get the negative advantages"
        )
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if estimator == "dr_grpo":
        return centred
    if estimator == "max_rl":
        return [difference / mean for difference in centred]
    others = len(rewards) - 1
    if estimator == "rloo":
        return [difference * len(rewards) / others for difference in centred]
    deviation = math.sqrt(math.fsum(difference**2 for difference in centred) / others)
    return [difference / (deviation + EPSILON) for difference in centred]
