"""The formulas of advantages: from the rewards of a group, and over the groups of a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgtoolkit.errors import DataError
from pgtoolkit.losses.checks import is_finite, shown

if TYPE_CHECKING:
    from pgtoolkit.document import Document
    from pgtoolkit.rollouts.settings import AdvantageSettings

EPSILON = 1e-6
EQUAL_REWARDS = 1e-6
"""Rewards that lie at most this far apart are equal: sums of weighted scores differ by rounding."""

_ROUNDING = 1e-12
"""A bound of that rounding, relative to the largest reward: it is above EQUAL_REWARDS for rewards
above a million."""

ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "max_rl",
    "batch_std",
    "pass_at_k",
    "opo",
    "none",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
"""The estimators that read rewards and lengths alone."""

MAX_REWARD = 1e12
"""The largest absolute value of a reward or a given advantage. With it advantages, gradients, and
the squares of these in a norm stay far from the end of float32 at 3e38."""


@dataclass(frozen=True)
class Shape:
    """Changes rewards before advantages are made of them, and advantages afterwards.

    A reward R becomes (R + shift) scale, within plus and minus `reward_clip`. None is no bound.
    """

    shift: float = 0.0
    scale: float = 1.0
    reward_clip: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_none = name not in ("shift", "scale")
            if not is_finite(value) and not (value is None and may_be_none):
                raise ValueError(f"{name} needs a finite number (got {shown(value)})")

    @classmethod
    def of(cls, settings: AdvantageSettings) -> Shape:
        return cls(
            settings.reward_shift,
            settings.reward_scale,
            settings.reward_clip,
            settings.clip_low,
            settings.clip_high,
        )

    def reward(self, reward: float) -> float:
        """Return a reward as estimators get it, without a penalty."""
        reward = (reward + self.shift) * self.scale
        # A clip would make a NaN, which is refused later on, a number.
        if self.reward_clip is None or not math.isfinite(reward):
            return reward
        return min(self.reward_clip, max(-self.reward_clip, reward))

    def reward_of(self, document: Document) -> float | None:
        """Return the reward of a document as estimators get it, with the penalty for the distance
        from the reference; None without a reward."""
        if document.reward is None:
            return None
        return self.reward(document.reward) + (document.kl_reward or 0.0)

    def advantage(self, advantage: float) -> float:
        """Return an advantage within its bounds."""
        if self.clip_low is not None:
            advantage = max(self.clip_low, advantage)
        return advantage if self.clip_high is None else min(self.clip_high, advantage)


def reward_problem(reward: float) -> str | None:
    """Return why a number cannot be a reward or an advantage; None if it can.

    The text is the end of a sentence.
    """
    if not math.isfinite(reward):
        return f"is {reward}; it must be finite"
    if abs(reward) > MAX_REWARD:
        return f"is {reward:g}; it must lie within -{MAX_REWARD:g} and {MAX_REWARD:g}"
    return None


def are_equal(rewards: Iterable[float]) -> bool:
    """Return whether all rewards lie within EQUAL_REWARDS, or closer together than the rounding of
    large rewards: comparing them teaches nothing then."""
    rewards = list(rewards)
    if not rewards:
        return True
    rounding = _ROUNDING * max(map(abs, rewards))
    return max(rewards) - min(rewards) <= max(EQUAL_REWARDS, rounding)


def has_signal(estimator: str, rewards: list[float]) -> bool:
    """Return whether the rewards of a group give an advantage other than 0 to one of its
    completions, for an estimator that compares those of a group."""
    if estimator == "pass_at_k":
        return len(rewards) > 1 and not are_equal(sorted(rewards)[-2:])
    return not are_equal(rewards)


def group_advantages(
    estimator: str, rewards: list[float], lengths: Sequence[int] = ()
) -> list[float]:
    """Return an advantage for each completion of a group, in float64, before `over_batch`.

    lengths: trained tokens of each completion, for opo.

    With r the rewards of the n completions and m their mean:

        grpo        (r - m) / (s + 1e-6), s the sample standard deviation, n - 1 (arXiv 2402.03300)
        dr_grpo     r - m (2503.20783)
        rloo        r - mean of the others = n / (n - 1) (r - m) (2402.14740)
        max_rl      (r - m) / m, for rewards that are not negative (2602.02710)
        batch_std   r - m, over the standard deviation of the batch (2508.08221)
        pass_at_k   the largest reward less the largest of the others: 0 but for a single best
                    (2503.19595)
        opo         r - (the mean of r, weighted by the lengths) (2505.23585)
        reinforce_plus_plus           r, whitened over the batch (2501.03262)
        reinforce_plus_plus_baseline  r - m, whitened over the batch
        none        0: for penalties that train alone, as in distillation

    In a group of equal rewards (`are_equal`) every advantage is exactly 0, except under
    reinforce_plus_plus. The same holds for a group of one, but rloo and pass_at_k refuse it.

    Raises DataError for a reward that `reward_problem` names, for rloo and pass_at_k with one
    completion and for max_rl with a negative reward, ValueError for another estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"estimator={estimator!r} is unknown here; choose one of {', '.join(ESTIMATORS)}"
        )
    check_rewards(rewards)
    _check_group(estimator, rewards)
    if estimator == "reinforce_plus_plus":
        return list(rewards)
    if estimator == "none" or not has_signal(estimator, rewards):
        return [0.0] * len(rewards)
    if estimator == "pass_at_k":
        second, best = sorted(rewards)[-2:]
        return [best - second if reward == best else 0.0 for reward in rewards]
    total = math.fsum(rewards)
    if estimator == "max_rl":
        # The mean itself may be too small for a float.
        return [reward / total * len(rewards) - 1 for reward in rewards]
    if estimator == "opo":
        weighted = math.fsum(
            reward * length for reward, length in zip(rewards, lengths, strict=True)
        )
        return [reward - weighted / max(1, sum(lengths)) for reward in rewards]
    centred = [reward - total / len(rewards) for reward in rewards]
    if estimator in ("dr_grpo", "batch_std", "reinforce_plus_plus_baseline"):
        return centred
    if estimator == "rloo":
        return [difference * len(rewards) / (len(rewards) - 1) for difference in centred]
    deviation = _deviation(rewards) + EPSILON
    return [difference / deviation for difference in centred]


def check_rewards(rewards: list[float]) -> None:
    """Raise DataError for the first reward of a group that `reward_problem` names."""
    for place, reward in enumerate(rewards):
        problem = reward_problem(reward)
        if problem is not None:
            raise DataError(f"the reward of completion {place} of {len(rewards)} {problem}")


def _check_group(estimator: str, rewards: list[float]) -> None:
    """Raise DataError for a group for which the estimator is not defined."""
    if estimator in ("rloo", "pass_at_k") and len(rewards) == 1:
        raise DataError(
            f"{estimator} compares a completion with the others of its group; a group of one has "
            "no others"
        )
    if estimator == "max_rl" and min(rewards, default=0) < 0:
        raise DataError(
            "max_rl divides by the group's mean reward, which needs rewards >= 0 (got "
            f"{min(rewards):g}); with a negative mean the better completions would get the "
            "negative advantages"
        )


def gdpo(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Return the weighted sum of the grpo advantages that each verifier gives a group, before
    `over_batch` (arXiv 2601.05242).

    scores: for each verifier, the scores of the group's completions. None for a completion that
        the verifier does not score: it compares the others, and adds 0 here.
    weights: of the verifiers.
    """
    weighted = []
    for of_verifier, weight in zip(scores, weights, strict=True):
        known = [score for score in of_verifier if score is not None]
        advantages = iter(group_advantages("grpo", known))
        weighted.append(
            [0.0 if score is None else weight * next(advantages) for score in of_verifier]
        )
    return [math.fsum(of_completion) for of_completion in zip(*weighted, strict=True)]


def over_batch(
    estimator: str, groups: list[list[float]], rewards: list[list[float]]
) -> list[list[float]]:
    """Return the advantages of a batch, made of those of its groups.

    batch_std divides by the standard deviation of all rewards (n - 1), plus 1e-6. The estimators of
    REINFORCE++ and gdpo are whitened: less their mean, over their standard deviation plus 1e-6.
    Each completion counts once, whatever its length; equal advantages (`are_equal`) become
    exactly 0.
    """
    if estimator == "batch_std":
        deviation = _deviation(list(itertools.chain.from_iterable(rewards))) + EPSILON
        return [[advantage / deviation for advantage in group] for group in groups]
    if estimator not in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return groups
    flat = list(itertools.chain.from_iterable(groups))
    if are_equal(flat):
        return [[0.0] * len(group) for group in groups]
    mean = math.fsum(flat) / len(flat)
    deviation = _deviation(flat) + EPSILON
    return [[(advantage - mean) / deviation for advantage in group] for group in groups]


def _deviation(values: list[float]) -> float:
    """Return the sample standard deviation, with n - 1; 0 for a single value."""
    mean = math.fsum(values) / max(1, len(values))
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(1, len(values) - 1))
