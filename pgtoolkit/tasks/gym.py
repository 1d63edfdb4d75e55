"""Data sets of the reasoning-gym package: their questions, and their scorers, in this process or in
others.

Nothing large is imported, for the sake of these processes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.process_pool import CRASH, NOTHING, Failure


class GymQuestion(NamedTuple):
    """A completion to be scored. row: of the question that it answers. on: both in words, for
    notes."""

    row: int
    completion: str
    on: str


class GymData:
    """A data set of reasoning-gym with its scorer. Raises ConfigError where the package has none
    such."""

    def __init__(self, dataset: str, options: dict[str, Any], given: dict[str, Any], seed: int):
        from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]  (an extra)

        try:
            data = create_dataset(dataset, seed=seed, **options)
        except (TypeError, ValueError, AssertionError) as error:  # among them a seed of its own
            raise ConfigError(
                refusal(
                    setting=f"task.dataset={dataset} with task.options={given}",
                    needs="a data set of reasoning-gym, and options that it has",
                    got=first_line(error),
                    reason="Its seed is that of the run.",
                    use="task.dataset=chain_sum",
                )
            ) from error
        self._score_answer = data.score_answer
        # A question is asked for again for each completion that is scored.
        self.entry = functools.lru_cache(maxsize=1024)(data.__getitem__)

    def answer(self, question: GymQuestion) -> float | Failure:
        """Return the package's score, or why there is none: some scorers raise for texts that they
        cannot read."""
        try:
            reward = float(
                self._score_answer(question.completion.strip(), self.entry(question.row))
            )
        except (Exception, SystemExit) as error:
            return Failure(CRASH, f"raised {type(error).__name__} ({first_line(error)[:200]})")
        return reward if math.isfinite(reward) else Failure(NOTHING, f"returned {reward}")
