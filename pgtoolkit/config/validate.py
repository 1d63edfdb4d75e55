"""The rules of a configuration: those that follow from what each key declares, and those between
keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pgtoolkit.config.compose import Composed
from pgtoolkit.config.keys import default, ignored
from pgtoolkit.config.rules import run, step, task
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report

Rule = Callable[[Config, Report], Config | None]
"""Adds problems and notes to the report; what it returns is the configuration for the rules that
follow."""

RULES: tuple[Rule, ...] = (
    *(
        step.loss,
        step.aggregation,
        step.correction,
        step.advantage,
        step.penalties,
        step.accumulation,
        step.anchor,
    ),
    *(run.rollout, run.model, task.task, run.sampler, run.kernel, step.parallelism, run.tracking),
    *(task.evaluation, run.optimizer, ignored),
)


def validate(
    config: Config, choices: Mapping[str, str] = MappingProxyType({}), rules: Sequence[Rule] = RULES
) -> tuple[Config, Report]:
    """Return all problems and notes of a configuration; imports no torch and starts nothing.

    It reads only whether named files exist. choices: see `Composed`. The configuration that is
        returned has other
    values in the place of some that are refused, so that a page can still be made of it.
    """
    report = Report(usual=functools.partial(default, config, choices=choices))
    for rule in rules:
        config = rule(config, report) or config
    return config, report


def validated(composed: Composed, rules: Sequence[Rule] = RULES) -> tuple[Config | None, Report]:
    """Return the same of what `compose` gives, whose problems come first; None where nothing could
    be composed."""
    if composed.config is None:
        return None, Report([*composed.problems])
    config, report = validate(composed.config, composed.choices, rules)
    report.problems[:0] = composed.problems
    return config, report
