"""`pgtk doctor`: finds the known failures of a run, since which step, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pgtoolkit.assembly.without_effect import without_effect
from pgtoolkit.comparison.failures import (
    FEWEST_STEPS,
    HELD_OUT_SHARE,
    RULES,
    Elsewhere,
    Finding,
    Rule,
    of_trained_documents,
)
from pgtoolkit.comparison.text_report import folded
from pgtoolkit.runs.find import HELD_OUT, Run, read_run, run_directories
from pgtoolkit.runs.loss_metrics import OVER_ALL_DOCUMENTS
from pgtoolkit.system.report import shell_path


@dataclass(frozen=True)
class Examined:
    """A run with its failures, the rules whose metrics it has not measured, those whose metrics
    mean something else in its configuration, and options that changed nothing."""

    run: Run
    failures: list[tuple[Rule, Finding]]
    not_measured: list[Rule]
    elsewhere: list[tuple[Rule, Elsewhere]]
    without_effect: list[str]


def examine(run: Run) -> Examined:
    """Apply every rule to a run; to a run of fewer than FEWEST_STEPS steps none."""
    examined = Examined(run, [], [], [], [])
    if _is_too_short(run):
        return examined
    examined.without_effect.extend(without_effect(run.config, run.columns))
    measured = {name for name in run.columns if run.values(name)}
    if any(name.startswith(HELD_OUT) for name in measured):
        measured.add(HELD_OUT_SHARE)
    judged = of_trained_documents(run)
    for rule in RULES:
        elsewhere = rule.elsewhere_in(run)
        if elsewhere is not None:
            examined.elsewhere.append((rule, elsewhere))
            continue
        if not measured.issuperset(rule.metrics):
            examined.not_measured.append(rule)
            continue
        finding = rule.find(judged)
        if finding is not None:
            if judged is not run and OVER_ALL_DOCUMENTS.intersection(rule.metrics):
                seen = f"{finding.seen}, over the documents with a trained token"
                finding = replace(finding, seen=seen)
            examined.failures.append((rule, finding))
    # What comes first is more often the cause than the consequence.
    examined.failures.sort(key=lambda failure: failure[1].step)
    return examined


def _is_too_short(run: Run) -> bool:
    return len(run.columns.get("step", ())) < FEWEST_STEPS


def diagnose(paths: Sequence[str], as_json: bool = False) -> str:
    """Return the page on the runs in these folders; raises ConfigError for a folder without any."""
    runs = [examine(read_run(path, None)) for path in run_directories("pgtk doctor", paths)]
    if as_json:
        return json.dumps([_as_values(run) for run in runs], indent=1, ensure_ascii=False)
    return _page(runs[0]) if len(runs) == 1 else _page_of_several(runs)


def _page(examined: Examined) -> str:
    """Return the lines on a run: its failures, and what could not be looked for."""
    lines = folded(_state(examined.run))
    if _is_too_short(examined.run):
        return "\n".join([*lines, f"  {_TOO_SHORT}"])
    for rule, finding in examined.failures:
        lines += ["", f"  {rule.name}, since step {finding.step}"]
        lines += folded(f"{finding.seen}. Healthy: {rule.healthy}. {rule.meaning}", "    ", "    ")
        lines += folded(f"Change: {rule.change_in(examined.run)}.", "    ", "      ")
    if not examined.failures:
        lines.append(f"  {_none_of_those(examined)}")
    if examined.without_effect:
        lines += ["", f"  {_WITHOUT_EFFECT}:"]
        for silent in examined.without_effect:
            lines += folded(silent, "    ", "      ")
    for sentence in _not_looked_for(examined):
        lines += ["", *folded(sentence, "  ", "    ")]
    return "\n".join(lines)


def _page_of_several(runs: list[Examined]) -> str:
    """Return the lines on several runs: what is the same of some of them once, with their names."""
    lines = [line for examined in runs for line in folded(_state(examined.run))]
    failing: dict[tuple[Rule, str], list[tuple[Run, Finding]]] = {}
    for examined in runs:
        for rule, finding in examined.failures:
            change = rule.change_in(examined.run)
            failing.setdefault((rule, change), []).append((examined.run, finding))
    for (rule, change), findings in failing.items():
        lines += ["", *folded(f"{rule.name}, in {_counted(findings, runs)}", "  ", "    ")]
        for run, finding in findings:
            seen = f"{run.name}, since step {finding.step}: {finding.seen}."
            lines += folded(seen, "    ", "      ")
        lines += folded(f"Healthy: {rule.healthy}. {rule.meaning}", "    ", "    ")
        lines += folded(f"Change: {change}.", "    ", "      ")
    having: dict[str, list[str]] = {}
    for examined in runs:
        for sentence in _further_sentences(examined):
            having.setdefault(sentence, []).append(examined.run.name)
    for sentence, names in having.items():
        named = "" if len(names) == len(runs) else f" ({', '.join(names)})"
        sentence = f"{_counted(names, runs)}{named}: {sentence}"
        lines += ["", *folded(sentence, "  ", "    ")]
    return "\n".join(lines)


def _counted(some: Sequence[object], runs: Sequence[object]) -> str:
    return f"{'all' if len(some) == len(runs) else f'{len(some)} of'} {len(runs)} runs"


_TOO_SHORT = f"Nothing can be said of fewer than {FEWEST_STEPS} steps."
_WITHOUT_EFFECT = "Options that changed no number of any step"


def _state(run: Run) -> str:
    state = run.why_not_counted() if run.state != "done" else f"done, {run.step} steps"
    return f"{shell_path(run.path)}: {state}"


def _none_of_those(examined: Examined) -> str:
    looked_at = len(RULES) - len(examined.not_measured) - len(examined.elsewhere)
    return f"None of the {looked_at} known failures that were looked for."


def _further_sentences(examined: Examined) -> list[str]:
    """Return what the page of a run says beside its failures, a sentence each."""
    if _is_too_short(examined.run):
        return [_TOO_SHORT]
    healthy = [] if examined.failures else [_none_of_those(examined)]
    silent = [f"{_WITHOUT_EFFECT}: {option}" for option in examined.without_effect]
    return [*healthy, *silent, *_not_looked_for(examined)]


def _not_looked_for(examined: Examined) -> list[str]:
    """Return the sentences on rules that could not be applied to a run."""
    sentences = []
    if examined.not_measured:
        names = "; ".join(
            f"{rule.name} ({rule.measured_by or ', '.join(rule.metrics)})"
            for rule in examined.not_measured
        )
        sentences.append(f"Not looked for, since it was not measured: {names}.")
    for elsewhere in dict.fromkeys(elsewhere for _, elsewhere in examined.elsewhere):
        names = ", ".join(rule.name for rule, other in examined.elsewhere if other == elsewhere)
        sentences.append(f"Not looked for, with {elsewhere.setting}: {names}. {elsewhere.reason}")
    return sentences


def _as_values(examined: Examined) -> dict[str, object]:
    """Return the same as _page for JSON."""
    failures = [
        {
            "failure": rule.name,
            "since": finding.step,
            "seen": finding.seen,
            "healthy": rule.healthy,
            "change": rule.change_in(examined.run),
        }
        for rule, finding in examined.failures
    ]
    run = examined.run
    return {
        "run": str(run.path),
        "state": run.state,
        "step": run.step,
        "found": failures,
        "without_effect": examined.without_effect,
        "not_measured": [rule.name for rule in examined.not_measured],
        "means_something_else": [
            {"failure": rule.name, "with": elsewhere.setting, "reason": elsewhere.reason}
            for rule, elsewhere in examined.elsewhere
        ],
    }
