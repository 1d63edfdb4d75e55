"""The rules on prompts: tasks, verifiers, and the sets of held-out prompts of an evaluation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from pgtoolkit.config.evaluation_sets import (
    DEFAULT_SET,
    OF_A_SET,
    HeldOut,
    are_training_prompts,
    held_out_sets,
    is_on,
    key_of_seed,
    place_of_set,
    sampling,
    watched,
    with_keys_of_set,
)
from pgtoolkit.config.keys import KEYS, existing_key, fits, ignored, option_values, values_in_words
from pgtoolkit.config.meant_values import typed, value_meant
from pgtoolkit.config.rules.named import existing, importable, installed
from pgtoolkit.config.rules.run import room_for, room_for_answer
from pgtoolkit.config.rules.table import EVALUATION
from pgtoolkit.config.saved import FORMER_TASKS
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.rollouts.batch_counts import powers_of_two
from pgtoolkit.runs.completion_files import TRAINING
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.declared import REQUIRED, Dictionary, Key
from pgtoolkit.system.report import Report, is_number, nearest, text
from pgtoolkit.tasks import settings as tasks

_VERIFIER_KEYS = ("verifier", "weight", "pattern")
"""The keys of an entry of task.verifiers."""

_LEAST_WEIGHT = 1e-6

_VERIFIERS_EXAMPLE = (
    "'task.verifiers={answer: {verifier: exact_match}, number: {verifier: last_number, "
    "weight: 0.1}}'"
)


def task(c: Config, report: Report) -> None:
    if c.rollout.name == "policy":
        prompts(c.task, report)


def prompts(task: tasks.TaskSettings, report: Report) -> None:
    """Check the task of training, or of a set of held-out prompts."""
    if isinstance(task, tasks.ReasoningGymTaskSettings):
        installed(report, "task=reasoning_gym", "reasoning_gym", "reasoning-gym")
    elif isinstance(task, tasks.ConversationTaskSettings):
        if task.environment is not None:  # None is refused elsewhere
            reason = "It answers the policy, and scores conversations."
            importable(report, "task.environment", task.environment, reason)
        _check_path(task, report)
    elif isinstance(task, tasks.PromptsTaskSettings):
        _check_path(task, report)
        groups, got = _count_groups(task.answer_pattern)
        if task.answer_pattern is not None and groups != 1:
            report.refuse(
                setting="task.answer_pattern",
                needs="a regular expression with one group",
                got=got,
                reason="What its group finds last is the answer.",
                use="\"task.answer_pattern='#### (.*)'\"",
            )
        verifiers = _check_verifiers(task, report)
        if "math_verify" in verifiers:
            installed(report, "math_verify among the verifiers", "math_verify", "math-verify")
        of_pgtoolkit = sorted(verifiers.intersection(tasks.VERIFIERS))
        is_prompt = task.answer_field == task.prompt_field and task.answer_pattern is None
        if is_prompt and of_pgtoolkit:
            report.refuse(
                setting=f"task.answer_field={task.answer_field}",
                needs="another column than task.prompt_field",
                got="the same",
                reason=f"{of_pgtoolkit[0]} would count a completion as right that repeats its "
                "prompt.",
                use="the column of the answers, or task.verifier=my_module.function of a function "
                "that reads no answer",
            )


def _check_path(
    task: tasks.PromptsTaskSettings | tasks.ConversationTaskSettings, report: Report
) -> None:
    """Refuse a path where there is nothing, and keys of the hub's data sets with a file's path."""
    if task.path is not None and tasks.is_data_set_name(task.path):
        installed(report, f"task.path={task.path}", "datasets", "datasets")
        return
    existing(report, "task.path", task.path)
    config = getattr(task, "config", None)
    if config is not None:
        report.refuse(
            setting=f"task.config={config}",
            needs="task.path=OWNER/NAME of a data set on the hub",
            got=task.path,
            reason="Files have no configurations.",
            use="task.config=null, or the folder of one",
        )


def _count_groups(pattern: str | None) -> tuple[int, str | None]:
    """Return (the number of groups of a pattern, the pattern).

    For an invalid pattern they are 0 and the pattern with its error.
    """
    try:
        return re.compile(str(pattern)).groups, pattern
    except re.error as error:
        return 0, f"{pattern}: {error}"


def _check_verifiers(task: tasks.PromptsTaskSettings, report: Report) -> set[str]:
    """Refuse verifiers that cannot score; return the names of those that are used."""
    entries: dict[str, Dictionary] = {}
    for name, entry in task.verifiers.items():
        if _check_entry(name, entry, report):
            entries[f"verifiers.{name}."] = entry
    if not task.verifiers and task.verifier is None:
        report.refuse(
            setting="task.verifier=null",
            needs="task.verifiers",
            got="none",
            reason="Completions need a score.",
            use=f"task.verifier=exact_match or {_VERIFIERS_EXAMPLE}",
        )
    elif not task.verifiers:
        entries = {"": {"verifier": task.verifier, "pattern": task.pattern}}
    for prefix, entry in entries.items():
        _check_verifier(f"task.{prefix}", entry["verifier"], entry.get("pattern"), report)
    return {entry["verifier"] for entry in entries.values()}


def _check_entry(name: str, entry: object, report: Report) -> bool:
    """Refuse an entry of task.verifiers that has not the right form; return whether it has."""
    key = f"task.verifiers.{name}"
    is_name = re.fullmatch(r"[A-Za-z]\w{0,39}", name) is not None
    if not is_name:
        report.refuse(
            setting=key,
            needs="a name of up to 40 letters, digits and '_', a letter first",
            got=name,
            reason="reward/NAME is its metric.",
            use=_VERIFIERS_EXAMPLE,
        )
    if (
        not isinstance(entry, dict)
        or not set(entry) <= set(_VERIFIER_KEYS)
        or not isinstance(entry.get("verifier"), str)
    ):
        unknown = (
            [word for word in entry if word not in _VERIFIER_KEYS]
            if isinstance(entry, dict)
            else []
        )
        near = nearest(str(unknown[0]), _VERIFIER_KEYS, 0.6) if unknown else None
        report.refuse(
            setting=key,
            needs="the keys verifier and, if need be, weight and pattern",
            got=entry,
            reason="It names the function that scores, and its weight.",
            use=f"{near} in place of {unknown[0]}" if near else _VERIFIERS_EXAMPLE,
        )
        return False
    weight = entry.get("weight", 1)
    if is_number(weight) and _LEAST_WEIGHT <= abs(weight) <= 1e6:
        return is_name
    report.refuse_value(
        key=f"{key}.weight",
        value=weight,
        needs="a number from 1e-6 to 1e6, or its negative",
        reason="The reward is the sum of weight x score, and rewards that differ by at most 1e-6 "
        "count as equal.",
        better=1,
    )
    return False


def _check_verifier(prefix: str, name: str, pattern: str | None, report: Report) -> None:
    """Refuse an unknown verifier, and a pattern that does not fit it.

    prefix: the beginning of its keys.
    """
    if name not in tasks.VERIFIERS:
        reason = "It scores the completions."
        importable(report, f"{prefix}verifier", str(name), reason, tasks.VERIFIERS)
    needs = f"{prefix}verifier=regular_expression"
    if name != "regular_expression":
        if pattern is not None:
            report.refuse(
                setting=f"{prefix}pattern={pattern}",
                needs=needs,
                got=name,
                reason="It would be ignored: other verifiers take none.",
                use=f"{needs} or {prefix}pattern=null",
            )
        return
    groups, got = _count_groups(pattern)
    if groups != 1:
        report.refuse(
            setting=needs,
            needs=f"{prefix}pattern with one group",
            got=got,
            reason="What its group finds last is compared with the answer; (?:...) captures "
            "nothing.",
            use=f"\"{prefix}pattern='answer: (.*)'\"",
        )


KINDS = tuple(name.partition("/")[2] for name in SCHEMAS if name.startswith("task/"))


def evaluation(c: Config, report: Report) -> Config:
    if not is_on(c):
        return _check_sets(c, report)
    c = evaluated(c, report)
    _check_best(c, report)
    _check_room_for_training(c, report)
    for held_out in held_out_sets(c):
        reason = are_training_prompts(c, held_out)
        if reason:
            setting = f"evaluation.every={c.evaluation.every}"
            if c.evaluation.sets:
                setting = f"evaluation.sets.{held_out.name}"
            got = f"seed {held_out.seed}"
            use = f"{key_of_seed(c, held_out)}={(c.seed + 10**9) % 2**32}"
            if held_out.files is not None:
                got = f"those of {held_out.files[0]}"
                use = "evaluation.sets.NAME.path=FILE"
            report.refuse(
                setting=setting,
                needs="prompts that training does not ask",
                got=got,
                reason=reason,
                use=use,
            )
    return c


def _check_room_for_training(c: Config, report: Report) -> None:
    """Refuse held-out numbers of the task `reverse` that leave less than half of all to training,
    which draws another number in place of one that is held out."""
    task = c.task
    if not isinstance(task, tasks.ReverseTaskSettings) or c.rollout.name != "policy":
        return
    sets = [held_out for held_out in held_out_sets(c) if held_out.task == task]
    num_held_out = sum(held_out.prompts for held_out in sets)
    half = 10**task.num_digits // 2
    if num_held_out <= half:
        return
    least = half // len(sets)
    uses = [f"task.num_digits={len(str(2 * num_held_out - 1))}"]
    if least:
        names = [
            f"evaluation.sets.{held_out.name}.prompts"
            if c.evaluation.sets
            else "evaluation.prompts_per_set"
            for held_out in sets
        ]
        uses.insert(0, " ".join(f"{name}={least}" for name in names))
    report.refuse(
        setting=f"task.num_digits={task.num_digits} with evaluation.every={c.evaluation.every}",
        needs=f"at most {half} held-out prompts",
        got=num_held_out,
        reason=f"Training asks none of them, and needs half of the {2 * half} numbers. They are "
        "drawn by chance, and some repeat, which a note counts.",
        use=", or ".join(uses),
    )


def evaluated(c: Config, report: Report) -> Config:
    """Refuse invalid sets and ways to sample them, by the rules that also hold without training.

    Returns the configuration for the rules that follow, without sets that are refused.
    """
    c = _check_sets(c, report)
    _check_sampling(c, report)
    # Without a length, which is refused, it is not known whether the answers have room.
    if sampling(c).max_completion_length:
        for held_out in held_out_sets(c):
            _check_task(c, held_out, report)
    return c


def _check_sets(c: Config, report: Report) -> Config:
    """Refuse invalid sets; return the configuration without them."""
    example = "seed: 7" if isinstance(c.task, tasks.GeneratedTaskSettings) else "path: test.jsonl"
    before = "" if is_on(c) else f"{existing_key('evaluation.sets', c).use} "
    example = f"{before}'evaluation.sets={{test: {{{example}}}}}'"
    valid = {}
    for name, settings in c.evaluation.sets.items():
        count = len(report.problems)
        place = f"evaluation.sets.{name}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", name) or name == TRAINING:
            needs = "a name of up to 40 letters, digits, '_' and '-', a letter first"
            report.refuse(
                setting=place,
                needs=f"{needs}, other than {TRAINING}",
                got=name,
                reason="Files and metrics bear it.",
                use=example,
            )
        elif not isinstance(settings, dict):
            report.refuse(
                setting=place,
                needs="keys with values",
                got=settings,
                reason="They say what differs from the task.",
                use=example,
            )
        else:
            _check_keys(c, place, before, settings, report)
        if len(report.problems) == count:
            valid[name] = settings
    return with_values(c, {"evaluation.sets": valid})


def _check_keys(
    c: Config, place: str, before: str, settings: Mapping[str, object], report: Report
) -> None:
    """Refuse keys that a set does not have, and values of a wrong type.

    A set has the keys of its task, and those in OF_A_SET. before: what is to be typed before a key
    of the set.
    """
    kind = settings.get("task", c.task.name)
    if kind in FORMER_TASKS:
        report.refuse(
            setting=f"{place}.task={kind}",
            needs=f"one of {', '.join(KINDS)}",
            got="a task of an earlier version",
            reason="The package reasoning-gym has it.",
            use=f"{place}.task=reasoning_gym {place}.dataset={kind}",
        )
        return
    if kind not in KINDS:
        report.refuse_value(
            key=f"{place}.task",
            value=kind,
            needs=f"one of {', '.join(KINDS)}",
            reason="It is a task.",
            better="prompts",
        )
        return
    known = {key.leaf: key for key in KEYS if key.schema == f"task/{kind}" and key.leaf != "name"}
    known["seed"] = existing_key("seed", c)
    known["prompts"] = existing_key("evaluation.prompts_per_set", c)
    for name, value in settings.items():
        if name == "task":
            continue
        setting = f"{place}.{name}={text(value)}"
        if name not in known:
            tasks_with_key = [
                key.schema.partition("/")[2] for key in KEYS if key.name == f"task.{name}"
            ]
            near = nearest(name, known, 0.6)
            use = "pgtk explain evaluation.sets"
            if near is not None:
                use = before + _with_value(place, known[near], near, value)
            elif tasks_with_key:
                with_key = f"{place}.task={tasks_with_key[0]} {typed(f'{place}.{name}', value)}"
                use = f"{before}{with_key}, or {use}"
            report.refuse(
                setting=setting,
                needs=f"one of {', '.join(known)}",
                got=name,
                reason=f"A set has the keys of task={kind}, and {', '.join(OF_A_SET)}.",
                use=use,
            )
        elif not fits(known[name], value):
            report.refuse(
                setting=setting,
                needs=values_in_words(known[name]),
                got=value,
                reason="Every key has a type.",
                use=before + _with_value(place, known[name], name, value),
            )


def _with_value(place: str, key: Key, name: str, value: object) -> str:
    """Return the override that gives a key of a set the value that is most likely meant.

    place: the key of the set. name: of the key in the set.
    """
    is_plain = isinstance(key.default, str | int | float | list | dict)
    example = key.default if is_plain and key.default != REQUIRED else key.example or "VALUE"
    return typed(f"{place}.{name}", value_meant(key, value, example))


def _check_sampling(c: Config, report: Report) -> None:
    """Refuse several completions at temperature 0, and completions without a longest length."""
    for rule in EVALUATION:
        rule(c, report)
    if sampling(c).max_completion_length is None:
        report.refuse_value(
            key="evaluation.max_completion_length",
            value=None,
            needs="a number",
            reason="Recorded rollouts do not say how long a completion may become.",
            better=256,
        )


def _check_task(c: Config, held_out: HeldOut, report: Report) -> None:
    """Apply the rules on a task to the task of a set. The longest length has to be known."""
    task = held_out.task
    length = sampling(c).max_completion_length
    assert length is not None
    of_set = Report(
        default_of=lambda name: option_values("task", task.name)[name.removeprefix("task.")]
    )
    place = place_of_set(c, held_out)
    ignored(dataclasses.replace(c, task=task), of_set, "task")
    if isinstance(task, tasks.GeneratedTaskSettings):
        room_for_answer(task, "evaluation.max_completion_length", length, of_set)
        longest = f"the longest document of evaluation set {held_out.name}"
        room_for(c, task.longest[0] + length, longest, of_set)
        prompts(task, of_set)
    elif getattr(task, "path", None) == "???":
        of_set.refuse(
            setting="task.path",
            needs="a value",
            got="none",
            reason="It names the file with the prompts.",
            use="task.path=test.jsonl",
        )
    elif getattr(task, "environment", None) == "???":
        of_set.refuse(
            setting="task.environment",
            needs="a value",
            got="none",
            reason="It names the class that answers the policy.",
            use="task.environment=my_module.Environment",
        )
    else:
        prompts(task, of_set)
    for problem in of_set.problems:
        named = with_keys_of_set(problem, place)
        # A set most often has the verifier of training, of which that is told already.
        if named not in report.problems and problem not in report.problems:
            report.problems.append(named)
            if problem in of_set.lacking:
                report.lacking.append(named)


def _check_best(c: Config, report: Report) -> None:
    """Refuse an evaluation.best that is not measured, and a stop_at that it cannot reach."""
    best = watched(c)
    if best is None:
        return
    stop_at = c.trainer.stop_at
    name, number = best
    names = list(c.evaluation.sets) or [DEFAULT_SET]
    setting = f"evaluation.best={c.evaluation.best}"
    count = c.evaluation.completions_per_prompt
    known = ["avg", *(f"pass@{k}" for k in powers_of_two(count))]
    if name not in names:
        report.refuse(
            setting=setting,
            needs=f"one of the sets {', '.join(names)}",
            got=name,
            reason="It is NUMBER or SET/NUMBER.",
            use=f"evaluation.best={names[0]}/pass@1",
        )
    elif number not in known:
        report.refuse(
            setting=setting,
            needs=f"one of {', '.join(known)}",
            got=number,
            reason=f"The best is the highest, and of {count} completions of a prompt these are "
            "known.",
            use="evaluation.best=pass@1, or other evaluation.completions_per_prompt",
        )
    elif stop_at is not None and number != "avg" and not 0 < stop_at <= 1:
        report.refuse_value(
            key="trainer.stop_at",
            value=stop_at,
            needs="a number above 0, at most 1",
            reason=f"{number} is a probability.",
            better=0.9,
        )
