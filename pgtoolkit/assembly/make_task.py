"""The task that a configuration describes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pgtoolkit.config.evaluation_sets import HeldOut
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.generated import SumsTask
from pgtoolkit.tasks.prompt_tasks import PromptsTask
from pgtoolkit.tasks.settings import (
    ConversationTaskSettings,
    GuessTaskSettings,
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    ReverseTaskSettings,
    SumsTaskSettings,
    TaskSettings,
)
from pgtoolkit.tasks.tasks import Once, ReasoningGymTask, ReverseTask, Task


def make_task(
    settings: TaskSettings,
    seed: int,
    once: Once = lambda read: read(),
    held_out: bool = False,
    never: Collection[str] = (),
) -> Task:
    """Return the task of a configuration. Raises ConfigError or, for a file of prompts, DataError.

    held_out: whether its prompts are those of an evaluation; of a task that divides its problems
        itself, those that training never asks.
    never: see `ReverseTask`.
    """
    match settings:
        case PromptsTaskSettings():
            return PromptsTask(settings, seed, once, held_out)
        case ConversationTaskSettings() | GuessTaskSettings():
            return ConversationTask(settings, seed, once, held_out)
        case SumsTaskSettings():
            return SumsTask(settings, seed, held_out)
        case ReasoningGymTaskSettings():
            return ReasoningGymTask(settings, seed, held_out)
        case ReverseTaskSettings():
            return ReverseTask(settings, seed, never)
    raise TypeError(f"no task is known for {type(settings).__name__}")


def held_out_numbers(task: TaskSettings, sets: Iterable[HeldOut]) -> frozenset[str]:
    """Return the prompts of evaluation sets that this task, if it is `reverse`, could ask, too."""
    return frozenset(
        make_task(held_out.task, held_out.seed).prompt(number).text
        for held_out in sets
        if isinstance(task, ReverseTaskSettings) and held_out.task == task
        for number in range(held_out.prompts)
    )
