"""`pgtk solutions`: a task's prompts with their worked answers, as rows for experiment=sft."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import default
from pgtoolkit.config.rules.task import prompts
from pgtoolkit.launch.start import refused
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.report import Report, shell_path


def write_solutions(out: Path, overrides: list[str], count: int) -> str:
    """Write the first `count` prompts of a task and a seed as {"prompt", "completion"}; says what
    is in the file.

    Raises ConfigError where the task or the file cannot be used.
    """
    from pgtoolkit.tasks.from_config import make_task
    from pgtoolkit.tasks.prompts import scored_by_nobody

    composed = compose(overrides)
    config = composed.config
    report = Report(
        [*composed.problems], usual=functools.partial(default, config, choices=composed.choices)
    )
    if out.suffix != ".jsonl" or out.exists():
        report.refuse(
            setting=f"OUT={out}",
            needs="a new .jsonl file",
            got="one that exists" if out.exists() else "another kind",
            reason="Nothing is written over.",
            use=str(out.with_name(f"{out.stem}-2.jsonl")),
        )
    for other in [one for one in overrides if not re.match(r"task[.=]|seed=", one)]:
        report.refuse(
            setting=other,
            needs="to be the task, a key of it, or the seed",
            got="another key",
            reason="Prompts and answers follow from these alone.",
            use="task=chain_sum seed=7",
        )
    if config is not None and not report.problems:
        prompts(config.task, report)
    if config is None or report.problems:
        raise refused(report.problems)
    task = config.task
    made = make_task(scored_by_nobody(task), config.seed)
    count = min(count, made.num_prompts or count)
    different = set()
    with replacing(out) as file:
        for prompt in map(made.prompt, range(count)):
            asked = prompt.messages or prompt.text
            answer = (
                [{"role": "assistant", "content": prompt.answer}]
                if prompt.messages
                else prompt.answer
            )
            different.add(repr(asked))
            file.write(
                json.dumps({"prompt": asked, "completion": answer}, ensure_ascii=False).encode()
                + b"\n"
            )
    rows = (
        f"{count} rows of task={task.name} with seed {config.seed}, {len(different)} of them "
        "different"
    )
    return f"{rows}: {shell_path(out)}"
