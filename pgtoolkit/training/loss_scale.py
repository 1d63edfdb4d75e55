"""The scale of the loss for gradients in float16: when it falls and rises, and its saved state."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_STEPS_TO_RISE = 2000
"""The first scale, the factors and this interval are those of torch.amp.GradScaler."""


@dataclass
class LossScale:
    """Multiplies the loss of every micro-batch before its backward pass.

    The gradient of a mean over a step is often too small for float16. The scale is a power of 2, so
    neither the product with the loss nor the division of the summed gradient, in float32, rounds.
    All micro-batches of a step have the same scale, on every rank.

    value: is halved by a step whose gradient overflows, and doubled after 2000 good ones in a row.
    good_steps: since the value last changed.
    num_overflows: steps of the run that made no update because their gradient overflowed.
    Source: arXiv 1710.03740, section 3.2.
    """

    value: float = 65536.0
    good_steps: int = 0
    num_overflows: int = 0

    def rise(self) -> None:
        """Count a step whose gradient is finite."""
        self.good_steps += 1
        if self.good_steps == _STEPS_TO_RISE:
            self.value *= 2
            self.good_steps = 0

    def fall(self) -> bool:
        """Count a step whose gradient is not finite, and return whether the scale may be the cause.

        A scale of 1 cannot be. Then nothing is counted.
        """
        if self.value <= 1:
            return False
        self.value /= 2
        self.good_steps = 0
        self.num_overflows += 1
        return True

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a result of `state_dict`."""
        self.value = state["value"]
        self.good_steps = int(state["good_steps"])
        self.num_overflows = int(state["num_overflows"])
