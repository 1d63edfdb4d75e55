"""Counts held-out prompts that training asks, too, and says so."""

from __future__ import annotations

from collections.abc import Iterable

from pgtoolkit.completion import Prompt
from pgtoolkit.tasks.tasks import Task


def note_on_shared(name: str, held_out: Task, count: int, training: Task) -> str | None:
    """Return a note on an evaluation set with prompts of training; None where it has none, and for
    training whose prompts never end.

    count: of the set, from its first prompt on.
    """
    num_shared = asked_by_both(training, held_out, count)
    if not num_shared:
        return None
    return (
        f"{num_shared} of the {count} prompts of evaluation set {name} are also prompts of "
        "training: what is measured on those is not held out."
    )


def asked_by_both(task: Task, other: Task, count: int) -> int:
    """Return how many of the first `count` prompts of `other` are among those of a task.

    Return 0 for a task whose prompts never end.
    """
    if task.num_prompts is None:
        return 0
    known = different(task.rows())
    return sum(not known.isdisjoint(different([other.prompt(number)])) for number in range(count))


def different(prompts: Iterable[Prompt]) -> set[str]:
    """Return a text for each different prompt."""
    return {repr((prompt.text, prompt.messages)) for prompt in prompts}
