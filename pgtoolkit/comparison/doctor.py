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
    return "\n\n".join(_page(run) for run in runs)


def _page(examined: Examined) -> str:
    """Return the lines on a run: its failures, and what could not be looked for."""
    run = examined.run
    state = run.why_not_counted() if run.state != "done" else f"done, {run.step} steps"
    lines = folded(f"{shell_path(run.path)}: {state}")
    if _is_too_short(run):
        return "\n".join([*lines, f"  Nothing can be said of fewer than {FEWEST_STEPS} steps."])
    for rule, finding in examined.failures:
        lines += ["", f"  {rule.name}, since step {finding.step}"]
        lines += folded(f"{finding.seen}. Healthy: {rule.healthy}. {rule.meaning}", "    ", "    ")
        lines += folded(f"Change: {rule.change_in(run)}.", "    ", "      ")
    if not examined.failures:
        looked_at = len(RULES) - len(examined.not_measured) - len(examined.elsewhere)
        lines.append(f"  None of the {looked_at} known failures that were looked for.")
    if examined.without_effect:
        lines += ["", "  Options that changed no number of any step:"]
        for silent in examined.without_effect:
            lines += folded(silent, "    ", "      ")
    if examined.not_measured:
        names = "; ".join(
            f"{rule.name} ({rule.measured_by or ', '.join(rule.metrics)})"
            for rule in examined.not_measured
        )
        lines += ["", *folded(f"Not looked for, since it was not measured: {names}.", "  ", "    ")]
    for elsewhere in dict.fromkeys(elsewhere for _, elsewhere in examined.elsewhere):
        names = ", ".join(rule.name for rule, other in examined.elsewhere if other == elsewhere)
        sentence = f"Not looked for, with {elsewhere.setting}: {names}. {elsewhere.reason}"
        lines += ["", *folded(sentence, "  ", "    ")]
    return "\n".join(lines)


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
