"""What a task makes of completions whose scoring failed, and the notes that tell of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pgtoolkit.config.schema_tasks import VerifierFailure
from pgtoolkit.system.report import plural
from pgtoolkit.tasks.process_pool import Failure

log = logging.getLogger("pgtoolkit")


class FailedScores:
    """`task.verifier_failure` and `task.failure_score` of a task.

    score: what a score that failed counts as; None where its completion is left out instead.
    """

    def __init__(self, config: Any):
        has_score = config.verifier_failure == VerifierFailure.score
        self.score = float(config.failure_score) if has_score else None
        self._noted_shares: dict[str, float] = {}

    def note(self, failures: Sequence[tuple[str, Failure]], count: int) -> None:
        """Tell of completions without a score, once of each kind, and again when the share has
        doubled.

        failures: of each of them what failed on what, in words. count: of the completions that were
            scored together.
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
                f"{'is' if failed == 1 else 'are'} {consequence}. Said again when the share "
                "doubles; the metric failed_score_fraction counts all kinds."
            )
