"""The declaration of a metric."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

OF_RATIOS = "loss", "rollout.old_log_probs", "accumulation"
OF_ADVANTAGES = "advantage", "critic", "kl", "accumulation"
OF_THE_WHOLE_LOSS = (
    *("loss", "aggregation", "correction", "kl", "entropy", "advantage", "critic"),
    *("accumulation", "rollout"),
)
OF_OWN_METRICS = *OF_RATIOS, *OF_ADVANTAGES
"""What is in the formula of ratios, of advantages, of the loss, and of a metric that a loss of the
user's own returns."""


@dataclass(frozen=True)
class Metric:
    """A number that a run writes.

    Texts may have `code`, and symbols of docs/metrics.md.
    """

    name: str
    """The written name. NAME, SET and the k of pass@k stand for a part that varies."""
    help: str
    """What it is, without a full stop."""
    formula: str = ""
    """The same in symbols, where these say more than words."""
    over: str = ""
    """What it is taken over, such as documents; for a mean each of them weighs the same."""
    level: str = "none"
    """The first level of `metrics=` at which it is measured."""
    condition: str = ""
    """What a run needs besides, to have it."""
    healthy: str = ""
    """Its values in a run that learns."""
    least: float | None = None
    most: float | None = None
    """The smallest and the largest value that `pgtk doctor` does not take for a failure, at the
    steps at which it looks."""
    failing_at: str = ""
    """The steps at which it looks, where these are not all."""
    unless: str = ""
    """Where a value beyond them is none, and what is one there."""
    in_formula: tuple[str, ...] = ()
    """The groups and keys of the configuration that are in its formula: of the keys that are in the
    formula of a loss (`Alters.formula`), those that change this number for the same policy."""
    see: str = ""
    """The page of docs/ that says more, with its section."""

    def measured(self) -> str:
        """Return the level and the condition, in words; empty if every run has the metric."""
        level = "" if self.level == "none" else f"`metrics={self.level}`"
        return ", ".join(part for part in (level, self.condition) if part)

    def healthy_in_words(self) -> str:
        """Return the healthy values, with those that `pgtk doctor` takes for a failure."""
        failing = ""
        if self.least is not None and self.most is not None:
            failing = f"outside of {self.least:g} to {self.most:g}"
        elif self.least is not None:
            failing = f"below {self.least:g}"
        elif self.most is not None:
            failing = f"above {self.most:g}"
        if self.failing_at:
            failing += f" {self.failing_at}"
        if self.unless:
            failing += f"; {self.unless}"
        return f"{self.healthy} (failing: {failing})" if failing else self.healthy


def declared_as(name: str, metrics: tuple[Metric, ...]) -> Metric | None:
    """Return the first of the metrics that a number of this name is; None if none is."""
    return next((metric for metric in metrics if _pattern(metric.name).fullmatch(name)), None)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace("NAME", ".+").replace("SET", ".+")
    return re.compile(escaped.replace("@k", r"@(k|\d+)"))
