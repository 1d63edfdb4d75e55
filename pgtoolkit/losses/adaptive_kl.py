"""The coefficient of a KL penalty that follows a target (Ziegler et al., arXiv 1909.08593)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pgtoolkit.losses.checks import check_positive, check_whole

_LARGEST_ERROR = 0.2

TO_0 = "A batch with a KL below the target would take the coefficient to 0, or below."
"""The reason why a horizon is long enough for a batch."""


def is_long_enough(horizon: int, documents: int) -> bool:
    """Return whether no batch of this many documents takes a coefficient to 0."""
    return 5 * horizon > documents  # 5 is 1 / _LARGEST_ERROR


@dataclass
class AdaptiveKL:
    """The coefficient of a penalty, which each batch of rollouts moves, so that the KL nears a
    target.

    After a batch of n documents

        coefficient <- coefficient (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

    where KL is the mean over them of the mean over their trained tokens of the penalty's term. It
    is the same on every rank, since all give it the same numbers.

    target: the KL that it is to near (> 0).
    horizon: documents (>= 1); the fewer, the faster the coefficient moves.
    coefficient: the one in use (> 0).
    distance: the sum over the documents of the batch so far of their KL.
    documents: their number.
    """

    target: float
    horizon: int
    coefficient: float
    distance: float = 0.0
    documents: int = 0

    def __post_init__(self):
        check_positive("target", self.target)
        check_whole("horizon", self.horizon, 1)
        check_positive("coefficient", self.coefficient)

    def check_batch(self, documents: int) -> None:
        """Raise ValueError where one batch of this many documents could take the coefficient to 0,
        or below."""
        if not is_long_enough(self.horizon, documents):
            raise ValueError(
                f"AdaptiveKL(horizon={self.horizon}) needs more than {documents // 5}, a fifth of "
                f"the {documents} documents of a batch (got {self.horizon}). {TO_0} Use "
                f"horizon={documents}."
            )

    def add(self, distance: float, documents: int) -> None:
        """Count documents of the batch. distance: the sum of their KL.

        Documents whose KL is not finite, which make no update, are not counted.
        """
        if math.isfinite(distance):
            self.distance += distance
            self.documents += documents

    def adapt(self) -> None:
        """Move the coefficient by the batch that has been counted, if there is one, and forget
        it."""
        if self.documents:
            error = self.distance / self.documents / self.target - 1
            error = min(_LARGEST_ERROR, max(-_LARGEST_ERROR, error))
            self.coefficient *= 1 + error * self.documents / self.horizon
        self.distance = 0.0
        self.documents = 0

    def state_dict(self) -> dict[str, float]:
        return {
            "coefficient": self.coefficient,
            "distance": self.distance,
            "documents": self.documents,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
        self.distance = state["distance"]
        self.documents = int(state["documents"])
