"""The estimator of advantages that a configuration describes, on the attempts of a batch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.rollouts.advantages import (
    ESTIMATORS,
    MAX_REWARD,
    check_rewards,
    gdpo,
    group_advantages,
    over_batch,
    reward_problem,
)
from pgtoolkit.system.functions import ADVANTAGE_KEYWORDS, blaming, import_function
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.tasks import Prompt


class Attempt(NamedTuple):
    """What an advantage is made of. length: trained tokens. measures: as of a document."""

    reward: float
    length: int
    measures: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Estimator:
    """`advantage=` of a configuration.

    name: one of ESTIMATORS, gdpo, custom, or given, which computes none. weights: of gdpo, by the measure that holds
    the verifier's score. path, function: of custom: function(rewards, lengths=, measures=), each a list with a list for
    each group, returns such a list of advantages.
    """

    name: str
    weights: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, c: Config) -> Estimator:
        """Raises ConfigError for a function that cannot be imported, or does not make advantages of a few numbers."""
        name, path, verifiers = c.advantage.estimator.value, c.advantage.path, getattr(c.task, "verifiers", {})
        weights = {f"reward/{name}": float(one.get("weight", 1)) for name, one in verifiers.items()}
        if name != "custom":
            return cls(name, weights if name == "gdpo" else {})
        estimator = cls(name, {}, path, import_function("advantage.path", path, ("rewards",), ADVANTAGE_KEYWORDS))
        estimator._try(min(c.rollout.group_size or 4, 64), weights)
        return estimator

    def advantages(self, groups: Iterable[Sequence[Attempt]], refuse: Callable[[int, str], None]) -> list[list[float]]:
        """Of each attempt of a batch, in float64. refuse: told of each group, by its place, that has none, and why."""
        parts, rewards, kept = [], [], []
        for number, group in enumerate(groups):
            rewards.append([one.reward for one in group])
            try:
                parts.append(self._of_group(rewards[-1], group))
            except DataError as error:
                refuse(number, str(error))
                parts.append([0.0] * len(group))
            if self.function is not None:
                kept.append(group)
        return over_batch(self.name, parts, rewards) if self.function is None else self._called(kept, DataError)

    def _of_group(self, rewards: list[float], group: Sequence[Attempt]) -> list[float]:
        if self.name in ESTIMATORS:
            return group_advantages(self.name, rewards, [one.length for one in group])
        check_rewards(rewards)
        scores = [[one.measures[name] for one in group] for name in self.weights]
        return gdpo(scores, [*self.weights.values()]) if self.name == "gdpo" else rewards

    def _called(self, groups: Sequence[Sequence[Attempt]], kind: type[PgtoolkitError]) -> list[list[float]]:
        """What the function makes of a batch; an error of it, or what are no advantages, becomes one of this kind."""
        rewards, lengths, measures = ([[one[i] for one in group] for group in groups] for i in range(3))
        setting, on = f"advantage.path={self.path}", f"{len(groups)} groups, the first with the rewards {rewards[0]}"
        with blaming(setting, kind, on):
            found = self.function(rewards, lengths=lengths, measures=measures)
        try:
            numbers = [[float(one) for one in group] for group in found]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            numbers, got = None, f"{found!r:.60}"
        else:
            sizes, wanted = [len(group) for group in numbers], [len(group) for group in groups]
            wrong = [one for group in numbers for one in group if reward_problem(one)]
            got = f"{sizes} numbers where there are {wanted} completions" if sizes != wanted else str(wrong[:1])
            numbers = None if sizes != wanted or wrong else numbers
        if numbers is None:
            needs = f"a finite number within -{MAX_REWARD:g} and {MAX_REWARD:g} for each completion of each group"
            use = "return [[... for one in group] for group in rewards]"
            raise kind(refusal(setting, needs, got, f"It was called on {on}.", use))
        return numbers

    def _try(self, size: int, names: Iterable[str]) -> None:
        """On three groups, one of them of equal rewards, in one order and in the other."""
        groups = []
        for factor in (1, 0, 2):
            rewards = [factor * (i % 3) / 4 for i in range(size)]
            measures = [defaultdict(lambda: 0.5, dict.fromkeys(names, reward)) for reward in rewards]
            lengths = [3 + i + i % 2 for i in range(size)]
            groups.append([Attempt(*one) for one in zip(rewards, lengths, measures, strict=True)])
        found, other = (self._called(x, ConfigError) for x in (groups, groups[::-1]))
        for one, two in zip(found, other[::-1], strict=True):
            if not all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for x, y in zip(one, two, strict=True)):
                needs, reason = "the same advantages in whichever order the groups come", "A batch has no first prompt."
                setting, use = f"advantage.path={self.path}", "neither state nor random numbers"
                raise ConfigError(refusal(setting, needs, f"{one} and {two}", reason, use))


def with_advantages(
    groups: list[list[Document]], estimator: Estimator, prompt_of: Callable[[Document], Prompt]
) -> list[Document]:
    """The documents of a batch, an attempt each, with advantages. Raises DataError with the prompt that has none."""

    def refuse(place: int, problem: str) -> None:
        prompt = prompt_of(groups[place][0])
        raise DataError(f"prompt {prompt.index}, {prompt.text[:60]!r}: {problem}")

    attempts = ([Attempt(d.reward, d.num_trained, d.measures) for d in group] for group in groups)
    advantages = itertools.chain.from_iterable(estimator.advantages(attempts, refuse))
    return [
        replace(document, advantages=torch.full((document.num_trained,), advantage))
        for document, advantage in zip(itertools.chain.from_iterable(groups), advantages, strict=True)
    ]
