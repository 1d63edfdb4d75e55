"""What recorded rollouts hold, in one pass: numbers of each document, sums over all, and their weights under a loss."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from pgtoolkit.batch import Document, StepTotals
from pgtoolkit.config.schema import Config
from pgtoolkit.dumps.alignment import LOG_PROBS, Branches, Shifts
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.losses import loss_of_log_probs
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.objective import Loss
from pgtoolkit.packing import pack
from pgtoolkit.rollouts.advantages import batch_divisor, group_advantages
from pgtoolkit.rollouts.recorded import RecordedRollouts

_PAIRED_TOKENS = 2**17
"""Tokens whose two log-probs are kept, to see whether they stand at the same places."""
_BINS = np.concatenate([[0.0], np.logspace(-6, 9, 1501), [np.inf]])
"""Of how far a ratio lies from 1; a bin is 2.3 % wide."""


@dataclass(frozen=True)
class Examined:
    """Recorded rollouts under the loss that would train on them.

    documents: the numbers that `_numbers` has of each, (documents,) in the order in which training reads them.
    in_files: (documents,) the place of each in the order of the files. branches: of each kind of log-probs. both: the
    two kinds beside each other. outside: the sum over documents of their shares of tokens that old less sampling
    log-probs alone take out of the clip. far: (bins,) tokens by how far the ratio of the two lies from 1.
    """

    config: Config
    loss: Loss
    documents: dict[str, np.ndarray]
    in_files: np.ndarray
    has_groups: bool
    branches: dict[str, Branches]
    both: Shifts
    outside: float
    far: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.documents["group"])

    @property
    def differs(self) -> bool:
        """Whether both kinds of log-probs are known and differ anywhere."""
        return bool((self.documents["differs"] == 1).any())

    @cached_property
    def _denominators(self) -> np.ndarray:
        """(documents,) the aggregation's; 1 where nothing is trained."""
        counts = torch.from_numpy(self.documents["trained"]).long()
        groups = torch.from_numpy(self.documents["group"]).long()
        per_group = torch.zeros(int(groups.max()) + 1, dtype=torch.int64).index_add_(0, groups, counts)
        empty = int((counts == 0).sum())
        totals = StepTotals(len(counts), int(counts.sum()), empty, len(per_group), per_group)
        denominators = self.loss.aggregation.denominators(totals, counts, groups).double().numpy()
        return np.where(counts.numpy() > 0, denominators, 1.0)

    @property
    def w(self) -> np.ndarray:
        """(documents,) the sum of w_t over the tokens of each."""
        return self.documents["trained"] / self._denominators

    def share(self, chosen: np.ndarray) -> str:
        """What the documents carry of the loss."""
        strength = self.documents["weight"] / self._denominators
        total = strength.sum()
        return percent(strength[chosen].sum() / total if total else 0.0) + " of the sum of w|A|"

    def moved(self, labels: np.ndarray) -> str:
        """By how much advantages change where these labels, (documents,), say what is a group."""
        before, after = self._advantages(self.documents["group"]), self._advantages(labels)
        size = np.abs(before).mean()
        return percent(np.abs(after - before).mean() / size if size else 0.0)

    def _advantages(self, labels: np.ndarray) -> np.ndarray:
        """(documents,) by the configured estimator; 0 where it needs more documents than a group has."""
        estimator, rewards = self.config.advantage.estimator.value, self.documents["reward"]
        advantages = np.zeros(len(rewards))
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            try:
                advantages[members] = group_advantages(estimator, rewards[members].tolist())
            except DataError:
                continue
        return advantages / batch_divisor(estimator, rewards.tolist())

    def epsilon(self, share: float) -> float:
        """A clip of 1 - epsilon to 1 + epsilon leaves this share of the tokens inside."""
        return float(_BINS[1:][np.searchsorted(np.cumsum(self.far), share * self.far.sum())])


def examine(rollouts: RecordedRollouts, loss: Loss, config: Config) -> Examined:
    """Read every document once; one group is in memory, and about 150 bytes per document stay."""
    columns, branches, both, outside_clip = array("d"), {}, Shifts(), 0.0
    far, paired, numbers = np.zeros(len(_BINS) - 1), 0, {}
    documents: Iterator[Document] = map(rollouts.document, range(rollouts.num_documents))
    for _, members in groupby(documents, attrgetter("group")):
        group = list(members)
        for name in LOG_PROBS:
            if all(getattr(document, name) is not None for document in group):
                branches.setdefault(name, Branches(name)).add(group)
        for document in group:
            numbers = _numbers(document)
            columns.extend(map(float, numbers.values()))
        known = [one for one in group if _has_both(one)]
        old, sampling = ([getattr(one, name).double().numpy() for one in known] for name in LOG_PROBS)
        outside_clip += outside(loss, known, old, sampling)
        for one, other in zip(sampling, old, strict=True):
            far += np.histogram(np.abs(np.expm1((other - one).clip(-20, 20))), _BINS)[0]
            if paired < _PAIRED_TOKENS:
                both.add(one, other)
                paired += len(one)
    found = dict(zip(numbers, np.frombuffer(columns).reshape(-1, len(numbers)).T, strict=True))
    in_files = np.argsort(rollouts.groups, kind="stable")
    return Examined(config, loss, found, in_files, rollouts.has_groups, branches, both, outside_clip, far)


def _numbers(document: Document) -> dict[str, float]:
    """What is kept of a document.

    weight: sum of its absolute advantages, which the aggregation divides. truncated: NaN where unknown. prompt, text:
    48 bits of a digest of the tokens before the first trained one (NaN without any), and of all. log_prob: of the whole
    completion. zeros: trained tokens whose log-prob is exactly 0. first_is_zero: whether the first is such a token.
    open_end: whether the last token is not trained. neighbours: sum of absolute differences of a log-prob and the next
    one. differs, gap, distance, largest, k3: of old less sampling log-probs, whether there are any, their sum, the sum
    and the maximum of their sizes, and the sum of k3. NaN where the log-probs that a number is made of are not known.
    """
    tokens, mask, trained = document.tokens.numpy(), document.loss_mask.numpy(), document.num_trained
    unknown = np.full(trained, np.nan)
    old = unknown if document.old_log_probs is None else document.old_log_probs.double().numpy()
    sampling = old if document.sampling_log_probs is None else document.sampling_log_probs.double().numpy()
    advantages = document.advantages.double().numpy()
    gap = old - sampling
    gaps = {
        "differs": not np.array_equal(old, sampling),
        "gap": gap.sum(),
        "distance": np.abs(gap).sum(),
        "largest": np.abs(gap).max(initial=0.0),
        "k3": (np.expm1(gap.clip(-20, 20)) - gap.clip(-20, 20)).sum(),
    }
    if not _has_both(document):
        gaps = dict.fromkeys(gaps, np.nan)
    return gaps | {
        "group": document.group,
        "trained": trained,
        "weight": np.abs(advantages).sum(),
        "reward": np.nan if document.reward is None else document.reward,
        "advantage": advantages.mean() if trained else 0.0,
        "truncated": np.nan if document.truncated is None else document.truncated,
        "prompt": _digest(tokens[: int(mask.argmax())]) if trained else np.nan,
        "text": _digest(tokens),
        "log_prob": sampling.sum(),
        "zeros": (old == 0).sum(),
        "first_is_zero": bool(trained) and old[0] == 0,
        "open_end": bool(trained) and not mask[-1],
        "neighbours": np.abs(np.diff(old)).sum(),
    }


def outside(loss: Loss, documents: list[Document], new: list[np.ndarray], old: list[np.ndarray]) -> float:
    """The share of a document's tokens that ratios of these log-probs, (N,) of each document, take out of the family's
    clip, summed over the documents."""
    if not any(map(len, new)):
        return 0.0
    measured = Loss(loss.family, aggregation_of("token_mean"), loss.temperature, "basic")
    given = [replace(one, old_log_probs=torch.from_numpy(o).float()) for one, o in zip(documents, old, strict=True)]
    micro_batch = pack(given, [0] * len(given))
    log_probs = torch.zeros(len(micro_batch.labels), dtype=torch.float64)
    log_probs[micro_batch.labels >= 0] = torch.from_numpy(np.concatenate(new))
    piece = loss_of_log_probs(log_probs, micro_batch, None, measured, Ranks(), False)
    return float(piece.metric_sums.finalize(piece.totals)["clipped_ratio_fraction"]) * len(documents)


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.3g} %"


def _has_both(document: Document) -> bool:
    return all(getattr(document, name) is not None for name in LOG_PROBS)


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=6).digest())
