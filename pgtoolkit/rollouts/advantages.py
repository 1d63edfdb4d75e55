"""Advantages: from the rewards of a batch, by the estimator that a configuration describes."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pgtoolkit.batch import Document
from pgtoolkit.completion import Prompt
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.system.functions import ADVANTAGE_KEYWORDS, blaming, import_function
from pgtoolkit.system.report import refusal

EPSILON = 1e-6
EQUAL_REWARDS = 1e-6
"""Rewards that lie at most this far apart are equal: sums of weighted scores differ by rounding."""

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "max_rl", "batch_std", "pass_at_k", "opo", "none")
ESTIMATORS += ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Those that are made of rewards and lengths alone."""

MAX_REWARD = 1e12
"""The largest absolute value of a reward or a given advantage. With it advantages, gradients, and
the squares of these in a norm stay far from the end of float32 at 3e38."""


def reward_problem(reward: float) -> str | None:
    """Why a number cannot be a reward or an advantage, as the end of a sentence; None if it can."""
    if not math.isfinite(reward):
        return f"is {reward}; it must be finite"
    if abs(reward) > MAX_REWARD:
        return f"is {reward:g}; it must lie within -{MAX_REWARD:g} and {MAX_REWARD:g}"
    return None


def are_equal(rewards: Iterable[float]) -> bool:
    """Return whether rewards are equal within EQUAL_REWARDS, so that nothing is learned from
    comparing them."""
    rewards = [*rewards]
    return not rewards or max(rewards) - min(rewards) <= EQUAL_REWARDS


def group_advantages(
    estimator: str, rewards: list[float], lengths: Sequence[int] = ()
) -> list[float]:
    """One advantage per completion of a group, in float64; `over_batch` makes of some what they are
    in their batch.

    lengths: trained tokens of each, for opo. With r the rewards of the n completions and m their
        mean:
        grpo     (r - m) / (s + 1e-6), s the sample standard deviation, n - 1 (arXiv 2402.03300)
        dr_grpo  r - m (2503.20783)
        rloo     r - mean of the others = n / (n - 1) (r - m) (2402.14740)
        max_rl   (r - m) / m, for rewards that are not negative (2602.02710)
        batch_std  r - m, over the standard deviation of the batch (2508.08221)
        pass_at_k the largest reward less the largest of the others: 0 but for a single best
            (2503.19595)
        opo      r - (the mean of r, weighted by the lengths) (2505.23585)
        reinforce_plus_plus           r, whitened over the batch (2501.03262)
        reinforce_plus_plus_baseline  r - m, whitened over the batch
        none     0: for penalties that train alone, as in distillation
    A group of equal rewards (`are_equal`) gives exactly 0 for each; so does a group of one, but
    under rloo and pass_at_k. Not so under reinforce_plus_plus. `given` advantages come from the
    data.

    Raises DataError for a reward that `reward_problem` names, for rloo and pass_at_k with one
    completion and for max_rl with a negative reward, ValueError for another estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"estimator={estimator!r} is unknown here; choose one of {', '.join(ESTIMATORS)}"
        )
    check_rewards(rewards)
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
    if estimator == "reinforce_plus_plus":
        return [*rewards]
    if estimator == "none" or are_equal(rewards):
        return [0.0] * len(rewards)
    if estimator == "pass_at_k":
        second, best = sorted(rewards)[-2:]
        return [best - second if reward == best else 0.0 for reward in rewards]
    total = math.fsum(rewards)
    if estimator == "max_rl":
        # the mean itself may be too small for a float
        return [reward / total * len(rewards) - 1 for reward in rewards]
    if estimator == "opo":
        weighted = math.fsum(
            reward * length for reward, length in zip(rewards, lengths, strict=True)
        )
        return [reward - weighted / max(1, sum(lengths)) for reward in rewards]
    centred = [reward - total / len(rewards) for reward in rewards]
    if estimator in ("dr_grpo", "batch_std", "reinforce_plus_plus_baseline"):
        return centred
    others = len(rewards) - 1
    if estimator == "rloo":
        return [difference * len(rewards) / others for difference in centred]
    deviation = _deviation(rewards) + EPSILON
    return [difference / deviation for difference in centred]


def check_rewards(rewards: list[float]) -> None:
    """DataError where one cannot be used."""
    for place, reward in enumerate(rewards):
        if problem := reward_problem(reward):
            raise DataError(f"the reward of completion {place} of {len(rewards)} {problem}")


def gdpo(scores: Sequence[list[float]], weights: Sequence[float]) -> list[float]:
    """Of a group, before `over_batch`: each verifier's scores as grpo has them, times its weight,
    summed (2601.05242).

    scores: of each verifier, those of the completions.
    """
    parts = [
        [weight * one for one in group_advantages("grpo", x)]
        for x, weight in zip(scores, weights, strict=True)
    ]
    return [math.fsum(of_completion) for of_completion in zip(*parts, strict=True)]


def over_batch(
    estimator: str, groups: list[list[float]], rewards: list[list[float]]
) -> list[list[float]]:
    """The advantages of a batch, made of those of its groups.

    batch_std divides by the standard deviation of all rewards, as `group_advantages` has it, plus
    1e-6. The estimators of REINFORCE++ and gdpo are whitened: less their mean, over their standard
    deviation plus 1e-6. Each completion counts once, whatever its length; equal ones (`are_equal`)
    give exactly 0.
    """
    if estimator == "batch_std":
        deviation = _deviation([*itertools.chain.from_iterable(rewards)]) + EPSILON
        return [[one / deviation for one in group] for group in groups]
    if estimator not in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return groups
    flat = [*itertools.chain.from_iterable(groups)]
    if are_equal(flat):
        return [[0.0] * len(group) for group in groups]
    mean = math.fsum(flat) / len(flat)
    deviation = _deviation(flat) + EPSILON
    return [[(advantage - mean) / deviation for advantage in group] for group in groups]


def _deviation(rewards: list[float]) -> float:
    """With n - 1; 0 for one reward."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    return math.sqrt(
        math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    )


class Attempt(NamedTuple):
    """What an advantage is made of. reward: None where nobody could score it. length: trained
    tokens.

    measures: as of a document.
    """

    reward: float | None
    length: int
    measures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Estimator:
    """`advantage=` of a configuration.

    name: one of ESTIMATORS, gdpo, custom, or given, which computes none. weights: of gdpo, by the
        measure that holds
    the verifier's score. path, function: of custom: function(rewards, lengths=, measures=), each a
    list with a list for each group, returns such a list of advantages.
    """

    name: str
    weights: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, c: Config) -> Estimator:
        """Raises ConfigError for a function that cannot be imported, or does not make advantages of
        a few numbers."""
        name, path, verifiers = (
            c.advantage.estimator.value,
            c.advantage.path,
            getattr(c.task, "verifiers", {}),
        )
        weights = {f"reward/{name}": float(one.get("weight", 1)) for name, one in verifiers.items()}
        if name != "custom":
            return cls(name, weights if name == "gdpo" else {})
        assert path is not None
        function = import_function("advantage", path, ("rewards",), ADVANTAGE_KEYWORDS, ESTIMATORS)
        estimator = cls(name, {}, path, function)
        estimator._try(min(c.rollout.group_size or 4, 64), weights)
        return estimator

    def advantages(
        self, groups: Iterable[Sequence[Attempt]], refuse: Callable[[int, str], None]
    ) -> list[list[float]]:
        """Return the advantage of each attempt of a batch, in float64.

        An attempt without a reward has the advantage 0, and no part in those of the others.
        refuse: told of each group, by its place, that has no advantages, and why.
        """
        groups = [[*group] for group in groups]
        scored = [[attempt for attempt in group if attempt.reward is not None] for group in groups]
        if self.function is not None:
            scored = self._usable(scored, refuse)
            known = [group for group in scored if group]
            found = iter(self._called(known, DataError) if known else [])
            parts = [next(found) if group else [] for group in scored]
        else:
            parts = []
            for number, (group, attempts) in enumerate(zip(groups, scored, strict=True)):
                try:
                    parts.append(self._of_group(attempts, is_alone=len(attempts) == 1 < len(group)))
                except DataError as error:
                    refuse(number, str(error))
                    parts.append([0.0] * len(attempts))
            parts = over_batch(self.name, parts, [_rewards(group) for group in scored])
        return [_with_zeros(group, part) for group, part in zip(groups, parts, strict=True)]

    def _usable(
        self, groups: list[list[Attempt]], refuse: Callable[[int, str], None]
    ) -> list[list[Attempt]]:
        """The groups, none left in that whose rewards cannot be used."""
        usable = []
        for number, group in enumerate(groups):
            try:
                check_rewards(_rewards(group))
                usable.append(group)
            except DataError as error:
                refuse(number, str(error))
                usable.append([])
        return usable

    def _of_group(self, group: Sequence[Attempt], is_alone: bool) -> list[float]:
        """is_alone: the others of its group have no reward, so that it is compared with nothing."""
        rewards = _rewards(group)
        if is_alone and self.name in ("rloo", "pass_at_k"):
            return [0.0]
        if self.name in ESTIMATORS:
            return group_advantages(self.name, rewards, [one.length for one in group])
        check_rewards(rewards)
        scores = [[one.measures[name] for one in group] for name in self.weights]
        return gdpo(scores, [*self.weights.values()]) if self.name == "gdpo" else rewards

    def _called(
        self, groups: Sequence[Sequence[Attempt]], kind: type[PgtoolkitError]
    ) -> list[list[float]]:
        """What the function makes of a batch; an error of it, or what are no advantages, becomes
        one of this kind."""
        rewards, lengths, measures = (
            [[one[i] for one in group] for group in groups] for i in range(3)
        )
        setting = f"advantage={self.path}"
        on = f"{len(groups)} groups, the first with the rewards {rewards[0]}"
        assert self.function is not None
        with blaming(setting, kind, on):
            found = self.function(rewards, lengths=lengths, measures=measures)
        wanted = [len(group) for group in groups]
        got = f"{found!r:.60}"
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            numbers = [[float(one) for one in group] for group in found]
            sizes = [*map(len, numbers)]
            wrong = [*filter(reward_problem, itertools.chain.from_iterable(numbers))]
            if sizes == wanted and not wrong:
                return numbers
            got = (
                str(wrong[:1])
                if sizes == wanted
                else f"{sizes} numbers where there are {wanted} completions"
            )
        raise kind(
            refusal(
                setting=setting,
                needs=f"a finite number within -{MAX_REWARD:g} and {MAX_REWARD:g} for each "
                "completion of each group",
                got=got,
                reason=f"It was called on {on}.",
                use="return [[... for one in group] for group in rewards]",
            )
        )

    def _try(self, size: int, names: Iterable[str]) -> None:
        """On three groups, one of them of equal rewards, in one order and in the other."""
        groups = []
        for factor in (1, 0, 2):
            rewards = [factor * (i % 3) / 4 for i in range(size)]
            measures = [
                defaultdict(lambda: 0.5, dict.fromkeys(names, reward)) for reward in rewards
            ]
            lengths = [3 + i + i % 2 for i in range(size)]
            groups.append([Attempt(*one) for one in zip(rewards, lengths, measures, strict=True)])
        found, other = (self._called(x, ConfigError) for x in (groups, groups[::-1]))
        for one, two in zip(found, other[::-1], strict=True):
            if not all(
                math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
                for x, y in zip(one, two, strict=True)
            ):
                raise ConfigError(
                    refusal(
                        setting=f"advantage={self.path}",
                        needs="the same advantages in whichever order the groups come",
                        got=f"{one} and {two}",
                        reason="A batch has no first prompt.",
                        use="neither state nor random numbers",
                    )
                )


def _rewards(group: Sequence[Attempt]) -> list[float]:
    """Return the rewards of attempts that have one."""
    return [attempt.reward for attempt in group if attempt.reward is not None]


def _with_zeros(group: Sequence[Attempt], advantages: list[float]) -> list[float]:
    """The advantages of the scored attempts of a group at their places, and 0 at those of the
    others."""
    if len(advantages) == len(group):
        return advantages
    following = iter(advantages)
    return [0.0 if attempt.reward is None else next(following, 0.0) for attempt in group]


def with_advantages(
    groups: list[list[Document]], estimator: Estimator, prompt_of: Callable[[Document], Prompt]
) -> list[Document]:
    """The documents of a batch, an attempt each, with advantages. Raises DataError with the prompt
    that has none."""

    def refuse(place: int, problem: str) -> None:
        prompt = prompt_of(groups[place][0])
        raise DataError(f"prompt {prompt.index}, {prompt.text[:60]!r}: {problem}")

    attempts = (
        [Attempt(d.reward_for_advantage, d.num_trained, d.measures) for d in group]
        for group in groups
    )
    advantages = itertools.chain.from_iterable(estimator.advantages(attempts, refuse))
    return [
        replace(document, advantages=torch.full((document.num_trained,), advantage))
        for document, advantage in zip(
            itertools.chain.from_iterable(groups), advantages, strict=True
        )
    ]
