"""What of a file of recorded rollouts is wrong, told without a model, and what it does to the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pgtoolkit.dumps.alignment import LOG_PROBS, OWN, WHOSE
from pgtoolkit.dumps.examine import Examined, percent
from pgtoolkit.rollouts.data_metrics import LARGE_SHARE
from pgtoolkit.system.report import plural

_MOST, _FEW, _MANY = 0.5, 0.1, 0.05


@dataclass(frozen=True)
class Finding:
    """level: "wrong", "look" (worth a look), "fine" or "?". says: whole sentences, the last about the loss."""

    level: str
    says: str
    topic: str = ""


wrong, look, fine, unknown = (partial(Finding, level) for level in ("wrong", "look", "fine", "?"))


def of_file(case: Examined) -> list[Finding]:
    """Every check that needs no model; each finds something to say."""
    checks = (_mask, _alignment, _groups, _duplicates, _truncation, _advantages, _mismatch)
    return [replace(finding, topic=check.__name__[1:]) for check in checks for finding in check(case)]


def _mask(case: Examined) -> Iterator[Finding]:
    trained, zeros, first = (case.documents[name] for name in ("trained", "zeros", "first_is_zero"))
    some = trained > 0
    others = (zeros - first).sum() / max(1, (trained - some).sum())
    begins_at_zero = first[some].mean() > _MOST and others < _FEW
    whole = some & (case.documents["truncated"] != 1)
    open_ends = case.documents["open_end"][whole].mean() if whole.any() else 0.0
    if begins_at_zero:
        yield look(
            f"The first trained token of {percent(first[some].mean())} of the documents has a log-prob of exactly 0, "
            f"and {percent(others)} of the other tokens have one. Either the mask begins within the prompt, or the "
            "log-probs stand one place too late. A policy that gives this token the log-prob -x has the ratio exp(-x) "
            "there, where it should be 1; with a model this command says how much that is."
        )
    if open_ends > _MOST:
        yield look(
            f"The last token of {percent(open_ends)} of the documents that were not truncated is not trained. If it "
            "ends the sequence, the loss never teaches the model to stop."
        )
    if not some.all():
        yield look(
            f"{percent(1 - some.mean())} of the documents train no token. They count as documents: under "
            f"aggregation={case.loss.aggregation.name} the weights w_t of all tokens add up to {case.w.sum():.3g}."
        )
    elif not begins_at_zero and open_ends <= _MOST:
        tokens = plural(int(trained.sum()), "token")
        yield fine(f"It trains {tokens}, {trained.mean():.4g} a document, after the prompts.")


def _alignment(case: Examined) -> Iterator[Finding]:
    neighbours, trained = case.documents["neighbours"], case.documents["trained"]
    if not case.branches:
        yield unknown("The file has no log-probs that could stand at other tokens than their own.")
    for name, branches in case.branches.items():
        if branches.shift in WHOSE:
            size = neighbours.sum() / max(1, (trained - 1).clip(0).sum())
            yield wrong(
                f"{name} are those {WHOSE[branches.shift]}. {branches.evidence.capitalize()}. Every first ratio "
                f"compares two tokens: its logarithm is {size:.2g} in size on average, where it should be 0."
            )
        elif branches.shift == OWN:
            yield fine(f"{name} stand at their own tokens (told at {len(branches.shared)} places).")
        else:
            yield unknown(
                f"Too few documents of a prompt begin alike and part later ({len(branches.shared)} places) to tell "
                f"whether {name} stand at their own tokens. The policy that sampled tells: model=huggingface "
                "model.path=FOLDER."
            )
    if case.differs and case.both.shift in WHOSE:
        yield wrong(
            f"sampling_log_probs at a token's place fit old_log_probs {WHOSE[case.both.shift]} best (correlations at "
            f"places {case.both}). One of the two is misplaced, and a correction weighs each token by its gap to "
            "another one."
        )


def _groups(case: Examined) -> Iterator[Finding]:
    if not case.has_groups:
        yield unknown("The file does not say which documents share a prompt.")
        return
    group, computed = case.documents["group"], case.config.advantage.estimator.value != "given"
    numbers, sizes = np.unique(group, return_counts=True)
    prompts, places = case.documents["prompt"], _runs(group, case.in_files)
    mixed, torn = (_have_several(group, labels) for labels in (prompts, places))
    alone = np.isin(group, numbers[sizes == 1])

    def effect(chosen: np.ndarray, labels: np.ndarray, when: str) -> str:
        if not computed:
            return f"They carry {case.share(chosen)}."
        labels = np.unique(np.stack([group, labels]), axis=1, return_inverse=True)[1].ravel()
        return f"Advantages would change by {case.moved(labels)} of their size if {when} were a group of its own."

    def of_all(chosen: np.ndarray) -> str:
        return f"{len(np.unique(group[chosen]))} of {plural(len(numbers), 'group')}"

    if mixed.any():
        yield wrong(
            f"{of_all(mixed)} hold different prompts: their numbers begin anew somewhere, or the mask begins too late. "
            f"A completion is judged by rewards of other prompts. {effect(mixed, prompts, 'each prompt')}"
        )
    if torn.any():
        yield look(
            f"{of_all(torn)} stand in several places of the files. They are trained together, with advantages over all "
            f"their documents, also those of different policies. {effect(torn, places, 'each place')}"
        )
    if alone.any():
        yield (wrong if alone.all() and computed else look)(
            f"{of_all(alone)} have one document, which nothing can be compared with. "
            + ("Its advantage is 0: it adds nothing" if computed else f"They carry {case.share(alone)}")
            + ". Is group_id that of the prompt?"
        )
    if sizes.min() < sizes.max():
        yield look(
            f"Groups have {sizes.min()} to {sizes.max()} documents. Under sample_mean, token_mean and constant a large "
            f"group weighs up to {sizes.max() / sizes.min():.3g} times a small one; under prompt_mean all weigh the "
            "same: a comparison of aggregations compares this, too."
        )
    elif not (mixed | torn | alone).any():
        groups, documents = plural(len(numbers), "group"), plural(sizes[0], "document")
        yield fine(f"{groups} of {documents}, each of one prompt and in one place.")


def _have_several(group: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(documents,) whether the documents of each one's group have different labels, (documents,); NaN is none."""
    pairs = np.unique(np.stack([group, labels])[:, ~np.isnan(labels)], axis=1)[0]
    numbers, counts = np.unique(pairs, return_counts=True)
    return np.isin(group, numbers[counts > 1])


def _runs(group: np.ndarray, in_files: np.ndarray) -> np.ndarray:
    """(documents,) which run of neighbours of one group, in the order of the files, a document belongs to."""
    in_order = np.empty(len(group))
    in_order[in_files] = group
    return np.cumsum(np.diff(in_order, prepend=in_order[0]) != 0)[in_files]


def _duplicates(case: Examined) -> Iterator[Finding]:
    """Pairs of equal documents against those of chance: a document's probability, once for each other of its prompt."""
    some = np.flatnonzero(case.documents["trained"])
    prompt, text, log_prob = (case.documents[name][some] for name in ("prompt", "text", "log_prob"))
    _, first, equal = np.unique(text, return_index=True, return_counts=True)
    observed = float((equal * (equal - 1) / 2).sum())
    again = np.delete(some, first)
    carried = f"They carry {case.share(again)}, and count twice in the baselines of their groups."
    said = f"{int(observed)} pairs of documents are equal"
    if np.isnan(log_prob).any():
        if not observed:
            yield fine("No two documents are equal.")
            return
        yield look(
            f"{said}. {len(again)} documents repeat another one; without log-probs it is not known how many would by "
            f"chance. {carried}"
        )
        return
    _, which, counts = np.unique(prompt, return_inverse=True, return_counts=True)
    expected = float(((counts[which.ravel()] - 1) * np.exp(log_prob)).sum() / 2)
    said = f"{said}; the recorded log-probs let {expected:.3g} be expected."
    if observed <= expected + 4 * np.sqrt(expected) + 3:
        yield fine(said)
        return
    yield wrong(
        f"{said} {len(again)} documents repeat another one: a dump read twice, or a run that was resumed. {carried}"
    )


def _truncation(case: Examined) -> Iterator[Finding]:
    truncated, trained = case.documents["truncated"], case.documents["trained"]
    if np.isnan(truncated).any():
        yield unknown("The file does not say of every document whether it was truncated.")
        return
    cut = truncated == 1
    tokens = trained[cut].sum() / max(1, trained.sum())
    said = f"{percent(cut.mean())} of the documents were truncated, with {percent(tokens)} of the trained tokens."
    if cut.any():
        means = ", ".join(
            f"{kind} {case.documents['advantage'][chosen].mean():+.2g}"
            for kind, chosen in (("truncated", cut), ("whole", ~cut))
            if chosen.any()
        )
        said += (
            f" They carry {case.share(cut)}; advantages on average: {means}. Their last token is no end of an answer."
        )
    yield (look if cut.mean() > _MANY else fine)(said)


def _advantages(case: Examined) -> Iterator[Finding]:
    nothing, group = (case.documents["weight"] == 0) & (case.documents["trained"] > 0), case.documents["group"]
    if nothing.all():
        yield wrong("Every advantage is 0: the loss has no gradient. Are the rewards of every group equal?")
        return
    diluted = case.w[nothing].sum() / case.w.sum()
    number = len(np.unique(group))
    empty = number - len(np.unique(group[~nothing]))
    of_groups = f" ({empty} of {number} groups)" if case.has_groups else ""
    yield (look if nothing.mean() > _MOST else fine)(
        f"{percent(nothing.mean())} of the documents{of_groups} have zero advantages. They add no gradient and count "
        f"in the denominators: under aggregation={case.loss.aggregation.name} the gradient is {1 - diluted:.3g} times "
        "that of the others alone."
    )


def _mismatch(case: Examined) -> Iterator[Finding]:
    if not case.differs:
        known = "The file has no log-probs"
        if case.branches:
            known = f"The file has {' and '.join(case.branches)} alone"
        if len(case.branches) == len(LOG_PROBS):
            known = "sampling_log_probs are old_log_probs, to the last bit"
        yield unknown(f"{known}: how far sampler and trainer differ is not known.")
        return
    share, tokens, trained = case.outside / case.num_documents, case.far.sum(), case.documents["trained"]
    gap, distance, largest, k3 = (case.documents[name] for name in ("gap", "distance", "largest", "k3"))
    if (scope := case.loss.family.scope) == "token":
        epsilon, what = case.epsilon(0.99), "tokens"
    else:
        over = gap / np.maximum(1, trained) if scope == "document" else gap
        far = np.abs(np.expm1(over[~np.isnan(over)].clip(-20, 20)))
        epsilon, what = float(np.quantile(far, 0.99, method="higher")), "documents"
    yield (look if share > LARGE_SHARE else fine)(
        f"Sampler and trainer differ by {np.nansum(distance) / tokens:.2g} a token on average and "
        f"{np.nanmax(largest):.2g} at most; k3 is {np.nansum(k3) / tokens:.2g}. This alone takes {percent(share)} of "
        f"the ratios out of the clip of loss={case.config.loss.name}: for 99 % of the {what} to stay inside, epsilon "
        f"has to be {epsilon:.2g} or more."
    )
