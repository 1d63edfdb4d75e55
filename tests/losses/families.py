"""Families as a user would write them, which tests name by their dotted path."""

from dataclasses import dataclass

from torch import Tensor

from pgtoolkit import families


@dataclass(frozen=True)
class Squared(families.Family):
    """-A s + (tau / 2) s^2 with s the log-ratio of a token (arXiv 2501.12599).

    It has a gradient also where A is 0.
    """

    tau: float = 0.1

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = -advantages * log_ratio + self.tau / 2 * log_ratio**2
        return losses, -advantages + self.tau * log_ratio


@dataclass(frozen=True)
class SquaredByDocument(Squared):
    """The same with s the mean of a document."""

    scope = "document"


@dataclass(frozen=True)
class WrongSlope(Squared):
    """A family whose slope is not the derivative of its loss."""

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        return losses, slope * 1.01


@dataclass(frozen=True)
class NoNumber(Squared):
    """A family that returns 0 / 0 where the advantage is 0."""

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return -advantages * log_ratio, -advantages * advantages / advantages


@dataclass(frozen=True)
class FailsLater(Squared):
    """A family that is right on the 1500 numbers of the check at the start, and fails on others."""

    sums: bool = False

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        if len(log_ratio) == 1500:
            return losses, slope
        if self.sums:
            return losses.sum(), slope
        raise KeyError(len(log_ratio))


def no_family(tau: float = 0.1) -> float:
    return tau


def squared(log_ratio: Tensor, advantages: Tensor, *, tau: float = 0.1) -> Tensor:
    """-A s + (tau / 2) s^2, as a function"""
    return -advantages * log_ratio + tau / 2 * log_ratio**2
