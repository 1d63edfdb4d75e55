"""The launcher that runs the jobs of a sweep, and the axes from which a search draws their
values."""

from __future__ import annotations

from dataclasses import dataclass, field

from pgtoolkit.system.declared import Dictionary

LAUNCHERS = ("local", "slurm", "ray_cluster")
"""The options of hydra/launcher. In an option of the user's, the key `kind` names the one on which
it is based."""

SEARCH = "optuna_search"
"""The option of hydra/sweeper that searches."""


@dataclass(frozen=True)
class Launcher:
    """The launcher that runs the jobs of a sweep.

    kind: one of LAUNCHERS; None for any other, which is refused. choice: the option that was
    chosen. settings: the keys of hydra.launcher.
    """

    kind: str | None
    choice: str
    settings: Dictionary = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """The range from which a search draws the values of a key: one of `values`, or a number from
    `low` to `high`.

    step: between the numbers; None for any number. log: whether their logarithms are drawn evenly.
    """

    values: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False


@dataclass(frozen=True)
class Search:
    """A sweep whose values are chosen as it goes.

    axes: key -> the range of its values. fixed: the other overrides of every job. settings: the
    keys of hydra.sweeper.
    """

    axes: dict[str, Axis]
    fixed: list[str]
    settings: Dictionary

    @property
    def prune_after(self) -> int | None:
        """The steps after which a job may be stopped early; None where none is."""
        return self.settings.get("prune_after")
