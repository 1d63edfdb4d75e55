"""From scored completions to documents with advantages; what lengths take off, which prompts teach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_completions import Mixed, PolicyRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.completion import Completion
from pgtoolkit.tasks.tasks import Prompt, Score

EPSILON = 1e-6
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "max_rl", "batch_std", "pass_at_k", "opo", "none")
ESTIMATORS += ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Those that are made of rewards and lengths alone."""

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


def group_advantages(estimator: str, rewards: list[float], lengths: Sequence[int] = ()) -> list[float]:
    """One advantage per completion of a group, in float64; `over_batch` makes of some what they are in their batch.

    lengths: trained tokens of each, for opo. With r the rewards of the n completions and m their mean:
        grpo     (r - m) / (s + 1e-6), s the sample standard deviation, with n - 1 (arXiv 2402.03300)
        dr_grpo  r - m (2503.20783)
        rloo     r - mean of the others = n / (n - 1) (r - m) (2402.14740)
        max_rl   (r - m) / m, for rewards that are not negative (2602.02710)
        batch_std  r - m, over the standard deviation of the batch (2508.08221)
        pass_at_k  the largest reward less the largest of the others: 0 but for a single best (2503.19595)
        opo      r - (the mean of r, weighted by the lengths) (2505.23585)
        reinforce_plus_plus           r, whitened over the batch (2501.03262)
        reinforce_plus_plus_baseline  r - m, whitened over the batch
        none     0: for penalties that train alone, as in distillation
    A group of equal rewards gives exactly 0 for each, whatever the rounding of m; so does a group of one, but
    under rloo and pass_at_k. Not so under reinforce_plus_plus. `given` advantages come from the data.

    Raises DataError for a reward that `reward_problem` names, for rloo and pass_at_k with one completion and for max_rl
    with a negative reward, ValueError for another estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown here; choose one of {', '.join(ESTIMATORS)}")
    check_rewards(rewards)
    if estimator in ("rloo", "pass_at_k") and len(rewards) == 1:
        raise DataError(f"{estimator} compares a completion with the others of its group; a group of one has no others")
    if estimator == "max_rl" and min(rewards, default=0) < 0:
        raise DataError(
            f"max_rl divides by the group's mean reward, which needs rewards >= 0 (got {min(rewards):g}); with a "
            "negative mean the better completions would get the negative advantages"
        )
    if estimator == "reinforce_plus_plus":
        return [*rewards]
    if estimator == "none" or len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    if estimator == "pass_at_k":
        second, best = sorted(rewards)[-2:]
        return [best - second if reward == best else 0.0 for reward in rewards]
    total = math.fsum(rewards)
    if estimator == "max_rl":
        return [reward / total * len(rewards) - 1 for reward in rewards]  # the mean itself may be too small for a float
    if estimator == "opo":
        weighted = math.fsum(reward * length for reward, length in zip(rewards, lengths, strict=True))
        return [reward - weighted / max(1, sum(lengths)) for reward in rewards]
    centred = [reward - total / len(rewards) for reward in rewards]
    if estimator in ("dr_grpo", "batch_std", "reinforce_plus_plus_baseline"):
        return centred
    others = len(rewards) - 1
    if estimator == "rloo":
        return [difference * len(rewards) / others for difference in centred]
    return [difference / (_deviation(rewards) + EPSILON) for difference in centred]


def check_rewards(rewards: list[float]) -> None:
    """DataError where one cannot be used."""
    for place, reward in enumerate(rewards):
        if problem := reward_problem(reward):
            raise DataError(f"the reward of completion {place} of {len(rewards)} {problem}")


def gdpo(scores: Sequence[list[float]], weights: Sequence[float]) -> list[float]:
    """Of a group, before `over_batch`: each verifier's scores as grpo has them, times its weight, summed (2601.05242).

    scores: of each verifier, those of the completions.
    """
    parts = [[weight * one for one in group_advantages("grpo", x)] for x, weight in zip(scores, weights, strict=True)]
    return [math.fsum(of_completion) for of_completion in zip(*parts, strict=True)]


def over_batch(estimator: str, groups: list[list[float]], rewards: list[list[float]]) -> list[list[float]]:
    """The advantages of a batch, made of those of its groups.

    batch_std divides by the standard deviation of all rewards, as `group_advantages` has it, plus 1e-6. The estimators
    of REINFORCE++ and gdpo are whitened: less their mean, over their standard deviation plus 1e-6. Each completion
    counts once, whatever its length; equal ones give exactly 0.
    """
    if estimator == "batch_std":
        deviation = _deviation([*itertools.chain.from_iterable(rewards)]) + EPSILON
        return [[one / deviation for one in group] for group in groups]
    if estimator not in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return groups
    flat = [*itertools.chain.from_iterable(groups)]
    mean, deviation = math.fsum(flat) / max(1, len(flat)), _deviation(flat) + EPSILON
    are_equal = len(set(flat)) <= 1
    return [[0.0 if are_equal else (one - mean) / deviation for one in group] for group in groups]


def _deviation(rewards: list[float]) -> float:
    """With n - 1; 0 for one reward."""
    mean = math.fsum(rewards) / max(1, len(rewards))
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
) -> list[Document]:
    """The documents of a prompt, whose tokens are `start`, with its completions and their scores; advantages are 0."""
    penalty = rollout.max_completion_length, rollout.overlong_buffer, rollout.overlong_penalty
    rewards = [score.reward + overlong_penalty(len(one.tokens), *penalty) for one, score in scored]
    documents = []
    for i, (completion, score) in enumerate(scored):
        tokens = torch.cat([torch.tensor(start), completion.tokens])
        drawn = torch.ones(len(completion.tokens), dtype=torch.bool) if completion.drawn is None else completion.drawn
        documents.append(
            Document(
                tokens=tokens,
                loss_mask=torch.cat([torch.zeros(len(start), dtype=torch.bool), drawn]),
                old_log_probs=completion.log_probs,
                advantages=torch.zeros(len(completion.log_probs)),
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
    groups: list[list[Document]],
    sample: Callable[[int], list[list[Document]]],
    rounds: int,
    mixed: Mixed = Mixed.reward,
) -> list[list[Document]]:
    """DAPO's dynamic sampling (2503.14476, eq. 11): groups that teach nothing replaced as long as the rounds last.

    groups: of the first round, in the order of their prompts, as is what is returned. sample: (number) -> the groups
    of so many further prompts. rounds: how often is sampled at most, the first time included; with 1 nothing is
    dropped. mixed: by what a group teaches. Where they do not suffice, the earliest groups that teach nothing stay.

    Every decision follows from the groups alone, so that ranks that hold the same groups take the same.
    """
    if rounds == 1:
        return groups
    wanted, number = len(groups), 1
    while (missing := wanted - sum(teaches(group, mixed) for group in groups)) and number < rounds:
        groups = groups + sample(missing)
        number += 1
    without = [place for place, group in enumerate(groups) if not teaches(group, mixed)]
    dropped = set(without[max(0, missing) :])
    share = len(dropped) / len(groups)
    kept = [group for place, group in enumerate(groups) if place not in dropped]
    return [[replace(document, dropped_prompt_fraction=share) for document in group] for group in kept]


def teaches(group: list[Document], mixed: Mixed = Mixed.reward) -> bool:
    """Whether the task scores the completions differently, or finds only some right; without what lengths take off."""
    if mixed == Mixed.exact_match:
        return len({document.exact_match for document in group}) > 1
    return len({d.reward if d.task_reward is None else d.task_reward for d in group}) > 1
