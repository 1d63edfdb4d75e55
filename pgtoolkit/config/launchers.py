"""What runs the jobs of a sweep, and what a search draws their values from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAUNCHERS = ("local", "slurm", "ray_cluster")
"""The options of hydra/launcher; the key `kind` of an option of one's own names the one that it is
based on."""

SEARCH = "optuna_search"
"""The option of hydra/sweeper that searches."""


@dataclass(frozen=True)
class Launcher:
    """What runs the jobs of a sweep.

    kind: one of LAUNCHERS; None for another one, which is refused. choice: the option that was
        chosen.
    settings: the keys of hydra.launcher.
    """

    kind: str | None
    choice: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """What a search draws the values of a key from: one of `values`, or numbers from `low` to
    `high`.

    step: between the numbers; None for any. log: whether their logarithms are drawn evenly.
    """

    values: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False


@dataclass(frozen=True)
class Search:
    """A sweep whose values are chosen as it goes.

    axes: key -> what its values are drawn from. fixed: the other overrides of every job. settings:
        the keys of
    hydra.sweeper.
    """

    axes: dict[str, Axis]
    fixed: list[str]
    settings: dict[str, Any]
