"""The rules on the task, what a model is asked and how it is scored: chats, stop strings, verifiers."""

from __future__ import annotations

import re
from typing import Any

from pgtoolkit.config.evaluation import is_on
from pgtoolkit.config.rules.run import existing, installed
from pgtoolkit.config.rules.step import importable
from pgtoolkit.config.schema import (
    Config,
    PolicyRolloutConfig,
    PromptsTaskConfig,
    ReasoningGymTaskConfig,
    TaskConfig,
    WrittenTaskConfig,
)
from pgtoolkit.system.report import Report, is_number

VERIFIERS = ("exact_match", "regular_expression", "math_verify")
"""Those that come with pgtoolkit; others are functions of the user's."""

_KEYS = ("verifier", "weight", "pattern")
_EXAMPLE = "'task.verifiers={answer: {verifier: math_verify}, short: {verifier: my_module.short, weight: 0.1}}'"


def task(c: Config, report: Report) -> None:
    if c.rollout.name == "recorded":
        if (typed := report.typed_of("task")) and not is_on(c):
            uses = "only gives model=tiny its characters" if c.model.name == "tiny" else "changes nothing"
            report.note(f"{' '.join(typed)} {uses}: with rollout=recorded prompts and rewards come from rollout.path.")
        return
    if isinstance(c.task, WrittenTaskConfig) and c.task.system_prompt is not None:
        _backslashes("task.system_prompt", c.task.system_prompt, report)
    prompts(c.task, report)


def prompts(task: TaskConfig, report: Report) -> None:
    """What the task of training, or of a set of held-out prompts, needs."""
    if isinstance(task, ReasoningGymTaskConfig):
        installed(report, "task=reasoning_gym", "reasoning_gym", "reasoning-gym")
    elif isinstance(task, PromptsTaskConfig):
        existing(report, "task.path", task.path)
        if "math_verify" in _verifiers(task, report):
            installed(report, "math_verify among the verifiers", "math_verify", "math-verify")


def stop(c: Config, report: Report) -> None:
    texts = c.rollout.stop if isinstance(c.rollout, PolicyRolloutConfig) else []
    for given in texts:
        if given == "":
            reason = "Every completion contains it."
            report.refuse(f"rollout.stop={texts}", "texts that are not empty", "''", reason, "rollout.stop=[]")
        _backslashes("rollout.stop", given, report)


def _backslashes(key: str, value: str, report: Report) -> None:
    if re.search(r"\\[nt]", value):
        report.note(
            f"{key} holds a backslash and a letter, as typed; for a line break, which models write, use a file, or "
            f"$'...' of the shell: $'{key}=[\"\\n\"]'."
        )


def _verifiers(task: PromptsTaskConfig, report: Report) -> set[str]:
    """Exactly one of task.verifier and task.verifiers, each with what it needs; returns those that are used."""
    if not task.verifiers:
        if task.verifier is None:
            reason, use = "Completions need a score.", f"task.verifier=exact_match or {_EXAMPLE}"
            report.refuse("task.verifier=null", "task.verifiers", "none", reason, use)
        else:
            _verifier("task.", task.verifier, task.pattern, report)
        return {str(task.verifier)}
    for key in ("verifier", "pattern"):
        if (value := getattr(task, key)) is not None:
            needs, reason = "task.verifiers={}", "It would be ignored: those score the completions."
            report.refuse(f"task.{key}={value}", needs, [*task.verifiers], reason, f"{needs} or task.{key}=null")
    entries = {name: entry for name, entry in task.verifiers.items() if _is_entry(name, entry, report)}
    for name, entry in entries.items():
        _verifier(f"task.verifiers.{name}.", entry["verifier"], entry.get("pattern"), report)
    return {entry["verifier"] for entry in entries.values()}


def _is_entry(name: str, entry: Any, report: Report) -> bool:
    """Whether an entry of task.verifiers has the form of one."""
    key, named = f"task.verifiers.{name}", re.fullmatch(r"[A-Za-z]\w{0,39}", name)
    if not named:
        needs, reason = (
            "a name of up to 40 letters, digits and '_', a letter first",
            "reward/NAME is its metric.",
        )
        report.refuse(key, needs, name, reason, _EXAMPLE)
    if not isinstance(entry, dict) or set(entry) - set(_KEYS) or not isinstance(entry.get("verifier"), str):
        needs, reason = "the keys verifier and, if need be, weight and pattern", "It says what scores, and how much."
        report.refuse(key, needs, entry, reason, _EXAMPLE)
        return False
    weight = entry.get("weight", 1)
    if is_number(weight) and 0 < abs(weight) <= 1e6:
        return bool(named)
    reason = "The reward is the sum of weight x score."
    report.refuse_value(f"{key}.weight", weight, "a number up to 1e6, not 0", reason, 1)
    return False


def _verifier(prefix: str, name: str, pattern: str | None, report: Report) -> None:
    """There is such a verifier, and the pattern fits it. prefix: of its keys."""
    if name not in VERIFIERS:
        alternatives = f"one of {', '.join(VERIFIERS)}, or "
        importable(report, f"{prefix}verifier", str(name), "It scores the completions.", alternatives)
    needs = f"{prefix}verifier=regular_expression"
    if name != "regular_expression":
        if pattern is not None:
            reason = "It would be ignored: other verifiers take none."
            report.refuse(f"{prefix}pattern={pattern}", needs, name, reason, f"{needs} or {prefix}pattern=null")
        return
    try:
        groups, got = re.compile(str(pattern)).groups, pattern
    except re.error as error:
        groups, got = 0, f"{pattern}: {error}"
    if groups != 1:
        reason = "What its group finds last is compared with the answer; (?:...) captures nothing."
        report.refuse(needs, f"{prefix}pattern with one group", got, reason, f"\"{prefix}pattern='answer: (.*)'\"")
