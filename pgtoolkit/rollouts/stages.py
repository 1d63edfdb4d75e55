"""How long each stage of making rollouts takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

STAGES = ("sampling", "scoring", "old_log_probs")


class Stages:
    """Seconds of this process in each stage; waiting for other ranks is in none."""

    def __init__(self):
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - started

    def taken(self) -> dict[str, float]:
        """Seconds since the last call, by stage."""
        taken, self._seconds = self._seconds, dict.fromkeys(STAGES, 0.0)
        return taken
