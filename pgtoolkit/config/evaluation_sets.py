"""What a configuration says of evaluation: its sets of held-out prompts, the numbers measured, how
often."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

from pgtoolkit.config.key import value_of
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.config.schema_tasks import (
    ChainSumTaskConfig,
    ConversationTaskConfig,
    PromptsTaskConfig,
    ReasoningGymTaskConfig,
    ShortestPathTaskConfig,
    SumsTaskConfig,
    TaskConfig,
)
from pgtoolkit.system.report import text

USUAL = "held_out"
"""The set of a configuration that names none."""

_OF_A_GENERATOR = ("num_digits", "dataset", "numbers", "environment", "path")
"""Keys of tasks: where one differs, generators with the same seed ask something else."""

OF_A_SET = ("task", "seed", "prompts")
"""Keys of a set that are none of its task's: the kind of task where it is another, and what differs
from the group."""

QUESTIONS = 10_000
"""Different questions of a data set of reasoning-gym, where its options do not say how many."""


@dataclass(frozen=True)
class HeldOut:
    """One set: a task's keys, the seed it is made with, and how many of its prompts are taken, if
    it has so many."""

    name: str
    task: TaskConfig
    seed: int
    prompts: int

    @property
    def files(self) -> tuple | None:
        """What tells its prompts from those of other files; None of a generator."""
        return _files_of(self.task)

    @property
    def source(self) -> str:
        """Where its prompts come from, in words."""
        path = getattr(self.task, "path", None)
        return f"{self.task.name} with seed {self.seed}" if path is None else path


def _files_of(task: TaskConfig) -> tuple[str, str | None, str | None] | None:
    if not isinstance(task, PromptsTaskConfig | ConversationTaskConfig) or task.path is None:
        return None
    place = os.path.realpath(os.path.expanduser(str(task.path)))
    return place, getattr(task, "config", None), task.split


def held_out_sets(c: Config) -> list[HeldOut]:
    """The sets of a configuration that the rules have passed."""
    usual = {"seed": c.evaluation.seed, "prompts": c.evaluation.prompts_per_set}
    sets = {name: usual | given for name, given in (c.evaluation.sets or {USUAL: {}}).items()}
    return [
        HeldOut(name, _task(c, given), given["seed"], given["prompts"])
        for name, given in sets.items()
    ]


def _task(c: Config, given: dict[str, Any]) -> TaskConfig:
    """A copy of the configured task, or the defaults of another kind, with the keys of a set."""
    kind = given.get("task", c.task.name)
    values = vars(c.task) if kind == c.task.name else option_values("task", kind)
    if "path" in given:  # these are of the other files
        values = values | {name: None for name in ("config", "split") if name in values}
    if kind == "prompts" and ("verifier" in given or "verifiers" in given):
        values = values | {
            "verifier": option_values("task", kind)["verifier"],
            "pattern": None,
            "verifiers": {},
        }
    values = values | {key: value for key, value in given.items() if key not in OF_A_SET}
    return SCHEMAS[f"task/{kind}"](**copy.deepcopy(dict(values)))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to it."""
    return [2**i for i in range(most.bit_length())]


def watched(config: object) -> tuple[str, str] | None:
    """The set and the number of evaluation.best in a configuration, see `value_of`; None without
    one."""
    best = value_of(config, "evaluation.best")
    if best is None:
        return None
    name, _, number = best.rpartition("/")
    return name or next(iter(value_of(config, "evaluation.sets")), USUAL), number


def is_on(c: Config) -> bool:
    return c.evaluation.every > 0


def samples(c: Config) -> bool:
    """Whether a run writes completions: to train on, or in its evaluations alone."""
    return c.rollout.name == "policy" or is_on(c)


def sampling(c: Config) -> dict[str, Any]:
    """How the completions of an evaluation are sampled: the keys of rollout=policy that say so."""
    names = ("temperature", "top_p", "max_completion_length")
    chosen = {name: getattr(c.evaluation, name) for name in names}
    usual = {name: getattr(c.rollout, name, None) for name in names}
    settings = {name: usual[name] if value is None else value for name, value in chosen.items()}
    return settings | {"stop": getattr(c.rollout, "stop", [])}


def how_sampled(c: Config) -> str:
    """The same in words."""
    how = sampling(c)
    cut = "" if how["top_p"] in (None, 1) else f", top_p {text(how['top_p'])}"
    return (
        f"at temperature {text(how['temperature'])}{cut}, at most "
        f"{how['max_completion_length']} tokens"
    )


def are_training_prompts(c: Config, one: HeldOut) -> str | None:
    """Why a set holds prompts that the configuration trains on, as far as the two descriptions
    tell; else None."""
    if c.rollout.name != "policy" or one.task.name != c.task.name:
        return None
    if isinstance(
        c.task, ChainSumTaskConfig | ShortestPathTaskConfig | SumsTaskConfig
    ):  # they never ask what is held out
        return None
    if one.files is not None:
        return "They are the prompts of training." if one.files == _files_of(c.task) else None
    if any(getattr(one.task, key, None) != getattr(c.task, key, None) for key in _OF_A_GENERATOR):
        return None
    if isinstance(one.task, ReasoningGymTaskConfig) and isinstance(c.task, ReasoningGymTaskConfig):
        # Its questions have seeds of their own, which follow each other.
        sizes = [task.options.get("size", QUESTIONS) for task in (c.task, one.task)]
        if -sizes[1] < one.seed - c.seed < sizes[0]:
            return (
                f"The question of row n comes from seed + n, so that {abs(one.seed - c.seed)} "
                "apart they overlap."
            )
        return None
    return "The same generator with the same seed asks the same." if one.seed == c.seed else None
