"""From scored completions to documents with advantages; what lengths take off, which prompts teach."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.schema import PolicyRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.completion import Completion
from pgtoolkit.tasks.tasks import Prompt, Score

EPSILON = 1e-6
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "max_rl", "batch_std", "pass_at_k", "none")

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
        batch_std  r - m, which `batch_divisor` divides later (2508.08221)
        pass_at_k  the largest reward less the largest of the others: 0 but for a single best (2503.19595)
        none     0: for penalties that train alone, as in distillation
    A group of equal rewards gives exactly 0 for each, whatever the rounding of m; so does a group of one, but
    under rloo and pass_at_k. `given` advantages come from the data and are not computed here.

    Raises DataError for a reward that `reward_problem` names, for rloo and pass_at_k with one completion and for max_rl
    with a negative reward, ValueError for another estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown here; choose one of {', '.join(ESTIMATORS)}")
    for place, reward in enumerate(rewards):
        if problem := reward_problem(reward):
            raise DataError(f"the reward of completion {place} of {len(rewards)} {problem}")
    if estimator in ("rloo", "pass_at_k") and len(rewards) == 1:
        raise DataError(f"{estimator} compares a completion with the others of its group; a group of one has no others")
    if estimator == "max_rl" and min(rewards, default=0) < 0:
        raise DataError(
            f"max_rl divides by the group's mean reward, which needs rewards >= 0 (got {min(rewards):g}); with a "
            "negative mean the better completions would get the negative advantages"
        )
    if estimator == "none" or len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    if estimator == "pass_at_k":
        second, best = sorted(rewards)[-2:]
        return [best - second if reward == best else 0.0 for reward in rewards]
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if estimator in ("dr_grpo", "batch_std"):
        return centred
    if estimator == "max_rl":
        return [difference / mean for difference in centred]
    others = len(rewards) - 1
    if estimator == "rloo":
        return [difference * len(rewards) / others for difference in centred]
    return [difference / (_deviation(rewards) + EPSILON) for difference in centred]


def batch_divisor(estimator: str, rewards: list[float]) -> float:
    """What every advantage of a batch is divided by, besides: under batch_std the standard deviation of its rewards.

    rewards: of all groups of the batch; the deviation is that of the sample, as `group_advantages` has it, plus 1e-6.
    """
    return _deviation(rewards) + EPSILON if estimator == "batch_std" else 1.0


def _deviation(rewards: list[float]) -> float:
    """With n - 1; 0 for one reward."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))


def overlong_penalty(length: int, longest: int, buffer: int | None, most: float) -> float:
    """What DAPO adds to the reward of a completion of `length` tokens, its end included (2503.14476, eq. 13).

    0 up to longest - buffer tokens, from there on in equal steps, down to -most at `longest`; buffer: None for none.
    """
    beyond = 0 if buffer is None else max(0, min(length, longest) - (longest - buffer))
    return -most * beyond / buffer if beyond else 0.0


def scored_group(
    prompt: Prompt,
    start: list[int],
    scored: list[tuple[Completion, Score]],
    rollout: PolicyRolloutConfig,
    estimator: str,
) -> list[Document]:
    """The documents of a prompt, whose tokens are `start`, with its completions and their scores."""
    penalty = rollout.max_completion_length, rollout.overlong_buffer, rollout.overlong_penalty
    rewards = [score.reward + overlong_penalty(len(one.tokens), *penalty) for one, score in scored]
    try:
        advantages = group_advantages(estimator, rewards)
    except DataError as error:
        raise DataError(f"prompt {prompt.index}, {prompt.text[:60]!r}: {error}") from error
    documents = []
    for i, (completion, score) in enumerate(scored):
        tokens = torch.cat([torch.tensor(start), completion.tokens])
        documents.append(
            Document(
                tokens=tokens,
                loss_mask=torch.arange(len(tokens)) >= len(start),
                old_log_probs=completion.log_probs,
                advantages=torch.full((len(completion.tokens),), advantages[i]),
                group=prompt.index,
                name=f"prompt {prompt.index}, completion {i}",
                reward=rewards[i],
                exact_match=score.exact_match,
                truncated=completion.finish_reason == "length",
                model_version=completion.model_version,
                measures=score.measures,
                task_reward=None if rollout.overlong_buffer is None else score.reward,
            )
        )
    return documents


def fill(
    groups: list[list[Document]], sample: Callable[[int], list[list[Document]]], rounds: int
) -> list[list[Document]]:
    """DAPO's dynamic sampling (2503.14476, eq. 11): groups that teach nothing replaced as long as the rounds last.

    groups: of the first round, in the order of their prompts, as is what is returned. sample: (number) -> the groups
    of so many further prompts. rounds: how often is sampled at most, the first time included; with 1 nothing is
    dropped. Where they do not suffice, the earliest groups that teach nothing stay.

    Every decision follows from the groups alone, so that ranks that hold the same groups take the same.
    """
    if rounds == 1:
        return groups
    wanted, number = len(groups), 1
    while (missing := wanted - sum(map(teaches, groups))) and number < rounds:
        groups = groups + sample(missing)
        number += 1
    without = [place for place, group in enumerate(groups) if not teaches(group)]
    dropped = set(without[max(0, missing) :])
    share = len(dropped) / len(groups)
    kept = [group for place, group in enumerate(groups) if place not in dropped]
    return [[replace(document, dropped_prompt_fraction=share) for document in group] for group in kept]


def teaches(group: list[Document]) -> bool:
    """Whether the task scores the completions differently, whatever is taken off for their lengths."""
    return len({d.reward if d.task_reward is None else d.task_reward for d in group}) > 1
