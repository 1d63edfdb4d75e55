"""Families as a user would write them, for the tests that import them by dotted path."""

from dataclasses import dataclass

from pgtoolkit import families


@dataclass(frozen=True)
class Squared(families.Family):
    """-A s + (tau / 2) s^2 with s the log-ratio by token (arXiv 2501.12599); a gradient also where
    A is 0."""

    tau: float = 0.1

    def surrogate(self, log_ratio, advantages, log_probs):
        losses = -advantages * log_ratio + self.tau / 2 * log_ratio**2
        return losses, -advantages + self.tau * log_ratio


@dataclass(frozen=True)
class SquaredByDocument(Squared):
    """The same of the document's mean."""

    scope = "document"


@dataclass(frozen=True)
class WrongSlope(Squared):
    """Its slope is not its loss's derivative."""

    def surrogate(self, log_ratio, advantages, log_probs):
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        return losses, slope * 1.01


@dataclass(frozen=True)
class NoNumber(Squared):
    """0 / 0 where the advantage is 0."""

    def surrogate(self, log_ratio, advantages, log_probs):
        return -advantages * log_ratio, -advantages * advantages / advantages


@dataclass(frozen=True)
class FailsLater(Squared):
    """As it should be on the numbers that it is looked at with at the start, 1500 of them."""

    sums: bool = False

    def surrogate(self, log_ratio, advantages, log_probs):
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        if len(log_ratio) == 1500:
            return losses, slope
        return (losses.sum(), slope) if self.sums else ({}[len(log_ratio)], slope)


def no_family(tau=0.1):
    return tau
