"""Notes on the steps of a run whose numbers may surprise, each given once."""

from __future__ import annotations

import logging

from pgtoolkit.document import Document
from pgtoolkit.rollouts.data_metrics import mismatch_note, overflow_note, sampling_note
from pgtoolkit.rollouts.settings import (
    AdvantageEstimator,
    PolicyRolloutSettings,
    RecordedRolloutSettings,
    Truncated,
)

log = logging.getLogger("pgtoolkit")

_TOO_HARD = (
    "Is the task too hard or too easy, or are answers longer than rollout.max_completion_length?"
)
_STEPS_WITHOUT_GRADIENT = 3
"""Steps in a row, from the first on, whose gradient is exactly 0 before a note says so."""

_CAUSES = {
    AdvantageEstimator.gae: "the critic expects what every completion gets, or all advantages are "
    f"equal and advantage.whiten makes them 0. {_TOO_HARD}",
    AdvantageEstimator.given: "so they are given.",
    AdvantageEstimator.custom: "so your own estimator has them.",
}
"""Why all advantages are 0, where that does not follow from the rewards of groups."""


class Surprises:
    """Looks at the metrics of steps, and logs what may surprise in them.

    loss: the name of the loss.
    estimator: of the advantages.
    """

    def __init__(
        self,
        loss: str,
        rollout: PolicyRolloutSettings | RecordedRolloutSettings,
        estimator: AdvantageEstimator,
    ):
        self._loss = loss
        self._rollout = rollout
        self._estimator = estimator
        self._noted_no_signal = False
        self._steps_without_gradient: int | None = 0  # None once a step had a gradient
        self._noted_mismatch = False
        self._noted_overflow = False

    def of_step(self, metrics: dict[str, float], documents_seen: int) -> None:
        """Look at a step: whether it has a signal, whether log-probs match, and whether documents
        are trained."""
        has_no_signal = metrics.get("zero_advantage_group_fraction") == 1
        gives_signal = self._estimator != AdvantageEstimator.none
        if has_no_signal and gives_signal and not self._noted_no_signal:
            self._noted_no_signal = True
            equal = "all completions of a prompt have equal rewards. " + _TOO_HARD
            failed = metrics.get("failed_score_fraction", 0.0)
            if failed:
                equal = (
                    f"{failed:.0%} of the scores failed, and the rewards of each prompt are equal, "
                    "or at most one is left. See the metric failed_score_fraction."
                )
            cause = _CAUSES.get(self._estimator, equal)
            cut_off = metrics.get("truncated_fraction", 0.0)
            if cut_off and self._rollout.truncated == Truncated.mask:
                cause = (
                    f"{cut_off:.0%} of the completions were cut off, which rollout.truncated=mask "
                    "does not train, and no other has an advantage. See the metric "
                    "truncated_fraction."
                )
            log.warning(
                f"note: every advantage of the step that ends at document {documents_seen} is "
                f"0, so the step teaches the policy nothing: {cause} This note "
                "is printed once; see the metric zero_advantage_group_fraction."
            )
        self._look_at_gradient(metrics.get("grad_norm"))
        if not self._noted_overflow:
            note = overflow_note(metrics)
            if note:
                self._noted_overflow = True
                log.warning(f"note: {note}")
        if not self._noted_mismatch:
            note = sampling_note(metrics, self._rollout, self._loss)
            if note:
                self._noted_mismatch = True
                log.warning(f"note: {note}")

    def _look_at_gradient(self, norm: float | None) -> None:
        """Note that no step has had a gradient yet; norm: of this step, None where it has none."""
        if norm is None or self._steps_without_gradient is None:
            return
        if norm != 0:
            self._steps_without_gradient = None
            return
        self._steps_without_gradient += 1
        if self._steps_without_gradient == _STEPS_WITHOUT_GRADIENT and not self._noted_no_signal:
            log.warning(
                f"note: the gradient of {_STEPS_WITHOUT_GRADIENT} steps, from the first on, is "
                f"exactly 0, so nothing is learned: neither loss={self._loss} with "
                f"advantage={self._estimator} nor a penalty depends on the policy there. This note "
                "is printed once; see the metric grad_norm."
            )

    def of_first_update(self, documents: list[Document], metrics: dict[str, float]) -> None:
        """Look at the first update: whether the policy's mean log-prob is the documents' old
        one."""
        note = mismatch_note(documents, metrics, self._rollout)
        if note:
            log.warning(f"note: {note}")
