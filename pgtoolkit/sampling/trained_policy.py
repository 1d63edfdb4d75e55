"""The interface of the module in training, as samplers and rollouts use it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model.policy import Policy


class TrainedPolicy(Protocol):
    """A policy in training. `training.module.PolicyGradientModule` is one.

    policy: the model with its current weights. num_updates: number of updates that they have had.
    reference_every: number of updates after which its reference moves; None: it never does.
    """

    policy: Policy
    reference_every: int | None

    @property
    def num_updates(self) -> int: ...

    def log_probs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return the (T,) log-probs of the labels by the forward pass that training uses.

        temperature: None for that of the run. Called by every rank.
        """
        ...

    def ref_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) log-probs of the labels under the reference model.

        Every rank calls this.
        """
        ...

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the critic's (T,) values of the positions, if there is a critic.

        Every rank calls this.
        """
        ...
