"""Our side of `pgtk parity`: the quantities of a step, computed by the code that trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from pgtoolkit.assembly.loss import loss_of, penalty_on_rewards
from pgtoolkit.assembly.recorded_rollouts import estimator_of
from pgtoolkit.batch import Tokens
from pgtoolkit.comparison.parity_step import QUANTITIES, Numbers, RecordedStep
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.top_entropy import top_entropy
from pgtoolkit.rollouts.advantages import Shape, group_advantages
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.settings import Uninformative
from pgtoolkit.system.conditions import with_values

_CENTRED = {"grpo": "dr_grpo", "batch_std": "dr_grpo", "dr_grpo": "dr_grpo"}
_CENTRED |= {"rloo": "rloo", "opo": "opo"}
"""Estimator -> the one whose advantages are rewards less the same baseline, undivided."""


@dataclass(frozen=True)
class OurSide:
    """A configuration of ours. name: its heading in the table."""

    config: Config
    name: str

    def numbers(self, step: RecordedStep) -> Numbers:
        config = self.config
        drops = getattr(config.rollout, "uninformative", None) == Uninformative.drop
        parts = _Parts(
            loss_of(config),
            estimator_of(config.advantage, config.rollout, config.task),
            penalty_on_rewards(config.kl),
            drops or getattr(config.rollout, "max_sampling_rounds", 1) > 1,
        )
        return _numbers(step, parts)

    def with_values(self, values: dict[str, object]) -> OurSide:
        return replace(self, config=with_values(self.config, values))


@dataclass(frozen=True)
class _Parts:
    """Holds the parts of a configuration that a step needs.

    drops_equal: whether groups without signal are left out.
    """

    loss: Loss
    estimator: Estimator
    penalty_on_rewards: KL | None
    drops_equal: bool


def _numbers(step: RecordedStep, parts: _Parts) -> Numbers:
    """Return the quantities of all documents and tokens of a step.

    Raises ConfigError where the step lacks what the configuration reads.
    """
    signal, made = _advantages(step, parts)
    trained = [bool(kept) for kept in signal]
    kept = torch.tensor(trained)[step.index]
    numbers = made | _of_tokens(
        step.of(trained),
        parts.loss,
        made["advantages"][kept],
        made["rewards"][torch.tensor(trained)],
    )
    for name in QUANTITIES[QUANTITIES.index("mask") :]:
        if name != "loss":
            numbers[name] = torch.zeros(len(kept)).double().masked_scatter(kept, numbers[name])
    return numbers


def _advantages(step: RecordedStep, parts: _Parts) -> tuple[list[float], Numbers]:
    """Return each document's signal, and the quantities up to the advantages."""
    documents = len(step.attempts)
    unknown = torch.full((documents,), math.nan).double()
    estimator = parts.estimator
    if not step.has_rewards or estimator.name in ("given", "gae"):
        names = ("rewards", "signal", "baseline", "deviation")
        return [1.0] * documents, dict.fromkeys(names, unknown) | {"advantages": step.advantages}
    step = _with_kl_rewards(step, parts)
    groups = [[step.attempts[place] for place in places] for places in step.members]
    order = [place for places in step.members for place in places]
    kept = [1.0] * len(groups)
    if parts.drops_equal:
        kept = [float(estimator.has_signal(group)) for group in groups]

    def by_document(parts: list[list[float]]) -> Tensor:
        flat = [number for part in parts for number in part]
        return unknown.index_copy(0, torch.tensor(order), torch.tensor(flat, dtype=torch.float64))

    trained = [group for group, is_kept in zip(groups, kept, strict=True) if is_kept]
    shown = iter(estimator.advantages(trained, _refuse))
    advantages = by_document(
        [
            next(shown) if is_kept else [0.0] * len(g)
            for g, is_kept in zip(groups, kept, strict=True)
        ]
    )
    signal = by_document([[k] * len(group) for k, group in zip(kept, groups, strict=True)])
    rewards = by_document([[_reward(attempt, estimator) for attempt in group] for group in groups])
    centred = _centred(estimator, groups)
    baseline = deviation = unknown
    if centred is not None:
        differences = by_document(centred)
        baseline = rewards - differences
        # Bounds of advantages are no part of the deviation.
        open_ended = replace(
            estimator, shape=replace(estimator.shape, clip_low=None, clip_high=None)
        )
        undivided = by_document(open_ended.advantages(groups, _refuse))
        deviation = torch.where(undivided == 0, math.nan, differences / undivided)
    made = {"rewards": rewards, "signal": signal, "baseline": baseline, "deviation": deviation}
    return signal.tolist(), made | {"advantages": advantages[step.index]}


def _with_kl_rewards(step: RecordedStep, parts: _Parts) -> RecordedStep:
    """Return the step with its rewards after the penalty on them."""
    penalty = parts.penalty_on_rewards
    if penalty is None:
        return step
    old = step.new_at(parts.loss.temperature) if step.old is None else step.old
    terms = penalty.of_samples(old, _ref(step)).split(step.lengths)
    attempts = zip(step.attempts, terms, strict=True)
    return replace(
        step,
        attempts=[
            attempt if attempt.reward is None else attempt._replace(kl_reward=-float(part.sum()))
            for attempt, part in attempts
        ],
    )


def _reward(attempt, estimator: Estimator) -> float:
    if attempt.reward is None:
        return math.nan
    shape: Shape = estimator.shape
    return shape.reward(attempt.reward) + (attempt.kl_reward or 0.0)


def _centred(estimator: Estimator, groups: list) -> list[list[float]] | None:
    """Return the rewards of each group less their baseline; None for an estimator without one."""
    name = _CENTRED.get(estimator.name)
    if name is None or any(attempt.reward is None for group in groups for attempt in group):
        return None
    return [
        group_advantages(
            name,
            [_reward(attempt, estimator) for attempt in group],
            [attempt.length for attempt in group],
        )
        for group in groups
    ]


def _refuse(_: int, problem: str) -> NoReturn:
    raise DataError(problem)


def _of_tokens(step: RecordedStep, loss: Loss, advantages: Tensor, rewards: Tensor) -> Numbers:
    """Return the quantities from the mask on of the documents that are trained."""
    new = step.new_at(loss.temperature)
    old = new if step.old is None else step.old
    tokens = _tokens(step, loss, advantages, rewards)
    objective = make_objective(
        tokens, None, replace(loss, correction=None), new.dtype, Ranks(), is_whole_step=True
    )
    corrected = make_objective(tokens, None, loss, new.dtype, Ranks(), is_whole_step=True)
    terms = objective.token_terms(new)
    factors = corrected.factors or corrected.token_terms(new).factors
    correction = torch.ones_like(new) if factors is None else factors.values
    if tokens.factors is not None:
        correction = correction * tokens.factors
    losses, gradient = corrected.losses_and_coefficients(new)
    penalties = corrected.penalties
    total = losses.sum()
    if penalties.bonus:
        assert step.entropy is not None
        total = total + (penalties.by_entropy * step.entropy).sum()
    weights = penalties.weights
    kl = torch.zeros_like(new)
    if loss.kl is not None:
        zeros = torch.zeros_like(new)
        kl = replace(penalties, weights=torch.ones_like(new)).with_kl(new, zeros, zeros)[0]
    mask = (weights != 0).double()
    return {
        "mask": mask,
        "new log-probs": new,
        "old log-probs": old,
        "ratio": terms.ratio * mask,
        "surrogate": terms.losses * mask,
        "correction": correction * mask,
        "kl": kl * mask,
        "weights": weights,
        "loss": total[None],
        "gradient": gradient,
    }


def _tokens(step: RecordedStep, loss: Loss, advantages: Tensor, rewards: Tensor) -> Tokens:
    """Return the step as one piece; raises ConfigError where it lacks what the loss reads."""
    new = step.new_at(loss.temperature)
    if loss.kl is not None:
        _ref(step)
    correction = loss.correction
    if correction is not None and not correction.of_policy and step.sampling is None:
        raise ConfigError(
            f"correction={correction.name} needs sampling_log_probs of every document (got "
            "some without). Use correction=none."
        )
    numbering = {group: number for number, group in enumerate(dict.fromkeys(step.groups))}
    mask = torch.ones(len(new), dtype=torch.bool)
    factors = None
    if loss.entropy_top_fraction is not None:
        assert step.entropy is not None
        factors = top_entropy(step.entropy, mask, loss.entropy_top_fraction).factors
    return Tokens(
        labels=torch.zeros(len(new), dtype=torch.int64),
        advantages=advantages,
        document_index=step.index,
        num_documents=len(step.attempts),
        group_index=torch.tensor([numbering[group] for group in step.groups], dtype=torch.int64),
        truncated=torch.tensor(step.truncated, dtype=torch.bool),
        excluded=torch.tensor(
            [attempt.reward is None for attempt in step.attempts], dtype=torch.bool
        )
        if step.has_rewards
        else None,
        old_log_probs=new if step.old is None else step.old,
        sampling_log_probs=step.sampling,
        ref_log_probs=step.ref,
        factors=factors,
        rewards=rewards,
    )


def _ref(step: RecordedStep) -> Tensor:
    if step.ref is None:
        raise ConfigError(
            "kl needs ref_log_probs of every document (got some without: the run has no penalty, "
            "so no reference). Use kl=none, or a run with the penalty."
        )
    return step.ref
