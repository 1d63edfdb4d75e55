"""What of recorded rollouts is wrong, told without a model, and what it does to the loss."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pgtoolkit.batch import Document, StepTotals
from pgtoolkit.dumps.alignment import LOG_PROBS, Comparison
from pgtoolkit.kernels.losses import loss_of_log_probs
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.objective import Loss
from pgtoolkit.packing import pack
from pgtoolkit.rollouts.data_metrics import LARGE_SHARE
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.system.report import plural

_COMPARED_TOKENS = 2**17
"""Tokens whose two log-probs are kept, to see whether they stand at the same places."""
_MOST, _FEW, _MANY = 0.5, 0.1, 0.05


@dataclass(frozen=True)
class Finding:
    """level: "wrong", "look" (worth a look), "fine" or "?". says: whole sentences, the last about the loss."""

    topic: str
    level: str
    says: str


@dataclass(frozen=True)
class Rollouts:
    """Recorded rollouts under the loss that would train on them.

    numbers: those that `_numbers` has of each document, (documents,) in the order in which training reads them.
    in_files: (documents,) the place of each in the order of the files. w: (documents,) the sum of w_t over the tokens
    of each. w_advantage: the same of w_t |A_t|. pairs: sampling and old log-probs of the first documents with both.
    outside: share of the ratios that old less sampling log-probs alone take out of the clip.
    """

    loss: Loss
    has_groups: bool
    has_advantages: bool
    numbers: dict[str, np.ndarray]
    in_files: np.ndarray
    w: np.ndarray
    w_advantage: np.ndarray
    pairs: list[tuple[np.ndarray, np.ndarray]]
    outside: float

    def share(self, chosen: np.ndarray) -> str:
        """What the chosen documents carry of the loss."""
        total = self.w_advantage.sum()
        return percent(self.w_advantage[chosen].sum() / total if total else 0.0) + " of the sum of w|A|"


def examine(rollouts: RecordedRollouts, loss: Loss, has_advantages: bool) -> Rollouts:
    """Read every document once; about 100 bytes of each stay. has_advantages: the file's own are trained on."""
    columns, names, pairs, tokens, outside_clip = array("d"), (), [], 0, 0.0
    for position in range(rollouts.num_documents):
        document = rollouts.document(position)
        row = _numbers(document)
        columns.extend(map(float, row.values()))
        names = row.keys()
        if document.num_trained and all(getattr(document, name) is not None for name in LOG_PROBS):
            old, sampling = (getattr(document, name).double().numpy() for name in LOG_PROBS)
            outside_clip += outside(loss, document, old, sampling)
            if tokens < _COMPARED_TOKENS:
                pairs.append((sampling, old))
                tokens += len(old)
    numbers = dict(zip(names, np.frombuffer(columns).reshape(-1, len(names)).T, strict=True))
    w = numbers["trained"] / _denominators(loss, numbers)
    w_advantage = w * numbers["weight"] / np.maximum(1, numbers["trained"])
    in_files, groups = np.argsort(rollouts.groups, kind="stable"), rollouts.has_groups
    share = outside_clip / rollouts.num_documents
    return Rollouts(loss, groups, has_advantages, numbers, in_files, w, w_advantage, pairs, share)


def _numbers(document: Document) -> dict[str, float]:
    """What is kept of a document; NaN is unknown.

    weight: sum of its absolute advantages. advantage: their mean. prompt, text: 48 bits of a digest of the tokens
    before the first trained one, and of all. log_prob: of the whole completion. zeros: trained tokens whose log-prob is
    exactly 0. first_is_zero: whether the first is one. open_end: whether the last token is not trained. distance,
    largest: sum and maximum of the absolute differences of the two kinds of log-probs.
    """
    tokens, mask, trained = document.tokens.numpy(), document.loss_mask.numpy(), document.num_trained
    old, sampling = document.old_log_probs, document.sampling_log_probs
    sampler = old if sampling is None else sampling
    gap = None if old is None or sampling is None else (old.double() - sampling.double()).abs()
    advantages = document.advantages.double()
    return {
        "group": document.group,
        "trained": trained,
        "weight": float(advantages.abs().sum()),
        "advantage": float(advantages.mean()) if trained else 0.0,
        "truncated": np.nan if document.truncated is None else document.truncated,
        "prompt": _digest(tokens[: int(mask.argmax())]) if trained else np.nan,
        "text": _digest(tokens),
        "log_prob": np.nan if sampler is None else float(sampler.double().sum()),
        "zeros": np.nan if old is None else int((old == 0).sum()),
        "first_is_zero": old is not None and bool(trained) and float(old[0]) == 0,
        "open_end": bool(trained) and not mask[-1],
        "distance": np.nan if gap is None else float(gap.sum()),
        "largest": float(gap.max()) if gap is not None and trained else 0.0,
    }


def _digest(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=6).digest())


def _denominators(loss: Loss, numbers: dict[str, np.ndarray]) -> np.ndarray:
    """(documents,) the aggregation's; 1 where nothing is trained."""
    counts, groups = (torch.from_numpy(numbers[name]).long() for name in ("trained", "group"))
    per_group = torch.zeros(int(groups.max()) + 1, dtype=torch.int64).index_add_(0, groups, counts)
    totals = StepTotals(len(counts), int(counts.sum()), int((counts == 0).sum()), len(per_group), per_group)
    return np.where(counts > 0, loss.aggregation.denominators(totals, counts, groups).double(), 1.0)


def outside(loss: Loss, document: Document, new: np.ndarray, old: np.ndarray) -> float:
    """The share of a document's tokens whose ratios of these log-probs, (N,), lie outside of the family's clip."""
    measured = Loss(loss.family, aggregation_of("token_mean"), loss.temperature, "basic")
    micro_batch = pack([replace(document, old_log_probs=torch.from_numpy(old).float())], [0])
    log_probs = torch.zeros(len(micro_batch.labels), dtype=torch.float64)
    log_probs[micro_batch.labels >= 0] = torch.from_numpy(new)
    piece = loss_of_log_probs(log_probs, micro_batch, None, measured, Ranks(), False)
    return float(piece.metric_sums.finalize(piece.totals)["clipped_ratio_fraction"])


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def check(rollouts: Rollouts) -> list[Finding]:
    """Every check that needs no model; each finds something to say."""
    checks = (_mask, _alignment, _groups, _duplicates, _truncation, _advantages, _mismatch)
    return [Finding(one.__name__[1:], level, says) for one in checks for level, says in one(rollouts)]


def _mask(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    trained, zeros, first = (rollouts.numbers[name] for name in ("trained", "zeros", "first_is_zero"))
    some, finds_nothing = trained > 0, True
    others = (zeros - first).sum() / max(1, (trained - some).sum())
    if first[some].mean() > _MOST and others < _FEW:
        finds_nothing = False
        yield (
            "look",
            f"The first trained token of {percent(first[some].mean())} of the documents has a log-prob of exactly 0, "
            f"and {percent(others)} of the other tokens have one. Either the mask begins within the prompt, or the "
            "log-probs stand one place too late.",
        )
    whole = some & (rollouts.numbers["truncated"] != 1)
    if whole.any() and (open_ends := rollouts.numbers["open_end"][whole].mean()) > _MOST:
        finds_nothing = False
        yield (
            "look",
            f"The last token of {percent(open_ends)} of the documents that were not truncated is not trained. If it "
            "ends the sequence, the loss never teaches the model to stop.",
        )
    if not some.all():
        yield (
            "look",
            f"{percent(1 - some.mean())} of the documents train no token. They count as documents: under "
            f"aggregation={rollouts.loss.aggregation.name} the weights w_t of all tokens add up to "
            f"{rollouts.w.sum():.3g}.",
        )
    elif finds_nothing:
        tokens = plural(int(trained.sum()), "token")
        yield "fine", f"It trains {tokens}, {trained.mean():.4g} a document, after the prompts."


def _alignment(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    by_model = "The policy that sampled tells: model=huggingface model.path=FOLDER."
    if not _differs(rollouts):
        yield "?", f"Without two kinds of log-probs it is not known whether they stand at their own tokens. {by_model}"
        return
    comparison = Comparison(rollouts.pairs)
    if comparison.whose:
        yield (
            "wrong",
            f"sampling_log_probs at a token's place are those {comparison.whose} {comparison}. One of the two kinds "
            "is misplaced, and a correction weighs each token by its gap to another one.",
        )
    else:
        yield "fine", f"old_log_probs and sampling_log_probs stand at the same tokens {comparison}."


def _differs(rollouts: Rollouts) -> bool:
    """Whether both kinds of log-probs are known and differ anywhere."""
    return bool(np.nansum(rollouts.numbers["distance"]))


def _groups(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    if not rollouts.has_groups:
        yield "?", "The file does not say which documents share a prompt."
        return
    group = rollouts.numbers["group"]
    numbers, sizes = np.unique(group, return_counts=True)
    in_order = np.empty(len(group))
    in_order[rollouts.in_files] = group
    places = np.cumsum(np.diff(in_order, prepend=in_order[0]) != 0)[rollouts.in_files]
    mixed, torn = (_have_several(group, labels) for labels in (rollouts.numbers["prompt"], places))
    alone = np.isin(group, numbers[sizes == 1])

    def of_all(chosen: np.ndarray) -> str:
        return f"{len(np.unique(group[chosen]))} of {plural(len(numbers), 'group')}"

    if mixed.any():
        yield (
            "wrong",
            f"{of_all(mixed)} hold different prompts: their numbers begin anew somewhere, or the mask begins too late. "
            f"A completion is judged by rewards of other prompts. They carry {rollouts.share(mixed)}.",
        )
    if torn.any():
        yield (
            "look",
            f"{of_all(torn)} stand in several places of the files. They are trained together, with advantages over all "
            f"their documents, also those of different policies. They carry {rollouts.share(torn)}.",
        )
    if alone.any():
        effect = "Its advantage is 0: it adds nothing"
        if rollouts.has_advantages:
            effect = f"They carry {rollouts.share(alone)}"
        yield (
            "wrong" if alone.all() and not rollouts.has_advantages else "look",
            f"{of_all(alone)} have one document, which nothing can be compared with. {effect}. Is group_id that of the "
            "prompt?",
        )
    if sizes.min() < sizes.max():
        yield (
            "look",
            f"Groups have {sizes.min()} to {sizes.max()} documents. Under sample_mean, token_mean and constant a large "
            f"group weighs up to {sizes.max() / sizes.min():.3g} times a small one; under prompt_mean all weigh the "
            "same: a comparison of aggregations compares this, too.",
        )
    elif not (mixed | torn | alone).any():
        groups, documents = plural(len(numbers), "group"), plural(sizes[0], "document")
        yield "fine", f"{groups} of {documents}, each of one prompt and in one place."


def _have_several(group: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(documents,) whether the documents of each one's group have different labels, (documents,); NaN is none."""
    pairs = np.unique(np.stack([group, labels])[:, ~np.isnan(labels)], axis=1)[0]
    numbers, counts = np.unique(pairs, return_counts=True)
    return np.isin(group, numbers[counts > 1])


def _duplicates(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    """Pairs of equal documents against those of chance: a document's probability, once for each other of its prompt."""
    some = np.flatnonzero(rollouts.numbers["trained"])
    prompt, text, log_prob = (rollouts.numbers[name][some] for name in ("prompt", "text", "log_prob"))
    _, first, equal = np.unique(text, return_index=True, return_counts=True)
    observed, again = int((equal * (equal - 1) / 2).sum()), np.delete(some, first)
    says = f"{plural(observed, 'pair')} of documents are equal"
    carried = f"They carry {rollouts.share(again)}, and count twice in the baselines of their groups."
    if not observed:
        yield "fine", "No two documents are equal."
    elif np.isnan(log_prob).any():
        chance = "without log-probs it is not known how many would by chance"
        yield "look", f"{says}. {plural(len(again), 'document')} repeat another one; {chance}. {carried}"
    else:
        _, which, counts = np.unique(prompt, return_inverse=True, return_counts=True)
        expected = float(((counts[which.ravel()] - 1) * np.exp(log_prob)).sum() / 2)
        says += f"; the recorded log-probs let {expected:.3g} be expected."
        if observed <= expected + 4 * np.sqrt(expected) + 3:
            yield "fine", says
        else:
            cause = "a dump read twice, or a run that was resumed"
            yield "wrong", f"{says} {plural(len(again), 'document')} repeat another one: {cause}. {carried}"


def _truncation(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    truncated, trained = rollouts.numbers["truncated"], rollouts.numbers["trained"]
    if np.isnan(truncated).any():
        yield "?", "The file does not say of every document whether it was truncated."
        return
    cut = truncated == 1
    tokens = trained[cut].sum() / max(1, trained.sum())
    says = f"{percent(cut.mean())} of the documents were truncated, with {percent(tokens)} of the trained tokens."
    if cut.any():
        mean = rollouts.numbers["advantage"][cut].mean()
        says += f" They carry {rollouts.share(cut)}; their mean advantage is {mean:+.2g}."
    yield "look" if cut.mean() > _MANY else "fine", says


def _advantages(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    nothing = (rollouts.numbers["weight"] == 0) & (rollouts.numbers["trained"] > 0)
    group = rollouts.numbers["group"]
    if nothing.all():
        yield "wrong", "Every advantage is 0: the loss has no gradient. Are the rewards of every group equal?"
        return
    number = len(np.unique(group))
    empty = number - len(np.unique(group[~nothing]))
    of_groups = f" ({empty} of {number} groups)" if rollouts.has_groups else ""
    left = 1 - rollouts.w[nothing].sum() / rollouts.w.sum()
    yield (
        "look" if nothing.mean() > _MOST else "fine",
        f"{percent(nothing.mean())} of the documents{of_groups} have zero advantages. They add no gradient and count "
        f"in the denominators: under aggregation={rollouts.loss.aggregation.name} the gradient is {left:.3g} times "
        "that of the others alone.",
    )


def _mismatch(rollouts: Rollouts) -> Iterator[tuple[str, str]]:
    if not _differs(rollouts):
        known = "sampling_log_probs are old_log_probs, to the last bit"
        if not rollouts.pairs:
            known = "The file has no two kinds of log-probs"
        yield "?", f"{known}: how far sampler and trainer differ is not known."
        return
    distance = rollouts.numbers["distance"]
    mean = np.nansum(distance) / rollouts.numbers["trained"][~np.isnan(distance)].sum()
    yield (
        "look" if rollouts.outside > LARGE_SHARE else "fine",
        f"Sampler and trainer differ by {mean:.2g} a token on average and {rollouts.numbers['largest'].max():.2g} at "
        f"most. This alone takes {percent(rollouts.outside)} of the ratios out of the clip of "
        f"loss={rollouts.loss.family.name}.",
    )
