"""pgtk doctor: whether recorded rollouts are fit for a comparison, told with or without the policy that sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgtoolkit.config.schema import Config
from pgtoolkit.dumps.alignment import WHOSE, Judge, Judged
from pgtoolkit.dumps.case import FINE, LOOK, UNKNOWN, WRONG, Case, Finding, percent
from pgtoolkit.dumps.checks import correlations, of_file
from pgtoolkit.dumps.configuration import configured
from pgtoolkit.dumps.convert import ANY_TOKEN, FITS
from pgtoolkit.dumps.examine import Examined, examine, outside
from pgtoolkit.errors import ConfigError
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.system.report import refusal
from pgtoolkit.training.loss import loss_of

_JUDGED = 16
"""Documents that a model is asked about."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, under which loss, and what was found."""

    path: str
    config: Config
    found: Examined
    findings: list[Finding]

    @property
    def is_wrong(self) -> bool:
        return any(finding.level == WRONG for finding in self.findings)


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
    found = examine(rollouts, loss)
    case = Case(found, loss, config, *found.weights(loss))
    findings = of_file(case) + ([] if judge is None else _model(case, rollouts, judge))
    return Diagnosis(path, config, found, findings)


def _model(case: Case, rollouts: RecordedRollouts, judge: Judge) -> list[Finding]:
    """The first ratios, of documents from all over the file."""
    positions = np.unique(np.linspace(0, rollouts.num_documents - 1, _JUDGED).astype(int))
    documents = [rollouts.document(int(position)) for position in positions]
    documents = [one for one in documents if one.num_trained and one.old_log_probs is not None]
    findings = []
    for name in ("old_log_probs", "sampling_log_probs"):
        known = [one for one in documents if getattr(one, name) is not None]
        if known and (name == "old_log_probs" or case.found.noise is not None):
            judged = Judged(name, judge)
            for document in known:
                judged.add(document)
            findings.append(_judged(case, judged, known))
    return findings or [Finding(UNKNOWN, "model", "No document has log-probs that a model could be asked about.")]


def _judged(case: Case, judged: Judged, documents: list) -> Finding:
    name, shift, temperature = judged.name, judged.shifts.shift, judged.judge.temperature
    recorded = [getattr(document, name).double().numpy() for document in documents]
    new = [old + gap for old, gap in zip(recorded, judged.differences, strict=True)]
    share = outside(case.loss, documents, new, recorded) / len(documents)
    size, gaps = np.abs(judged.difference).mean(), judged.difference
    first = np.mean([abs(gap[0]) for gap in judged.differences])
    facts = (
        f"(correlations at places {correlations(judged.shifts)}; first document's mean ratio "
        f"{np.exp(judged.differences[0]).mean():.4f})"
    )
    effect = (
        f"The first ratios have logarithms of {size:.2g} in size on average, and {percent(share)} of them are outside "
        f"of the clip of loss={case.config.loss.name} before anything is learned."
    )
    if shift in WHOSE:
        return Finding(WRONG, "model", f"{name} are those {WHOSE[shift]} {facts}. {effect}")
    if size <= FITS and not first > 10 * size + FITS:
        best = judged.best_temperature
        if size > 1e-3 and abs(np.log(best / temperature)) > 0.02 and judged.improves:
            return Finding(WRONG, "model", _temperature(name, best, temperature, effect))
        return Finding(FINE, "model", f"{name} are the model's {facts}. {effect}")
    if judged.improves:
        return Finding(WRONG, "model", _temperature(name, judged.best_temperature, temperature, effect))
    rest = np.concatenate([gap[1:] for gap in judged.differences])
    if len(rest) and np.abs(rest).mean() <= FITS:
        cause = f"The first trained token's differ by {first:.2g}, the others by {np.abs(rest).mean():.2g}: the mask "
        cause += "begins within the prompt"
    elif (gaps < 1e-3).mean() > 0.95 and gaps.mean() < -0.02:
        cause = (
            f"{percent((gaps < 1e-3).mean())} of the tokens were recorded with more than the model's log-prob: top_p "
            "or top_k has cut the distribution and renormalised it"
        )
    else:
        cause = "Other weights sampled them, or another model"
    return Finding(WRONG, "model", f"{name} are not the model's {facts}. {cause}. {effect}")


def _temperature(name: str, best: float, temperature: float, effect: str) -> str:
    return (
        f"{name} fit the model at a temperature of {best:.2f}, not at rollout.temperature={temperature:g}. {effect} "
        f"Use rollout.temperature={best:.2f} if they were sampled at that; else they were taken before dividing by the "
        "temperature: record them after it."
    )


def page(diagnosis: Diagnosis) -> str:
    """What `pgtk doctor` prints, at most 120 columns wide."""
    found, config = diagnosis.found, diagnosis.config
    groups = f" of {len(np.unique(found.documents['group']))} groups" if found.has_groups else ""
    lines = [
        f"{diagnosis.path}: {found.num_documents} documents{groups}, judged under loss={config.loss.name} "
        f"aggregation={config.aggregation.mode.value} advantage={config.advantage.estimator.value}"
    ]
    for finding in diagnosis.findings:
        start = f"{finding.level:<6}{finding.topic:<12}"
        lines += textwrap.wrap(finding.says, 120, initial_indent=start, subsequent_indent=" " * len(start))
    wrong = sum(finding.level == WRONG for finding in diagnosis.findings)
    look = sum(finding.level == LOOK for finding in diagnosis.findings)
    verdict = "not fit for a comparison" if wrong else "nothing is wrong"
    lines.append(f"{verdict}: {wrong} wrong, {look} worth a look")
    return "\n".join(lines)
