"""Checks of recorded rollouts across rows, of files whose rows are right each by itself."""

from __future__ import annotations

import hashlib
import math
from array import array

import numpy as np

from pgtoolkit.rollouts.rows import RecordedRow
from pgtoolkit.system.report import plural

_COMPARED_TOKENS = 2**17
"""Tokens whose two kinds of log-probs are compared with each other."""

_ENOUGH_TOKENS = 64
"""Tokens without which nothing is concluded about their places."""

_MIN_CORRELATION = 0.5
_MIN_LEAD = 0.1
"""Another place fits better where its correlation exceeds the former, and every other place's by
the latter."""

_PLACES = {-1: "of the token before", 0: "of the token itself", 1: "of the next token"}


class Plausibility:
    """Collects what three checks need while rows are read: 32 bytes of each, and the first
    log-probs.

    Of every row with a trained token it keeps digests of its prompt and of all its tokens, its
    group, and the log-prob of its completion (NaN: unknown). The group is below 0 if it is unknown,
    or if the row is a later part of a trajectory, with another context before it.
    """

    def __init__(self) -> None:
        self._prompts = array("Q")
        self._texts = array("Q")
        self._groups = array("q")
        self._log_probs = array("d")
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_compared = 0

    def add(self, row: RecordedRow, group: int) -> None:
        """Take note of a row that is right."""
        mask = row.loss_mask
        if not mask.any():
            return
        self._prompts.append(_digest(row.token_ids[: int(mask.argmax())]))
        self._texts.append(_digest(row.token_ids))
        self._groups.append(group)
        old = row.old_log_probs
        sampling = row.sampling_log_probs
        sampler = old if sampling is None else sampling
        self._log_probs.append(math.nan if sampler is None else sampler[mask].sum(dtype=np.float64))
        if old is not None and sampling is not None and self._num_compared < _COMPARED_TOKENS:
            self._pairs.append((sampling[mask].astype(np.float64), old[mask].astype(np.float64)))
            self._num_compared += int(mask.sum())

    def misplaced(self) -> str | None:
        """Return which tokens sampling_log_probs belong to, with the evidence; None if they are in
        their places."""
        if self._num_compared < _ENOUGH_TOKENS:
            return None
        correlations = {place: self._correlation(place) for place in _PLACES}
        best = max(correlations, key=lambda place: correlations[place])
        second = max(correlation for place, correlation in correlations.items() if place != best)
        if (
            best == 0
            or correlations[best] <= _MIN_CORRELATION
            or correlations[best] <= second + _MIN_LEAD
        ):
            return None
        values = ", ".join(f"{correlation:z.3f}" for correlation in correlations.values())
        return (
            f"that {_PLACES[best]}: correlations with old_log_probs at places -1, 0, +1 are "
            f"{values}"
        )

    def _correlation(self, place: int) -> float:
        """Return the correlation of each sampling log-prob with the old one `place` tokens later;
        -1 if either is constant."""
        ahead = max(0, place)
        behind = max(0, -place)
        sampling = np.concatenate(
            [values[behind : len(values) - ahead] for values, _ in self._pairs]
        )
        old = np.concatenate([values[ahead : len(values) - behind] for _, values in self._pairs])
        if len(old) < 2 or not sampling.std() or not old.std():
            return -1.0
        return float(np.corrcoef(sampling, old)[0, 1])

    def notes(self) -> list[str]:
        """Return what a user should know of groups and of equal rows."""
        return [note for note in (self._note_on_groups(), self._note_on_copies()) if note]

    def _note_on_groups(self) -> str:
        """Return a note if a group holds several prompts; else ""."""
        groups = np.array(self._groups)
        prompts = np.array(self._prompts)
        pairs = np.unique(np.stack([groups.astype(np.uint64), prompts])[:, groups >= 0], axis=1)
        numbers, num_prompts = np.unique(pairs[0], return_counts=True)
        num_mixed = int((num_prompts > 1).sum())
        if not num_mixed:
            return ""
        return (
            f"{num_mixed} of {plural(len(numbers), 'group')} hold different prompts: a completion "
            "is judged by the rewards of other prompts. Either the numbers in group_id begin anew "
            "somewhere, or loss_mask begins too late."
        )

    def _note_on_copies(self) -> str:
        """Return a note if many more pairs of rows are equal than chance explains; else "".

        Chance: a row equals each other row of its prompt with its probability.
        """
        is_known = ~np.isnan(self._log_probs)
        prompts = np.array(self._prompts)[is_known]
        texts = np.array(self._texts)[is_known]
        if not len(texts):
            return ""
        copies = np.unique(texts, return_counts=True)[1]
        pairs = int((copies * (copies - 1) // 2).sum())
        prompt, rows_of_prompt = np.unique(prompts, return_inverse=True, return_counts=True)[1:]
        probabilities = np.exp(np.minimum(0.0, np.array(self._log_probs)[is_known]))
        expected = float(((rows_of_prompt[prompt] - 1) * probabilities).sum() / 2)
        if pairs <= expected + 4 * math.sqrt(expected) + 3:
            return ""
        repeated = len(texts) - len(copies)
        return (
            f"{plural(repeated, 'row')} repeat another one: {plural(pairs, 'pair')} are equal, "
            f"where {expected:.3g} are expected by the recorded log-probs. They count twice in the "
            "baselines of their groups. Was a file read twice, or written by a run that was "
            "resumed?"
        )


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest())
