"""Several passes over a batch of rollouts: how many, and the order of the documents in each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from pgtoolkit.rollouts.settings import PassOrder, PolicyRolloutSettings
from pgtoolkit.tasks.shuffle import seed_of, shuffled


@dataclass(frozen=True)
class Passes:
    """The passes over each batch of a source.

    count: how often each batch is trained.
    groups, group_size: the groups of a batch and the documents of each, where every pass takes the
        groups in another order; 0 where all passes take them as they are.
    seed: of these orders.
    """

    count: int = 1
    groups: int = 0
    group_size: int = 0
    seed: int = 0

    @staticmethod
    def of(rollout: PolicyRolloutSettings, seed: int) -> Passes:
        """Return the passes that settings ask for. seed: of the run."""
        if rollout.pass_order == PassOrder.same:
            return Passes(rollout.passes)
        return Passes(rollout.passes, rollout.prompts_per_batch, rollout.group_size, seed)

    def source_position(self, position: int, number: int) -> int:
        """Return the position in the source of the document that stands at `position` in pass
        `number`, from 0, over its batch."""
        if self.groups == 0:
            return position
        batch, place = divmod(position, self.groups * self.group_size)
        group, member = divmod(place, self.group_size)
        order = _order(self.groups, self.seed, batch, number)
        return (batch * self.groups + int(order[group])) * self.group_size + member


@functools.lru_cache(maxsize=4)
def _order(groups: int, seed: int, batch: int, number: int) -> np.ndarray:
    """Return the (groups,) order of a batch's groups in pass `number`."""
    return shuffled(groups, seed_of(seed, batch), number)


ONE_PASS = Passes()
