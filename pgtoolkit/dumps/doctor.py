"""pgtk doctor: whether recorded rollouts are fit for a comparison, told with or without the policy that sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgtoolkit.config.schema import Config
from pgtoolkit.dumps.alignment import LOG_PROBS, SamplingPolicy
from pgtoolkit.dumps.checks import Finding, Rollouts, check, examine, outside, percent
from pgtoolkit.dumps.configuration import configured
from pgtoolkit.dumps.convert import ANY_TOKEN
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.system.report import plural, refusal
from pgtoolkit.training.data import recorded_rollouts
from pgtoolkit.training.loss import loss_of

_ASKED_DOCUMENTS = 16
"""Documents that a model is asked about."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, and what was found."""

    path: str
    config: Config
    rollouts: Rollouts
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
    in_order = replace(config, rollout=replace(config.rollout, shuffle=False, epochs=1))
    limits = (ANY_TOKEN, None) if policy is None else (policy.vocabulary_size, policy.max_positions)
    source = recorded_rollouts(in_order, loss, *limits)
    rollouts = examine(source, loss, config.advantage.estimator.value == "given")
    findings = check(rollouts)
    if policy is not None:
        findings += [Finding("model", level, says) for level, says in _model(loss, source, policy)]
    return Diagnosis(path, config, rollouts, findings)


def _model(loss: Loss, source: RecordedRollouts, policy: SamplingPolicy) -> Iterator[tuple[str, str]]:
    """The first ratios, of documents from all over the file."""
    positions = np.unique(np.linspace(0, source.num_documents - 1, _ASKED_DOCUMENTS).astype(int))
    documents = [document for document in map(source.document, positions.tolist()) if document.num_trained]
    for name in LOG_PROBS:
        known = [document for document in documents if getattr(document, name) is not None]
        if not known:
            continue
        comparison = policy.compare(name, known)
        pairs = zip(known, comparison.pairs, strict=True)
        share = sum(outside(loss, document, new, recorded) for document, (recorded, new) in pairs) / len(known)
        effect = (
            f"The first ratios have logarithms of {comparison.size:.2g} in size on average, and {percent(share)} of "
            f"them are outside of the clip of loss={loss.family.name} before anything is learned."
        )
        if comparison.whose:
            yield "wrong", f"{name} are those {comparison.whose} {comparison}. {effect}"
        elif comparison.fits:
            yield "fine", f"{name} are the model's {comparison}. {effect}"
        else:
            cause = "Other weights sampled them, or at another temperature, or top_p has cut the distribution"
            yield "wrong", f"{name} are not the model's {comparison}. {effect} {cause}."
    if not any(getattr(document, name) is not None for document in documents for name in LOG_PROBS):
        yield "?", "No document has log-probs that a model could be asked about."


def render(diagnosis: Diagnosis) -> str:
    """What `pgtk doctor` prints, at most 120 columns wide."""
    config, group = diagnosis.config, diagnosis.rollouts.numbers["group"]
    groups = f" of {plural(len(np.unique(group)), 'group')}" if diagnosis.rollouts.has_groups else ""
    lines = [
        f"{diagnosis.path}: {plural(len(group), 'document')}{groups}, judged under loss={config.loss.name} "
        f"aggregation={config.aggregation.mode.value} advantage={config.advantage.estimator.value}"
    ]
    for finding in diagnosis.findings:
        start = f"{finding.level:<6}{finding.topic:<12}"
        lines += textwrap.wrap(finding.says, 120, initial_indent=start, subsequent_indent=" " * len(start))
    verdict = "not fit for a comparison" if diagnosis.count("wrong") else "nothing is wrong"
    lines.append(f"{verdict}: {diagnosis.count('wrong')} wrong, {diagnosis.count('look')} worth a look")
    return "\n".join(lines)
