"""pgtk doctor: what of recorded rollouts is wrong, and what it does to the loss; also by the policy that sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pgtoolkit.dumps.alignment import ANY_TOKEN, Comparison, SamplingPolicy, configured
from pgtoolkit.dumps.measured import Rollouts, outside_of_clip, percent
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.data_metrics import LARGE_SHARE
from pgtoolkit.rollouts.recorded import RecordedRollouts, recorded_rollouts
from pgtoolkit.system.report import plural, refusal
from pgtoolkit.training.loss import loss_of

_ASKED_DOCUMENTS = 16
"""Documents that a model is asked about."""
_MOST, _FEW, _MANY = 0.5, 0.1, 0.05

_Findings = Iterator[tuple[str, str]]
"""(level, sentences) of one check."""


class Finding(NamedTuple):
    """level: "wrong", "look" (worth a look), "fine" or "?". says: whole sentences, the last about the loss."""

    topic: str
    level: str
    says: str


@dataclass(frozen=True)
class Diagnosis:
    """title: what was looked at, and under which loss."""

    title: str
    findings: list[Finding]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)


def diagnose(path: str, overrides: Sequence[str]) -> Diagnosis:
    """Read the rollouts as training would, and examine them; DataError for what training refuses."""
    config = configured(path, overrides)
    if config.aggregation.reducer:
        reason = "The weights of the four aggregations are known here."
        setting = f"aggregation.reducer={config.aggregation.reducer}"
        raise ConfigError(refusal(setting, "null for pgtk doctor", "a function", reason, "aggregation=token_mean"))
    loss, policy = loss_of(config), SamplingPolicy(config) if config.model.name == "huggingface" else None
    limits = (ANY_TOKEN, None) if policy is None else (policy.vocabulary_size, policy.max_positions)
    config.rollout.shuffle, config.rollout.epochs = False, 1
    source = recorded_rollouts(config, loss, *limits)
    rollouts = Rollouts(source, loss, config.advantage.estimator == "given")
    findings = [Finding(check.__name__[1:], *found) for check in _CHECKS for found in check(rollouts)]
    if policy is not None:
        findings += [Finding("model", *found) for found in _model(loss, source, policy)]
    of_groups = f" of {plural(rollouts.num_groups, 'group')}" if rollouts.has_groups else ""
    of_groups += "" if rollouts.begins.all() else f", {plural(int(rollouts.begins.sum()), 'trajectory')}"
    title = f"{path}: {plural(source.num_documents, 'document')}{of_groups}, judged under loss={config.loss.name} "
    title += f"aggregation={config.aggregation.mode} advantage={config.advantage.estimator}"
    return Diagnosis(title, findings)


def render(diagnosis: Diagnosis) -> str:
    """What `pgtk doctor` prints, at most 120 columns wide."""
    lines = [diagnosis.title]
    for topic, level, says in diagnosis.findings:
        start = f"{level:<6}{topic:<12}"
        lines += textwrap.wrap(says, 120, initial_indent=start, subsequent_indent=" " * len(start))
    verdict = "not fit for a comparison" if diagnosis.count("wrong") else "nothing is wrong"
    lines.append(f"{verdict}: {diagnosis.count('wrong')} wrong, {diagnosis.count('look')} worth a look")
    return "\n".join(lines)


def _mask(r: Rollouts) -> _Findings:
    trained, first = r.columns.trained, r.columns.first_is_zero
    some = trained > 0
    others = (r.columns.zeros - first).sum() / max(1, (trained - some).sum())
    whole = some & (r.columns.truncated != 1)
    open_ends = r.columns.open_end[whole].mean() if whole.any() else 0.0
    begins_early = first[some].mean() > _MOST and others < _FEW
    if begins_early:
        says = f"The first trained token of {percent(first[some].mean())} of the documents has a log-prob of exactly 0"
        says += f", and {percent(others)} of the other tokens have one. Either the mask begins within the prompt, or "
        yield "look", says + "the log-probs stand one place too late."
    if open_ends > _MOST:
        says = f"The last token of {percent(open_ends)} of the documents that were not truncated is not trained. "
        yield "look", says + "If it ends the sequence, the loss never teaches the model to stop."
    if not some.all():
        says = f"{percent(1 - some.mean())} of the documents train no token. They count as documents: under "
        says += f"aggregation={r.loss.aggregation.name} the weights w_t of all tokens add up to {r.w.sum():.3g}."
        yield "look", says
    elif not begins_early and open_ends <= _MOST:
        tokens = plural(int(trained.sum()), "token")
        yield "fine", f"It trains {tokens}, {trained.mean():.4g} a document, after the prompts."


def _alignment(r: Rollouts) -> _Findings:
    if not r.differ:
        says = "Without both kinds of log-probs the file does not show whether they stand at their own tokens. "
        yield "?", says + "To compare them with the policy that sampled, add model=huggingface model.path=FOLDER."
    elif (comparison := Comparison(r.pairs)).whose:
        says = f"sampling_log_probs at a token's place are those {comparison.whose} {comparison}. One of the two "
        yield "wrong", says + "kinds is misplaced, and a correction weighs each token by its gap to another one."
    else:
        yield "fine", f"old_log_probs and sampling_log_probs stand at the same tokens {comparison}."


def _groups(r: Rollouts) -> _Findings:
    if not r.has_groups:
        yield "?", "The file does not say which documents share a prompt."
        return
    group = r.columns.group
    numbers, sizes = np.unique(group[r.begins], return_counts=True)
    counted = "document" if r.begins.all() else "trajectory"
    in_order = np.empty(len(group))
    in_order[r.in_files] = group
    places = np.cumsum(np.diff(in_order, prepend=in_order[0]) != 0)[r.in_files]
    prompts = np.where(r.begins, r.columns.prompt, np.nan)  # later parts of a trajectory have another context
    mixed, torn = (_have_several(group, labels) for labels in (prompts, places))
    alone = np.isin(group, numbers[sizes == 1])
    if mixed.any():
        says = f"{r.groups_of(mixed)} hold different prompts: their numbers begin anew somewhere, or the mask begins "
        says += f"too late. A completion is judged by rewards of other prompts. They carry {r.share(mixed)}."
        yield "wrong", says
    if torn.any():
        says = f"{r.groups_of(torn)} stand in several places of the files. They are trained together, with advantages "
        says += f"over all their documents, also those of different policies. They carry {r.share(torn)}."
        yield "look", says
    if alone.any():
        effect = f"They carry {r.share(alone)}" if r.has_advantages else "Its advantage is 0: it adds nothing"
        says = f"{r.groups_of(alone)} have one {counted}, which nothing can be compared with. {effect}. Is group_id "
        yield "wrong" if alone.all() and not r.has_advantages else "look", says + "that of the prompt?"
    if sizes.min() < sizes.max():
        says = f"Groups have {sizes.min()} to {plural(sizes.max(), counted)}. Under sample_mean, token_mean and "
        says += f"constant a large group weighs up to {sizes.max() / sizes.min():.3g} times a small one; under "
        yield "look", says + "prompt_mean all weigh the same: a comparison of aggregations compares this, too."
    elif not (mixed | torn | alone).any():
        groups, documents = plural(len(numbers), "group"), plural(sizes[0], counted)
        yield "fine", f"{groups} of {documents}, each of one prompt and in one place."


def _have_several(group: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(documents,) whether the documents of each one's group have different labels, (documents,); NaN is none."""
    pairs = np.unique(np.stack([group, labels])[:, ~np.isnan(labels)], axis=1)[0]
    numbers, counts = np.unique(pairs, return_counts=True)
    return np.isin(group, numbers[counts > 1])


def _duplicates(r: Rollouts) -> _Findings:
    """Pairs of equal documents against those of chance: a document's probability, once for each other of its prompt."""
    some = np.flatnonzero(r.columns.trained)
    prompt, text, log_prob = r.columns.prompt[some], r.columns.text[some], r.columns.log_prob[some]
    _, first, equal = np.unique(text, return_index=True, return_counts=True)
    observed, again = int((equal * (equal - 1) / 2).sum()), np.delete(some, first)
    says, copies = f"{plural(observed, 'pair')} of documents are equal", plural(len(again), "document")
    carried = f"They carry {r.share(again)}, and count twice in the baselines of their groups."
    _, which, counts = np.unique(prompt, return_inverse=True, return_counts=True)
    expected = float(((counts[which.ravel()] - 1) * np.exp(log_prob)).sum() / 2)
    if not observed:
        yield "fine", "No two documents are equal."
    elif np.isnan(expected):
        chance = "without log-probs it is not known how many would by chance"
        yield "look", f"{says}. {copies} repeat another one; {chance}. {carried}"
    elif observed <= expected + 4 * np.sqrt(expected) + 3:
        yield "fine", f"{says}; the recorded log-probs let {expected:.3g} be expected."
    else:
        cause = "a dump read twice, or a run that was resumed"
        says += f"; the recorded log-probs let {expected:.3g} be expected."
        yield "wrong", f"{says} {copies} repeat another one: {cause}. {carried}"


def _truncation(r: Rollouts) -> _Findings:
    truncated, trained = r.columns.truncated, r.columns.trained
    if np.isnan(truncated).any():
        yield "?", "The file does not say of every document whether it was truncated."
        return
    cut = truncated == 1
    tokens = trained[cut].sum() / max(1, trained.sum())
    says = f"{percent(cut.mean())} of the documents were truncated, with {percent(tokens)} of the trained tokens."
    if cut.any():
        says += f" They carry {r.share(cut)}; their mean advantage is {r.columns.advantage[cut].mean():+.2g}."
    yield "look" if cut.mean() > _MANY else "fine", says


def _advantages(r: Rollouts) -> _Findings:
    nothing = (r.columns.weight == 0) & (r.columns.trained > 0)
    if nothing.all():
        yield "wrong", "Every advantage is 0: the loss has no gradient. Are the rewards of every group equal?"
        return
    empty = r.num_groups - len(np.unique(r.columns.group[~nothing]))
    of_groups = f" ({empty} of {r.num_groups} groups)" if r.has_groups else ""
    left = 1 - r.w[nothing].sum() / r.w.sum()
    says = f"{percent(nothing.mean())} of the documents{of_groups} have zero advantages. They add no gradient and "
    says += f"count in the denominators: under aggregation={r.loss.aggregation.name} the gradient is {left:.3g} times "
    yield "look" if nothing.mean() > _MOST else "fine", says + "that of the others alone."


def _mismatch(r: Rollouts) -> _Findings:
    if not r.differ:
        same = "sampling_log_probs are old_log_probs, to the last bit"
        known = same if r.pairs else "The file does not have both kinds of log-probs"
        yield "?", f"{known}: how far sampler and trainer differ is unknown."
        return
    distance, outside = r.columns.distance, r.columns.outside.mean()
    mean, most = np.nansum(distance) / r.columns.trained[~np.isnan(distance)].sum(), np.nanmax(r.columns.largest)
    says = f"Sampler and trainer differ by {mean:.2g} a token on average and {most:.2g} at most. "
    says += f"This alone takes {percent(outside)} of the ratios out of the clip of loss={r.loss.family.name}."
    yield "look" if outside > LARGE_SHARE else "fine", says


_CHECKS = (_mask, _alignment, _groups, _duplicates, _truncation, _advantages, _mismatch)
"""Those that need no model; each finds something to say."""


def _model(loss: Loss, source: RecordedRollouts, policy: SamplingPolicy) -> _Findings:
    """The first ratios, of documents from all over the file."""
    positions = np.unique(np.linspace(0, source.num_documents - 1, _ASKED_DOCUMENTS).astype(int))
    documents = [document for document in map(source.document, positions.tolist()) if document.num_trained]
    compared = list(policy.compare(documents))
    for name, known, comparison in compared:
        pairs = zip(known, comparison.pairs, strict=True)
        share = np.mean([outside_of_clip(loss, document, new, old) for document, (old, new) in pairs])
        effect = f"The first ratios have logarithms of {comparison.size:.2g} in size on average, and {percent(share)} "
        effect += f"of them are outside of the clip of loss={loss.family.name} before anything is learned."
        if comparison.whose:
            yield "wrong", f"{name} are those {comparison.whose} {comparison}. {effect}"
        elif comparison.fits:
            yield "fine", f"{name} are the model's {comparison}. {effect}"
        else:
            cause = "Other weights sampled them, or at another temperature, or top_p has cut the distribution"
            yield "wrong", f"{name} are not the model's {comparison}. {effect} {cause}."
    if not compared:
        yield "?", "No document has log-probs that a model could be asked about."
