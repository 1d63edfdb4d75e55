"""What recorded rollouts hold, in one pass: numbers of each document, and sums over all of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from pgtoolkit.batch import Document, StepTotals
from pgtoolkit.dumps.alignment import Branches, Shifts
from pgtoolkit.kernels.losses import loss_of_log_probs
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.packing import pack
from pgtoolkit.rollouts.recorded import RecordedRollouts

_PAIRED_TOKENS = 2**17
"""Tokens whose two log-probs are kept, to see whether they stand at the same places."""
_BINS = np.concatenate([[0.0], np.logspace(-6, 9, 1501), [np.inf]])
"""Of how far a ratio lies from 1; a bin is 2.3 % wide."""


@dataclass
class Columns:
    """Numbers of each document, in the order in which training reads them; (documents,) each.

    weight: sum of its absolute advantages, which the aggregation divides. truncated: NaN where unknown. prompt, text:
    48 bits of a digest of the tokens before the first trained one, and of all. log_prob: of the whole completion.
    zeros: trained tokens whose log-prob is exactly 0. first_is_zero: whether the first is such a token. open_end:
    whether the last token is not trained. gap: sum of old less sampling log-probs.
    """

    group: array = field(default_factory=lambda: array("d"))
    trained: array = field(default_factory=lambda: array("d"))
    weight: array = field(default_factory=lambda: array("d"))
    reward: array = field(default_factory=lambda: array("d"))
    advantage: array = field(default_factory=lambda: array("d"))
    truncated: array = field(default_factory=lambda: array("d"))
    prompt: array = field(default_factory=lambda: array("d"))
    text: array = field(default_factory=lambda: array("d"))
    log_prob: array = field(default_factory=lambda: array("d"))
    zeros: array = field(default_factory=lambda: array("d"))
    first_is_zero: array = field(default_factory=lambda: array("d"))
    open_end: array = field(default_factory=lambda: array("d"))
    gap: array = field(default_factory=lambda: array("d"))

    def add(self, document: Document) -> None:
        tokens, mask, trained = document.tokens.numpy(), document.loss_mask.numpy(), document.num_trained
        old = np.zeros(trained) if document.old_log_probs is None else document.old_log_probs.double().numpy()
        sampling = old if document.sampling_log_probs is None else document.sampling_log_probs.double().numpy()
        advantages = document.advantages.double().numpy()
        values = {
            "group": document.group,
            "trained": trained,
            "weight": np.abs(advantages).sum(),
            "reward": np.nan if document.reward is None else document.reward,
            "advantage": advantages.mean() if trained else 0.0,
            "truncated": np.nan if document.truncated is None else document.truncated,
            "prompt": _digest(tokens[: int(mask.argmax())] if trained else tokens),
            "text": _digest(tokens),
            "log_prob": sampling.sum(),
            "zeros": (old == 0).sum(),
            "first_is_zero": bool(trained) and old[0] == 0,
            "open_end": bool(trained) and not mask[-1],
            "gap": (old - sampling).sum(),
        }
        for name, value in values.items():
            getattr(self, name).append(float(value))


@dataclass
class Examined:
    """All that the pass finds.

    documents: Columns as arrays. in_files: (documents,) the place of each in the order of the files. branches: of each
    kind of log-probs. both: the two kinds beside each other. neighbours: mean absolute difference of a log-prob and
    the next one of its document. noise: of sampler against trainer, where both are known and differ anywhere.
    """

    documents: dict[str, np.ndarray]
    in_files: np.ndarray
    has_groups: bool
    branches: dict[str, Branches]
    both: Shifts | None
    neighbours: float
    noise: Noise | None

    @property
    def num_documents(self) -> int:
        return len(self.documents["group"])

    def weights(self, loss: Loss) -> tuple[np.ndarray, np.ndarray]:
        """(documents,) each: the sum of w_t over the tokens of a document, and the sum of w_t |A_t|."""
        counts = torch.from_numpy(self.documents["trained"]).long()
        groups = torch.from_numpy(self.documents["group"]).long()
        per_group = torch.zeros(int(groups.max()) + 1, dtype=torch.int64).index_add_(0, groups, counts)
        empty = int((counts == 0).sum())
        totals = StepTotals(len(counts), int(counts.sum()), empty, len(per_group), per_group)
        denominators = loss.aggregation.denominators(totals, counts, groups).double().numpy()
        some = np.where(counts.numpy() > 0, denominators, 1.0)
        return self.documents["trained"] / some, self.documents["weight"] / some


@dataclass
class Noise:
    """Old less sampling log-probs of the trained tokens. outside: documents' mean share of tokens that this alone
    takes out of the family's clip. far: how many tokens' ratios lie how far from 1, by _BINS."""

    absolute: float = 0.0
    largest: float = 0.0
    k3: float = 0.0
    tokens: int = 0
    outside: float = 0.0
    far: np.ndarray = field(default_factory=lambda: np.zeros(len(_BINS) - 1))

    def add(self, old: list[np.ndarray], sampling: list[np.ndarray], outside: float) -> None:
        """(N,) of each of some documents. outside: their shares, summed."""
        gap = np.concatenate(old) - np.concatenate(sampling)
        limited = gap.clip(-20, 20)
        self.absolute += np.abs(gap).sum()
        self.largest = max(self.largest, np.abs(gap).max(initial=0.0))
        self.k3 += (np.expm1(limited) - limited).sum()
        self.tokens += len(gap)
        self.far += np.histogram(np.abs(np.expm1(limited)), _BINS)[0]
        self.outside += outside

    def epsilon(self, share: float) -> float:
        """A clip of 1 - epsilon to 1 + epsilon leaves this share of the tokens inside."""
        return float(_BINS[1:][np.searchsorted(np.cumsum(self.far), share * self.tokens)])


def examine(rollouts: RecordedRollouts, loss: Loss) -> Examined:
    """Read every document once; one group is in memory, and about 100 bytes per document stay."""
    columns, branches, noise = Columns(), {}, Noise()
    both, paired, distance, pairs, differs = Shifts(), 0, 0.0, 0, False
    for group in _groups(rollouts):
        for name in ("old_log_probs", "sampling_log_probs"):
            if all(getattr(document, name) is not None for document in group):
                branches.setdefault(name, Branches(name)).add(group)
        for document in group:
            columns.add(document)
            if document.old_log_probs is not None:
                distance += float(document.old_log_probs.double().diff().abs().sum())
                pairs += max(0, document.num_trained - 1)
        if all(one.old_log_probs is not None and one.sampling_log_probs is not None for one in group):
            old = [one.old_log_probs.double().numpy() for one in group]
            sampling = [one.sampling_log_probs.double().numpy() for one in group]
            differs |= not all(map(np.array_equal, old, sampling))
            noise.add(old, sampling, outside(loss, group, old, sampling))
            for one, other in zip(sampling, old, strict=True):
                if paired < _PAIRED_TOKENS:
                    both.add(one, other)
                    paired += len(one)
    found = {one.name: np.frombuffer(getattr(columns, one.name)) for one in fields(columns)}
    in_files = np.argsort(rollouts.groups, kind="stable")
    known = noise if differs else None
    return Examined(
        found, in_files, rollouts.has_groups, branches, both if differs else None, distance / max(1, pairs), known
    )


def outside(loss: Loss, documents: list[Document], new: list[np.ndarray], old: list[np.ndarray]) -> float:
    """The share of a document's tokens that ratios of these log-probs, (N,) of each document, take out of the family's
    clip, summed over the documents."""
    if not any(map(len, new)):
        return 0.0
    measured = replace(loss, aggregation=aggregation_of("token_mean"), metrics="basic", correction=None, kl=None)
    measured = replace(measured, entropy_coefficient=0.0)
    given = [replace(one, old_log_probs=torch.from_numpy(o).float()) for one, o in zip(documents, old, strict=True)]
    micro_batch = pack(given, [0] * len(given))
    log_probs = torch.zeros(len(micro_batch.labels), dtype=torch.float64)
    log_probs[micro_batch.labels >= 0] = torch.from_numpy(np.concatenate(new))
    piece = loss_of_log_probs(log_probs, micro_batch, None, measured, Ranks(), False)
    return float(piece.metric_sums.finalize(piece.totals)["clipped_ratio_fraction"]) * len(documents)


def _groups(rollouts: RecordedRollouts) -> Iterator[list[Document]]:
    group: list[Document] = []
    for position in range(rollouts.num_documents):
        document = rollouts.document(position)
        if group and group[0].group != document.group:
            yield group
            group = []
        group.append(document)
    if group:
        yield group


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=6).digest())
