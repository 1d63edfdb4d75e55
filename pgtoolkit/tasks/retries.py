"""Repeats calls that could not reach their server: how often, and after how many seconds."""

from __future__ import annotations

import threading
from typing import NamedTuple

_LONGEST_WAIT = 60.0
"""The most seconds between two calls, unless the first wait is longer."""

stop_asked = threading.Event()
"""Set once the run was asked to stop: then nobody waits for a server."""


class Retries(NamedTuple):
    """`task.verifier_retries` and `task.verifier_retry_seconds`."""

    count: int
    seconds: float

    def waits(self) -> list[float]:
        """Return the seconds before each further call: each four times those before."""
        longest = max(self.seconds, _LONGEST_WAIT)
        return [min(self.seconds * 4.0 ** min(number, 20), longest) for number in range(self.count)]

    def longer(self) -> Retries:
        """Return retries that wait minutes longer for a server."""
        return Retries(min(self.count + 4, 10_000), self.seconds or 0.5)
