"""`advantage=` of a configuration: the advantages of a batch of attempts, and of its documents."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, cast

import torch

from pgtoolkit.completion import Prompt
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.losses.checks import check_call, check_name, name_of_function, shown
from pgtoolkit.rollouts.advantages import (
    ESTIMATORS,
    MAX_REWARD,
    Shape,
    are_equal,
    check_rewards,
    gdpo,
    group_advantages,
    has_signal,
    over_batch,
    reward_problem,
)
from pgtoolkit.rollouts.settings import (
    AdvantageEstimator,
    AdvantageSettings,
    RolloutSettings,
    Uninformative,
)
from pgtoolkit.system.functions import ADVANTAGE_KEYWORDS, blaming, import_function
from pgtoolkit.system.report import refusal


class Attempt(NamedTuple):
    """The numbers of one attempt at a prompt from which its advantage is made.

    reward: None if nobody could score it. length: trained tokens. measures, kl_reward: as in
        `Document`.
    """

    reward: float | None
    length: int
    measures: Mapping[str, float] = MappingProxyType({})
    kl_reward: float | None = None


@dataclass(frozen=True)
class Estimator:
    """`advantage=` of a configuration.

    name: one of ESTIMATORS, gdpo, custom, or `given`, whose advantages come with the data.
    weights: for gdpo, which needs two or more, by the name of the measure that holds the verifier's
        score.
    shape: what happens to rewards before, and to advantages afterwards.
    path, function: for custom. function(rewards, lengths=, measures=) gets three lists with a list
        for each group, and returns the advantages as such a list.
    gae: for gae, how the values of a critic make the advantages: gamma, gae_lambda and whiten, with
        the shape. None: as they are by default.
    """

    name: str
    weights: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    function: Callable[..., Iterable[Iterable[float]]] | None = field(default=None, repr=False)
    shape: Shape = field(default_factory=Shape)
    gae: AdvantageSettings | None = None

    def __post_init__(self) -> None:
        check_name("estimator", self.name, tuple(AdvantageEstimator))
        if (self.name == "custom") != callable(self.function):
            raise ValueError(
                "Estimator needs a function with the name 'custom', and none with another (got "
                f"{self.name!r} with function={shown(self.function)}). The other estimators have "
                "formulas of their own. Use Estimator('custom', function=...), or leave it out."
            )
        if self.name == "gdpo" and sum(weight != 0 for weight in self.weights.values()) < 2:
            raise ValueError(
                "Estimator('gdpo') needs weights of two or more measures, each other than 0 (got "
                f"{dict(self.weights)}). It normalises the score of each verifier in its group, "
                "before it adds them up. Use weights={'reward/first': 1.0, 'reward/second': 1.0} "
                "of the verifiers first and second, or Estimator('grpo')."
            )
        if self.name != "gdpo" and self.weights:
            raise ValueError(
                f"Estimator({self.name!r}) needs no weights (got {dict(self.weights)}). They are "
                "those of the verifiers in gdpo. Use Estimator('gdpo', weights=...), or leave them "
                "out."
            )
        self._check_gae()
        if self.function is not None and self.path is None:  # else `of` has checked it
            check_call(self._setting, self.function, ("rewards",), ADVANTAGE_KEYWORDS)

    def _check_gae(self) -> None:
        """Give gae the settings that it has by default; raise ValueError for other ones."""
        if self.name != "gae":
            if self.gae is not None:
                raise ValueError(
                    f"Estimator({self.name!r}) needs gae=None (got AdvantageSettings(...)). Only "
                    "gae reads the values of a critic. Use Estimator('gae', gae=...), or leave it "
                    "out."
                )
            return
        if self.gae is None:
            settings = AdvantageSettings(
                estimator=AdvantageEstimator.gae,
                reward_shift=self.shape.shift,
                reward_scale=self.shape.scale,
                reward_clip=self.shape.reward_clip,
                clip_low=self.shape.clip_low,
                clip_high=self.shape.clip_high,
            )
            object.__setattr__(self, "gae", settings)
            return
        if self.gae.estimator != AdvantageEstimator.gae:
            raise ValueError(
                "Estimator('gae', gae=...) needs AdvantageSettings(estimator='gae') (got "
                f"AdvantageSettings(estimator={self.gae.estimator.value!r})). They say how the "
                "critic's values make the advantages. Use AdvantageSettings(estimator='gae')."
            )
        shape = Shape.of(self.gae)
        if self.shape not in (Shape(), shape):
            raise ValueError(
                f"Estimator('gae', gae=...) needs shape={shape}, that of its settings (got "
                f"{self.shape}). Two shapes would change the same rewards. Leave shape out."
            )
        object.__setattr__(self, "shape", shape)

    @property
    def values_by_key(self) -> dict[str, object]:
        """Return what the rules between parts compare, by the names of keys."""
        return {
            "advantage": self.name,
            "advantage.estimator": self.name,
            "advantage.reward_shift": self.shape.shift,
            "advantage.reward_scale": self.shape.scale,
            "advantage.reward_clip": self.shape.reward_clip,
            "advantage.clip_low": self.shape.clip_low,
            "advantage.clip_high": self.shape.clip_high,
        }

    @property
    def _setting(self) -> str:
        """Return what the user has typed for a function of their own."""
        if self.path is not None:
            return f"advantage={self.path}"
        assert self.function is not None
        return f"Estimator('custom', function={name_of_function(self.function)})"

    @classmethod
    def of(
        cls,
        settings: AdvantageSettings,
        rollout: RolloutSettings,
        verifiers: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    ) -> Estimator:
        """Return the estimator that settings name.

        rollout: whose attempts get advantages. verifiers: task.verifiers.
        Raises ConfigError for a function that cannot be imported, or that fails on a few numbers.
        """
        name = settings.estimator.value
        path = settings.path
        weights = {
            f"reward/{verifier}": float(cast("float", options.get("weight", 1)))
            for verifier, options in verifiers.items()
        }
        shape = Shape.of(settings)
        if name != "custom":
            gae = settings if name == "gae" else None
            return cls(name, weights if name == "gdpo" else {}, shape=shape, gae=gae)
        assert path is not None
        function = import_function("advantage", path, ("rewards",), ADVANTAGE_KEYWORDS, ESTIMATORS)
        estimator = cls(name, {}, path, function, shape)
        groups = list(_example_groups(min(rollout.group_size or 4, 64), weights))
        advantages = estimator._try_function(groups)
        estimator._check_equal_rewards(rollout, groups, advantages)
        return estimator

    def advantages(
        self, groups: Iterable[Sequence[Attempt]], refuse: Callable[[int, str], None]
    ) -> list[list[float]]:
        """Return the advantage of each attempt of a batch, in float64.

        An attempt without a reward has the advantage 0, and no part in the advantages of others.
        refuse: called with the place of each group that has no advantages, and the reason.
        """
        groups = [list(group) for group in groups]
        scored = [
            [self._shaped(attempt) for attempt in group if attempt.reward is not None]
            for group in groups
        ]
        if self.function is not None:
            parts = self._by_function(scored, refuse)
        else:
            parts = self._by_formula(groups, scored, refuse)
        parts = [[self.shape.advantage(advantage) for advantage in part] for part in parts]
        return [_with_zeros(group, part) for group, part in zip(groups, parts, strict=True)]

    def _shaped(self, attempt: Attempt) -> Attempt:
        """Return a scored attempt with its reward as estimators get it; for gdpo, with the scores
        of its verifiers."""
        shape = self.shape
        assert attempt.reward is not None
        measures = attempt.measures
        if self.name == "gdpo":
            measures = {
                name: shape.reward(measures[name]) for name in self.weights if name in measures
            }
        reward = shape.reward(attempt.reward) + (attempt.kl_reward or 0.0)
        return attempt._replace(reward=reward, measures=measures)

    def has_signal(self, group: Sequence[Attempt]) -> bool:
        """Return whether the scores of a group tell its attempts apart, so that one of them has an
        advantage; for an estimator that compares those of a group."""
        scored = [attempt for attempt in group if attempt.reward is not None]
        if self.name == "gdpo":
            return not are_equal(self._gdpo(scored))
        return has_signal(self.name, _rewards(scored))

    def _by_function(
        self, scored: list[list[Attempt]], refuse: Callable[[int, str], None]
    ) -> list[list[float]]:
        """Return the result of the user's function for scored attempts; none for refused groups."""
        usable = []
        for number, group in enumerate(scored):
            try:
                check_rewards(_rewards(group))
                usable.append(group)
            except DataError as error:
                refuse(number, str(error))
                usable.append([])
        nonempty = [group for group in usable if group]
        advantages = iter(self._call_function(nonempty, DataError) if nonempty else [])
        return [next(advantages) if group else [] for group in usable]

    def _by_formula(
        self,
        groups: list[list[Attempt]],
        scored: list[list[Attempt]],
        refuse: Callable[[int, str], None],
    ) -> list[list[float]]:
        """Return the advantages of scored attempts by the estimator; 0 in refused groups."""
        parts = []
        for number, (group, attempts) in enumerate(zip(groups, scored, strict=True)):
            # The others of its group have no reward: there is nothing to compare it with.
            is_alone = len(attempts) == 1 < len(group)
            try:
                parts.append(self._of_group(attempts, is_alone))
            except DataError as error:
                refuse(number, str(error))
                parts.append([0.0] * len(attempts))
        return over_batch(self.name, parts, [_rewards(group) for group in scored])

    def _of_group(self, group: Sequence[Attempt], is_alone: bool) -> list[float]:
        rewards = _rewards(group)
        if is_alone and self.name in ("rloo", "pass_at_k"):
            return [0.0]
        if self.name in ESTIMATORS:
            return group_advantages(self.name, rewards, [attempt.length for attempt in group])
        check_rewards(rewards)
        return self._gdpo(group) if self.name == "gdpo" else rewards

    def _gdpo(self, group: Sequence[Attempt]) -> list[float]:
        scores = [[attempt.measures.get(name) for attempt in group] for name in self.weights]
        return gdpo(scores, list(self.weights.values()))

    def _call_function(
        self, groups: Sequence[Sequence[Attempt]], error_type: type[PgtoolkitError]
    ) -> list[list[float]]:
        """Return the advantages that the user's function gives a batch.

        Raises an error of this type where the function fails or returns something else.
        """
        rewards = [[attempt.reward for attempt in group] for group in groups]
        lengths = [[attempt.length for attempt in group] for group in groups]
        measures = [[attempt.measures for attempt in group] for group in groups]
        setting = self._setting
        batch = f"{len(groups)} groups, the first with the rewards {rewards[0]}"
        assert self.function is not None
        with blaming(setting, error_type, batch):
            returned = self.function(rewards, lengths=lengths, measures=measures)
        wanted = [len(group) for group in groups]
        problem = f"{returned!r:.60}"
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            advantages = [[float(advantage) for advantage in group] for group in returned]
            sizes = [len(group) for group in advantages]
            flat = itertools.chain.from_iterable(advantages)
            unusable = [advantage for advantage in flat if reward_problem(advantage)]
            if sizes == wanted and not unusable:
                return advantages
            if sizes == wanted:
                problem = str(unusable[:1])
            else:
                problem = f"{sizes} numbers where there are {wanted} completions"
        raise error_type(
            refusal(
                setting=setting,
                needs=f"a finite number within -{MAX_REWARD:g} and {MAX_REWARD:g} for each "
                "completion of each group",
                got=problem,
                reason=f"It was called on {batch}.",
                use="return [[... for reward in group] for group in rewards]",
            )
        )

    def _try_function(self, groups: list[list[Attempt]]) -> list[list[float]]:
        """Call the user's function on these groups, in both orders; return their advantages.

        Raises ConfigError where it fails, or where a group's advantages depend on the order.
        """
        forwards = self._call_function(groups, ConfigError)
        backwards = self._call_function(groups[::-1], ConfigError)[::-1]
        for first, second in zip(forwards, backwards, strict=True):
            if all(
                math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
                for x, y in zip(first, second, strict=True)
            ):
                continue
            raise ConfigError(
                refusal(
                    setting=self._setting,
                    needs="the same advantages in whichever order the groups come",
                    got=f"{first} and {second}",
                    reason="The order of the prompts in a batch means nothing.",
                    use="neither state nor random numbers",
                )
            )
        return forwards

    def _check_equal_rewards(
        self, rollout: RolloutSettings, groups: list[list[Attempt]], advantages: list[list[float]]
    ) -> None:
        """Raise ConfigError where groups of equal rewards are left out or replaced, and the
        function gives the last of these groups, which is one, advantages."""
        rounds = getattr(rollout, "max_sampling_rounds", 1)
        drops = getattr(rollout, "uninformative", None) == Uninformative.drop
        if not (drops or rounds > 1) or are_equal([0.0, *advantages[-1]]):
            return
        setting = "rollout.uninformative=drop" if drops else f"rollout.max_sampling_rounds={rounds}"
        off = "rollout.uninformative=train" if drops else "rollout.max_sampling_rounds=1"
        raise ConfigError(
            refusal(
                setting=self._setting,
                needs=f"advantages of 0 for a group of equal rewards, with {setting}",
                got=f"{advantages[-1][:4]} for rewards of {groups[-1][0].reward}",
                reason="Such groups are taken out of training, as if they taught nothing.",
                use=f"{off}, or a function that compares the rewards of a group",
            )
        )


def _example_groups(size: int, names: Iterable[str]) -> Iterator[list[Attempt]]:
    """Yield four groups of `size` attempts; names: of the measures that hold the reward.

    The second and the last have equal rewards: of 0, and of 0.5.
    """
    names = list(names)
    for factor, least in ((1, 0.0), (0, 0.0), (2, 0.0), (0, 0.5)):
        group = []
        for place in range(size):
            reward = least + factor * (place % 3) / 4
            measures = defaultdict(lambda: 0.5, dict.fromkeys(names, reward))
            group.append(Attempt(reward, 3 + place + place % 2, measures))
        yield group


def _rewards(group: Sequence[Attempt]) -> list[float]:
    """Return the rewards of the attempts that have one."""
    return [attempt.reward for attempt in group if attempt.reward is not None]


def _with_zeros(group: Sequence[Attempt], advantages: list[float]) -> list[float]:
    """Return the advantages of a group's scored attempts at their places, and 0 for the others."""
    if len(advantages) == len(group):
        return advantages
    following = iter(advantages)
    return [0.0 if attempt.reward is None else next(following, 0.0) for attempt in group]


def advantages_of(
    groups: list[list[Document]], estimator: Estimator, prompt_of: Callable[[Document], Prompt]
) -> list[torch.Tensor]:
    """Return the (N,) advantages of each document of a batch, which is an attempt.

    Raises DataError that names the prompt of the first group that has none.
    """

    def refuse(place: int, problem: str) -> None:
        prompt = prompt_of(groups[place][0])
        raise DataError(f"prompt {prompt.index}, {prompt.text[:60]!r}: {problem}")

    attempts = (
        [
            Attempt(document.reward, document.num_trained, document.measures, document.kl_reward)
            for document in group
        ]
        for group in groups
    )
    advantages = itertools.chain.from_iterable(estimator.advantages(attempts, refuse))
    documents = itertools.chain.from_iterable(groups)
    return [
        torch.full((document.num_trained,), advantage)
        for document, advantage in zip(documents, advantages, strict=True)
    ]
