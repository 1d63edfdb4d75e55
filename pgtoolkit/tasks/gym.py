"""Data sets of the reasoning-gym package: their questions and scorers, in this process or others.

Nothing large is imported, so that these processes start quickly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.process_pool import CRASH, NOTHING, Failure


class GymQuestion(NamedTuple):
    """A completion to be scored.

    row: of the question that it answers. on: the completion and its question in words, for notes.
    """

    row: int
    completion: str
    on: str


class GymData:
    """A data set of reasoning-gym with its scorer.

    options: of the data set. chosen: those of the configuration, for errors. Raises ConfigError for
    a data set or options that the package does not have.
    """

    def __init__(
        self, dataset: str, options: Mapping[str, object], chosen: Mapping[str, object], seed: int
    ):
        from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]  (an extra)

        try:
            data = create_dataset(dataset, seed=seed, **options)
        except (TypeError, ValueError, AssertionError) as error:  # also for a seed in the options
            raise ConfigError(
                refusal(
                    setting=f"task.dataset={dataset} with task.options={chosen}",
                    needs="a data set of reasoning-gym, and options that it has",
                    got=first_line(error),
                    reason="Options are those of the data set; its seed is the run's.",
                    use="task.dataset=chain_sum",
                )
            ) from error
        self._score_answer = data.score_answer
        # A question is asked for again for each completion that is scored.
        self.entry = functools.lru_cache(maxsize=1024)(data.__getitem__)

    def answer(self, question: GymQuestion) -> float | Failure:
        """Return the package's score, or why there is none: some scorers raise for texts that they
        cannot read."""
        completion = question.completion.strip()
        try:
            reward = float(self._score_answer(completion, self.entry(question.row)))
        except (Exception, SystemExit) as error:
            return Failure(CRASH, f"raised {type(error).__name__} ({first_line(error)[:200]})")
        return reward if math.isfinite(reward) else Failure(NOTHING, f"returned {reward}")
