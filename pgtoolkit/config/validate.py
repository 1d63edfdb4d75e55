"""Checks a configuration by all rules: those that its keys declare, and those between keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pgtoolkit.config.compose import Composed
from pgtoolkit.config.keys import default, ignored
from pgtoolkit.config.rules import (
    executed,
    loss_terms,
    run,
    sampler,
    step,
    table,
    task,
    tracking,
)
from pgtoolkit.config.schema import Config
from pgtoolkit.system.report import Report

Check = Callable[[Config, Report], Config | None]
"""Adds problems and notes to the report. It may return another configuration for the rules that
follow."""

RULES: tuple[Check, ...] = (
    loss_terms.loss,
    loss_terms.aggregation,
    loss_terms.correction,
    *table.CORRECTION,
    *table.BALANCED,
    *table.TOP_ENTROPY,
    *table.TRUNCATED,
    *table.CENTERING,
    *table.GROUP_LOSS,
    *table.ADVANTAGE,
    *table.SHAPE,
    *table.SIGNAL,
    *table.CRITIC,
    loss_terms.advantage,
    loss_terms.penalties,
    *table.KL,
    *table.ACCUMULATION,
    step.accumulation,
    loss_terms.anchor,
    run.rollout,
    *table.SAMPLING,
    run.model,
    task.task,
    sampler.sampler,
    run.kernel,
    step.parallelism,
    *table.PARALLELISM,
    *table.SHARING,
    tracking.tracking,
    task.evaluation,
    run.optimizer,
    run.callbacks,
    executed.functions,
    ignored,
)

RULES_OF_EVALUATION: tuple[Check, ...] = (ignored, run.model, task.evaluated, sampler.sampler)
"""The rules of what `pgtk evaluate` reads of a configuration."""


def validate(
    config: Config,
    choices: Mapping[str, str] = MappingProxyType({}),
    rules: Sequence[Check] = RULES,
) -> tuple[Config, Report]:
    """Return all problems and notes of a configuration.

    No torch is imported, nothing is started, and files are only looked for. choices: see
    `Composed`. The configuration that is returned has other values in place of some that are
    refused, so that `pgtk check` can still show its page.
    """
    report = Report(default_of=functools.partial(default, config, choices=choices))
    for rule in rules:
        config = rule(config, report) or config
    return config, report


def validated(composed: Composed, rules: Sequence[Check] = RULES) -> tuple[Config | None, Report]:
    """Validate what `compose` returned, whose problems come first in the report.

    The configuration is None if nothing could be composed.
    """
    if composed.config is None:
        return None, Report([*composed.problems])
    config, report = validate(composed.config, composed.choices, rules)
    report.problems[:0] = composed.problems
    report.notes[:0] = composed.notes
    return config, report
