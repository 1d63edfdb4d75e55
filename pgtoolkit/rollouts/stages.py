"""The seconds that each stage of making documents takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

STAGES = ("sampling", "scoring", "old_log_probs")


class Stopwatch:
    """Adds up the seconds of each of STAGES in this process."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time inside the block to a stage."""
        started = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - started

    def reset(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, and start again from 0."""
        seconds = self._seconds
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return seconds
