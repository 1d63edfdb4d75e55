"""`pgtk solutions`: a task's prompts with their worked answers, as rows for experiment=sft."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation_sets import held_out_sets
from pgtoolkit.config.keys import default
from pgtoolkit.config.rules.task import prompts
from pgtoolkit.config.schema import Config
from pgtoolkit.launch.start import refused
from pgtoolkit.system.output_files import unwritable
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.report import Report, beside, shell_path, with_ending
from pgtoolkit.tasks.settings import ReverseTaskSettings


def write_solutions(out: Path, overrides: list[str], count: int) -> str:
    """Write the first `count` prompts of a task, and return a sentence on the file.

    Each row is {"prompt", "completion"}.
    Raises ConfigError where the task or the file cannot be used.
    """
    from pgtoolkit.assembly.make_task import held_out_numbers, make_task
    from pgtoolkit.tasks.prompts import scored_by_nobody

    config = _checked_task(out, overrides)
    task = config.task
    seed = config.seed
    never = held_out_numbers(task, held_out_sets(config))
    if isinstance(task, ReverseTaskSettings) and 2 * len(never) > 10**task.num_digits:
        never = frozenset()  # an evaluation with these would be refused
    prompts_of_task = make_task(scored_by_nobody(task), seed, never=never)
    count = min(count, prompts_of_task.num_prompts or count)
    questions = set()
    with replacing(out) as file:
        for number in range(count):
            prompt = prompts_of_task.prompt(number)
            question = prompt.messages or prompt.text
            answer = prompt.answer
            if prompt.messages:
                answer = [{"role": "assistant", "content": prompt.answer}]
            questions.add(repr(question))
            row = {"prompt": question, "completion": answer}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    rows = f"{count} rows of task={task.name} with seed {seed}, {len(questions)} of them different"
    return f"{rows}: {shell_path(out)}"


def _checked_task(out: Path, overrides: list[str]) -> Config:
    """Return the task and the seed in their configuration; raises ConfigError with all problems,
    those of the file too."""
    composed = compose(overrides)
    config = composed.config
    default_of = functools.partial(default, config, choices=composed.choices)
    report = Report([*composed.problems], default_of=default_of)
    free = with_ending(out, ".jsonl")
    if free.exists():
        free = beside(free)
    if out.exists():
        report.refuse(
            setting=f"OUT={out}",
            needs="a new .jsonl file",
            got="one that exists",
            reason="Nothing is written over.",
            use=str(free),
        )
    elif out.suffix != ".jsonl":
        report.refuse(
            setting=f"OUT={out}",
            needs="a name that ends in .jsonl",
            got=out.name,
            reason="Each line of the file is a JSON object.",
            use=str(free),
        )
    else:
        problem = unwritable("", out)
        report.problems += [problem] if problem else []
    for override in overrides:
        if re.match(r"task[.=]|seed=", override):
            continue
        report.refuse(
            setting=override,
            needs="to be the task, a key of it, or the seed",
            got="another key",
            reason="Prompts and answers follow from these alone.",
            use="task=sums seed=7",
        )
    if config is not None and not report.problems:
        prompts(config.task, report)
    if config is None or report.problems:
        raise refused(report.problems)
    return config
