"""What is judged of recorded rollouts: their documents under a loss, and what is found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pgtoolkit.config.schema import Config
from pgtoolkit.dumps.examine import Examined
from pgtoolkit.errors import DataError
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.advantages import batch_divisor, group_advantages

WRONG, LOOK, FINE, UNKNOWN = "wrong", "look", "fine", "?"


@dataclass(frozen=True)
class Finding:
    """level: WRONG, LOOK (worth a look), FINE or UNKNOWN. says: whole sentences, the last about the loss."""

    level: str
    topic: str
    says: str


@dataclass(frozen=True)
class Case:
    """The documents with their weights under the loss that would train on them: w of w_t, strength of w_t |A_t|."""

    found: Examined
    loss: Loss
    config: Config
    w: np.ndarray
    strength: np.ndarray

    def column(self, name: str) -> np.ndarray:
        return self.found.documents[name]

    def share(self, chosen: np.ndarray) -> str:
        """What the documents carry of the loss."""
        total = self.strength.sum()
        return percent(self.strength[chosen].sum() / total if total else 0.0) + " of the sum of w|A|"

    def moved(self, labels: np.ndarray) -> str:
        """By how much advantages change where these labels, (documents,), say what is a group."""
        before, after = self.advantages(self.column("group")), self.advantages(labels)
        size = np.abs(before).mean()
        return percent(np.abs(after - before).mean() / size if size else 0.0)

    def advantages(self, labels: np.ndarray) -> np.ndarray:
        """(documents,) by the configured estimator; 0 where it needs more documents than a group has."""
        estimator, rewards = self.config.advantage.estimator.value, self.column("reward")
        advantages = np.zeros(len(rewards))
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            try:
                advantages[members] = group_advantages(estimator, rewards[members].tolist())
            except DataError:
                continue
        return advantages / batch_divisor(estimator, rewards.tolist())


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.3g} %"
