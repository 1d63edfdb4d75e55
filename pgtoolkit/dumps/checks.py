"""What of a file of recorded rollouts is wrong, told without a model, and what it does to the loss."""

from __future__ import annotations

import numpy as np

from pgtoolkit.dumps.alignment import OWN, WHOSE, Shifts
from pgtoolkit.dumps.case import FINE, LOOK, UNKNOWN, WRONG, Case, Finding, percent
from pgtoolkit.rollouts.data_metrics import LARGE_SHARE

_MOST, _FEW, _MANY = 0.5, 0.1, 0.05


def of_file(case: Case) -> list[Finding]:
    """Every check that needs no model; each finds something to say."""
    checks = (_mask, _alignment, _groups, _duplicates, _truncation, _advantages, _mismatch)
    return [finding for check in checks for finding in check(case)]


def _mask(case: Case) -> list[Finding]:
    trained, zeros, first = (case.column(name) for name in ("trained", "zeros", "first_is_zero"))
    some, findings = trained > 0, []
    others = (zeros - first).sum() / max(1, (trained - some).sum())
    if first[some].mean() > _MOST and others < _FEW:
        findings.append(
            Finding(
                LOOK,
                "mask",
                f"The first trained token of {percent(first[some].mean())} of the documents has a log-prob of exactly "
                f"0, and {percent(others)} of the other tokens have one. Either the mask begins within the prompt, or "
                "the log-probs stand one place too late. A policy that gives this token the log-prob -x has the ratio "
                "exp(-x) there, where it should be 1; with a model this command says how much that is.",
            )
        )
    whole = some & (case.column("truncated") != 1)
    if whole.any() and case.column("open_end")[whole].mean() > _MOST:
        findings.append(
            Finding(
                LOOK,
                "mask",
                f"The last token of {percent(case.column('open_end')[whole].mean())} of the documents that were not "
                "truncated is not trained. If it ends the sequence, the loss never teaches the model to stop.",
            )
        )
    if not some.all():
        findings.append(
            Finding(
                LOOK,
                "mask",
                f"{percent(1 - some.mean())} of the documents train no token. They count as documents: under "
                f"aggregation={case.loss.aggregation.name} the weights w_t of all tokens add up to {case.w.sum():.3g}.",
            )
        )
    said = f"It trains {int(trained.sum())} tokens, {trained[some].mean():.4g} a document, after the prompts."
    return findings or [Finding(FINE, "mask", said)]


def _alignment(case: Case) -> list[Finding]:
    findings = []
    for name, branches in case.found.branches.items():
        places, shift = len(branches.shared), branches.shift
        if shift in WHOSE:
            findings.append(
                Finding(
                    WRONG,
                    "alignment",
                    f"{name} are those {WHOSE[shift]}. Where two documents of a prompt part ({places} places), the "
                    f"last shared token's differ by {np.median(branches.shared):.2g} and the first different token's "
                    f"by {np.median(branches.differing):.2g} (medians). Every first ratio compares two tokens: its "
                    f"logarithm is {case.found.neighbours:.2g} in size on average, where it should be 0.",
                )
            )
        elif shift == OWN:
            findings.append(Finding(FINE, "alignment", f"{name} stand at their own tokens (told at {places} places)."))
        else:
            findings.append(
                Finding(
                    UNKNOWN,
                    "alignment",
                    f"Too few documents of a prompt begin alike and part later ({places} places) to tell whether "
                    f"{name} stand at their own tokens. The policy that sampled tells: model=huggingface "
                    "model.path=FOLDER.",
                )
            )
    both = case.found.both
    if both is not None and both.shift in WHOSE:
        findings.append(
            Finding(
                WRONG,
                "alignment",
                f"sampling_log_probs at a token's place fit old_log_probs {WHOSE[both.shift]} best (correlations at "
                f"places {correlations(both)}). One of the two is misplaced, and a correction weighs each token by "
                "its gap to another one.",
            )
        )
    return findings


def _groups(case: Case) -> list[Finding]:
    if not case.found.has_groups:
        return [Finding(UNKNOWN, "groups", "The file does not say which documents share a prompt.")]
    group, prompt = case.column("group"), case.column("prompt")
    findings, computed = [], case.config.advantage.estimator.value != "given"
    numbers, sizes = np.unique(group, return_counts=True)
    pairs = np.unique(np.stack([group, prompt]), axis=1)[0]
    mixed = np.isin(group, [one for one, count in zip(*np.unique(pairs, return_counts=True), strict=True) if count > 1])
    if mixed.any():
        texts = np.unique(np.stack([group, prompt]), axis=1, return_inverse=True)[1].ravel()
        effect = f"Advantages would change by {case.moved(texts)} of their size if each prompt were its own group."
        findings.append(
            Finding(
                WRONG,
                "groups",
                f"{len(np.unique(group[mixed]))} of {len(numbers)} groups hold different prompts: their numbers begin "
                "anew somewhere, or the mask begins too late. A completion is judged by rewards of other prompts. "
                + (effect if computed else f"They carry {case.share(mixed)}."),
            )
        )
    runs = _runs(group, case.found.in_files)
    places = np.unique(np.stack([group, runs]), axis=1)[0]
    torn = np.isin(group, [one for one, count in zip(*np.unique(places, return_counts=True), strict=True) if count > 1])
    if torn.any():
        effect = f"Advantages would change by {case.moved(runs)} of their size if each place were a group of its own."
        findings.append(
            Finding(
                LOOK,
                "groups",
                f"{len(np.unique(group[torn]))} of {len(numbers)} groups stand in several places of the files. They "
                "are trained together, with advantages over all their documents, also those of different policies. "
                + (effect if computed else f"They carry {case.share(torn)}."),
            )
        )
    alone = np.isin(group, numbers[sizes == 1])
    if alone.any():
        findings.append(
            Finding(
                WRONG if alone.all() and computed else LOOK,
                "groups",
                f"{int(alone.sum())} of {len(numbers)} groups have one document, which nothing can be compared with. "
                + ("Its advantage is 0: it adds nothing" if computed else f"They carry {case.share(alone)}")
                + ". Is group_id that of the prompt?",
            )
        )
    if len(np.unique(sizes)) > 1:
        findings.append(
            Finding(
                LOOK,
                "groups",
                f"Groups have {sizes.min()} to {sizes.max()} documents. Under sample_mean, token_mean and constant a "
                f"large group weighs up to {sizes.max() / sizes.min():.3g} times a small one; under prompt_mean all "
                "weigh the same: a comparison of aggregations compares this, too.",
            )
        )
    said = f"{len(numbers)} groups of {sizes[0]} documents, each of one prompt and in one place."
    return findings or [Finding(FINE, "groups", said)]


def _runs(group: np.ndarray, in_files: np.ndarray) -> np.ndarray:
    """(documents,) which run of neighbours of one group, in the order of the files, a document belongs to."""
    in_order = np.empty(len(group))
    in_order[in_files] = group
    return np.cumsum(np.diff(in_order, prepend=in_order[0]) != 0)[in_files]


def _duplicates(case: Case) -> list[Finding]:
    """Pairs of equal documents against those of chance: a document's probability, once for each other of its prompt."""
    prompt, text, log_prob = (case.column(name) for name in ("prompt", "text", "log_prob"))
    some = case.column("trained") > 0
    _, which, counts = np.unique(prompt[some], return_inverse=True, return_counts=True)
    expected = float(((counts[which.ravel()] - 1) * np.exp(log_prob[some])).sum() / 2)
    _, copies, equal = np.unique(text[some], return_index=True, return_counts=True)
    observed = float((equal * (equal - 1) / 2).sum())
    surplus = np.ones(int(some.sum()), bool)
    surplus[copies] = False
    said = f"{int(observed)} pairs of documents are equal; the recorded log-probs let {expected:.3g} be expected."
    if observed <= expected + 4 * np.sqrt(expected) + 3:
        return [Finding(FINE, "duplicates", said)]
    again = np.flatnonzero(some)[surplus]
    return [
        Finding(
            WRONG,
            "duplicates",
            f"{said} {len(again)} documents repeat another one: a dump read twice, or a run that was resumed. They "
            f"carry {case.share(again)}, and count twice in the baselines of their groups.",
        )
    ]


def _truncation(case: Case) -> list[Finding]:
    truncated = case.column("truncated")
    if np.isnan(truncated).any():
        return [Finding(UNKNOWN, "truncation", "The file does not say of every document whether it was truncated.")]
    cut = truncated == 1
    tokens = case.column("trained")[cut].sum() / max(1, case.column("trained").sum())
    said = f"{percent(cut.mean())} of the documents were truncated, with {percent(tokens)} of the trained tokens."
    if not cut.any():
        return [Finding(FINE, "truncation", said)]
    means = ", ".join(
        f"{kind} {case.column('advantage')[chosen].mean():+.2g}"
        for kind, chosen in (("truncated", cut), ("whole", ~cut))
        if chosen.any()
    )
    effect = f"They carry {case.share(cut)}; advantages on average: {means}. Their last token is no end of an answer."
    return [Finding(LOOK if cut.mean() > _MANY else FINE, "truncation", f"{said} {effect}")]


def _advantages(case: Case) -> list[Finding]:
    nothing = (case.column("weight") == 0) & (case.column("trained") > 0)
    if nothing.all():
        says = "Every advantage is 0: the loss has no gradient. Are the rewards of every group equal?"
        return [Finding(WRONG, "advantages", says)]
    diluted = case.w[nothing].sum() / case.w.sum()
    numbers = np.unique(case.column("group"))
    empty = len(numbers) - len(np.unique(case.column("group")[~nothing]))
    of_groups = f" ({empty} of {len(numbers)} groups)" if case.found.has_groups else ""
    says = (
        f"{percent(nothing.mean())} of the documents{of_groups} have zero advantages. They add no gradient and count "
        f"in the denominators: under aggregation={case.loss.aggregation.name} the gradient is {1 - diluted:.3g} times "
        "that of the others alone."
    )
    return [Finding(LOOK if nothing.mean() > _MOST else FINE, "advantages", says)]


def _mismatch(case: Case) -> list[Finding]:
    noise = case.found.noise
    if noise is None or not noise.tokens:
        both = "sampling_log_probs" in case.found.branches
        says = (
            "sampling_log_probs are old_log_probs, to the last bit"
            if both
            else "The file has one kind of log-probs alone"
        )
        return [Finding(UNKNOWN, "mismatch", f"{says}: how far sampler and trainer differ is not known.")]
    share = noise.outside / case.found.num_documents
    scope = case.loss.family.scope
    if scope == "token":
        epsilon, what = noise.epsilon(0.99), "tokens"
    else:
        gap, trained = case.column("gap"), case.column("trained")
        over = gap / np.maximum(1, trained) if scope == "document" else gap
        epsilon, what = float(np.quantile(np.abs(np.expm1(over.clip(-20, 20))), 0.99, method="higher")), "documents"
    says = (
        f"Sampler and trainer differ by {noise.absolute / noise.tokens:.2g} a token on average and {noise.largest:.2g} "
        f"at most; k3 is {noise.k3 / noise.tokens:.2g}. This alone takes {percent(share)} of the ratios out of the "
        f"clip of loss={case.config.loss.name}: for 99 % of the {what} to stay inside, epsilon has to be {epsilon:.2g} "
        "or more."
    )
    return [Finding(LOOK if share > LARGE_SHARE else FINE, "mismatch", says)]


def correlations(shifts: Shifts) -> str:
    """Of the two kinds of log-probs as they stand, and one place off."""
    return "-1, 0, +1: " + ", ".join(f"{value:.3f}" for value in shifts.correlations.values())
