"""The evaluation that a configuration asks for: its sets of held-out prompts, how they are sampled,
and the number by which the best checkpoint is kept."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pgtoolkit.config.keys import KEYS, option_values
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.sampling.settings import SamplingSettings
from pgtoolkit.system.conditions import value_of
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.system.report import text
from pgtoolkit.tasks.settings import (
    QUESTIONS,
    ConversationTaskSettings,
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    SumsTaskSettings,
    TaskSettings,
)

DEFAULT_SET = "held_out"
"""The set of a configuration that names none."""

_KEYS_OF_QUESTIONS = ("num_digits", "dataset", "numbers", "environment", "path")
"""Keys of generators: where one of them differs, the same seed gives other questions."""

OF_A_SET = ("task", "seed", "prompts")
"""Keys of an evaluation set beyond those of its task: the task, if another one than in training,
and its own values of evaluation.seed and evaluation.prompts_per_set."""


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts: its task, the seed that the task gets, and the most prompts that
    are taken from it."""

    name: str
    task: TaskSettings
    seed: int
    prompts: int

    @property
    def files(self) -> tuple[str, str | None, str | None] | None:
        """The (path, configuration, split) that its prompts are read from; None for a generator."""
        return _files_of(self.task)

    @property
    def source(self) -> str:
        """Return the origin of its prompts, in words."""
        path = getattr(self.task, "path", None)
        return f"{self.task.name} with seed {self.seed}" if path is None else path


def _files_of(task: TaskSettings) -> tuple[str, str | None, str | None] | None:
    if not isinstance(task, PromptsTaskSettings | ConversationTaskSettings) or task.path is None:
        return None
    path = os.path.realpath(os.path.expanduser(str(task.path)))
    return path, getattr(task, "config", None), task.split


def held_out_sets(config: Config) -> list[HeldOut]:
    """Return the sets of a configuration that the rules have passed."""
    defaults = {"seed": config.evaluation.seed, "prompts": config.evaluation.prompts_per_set}
    sets = []
    for name, settings in (config.evaluation.sets or {DEFAULT_SET: {}}).items():
        settings = defaults | settings
        task = _task(config, settings)
        sets.append(HeldOut(name, task, settings["seed"], settings["prompts"]))
    return sets


def place_of_set(config: Config, held_out: HeldOut) -> str:
    """Return the key below which an evaluation set has its task."""
    return f"evaluation.sets.{held_out.name}" if config.evaluation.sets else "task"


_KEYS_OF_TASKS = "|".join(sorted({key.leaf for key in KEYS if key.group == "task"}))


def with_keys_of_set(message: str, place: str) -> str:
    """Return a message about the task of a set with its keys as they are typed for the set.

    Names of files and functions that contain `task.` stay. place: see `place_of_set`.
    """
    message = re.sub(rf"(?<![\w./=-])task\.(?=(?:{_KEYS_OF_TASKS})\b)", f"{place}.", message)
    return message.replace("rollout.max_comp", "evaluation.max_comp")


def _task(config: Config, settings: Dictionary) -> TaskSettings:
    """Return the task of a set. settings: the keys of the set."""
    kind = settings.get("task", config.task.name)
    values = values_of_set(vars(config.task), settings)
    # The rules say which of its keys have no effect, or lack something.
    task = SCHEMAS[f"task/{kind}"].unchecked(copy.deepcopy(values))
    assert isinstance(task, TaskSettings)  # all options of the group are
    task.check_values()
    return task


def values_of_set(task: Mapping[str, object], settings: Mapping[str, object]) -> Dictionary:
    """Return the keys of the task of a set: the configured one, or another one with its defaults,
    and with the set's values in either.

    task: the keys of the configured one. settings: the keys of the set.
    """
    kind = settings.get("task", task.get("name"))
    values = dict(task if kind == task.get("name") else option_values("task", str(kind)))
    if "path" in settings:
        # The configuration and split of training belong to other files.
        values |= {name: None for name in ("config", "split") if name in values}
    if kind == "prompts" and ("verifier" in settings or "verifiers" in settings):
        verifier = option_values("task", "prompts")["verifier"]
        values |= {"verifier": verifier, "pattern": None, "verifiers": {}}
    return values | {key: value for key, value in settings.items() if key not in OF_A_SET}


def watched(config: object) -> tuple[str, str] | None:
    """Return the set and the number that evaluation.best names in a configuration; None if it is
    null.

    config: see `value_of`.
    """
    best = value_of(config, "evaluation.best")
    if best is None:
        return None
    name, _, number = best.rpartition("/")
    return name or next(iter(value_of(config, "evaluation.sets")), DEFAULT_SET), number


def is_on(config: Config) -> bool:
    return config.evaluation.every > 0


def sets_beside_training(config: Config) -> list[HeldOut]:
    """Return the sets of held-out prompts that are evaluated while a policy is trained on prompts:
    what these ask, training must not."""
    return held_out_sets(config) if is_on(config) and config.rollout.name == "policy" else []


def needs_sampler(config: Config) -> bool:
    """Return whether a run writes completions: to train on, or in its evaluations alone."""
    return config.rollout.name == "policy" or is_on(config)


def sampling(config: Config) -> SamplingSettings:
    """Return how the completions of an evaluation are sampled."""
    return config.evaluation.sampling_of(config.rollout)


def sampling_in_words(config: Config) -> str:
    """Return how the completions of an evaluation are sampled, in words."""
    settings = sampling(config)
    top_p = settings.top_p
    truncation = "" if settings.top_k is None else f", top_k {text(settings.top_k)}"
    truncation += "" if top_p in (None, 1) else f", top_p {text(top_p)}"
    return (
        f"at temperature {text(settings.temperature)}{truncation}, at most "
        f"{settings.max_completion_length} tokens"
    )


def key_of_seed(config: Config, held_out: HeldOut) -> str:
    """Return the key that gives a set its seed: the set's own, where it has one."""
    own_key = f"evaluation.sets.{held_out.name}.seed"
    has_own = "seed" in config.evaluation.sets.get(held_out.name, {})
    return own_key if has_own else "evaluation.seed"


def are_training_prompts(config: Config, held_out: HeldOut) -> str | None:
    """Return why a set holds prompts that the configuration trains on; None where the two
    descriptions do not show that it does."""
    task = config.task
    if config.rollout.name != "policy" or held_out.task.name != task.name:
        return None
    if isinstance(task, SumsTaskSettings):
        return None  # training never asks what these hold out
    if held_out.files is not None:
        return "They are the prompts of training." if held_out.files == _files_of(task) else None
    for key in _KEYS_OF_QUESTIONS:
        if getattr(held_out.task, key, None) != getattr(task, key, None):
            return None
    if isinstance(held_out.task, ReasoningGymTaskSettings) and isinstance(
        task, ReasoningGymTaskSettings
    ):
        # Each question has a seed of its own, and the seeds follow each other.
        distance = held_out.seed - config.seed
        size = task.options.get("size", QUESTIONS)
        size_of_set = held_out.task.options.get("size", QUESTIONS)
        if not -size_of_set < distance < size:
            return None
        return (
            f"Question n has the seed of the set plus n, so sets that start {abs(distance)} apart "
            "overlap."
        )
    if held_out.seed != config.seed:
        return None
    return "The same generator with the same seed asks the same questions."
