"""The seam between sampling and training: what samplers and rollouts ask of the module that is
trained."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model.policy import Policy


class TrainedPolicy(Protocol):
    """A policy in training. `training.module.PolicyGradientModule` is one.

    policy: the model as it is now. num_updates: how many updates its weights have had.
    """

    policy: Policy

    @property
    def num_updates(self) -> int: ...

    def log_probs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return the (T,) log-prob of each label by the forward pass that training uses.

        temperature: None for that of the run. Called by every rank.
        """
        ...

    def ref_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) log-prob of each label under the reference, which is a model. Called by
        every rank."""
        ...

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the critic's (T,) value of each position, where there is a critic. Called by every
        rank."""
        ...
