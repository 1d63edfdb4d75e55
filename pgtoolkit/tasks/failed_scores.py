"""Completions whose scoring failed: the score that they get, and the notes about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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


class FailedScores:
    """`task.verifier_failure` and `task.failure_score` of a task.

    score: replaces a score that failed; None where the completion is left out instead.
    """

    def __init__(self, config: _Config):
        self.score: float | None = None
        if config.verifier_failure == VerifierFailure.score:
            self.score = float(config.failure_score)
        self._noted_shares: dict[str, float] = {}

    def note(self, failures: Sequence[tuple[str, Failure]], count: int) -> None:
        """Log a note on completions without a score, once for each kind of failure, and again when
        the share has doubled.

        failures: for each of them a sentence that says what failed. count: the number of
            completions that were scored together.
        """
        examples = {failure.kind: sentence for sentence, failure in reversed(failures)}
        for kind, sentence in examples.items():
            failed = sum(failure.kind == kind for _, failure in failures)
            share = failed / count
            if share < 2 * self._noted_shares.get(kind, 0.0):
                continue
            self._noted_shares[kind] = share
            consequence = "out of training and of mean rewards (task.verifier_failure=exclude)"
            if self.score is not None:
                consequence = f"scored with task.failure_score={self.score:g}"
            log.warning(
                f"note: {sentence}. For this reason {failed} of {plural(count, 'completion')} "
                f"{'is' if failed == 1 else 'are'} {consequence}. This note comes again when the "
                "share doubles; the metric failed_score_fraction counts all kinds."
            )
