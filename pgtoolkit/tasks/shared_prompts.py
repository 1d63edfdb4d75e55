"""Counts held-out prompts that training asks, too, or that repeat, and says so."""

from __future__ import annotations

from collections.abc import Iterable

from pgtoolkit.completion import Prompt
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.tasks import Task


def note_on_shared(
    name: str, held_out: Task, count: int, training: Task, num_asked: int = 0
) -> str | None:
    """Return a note on an evaluation set with prompts of training; None where it has none.

    count: of the set, from its first prompt on. num_asked: of training whose prompts never end,
        those that are looked at, from its first on.
    """
    return note_on_number(name, asked_by_both(training, held_out, count, num_asked), count)


def note_on_number(name: str, num_shared: int, count: int, at_least: bool = False) -> str | None:
    """Return a note on an evaluation set, `num_shared` of whose prompts training asks, too; None
    where it is 0.

    at_least: whether not all prompts of training are known.
    """
    if not num_shared:
        return None
    beginning = "At least " if at_least else ""
    return (
        f"{beginning}{num_shared} of the {count} prompts of evaluation set {name} are also prompts "
        "of training: what is measured on those is not held out."
    )


def note_on_repeated(
    name: str, task: Task, count: int, means: str = "pass@1 and its error count it again"
) -> str | None:
    """Return a note on an evaluation set, or on a file of training, that asks a prompt more than
    once; None where each of its first `count` prompts is another one.

    means: what becomes of a repeated prompt.
    """
    if isinstance(task, ConversationTask):
        return None  # conversations may begin alike, and differ by the seeds of their prompts
    num_repeated = count - len(different(map(task.prompt, range(count))))
    if not num_repeated:
        return None
    return f"{num_repeated} of the {count} prompts of {name} repeat an earlier one: {means}."


def asked_by_both(task: Task, other: Task, count: int, num_asked: int = 0) -> int:
    """Return how many of the first `count` prompts of `other` are among those of a task.

    num_asked: see `note_on_shared`.
    """
    training = _of_file(task)
    held_out = _of_file(other)
    is_endless = training.num_prompts is None
    asked = map(training.prompt, range(num_asked)) if is_endless else training.rows()
    known = different(asked)
    return sum(
        not known.isdisjoint(different([held_out.prompt(number)])) for number in range(count)
    )


def _of_file(task: Task) -> Task:
    """Return the prompts of a task; of conversations with a file those that it holds, since what
    an environment makes of one may depend on its seed."""
    return task.source_rows if isinstance(task, ConversationTask) else task


def different(prompts: Iterable[Prompt]) -> set[str]:
    """Return a text for each different prompt."""
    return {repr((prompt.text, prompt.messages)) for prompt in prompts}
