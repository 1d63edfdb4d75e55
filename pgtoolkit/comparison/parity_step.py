"""One step as `pgtk parity` compares it: its numbers, without a framework's reading of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.comparison.tokens_step import MadeStep
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.estimator import Attempt

QUANTITIES = (
    "rewards",
    "signal",
    "baseline",
    "deviation",
    "advantages",
    "mask",
    "new log-probs",
    "old log-probs",
    "ratio",
    "surrogate",
    "correction",
    "kl",
    "weights",
    "loss",
    "gradient",
)
"""What is compared, in the order in which a step computes it.

rewards, signal, baseline, deviation: (documents,), as advantages are made of them; signal is 1 for
    a document that is trained, 0 for one that is left out with its group.
The others are (N,), with a number for each trained token in the order of the documents:
mask: 1 where a token is trained; ratio, surrogate, correction and kl are 0 elsewhere.
surrogate: l_t, without weight and correction. correction: its factor.
kl: the coefficient times the term. weights: w_t. gradient: of the loss by the log-prob.
loss: (1,).
"""

MAY_BE_UNKNOWN = ("rewards", "signal", "baseline", "deviation")
"""Quantities in which NaN stands where a side has no such number, and nothing is compared."""

Numbers = dict[str, Tensor]
"""The quantities of one side, in float64."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The documents of a step. Vectors are (N,) float64, one number for each trained token.

    attempts: each document's reward, length and measures.
    groups: the number of each document's prompt.
    truncated: whether its completion was cut off.
    advantages: as the run had them.
    has_rewards: whether all members of each group are here, with their rewards, so that advantages
        can be made anew.
    new: the log-probs of the policy by temperature.
    old: None where they are the new ones: every ratio is 1.
    sampling, ref: None where they are not known.
    """

    attempts: Sequence[Attempt]
    groups: Sequence[int]
    truncated: Sequence[bool]
    advantages: Tensor
    new: Mapping[float, Tensor]
    old: Tensor | None = None
    sampling: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    has_rewards: bool = True

    @property
    def lengths(self) -> list[int]:
        return [attempt.length for attempt in self.attempts]

    @property
    def index(self) -> Tensor:
        """Return (N,), the place of each token's document."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def members(self) -> list[list[int]]:
        """Return the places of the documents of each group."""
        by_group: dict[int, list[int]] = {}
        for place, group in enumerate(self.groups):
            by_group.setdefault(group, []).append(place)
        return [*by_group.values()]

    def new_at(self, temperature: float) -> Tensor:
        """Return the new log-probs at a temperature; raises ConfigError where nobody has them."""
        if temperature not in self.new:
            raise ConfigError(
                f"rollout.temperature={temperature:g} needs the log-probs of the step at this "
                f"temperature (got those at {', '.join(f'{known:g}' for known in self.new)})"
            )
        return self.new[temperature]

    def of(self, documents: Sequence[bool]) -> RecordedStep:
        """Return the step of these documents alone."""
        tokens = torch.tensor(documents)[self.index]

        def chosen(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else vector[tokens]

        vectors = {name: chosen(getattr(self, name)) for name in ("old", "sampling", "ref")}
        return replace(
            self,
            attempts=[*itertools.compress(self.attempts, documents)],
            groups=[*itertools.compress(self.groups, documents)],
            truncated=[*itertools.compress(self.truncated, documents)],
            advantages=self.advantages[tokens],
            new={temperature: vector[tokens] for temperature, vector in self.new.items()},
            entropy=chosen(self.entropy),
            **vectors,
        )


def recorded_step(made: MadeStep) -> RecordedStep:
    """Return what a repeated step holds. Raises ConfigError where a document is not an attempt."""
    documents = made.step.documents
    if any(document.trajectory is not None for document in documents):
        raise ConfigError(
            "pgtk parity needs documents that are one attempt at a prompt each (got trajectories "
            "of several): TRL and verl have no such step. Use a run of another task."
        )
    pieces = made.pieces
    trained = [piece.micro_batch.labels >= 0 for piece in pieces]

    def joined(vectors: Sequence[Tensor | None]) -> Tensor | None:
        if any(vector is None for vector in vectors):
            return None
        known = [
            vector[mask]
            for vector, mask in zip(vectors, trained, strict=True)
            if vector is not None
        ]
        return torch.cat(known).double()

    def of_batches(name: str) -> Tensor | None:
        return joined([getattr(piece.micro_batch, name) for piece in pieces])

    advantages = of_batches("advantages")
    assert advantages is not None
    new = {}
    for temperature in pieces[0].at_temperatures:
        vector = joined([piece.at_temperatures[temperature] for piece in pieces])
        assert vector is not None
        new[temperature] = vector
    is_on_policy = all(document.on_policy for document in documents)
    has_old = made.has_old_log_probs and not is_on_policy
    return RecordedStep(
        attempts=[
            Attempt(document.reward, document.num_trained, document.measures)
            for document in documents
        ],
        groups=[document.group for document in documents],
        truncated=[bool(document.truncated) for document in documents],
        advantages=advantages,
        new=new,
        old=of_batches("old_log_probs") if has_old else None,
        sampling=of_batches("sampling_log_probs"),
        ref=of_batches("ref_log_probs"),
        entropy=joined([piece.entropy for piece in pieces]),
        has_rewards=made.has_groups
        and all(document.reward is not None or document.score_failed for document in documents),
    )
