"""pgtk doctor: whether recorded rollouts are fit for a comparison, told with or without the policy that sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgtoolkit.dumps.alignment import LOG_PROBS, Judge, Judged
from pgtoolkit.dumps.checks import Finding, fine, of_file, unknown, wrong
from pgtoolkit.dumps.configuration import configured
from pgtoolkit.dumps.convert import ANY_TOKEN
from pgtoolkit.dumps.examine import Examined, examine, outside, percent
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.system.report import plural, refusal
from pgtoolkit.training.loss import loss_of

_JUDGED = 16
"""Documents that a model is asked about."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, and what was found."""

    path: str
    case: Examined
    findings: list[Finding]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)


def diagnose(path: str, overrides: Sequence[str]) -> Diagnosis:
    """Read the rollouts as training would, and judge them; DataError for what training refuses."""
    config = configured(path, overrides)
    if config.aggregation.reducer:
        reason = "The weights of the four aggregations are known here."
        setting = f"aggregation.reducer={config.aggregation.reducer}"
        raise ConfigError(refusal(setting, "null for pgtk doctor", "a function", reason, "aggregation=token_mean"))
    loss, judge = loss_of(config), Judge(config) if config.model.name == "huggingface" else None
    rollouts = RecordedRollouts(
        replace(config.rollout, shuffle=False, epochs=1),
        config.advantage.estimator.value,
        ANY_TOKEN if judge is None else judge.vocabulary_size,
        needs=("group_id",) if config.aggregation.mode.value == "prompt_mean" else (),
        max_tokens=None if judge is None else judge.max_positions,
        reads_old_log_probs=loss.reads_old_log_probs,
    )
    case = examine(rollouts, loss, config)
    findings = of_file(case)
    if judge is not None:
        findings += [replace(finding, topic="model") for finding in _model(case, rollouts, judge)]
    return Diagnosis(path, case, findings)


def _model(case: Examined, rollouts: RecordedRollouts, judge: Judge) -> Iterator[Finding]:
    """The first ratios, of documents from all over the file."""
    positions = np.unique(np.linspace(0, rollouts.num_documents - 1, _JUDGED).astype(int))
    documents = [rollouts.document(int(position)) for position in positions]
    documents = [one for one in documents if one.num_trained and one.old_log_probs is not None]
    for name in LOG_PROBS if case.differs else LOG_PROBS[:1]:
        if known := [one for one in documents if getattr(one, name) is not None]:
            yield _judged(case, Judged(name, judge, known), known)
    if not documents:
        yield unknown("No document has log-probs that a model could be asked about.")


def _judged(case: Examined, judged: Judged, documents: list) -> Finding:
    recorded = [getattr(document, judged.name).double().numpy() for document in documents]
    new = [old + gap for old, gap in zip(recorded, judged.differences, strict=True)]
    share = outside(case.loss, documents, new, recorded) / len(documents)
    fits, what, advice = judged.verdict
    effect = (
        f"The first ratios have logarithms of {judged.size:.2g} in size on average, and {percent(share)} of them are "
        f"outside of the clip of loss={case.config.loss.name} before anything is learned."
    )
    return (fine if fits else wrong)(f"{what} {effect} {advice}".rstrip())


def page(diagnosis: Diagnosis) -> str:
    """What `pgtk doctor` prints, at most 120 columns wide."""
    case, config = diagnosis.case, diagnosis.case.config
    groups = f" of {plural(len(np.unique(case.documents['group'])), 'group')}" if case.has_groups else ""
    lines = [
        f"{diagnosis.path}: {plural(case.num_documents, 'document')}{groups}, judged under loss={config.loss.name} "
        f"aggregation={config.aggregation.mode.value} advantage={config.advantage.estimator.value}"
    ]
    for finding in diagnosis.findings:
        start = f"{finding.level:<6}{finding.topic:<12}"
        lines += textwrap.wrap(finding.says, 120, initial_indent=start, subsequent_indent=" " * len(start))
    verdict = "not fit for a comparison" if diagnosis.count("wrong") else "nothing is wrong"
    lines.append(f"{verdict}: {diagnosis.count('wrong')} wrong, {diagnosis.count('look')} worth a look")
    return "\n".join(lines)
