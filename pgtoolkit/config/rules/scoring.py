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
from pgtoolkit.system.report import Report, is_number, text

VERIFIERS = ("exact_match", "regular_expression", "math_verify")
"""Those that come with pgtoolkit; others are functions of the user's."""

_KEYS = ("verifier", "weight", "pattern")
_EXAMPLE = "'task.verifiers={answer: {verifier: math_verify}, short: {verifier: my_module.short, weight: 0.1}}'"


def task(c: Config, report: Report) -> None:
    if c.rollout.name == "recorded":
        if (own := report.typed_of("task")) and not is_on(c):
            uses = "only gives model=tiny its characters" if c.model.name == "tiny" else "changes nothing"
            report.note(f"{' '.join(own)} {uses}: with rollout=recorded prompts and rewards come from rollout.path.")
        return
    if isinstance(c.task, WrittenTaskConfig):
        _chat(c, c.task, report)
    prompts(c.task, report)


def prompts(task: TaskConfig, report: Report) -> None:
    """What the task of training, or of a set of held-out prompts, needs."""
    if isinstance(task, ReasoningGymTaskConfig):
        installed(report, "task=reasoning_gym", "reasoning_gym", "reasoning-gym")
    elif isinstance(task, PromptsTaskConfig):
        existing(report, "task.path", task.path)
        if "math_verify" in _verifiers(task, report):
            installed(report, "math_verify among the verifiers", "math_verify", "math-verify")
        _processes(task, report)


def _chat(c: Config, task: WrittenTaskConfig, report: Report) -> None:
    """A system message needs a chat template; whether the model's tokenizer has one, only the tokenizer knows."""
    system = task.system_prompt
    if not isinstance(system, str):
        return
    if c.model.name == "tiny" or task.chat == "never":
        got = "model=tiny, which has none" if c.model.name == "tiny" else "task.chat=never"
        use = "model=huggingface" if c.model.name == "tiny" else "task.chat=auto or task.system_prompt=null"
        report.refuse(f"task.system_prompt={system:.40}", "a chat template", got, "It would be ignored.", use)
    _backslashes("task.system_prompt", system, report)


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
    if task.verifiers:
        for key in ("verifier", "pattern"):
            if (value := getattr(task, key)) is not None:
                needs, reason = "task.verifiers={}", "It would be ignored: those score the completions."
                report.refuse(f"task.{key}={value}", needs, [*task.verifiers], reason, f"{needs} or task.{key}=null")
        several = {key: one for key, one in task.verifiers.items() if _entry(f"task.verifiers.{key}", key, one, report)}
        for name, one in several.items():
            _verifier(f"task.verifiers.{name}.", one["verifier"], one.get("pattern"), report)
        return {one["verifier"] for one in several.values()}
    if task.verifier is None:
        reason, use = "Completions need a score.", f"task.verifier=exact_match or {_EXAMPLE}"
        report.refuse("task.verifier=null", "task.verifiers", "none", reason, use)
    else:
        _verifier("task.", task.verifier, task.pattern, report)
    return {str(task.verifier)}


def _entry(key: str, name: str, one: Any, report: Report) -> bool:
    """Whether an entry of task.verifiers has the form of one."""
    before = len(report.problems)
    if not re.fullmatch(r"[A-Za-z]\w{0,39}", name):
        reason, use = "The metric reward/NAME is named after it.", _EXAMPLE
        report.refuse(key, "a name of up to 40 letters, digits and '_', a letter first", name, reason, use)
    if not isinstance(one, dict) or set(one) - set(_KEYS) or not isinstance(one.get("verifier"), str):
        needs, reason = "the keys verifier and, if need be, weight and pattern", "It says what scores, and how much."
        report.refuse(key, needs, one, reason, _EXAMPLE)
    else:
        weight, shape = one.get("weight", 1), one.get("pattern")
        if not (is_number(weight) and 0 < abs(weight) <= 1e6):
            reason = "The reward is the sum of weight x score."
            report.refuse_value(f"{key}.weight", weight, "a number up to 1e6, not 0", reason, 1)
        if not (shape is None or isinstance(shape, str)):
            report.refuse_value(f"{key}.pattern", shape, "a text", "It is a regular expression.", None)
    return len(report.problems) == before


def _verifier(prefix: str, name: str, shape: str | None, report: Report) -> None:
    """There is such a verifier, and the pattern fits it. prefix: of its keys."""
    if name not in VERIFIERS:
        alternatives = f"one of {', '.join(VERIFIERS)}, or "
        importable(report, f"{prefix}verifier", str(name), "It scores the completions.", alternatives)
    if name == "regular_expression":
        _pattern(prefix, shape, report)
    elif shape is not None:
        needs, reason = f"{prefix}verifier=regular_expression", "It would be ignored: other verifiers take none."
        report.refuse(f"{prefix}pattern={shape}", needs, name, reason, f"{needs} or {prefix}pattern=null")


def _pattern(prefix: str, shape: str | None, report: Report) -> None:
    got = shape
    try:
        if shape is not None:
            groups = re.compile(shape).groups
            if groups == 1:
                return
            got = f"{shape} with {groups}; (?:...) is a group that captures nothing"
    except re.error as error:
        got = f"{shape}: {error}"
    reason, use = "What its group finds last is compared with the answer.", f"\"{prefix}pattern='answer: (.*)'\""
    report.refuse(f"{prefix}verifier=regular_expression", f"{prefix}pattern with one group", got, reason, use)


def _processes(task: PromptsTaskConfig, report: Report) -> None:
    """A time limit and the processes that can keep it come together."""
    number, seconds = task.verifier_processes, task.verifier_seconds
    if number > 0 and seconds is None:
        reason, use = "A verifier in a process of its own has a time limit.", "task.verifier_seconds=10"
        report.refuse(f"task.verifier_processes={number}", "task.verifier_seconds", None, reason, use)
    if number == 0 and seconds is not None:
        reason, use = (
            "Only a process of its own can be ended.",
            "task.verifier_processes=4 or task.verifier_seconds=null",
        )
        report.refuse(f"task.verifier_seconds={text(seconds)}", "task.verifier_processes > 0", 0, reason, use)
