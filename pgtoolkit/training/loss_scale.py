"""The scale of the loss where gradients pass through float16: when it falls, when it rises, what a
checkpoint keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_STEPS_TO_RISE = 2000
"""As in torch.amp.GradScaler, whose first scale and factors these are, too."""


@dataclass
class LossScale:
    """What the loss of every micro-batch is multiplied by before its backward pass (arXiv
    1710.03740, section 3.2).

    A gradient of a mean over a step is often too small for float16. The scale is a power of 2, so
    that neither multiplying by it nor dividing the sum of all gradients, in float32, by it rounds.
    It is the same for all micro-batches of a step and on every rank.

    value: halved by a step whose gradient overflows, doubled after 2000 others in a row.
        good_steps: since it changed.
    num_overflows: steps of the run that made no update since their gradient overflowed.
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
        """Count a step whose gradient is not finite; False, and nothing done, where the scale
        cannot be the cause."""
        if self.value <= 1:
            return False
        self.value /= 2
        self.good_steps = 0
        self.num_overflows += 1
        return True

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state of `state_dict`."""
        self.value = state["value"]
        self.good_steps = int(state["good_steps"])
        self.num_overflows = int(state["num_overflows"])
