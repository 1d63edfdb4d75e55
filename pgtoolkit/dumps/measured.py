"""Recorded rollouts as numbers of each document, under the loss that would train on them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from pgtoolkit.batch import Document, StepTotals, pack
from pgtoolkit.dumps.alignment import COMPARED_TOKENS, recorded_pair
from pgtoolkit.kernels.losses import loss_of_log_probs
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.recorded_index import first_parts
from pgtoolkit.system.report import plural

_COLUMNS = (
    *("group", "trained", "weight", "advantage", "truncated", "prompt", "text", "log_prob", "zeros", "first_is_zero"),
    *("open_end", "distance", "largest", "outside"),
)
"""Numbers of a document; NaN is unknown.

weight: sum of its absolute advantages. advantage: their mean. prompt, text: 48 bits of a digest of the tokens before
the first trained one, and of all. log_prob: of the whole completion. zeros: trained tokens whose log-prob is exactly 0.
first_is_zero: whether the first is one. open_end: whether the last token is not trained. distance, largest: sum and
maximum of the absolute differences of the two kinds of log-probs. outside: share of the ratios that these differences
alone take out of the clip.
"""


class Rollouts:
    """Recorded rollouts under the loss that would train on them; every document is read once, 110 bytes of each stay.

    columns: of each name in _COLUMNS (documents,) float64, in the order in which training reads them. in_files:
    (documents,) the place of each in the order of the files. w: (documents,) the sum of w_t over the tokens of each.
    w_advantage: the same of w_t |A_t|. pairs: sampling and old log-probs of the first documents with both. differ:
    whether any of them differ. has_advantages: whether the file's own are trained on. begins: (documents,) bool, True
    for the first of a trajectory.
    """

    def __init__(self, source: RecordedRollouts, loss: Loss, has_advantages: bool):
        self.loss, self.has_groups, self.has_advantages = loss, source.has_groups, has_advantages
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self._compared = 0
        rows = (self._numbers(source.document(place)) for place in range(source.num_documents))
        self.columns = columns = np.fromiter(rows, [(name, "f8") for name in _COLUMNS]).view(np.recarray)
        self.num_groups = len(np.unique(columns.group))
        rows = source.index.rows
        self.in_files = np.lexsort((first_parts(rows), source.groups))
        first = first_parts(rows)[self.in_files]
        self.begins = first == self.in_files
        self.w = columns.trained / _denominators(loss, columns.trained, columns.group, first)
        self.w_advantage = self.w * columns.weight / np.maximum(1, columns.trained)
        self.differ = bool(np.nansum(columns.distance))

    def share(self, chosen: np.ndarray) -> str:
        """What the chosen documents carry of the loss."""
        total = self.w_advantage.sum()
        return percent(self.w_advantage[chosen].sum() / total if total else 0.0) + " of the sum of w|A|"

    def groups_of(self, chosen: np.ndarray) -> str:
        return f"{len(np.unique(self.columns.group[chosen]))} of {plural(self.num_groups, 'group')}"

    def _numbers(self, document: Document) -> tuple[float, ...]:
        tokens, mask, trained = document.tokens.numpy(), document.loss_mask.numpy(), document.num_trained
        old, sampling, advantages = document.old_log_probs, document.sampling_log_probs, document.advantages.double()
        sampler, pair = old if sampling is None else sampling, recorded_pair(document)
        gap, outside = np.full(1, np.nan), 0.0
        if pair is not None:
            gap, outside = np.abs(pair[1] - pair[0]), outside_of_clip(self.loss, document, *pair[::-1])
            if self._compared < COMPARED_TOKENS:
                self.pairs.append(pair)
                self._compared += trained
        return (
            *(document.group, trained, float(advantages.abs().sum()), float(advantages.mean()) if trained else 0.0),
            np.nan if document.truncated is None else document.truncated,
            _digest(tokens[: int(mask.argmax())]) if trained else np.nan,
            _digest(tokens),
            np.nan if sampler is None else float(sampler.double().sum()),
            np.nan if old is None else int((old == 0).sum()),
            old is not None and bool(trained) and float(old[0]) == 0,
            bool(trained) and not mask[-1],
            *(gap.sum(), gap.max(), outside),
        )


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=6).digest())


def _denominators(loss: Loss, trained: np.ndarray, group: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(documents,) the aggregation's, over all of them as one step; 1 where nothing is trained.

    first: the same number for all documents of a trajectory.
    """
    counts, groups = torch.tensor(trained).long(), torch.tensor(group).long()
    trajectories = torch.tensor(np.unique(first, return_inverse=True)[1].ravel())
    per_group, per_trajectory = (torch.bincount(x, counts).long() for x in (groups, trajectories))
    numbers = len(counts), int(counts.sum()), int((counts == 0).sum())
    totals = StepTotals(*numbers, len(per_group), per_group, per_trajectory)
    denominators = loss.aggregation.denominators(totals, per_trajectory[trajectories], groups)
    return np.where(counts > 0, denominators.double(), 1.0)


def outside_of_clip(loss: Loss, document: Document, new: np.ndarray, old: np.ndarray) -> float:
    """The share of a document's tokens whose ratios of these log-probs, (N,), lie outside of the family's clip."""
    measured = Loss(loss.family, aggregation_of("token_mean"), loss.temperature, "basic")
    micro_batch = pack([replace(document, old_log_probs=torch.from_numpy(old).float())])
    log_probs = torch.zeros(len(micro_batch.labels), dtype=torch.float64)
    log_probs[micro_batch.labels >= 0] = torch.from_numpy(new)
    piece = loss_of_log_probs(log_probs, micro_batch, None, measured, Ranks(), False)
    return float(piece.metric_sums.finalize(piece.totals)["clipped_ratio_fraction"])


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
