"""The rules on evaluation: its sets of prompts, how they are sampled, and what the best checkpoint is kept by."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from pgtoolkit.config.defaults import values_of
from pgtoolkit.config.evaluation import (
    OF_A_SET,
    USUAL,
    HeldOut,
    are_training_prompts,
    held_out_sets,
    is_on,
    numbers_of,
    sampling,
    watched,
)
from pgtoolkit.config.keys import KEYS, describe, fits, key_named
from pgtoolkit.config.plan import documents_per_step
from pgtoolkit.config.rules.declared import ignored
from pgtoolkit.config.rules.run import room_for, room_for_answer
from pgtoolkit.config.rules.scoring import prompts
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.completions import TRAINING
from pgtoolkit.system.report import Report, text

KINDS = ("reverse", "reasoning_gym", "prompts")
_NOT_OF_A_SET = ("name", "verifiers")
_EXAMPLE = "'evaluation.sets={test: {path: test.jsonl}}'"
_FEW = 0.01
"""Share of held-out prompts that training may also ask by chance before a note says so."""


def evaluation(c: Config, report: Report) -> None:
    if not is_on(c):
        return
    sets = evaluated(c, report)
    _best(c, report)
    for held_out in sets:
        if reason := are_training_prompts(c, held_out):
            got, use = f"seed {held_out.seed}", f"evaluation.seed={(c.seed + 10**9) % 2**32}"
            if held_out.files is not None:
                got, use = f"those of {held_out.files[0]}", "evaluation.sets.NAME.path=FILE"
            every = f"evaluation.every={c.evaluation.every}"
            setting = f"evaluation.sets.{held_out.name}" if c.evaluation.sets else every
            report.refuse(setting, "prompts that training does not ask", got, reason, use)
        elif (share := _by_chance(c, held_out)) > _FEW:
            digits = held_out.task.num_digits
            report.note(
                f"about {share:.0%} of the prompts of evaluation set {held_out.name} are asked in training, too: there "
                f"are only {10**digits} different ones of task.num_digits={digits}."
            )


def evaluated(c: Config, report: Report) -> list[HeldOut]:
    """The sets, each seen to be one, and the way they are sampled: the rules that hold without training, too."""
    _sets(c, report)
    _sampling(c, report)
    sets = held_out_sets(c)
    for held_out in sets if sampling(c)["max_completion_length"] else ():
        _task(c, held_out, report)
    return sets


def _sets(c: Config, report: Report) -> None:
    """Report invalid sets, and drop them so that later rules can run."""
    for name, given in [*c.evaluation.sets.items()]:
        before = len(report.problems)
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", name) or name == TRAINING:
            needs = f"a name of up to 40 letters, digits, '_' and '-', a letter first, other than {TRAINING}"
            report.refuse(f"evaluation.sets.{name}", needs, name, "Files and metrics bear it.", _EXAMPLE)
        elif not isinstance(given, dict):
            needs, reason = "keys with values", "They say what differs from the task."
            report.refuse(f"evaluation.sets.{name}", needs, text(given), reason, _EXAMPLE)
        else:
            _keys(c, f"evaluation.sets.{name}", given, report)
        if len(report.problems) > before:
            del c.evaluation.sets[name]


def _keys(c: Config, place: str, given: dict[str, Any], report: Report) -> None:
    """Each key of a set is one of its task's, or of OF_A_SET, and its value as that key declares."""
    kind = given.get("task", c.task.name)
    if kind not in KINDS:
        report.refuse_value(f"{place}.task", kind, f"one of {', '.join(KINDS)}", "It is a task.", "prompts")
        return
    known = {key.leaf: key for key in KEYS if key.schema == f"task/{kind}" and key.leaf not in _NOT_OF_A_SET}
    known |= {"seed": key_named("seed", c), "prompts": key_named("evaluation.prompts_per_set", c)}
    for name, value in given.items():
        setting = f"{place}.{name}={text(value)}"
        if name == "task":
            continue
        if name not in known:
            reason = f"A set has the keys of task={kind} but for verifiers, and {', '.join(OF_A_SET)}."
            report.refuse(setting, f"one of {', '.join(known)}", name, reason, f"{place}.KEY=VALUE with one of them")
        elif not fits(known[name], value):
            report.refuse(setting, describe(known[name]), value, "Every key has a type.", f"{place}.{name}=VALUE")


def _sampling(c: Config, report: Report) -> None:
    settings, count = sampling(c), c.evaluation.completions_per_prompt
    if settings["temperature"] == 0 and count > 1:
        reason = "At temperature 0 all completions of a prompt are the same."
        needs = "evaluation.completions_per_prompt=1"
        report.refuse("evaluation.temperature=0", needs, count, reason, f"{needs} or a temperature above 0")
    if settings["max_completion_length"] is None:
        reason = "Recorded rollouts do not say how long a completion may become."
        report.refuse_value("evaluation.max_completion_length", None, "a number", reason, 256)


def _task(c: Config, held_out: HeldOut, report: Report) -> None:
    """The rules on a task, of the task of a set."""
    task, length = held_out.task, sampling(c)["max_completion_length"]
    of_set = Report(usual=lambda name: values_of("task", task.name)[name.removeprefix("task.")])
    place = f"evaluation.sets.{held_out.name}" if c.evaluation.sets else "task"
    ignored(dataclasses.replace(c, task=task), of_set, "task")
    if task.name == "reverse":
        room_for_answer(task.num_digits, "evaluation.max_completion_length", length, of_set)
        tokens = task.num_digits + 1 + length
        room_for(c, tokens, f"the longest document of evaluation set {held_out.name}", of_set)
    elif getattr(task, "path", None) == "???":
        of_set.refuse("task.path", "a value", "none", "It names the file with the prompts.", "task.path=test.jsonl")
    else:
        prompts(task, of_set)
    named = [problem.replace("task.", f"{place}.") for problem in of_set.problems]
    report.problems += [problem for problem in named if problem not in report.problems]


def _best(c: Config, report: Report) -> None:
    best, stop_at = watched(c), c.trainer.stop_at
    if best is None:
        return
    (name, number), names = best, [*c.evaluation.sets] or [USUAL]
    setting, count = f"evaluation.best={c.evaluation.best}", c.evaluation.completions_per_prompt
    if name not in names:
        needs, reason = f"one of the sets {', '.join(names)}", "It is NUMBER or SET/NUMBER."
        report.refuse(setting, needs, name, reason, f"evaluation.best={names[0]}/pass@1")
    elif number not in (known := numbers_of(count)):
        reason = f"The best is the highest, and of {count} completions of a prompt these are known."
        use = "evaluation.best=pass@1, or other evaluation.completions_per_prompt"
        report.refuse(setting, f"one of {', '.join(known)}", number, reason, use)
    elif stop_at is not None and number != "avg" and not 0 < stop_at <= 1:
        needs, reason = "a number above 0, at most 1", f"{number} is a probability."
        report.refuse_value("trainer.stop_at", stop_at, needs, reason, 0.9)


def _by_chance(c: Config, one: HeldOut) -> float:
    """The share of a generator's held-out prompts that training is expected to ask, too, where that can be told."""
    task = one.task
    if c.rollout.name != "policy" or task.name != "reverse" or vars(task) != vars(c.task):
        return 0.0
    asked = c.trainer.max_steps * documents_per_step(c) / c.rollout.group_size
    return -math.expm1(-asked / 10**task.num_digits)
