"""Completions whose scoring failed: the score that they get, and the notes about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from pgtoolkit.system.report import plural
from pgtoolkit.tasks.process_pool import Failure
from pgtoolkit.tasks.settings import (
    ConversationTaskSettings,
    GuessTaskSettings,
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    VerifierFailure,
)

log = logging.getLogger("pgtoolkit")

_Config = (
    ConversationTaskSettings | GuessTaskSettings | PromptsTaskSettings | ReasoningGymTaskSettings
)


class FailedScore(NamedTuple):
    """A score that failed.

    giver: the code that was to give it, as the configuration names it. on: what it was asked about.
    """

    giver: str
    failure: Failure
    on: str


class FailedScores:
    """`task.verifier_failure` and `task.failure_score` of a task.

    held_out: whether its prompts are those of an evaluation.
    score: replaces a score that failed; None where the completion is left out instead.
    """

    def __init__(self, config: _Config, held_out: bool = False):
        self.score: float | None = None
        if config.verifier_failure == VerifierFailure.score:
            self.score = float(config.failure_score)
        self._out_of = "the mean reward avg" if held_out else "training and of mean rewards"
        self._noted_shares: dict[tuple[str, str], float] = {}

    def note(self, failures: Sequence[FailedScore], count: int) -> None:
        """Log a note on completions without a score, once for each giver and kind of failure, and
        again when its share has doubled.

        failures: at most one of a giver for each completion. count: the number of completions that
            were scored together.
        """
        alike: dict[tuple[str, str], list[FailedScore]] = {}
        for failed_score in failures:
            kind = (failed_score.giver, failed_score.failure.kind)
            alike.setdefault(kind, []).append(failed_score)
        for kind, failed_scores in alike.items():
            failed = len(failed_scores)
            share = failed / count
            if share < 2 * self._noted_shares.get(kind, 0.0):
                continue
            self._noted_shares[kind] = share
            consequence = f"out of {self._out_of} (task.verifier_failure=exclude)"
            if self.score is not None:
                consequence = f"scored with task.failure_score={self.score:g}"
            giver, failure, on = failed_scores[0]
            log.warning(
                f"note: {giver} {failure.reason} on {on}. For this reason {failed} of "
                f"{plural(count, 'completion')} {'is' if failed == 1 else 'are'} {consequence}. "
                "This note comes again when the share doubles; the metric "
                "failed_score_fraction counts all kinds."
            )
