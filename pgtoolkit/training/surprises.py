"""Notes on the steps of a run whose numbers may surprise, each given once."""

from __future__ import annotations

import logging

from pgtoolkit.document import Document
from pgtoolkit.rollouts.data_metrics import mismatch_note, overflow_note, sampling_note
from pgtoolkit.rollouts.settings import PolicyRolloutSettings, RecordedRolloutSettings

log = logging.getLogger("pgtoolkit")


class Surprises:
    """Looks at the metrics of steps, and logs what may surprise in them.

    loss: the name of the loss.
    has_advantages: whether the configuration gives advantages other than 0.
    """

    def __init__(
        self,
        loss: str,
        rollout: PolicyRolloutSettings | RecordedRolloutSettings,
        has_advantages: bool,
    ):
        self._loss = loss
        self._rollout = rollout
        self._has_advantages = has_advantages
        self._noted_no_signal = False
        self._noted_mismatch = False
        self._noted_overflow = False

    def of_step(self, metrics: dict[str, float], documents_seen: int) -> None:
        """Look at a step: whether it has a signal, whether log-probs match, and whether documents
        are trained."""
        has_no_signal = metrics.get("zero_advantage_group_fraction") == 1 and self._has_advantages
        if has_no_signal and not self._noted_no_signal:
            self._noted_no_signal = True
            log.warning(
                f"note: every advantage of the step that ends at document {documents_seen} is "
                "0, so the step teaches nothing: all completions of a prompt have equal rewards. "
                "Is the task too hard or too easy, or are answers longer than "
                "rollout.max_completion_length? This note is printed once; see the metric "
                "zero_advantage_group_fraction."
            )
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

    def of_first_update(self, documents: list[Document], log_probs: float) -> None:
        """Look at the first update: whether the policy's mean log-prob is the documents' old one.

        log_probs: the metric new_logprobs.
        """
        note = mismatch_note(documents, log_probs, self._rollout)
        if note:
            log.warning(f"note: {note}")
