"""Every rule of the configuration: those that follow from what each key declares, and those between keys."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from pgtoolkit.config.compose import Composed
from pgtoolkit.config.key import value_of
from pgtoolkit.config.keys import default, describe, fits, help_of, ignored, key_named, keys_of
from pgtoolkit.config.refusals import holds_secret, unresolvable
from pgtoolkit.config.rules import run, step, task
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, text

RULES = (
    *(step.loss, step.aggregation, step.correction, step.advantage, step.penalties, step.accumulation, step.anchor),
    *(run.rollout, run.model, task.task, run.sampler, run.kernel, step.parallelism, run.tracking),
    *(task.evaluation, run.optimizer, ignored),
)


def resolve_and_validate(
    config: DictConfig,
    before: Config | None = None,
    names: Iterable[str] = (),
    usual: Callable[[str], Any] | None = None,
    rules: Sequence[Callable[[Config, Report], Any]] = RULES,
) -> tuple[Config, Report]:
    """The configuration as an object, see `resolve`, with all problems and notes; imports no torch and starts nothing.

    It reads only whether named files exist. usual: what gives defaults faster.
    """
    report = Report(usual=usual or functools.partial(default, config))
    resolved = resolve(config, report, before, names)
    for rule in rules:
        rule(resolved, report)
    return resolved, report


def validated(composed: Composed) -> tuple[Config | None, Report]:
    """The same of what `compose` gives, whose problems come first; None where nothing could be composed."""
    values, report = (None, Report()) if composed.config is None else resolve_and_validate(composed.config)
    report.problems[:0] = composed.problems
    return values, report


def resolve(config: DictConfig, report: Report, before: Config | None = None, names: Iterable[str] = ()) -> Config:
    """The configuration as an object, with a problem for each key that is unset, does not resolve or is out of its
    range; it gets its default, for the sake of the rules that follow.

    before, names: what an earlier call returned, and the keys that may have other values now, by which alone the two
    configurations differ; what they share is one object.
    """
    groups = {}
    with _without_environment():
        if before is not None:
            for name in names:
                group, _, leaf = name.rpartition(".")
                value = _resolve_node(config[group] if group else config, leaf, name, report)
                groups.setdefault(group, {})[leaf] = value
            changed = {group: replace(getattr(before, group), **groups[group]) for group in groups if group}
            resolved = replace(before, **changed, **groups.get("", {}))
        else:
            for group in config:
                if group != "hydra":
                    value = _resolve_node(config, group, str(group), report)
                    if isinstance(value, dict):
                        value = (SCHEMAS.get(group) or SCHEMAS[f"{group}/{value['name']}"])(**value)
                    groups[group] = value
            resolved = Config(**groups)
    _values(config, resolved, report)
    return resolved


def interpolated(config: DictConfig, values: Config) -> list[str]:
    """The keys whose values are computed of others'; values: the same, resolved."""
    nodes = {key.name: (config[key.group] if key.group else config)._get_node(key.leaf) for key in keys_of(values)}
    return [name for name, node in nodes.items() if "${" in _unresolved(node)]


def _unresolved(node: Any) -> str:
    return str(OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node._value())


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """No interpolation reads an environment variable, however it spells the resolver's name."""

    def refuse(*_: Any) -> None:
        raise ValueError("It would read an environment variable, where secrets are, into the run directory")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _resolve_node(parent: DictConfig, key: Any, path: str, report: Report) -> Any:
    if key == "_target_":
        report.refuse(path, "to be left out", parent._get_node(key), *_NO_CODE)
        return None
    raw = parent._get_node(key)
    if isinstance(raw, DictConfig) and not raw._is_none() and not raw._is_missing() and not raw._is_interpolation():
        return {str(name): _resolve_node(raw, name, f"{path}.{name}", report) for name in raw}
    hidden = _unresolved(raw)
    try:
        if OmegaConf.is_missing(parent, key):
            usual = default(parent._get_root(), path)
            example = getattr(key_named(path, parent._get_root()), "example", "") or text(usual)
            reason = help_of(parent._get_root(), path) or "??? stands for a value that is still to be given."
            report.refuse(path, "a value", "none", reason, f"{path}={example}")
        elif "_target_" in hidden:
            report.refuse(path, "plain values", "_target_", *_NO_CODE)
        else:
            value = parent[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
            setting = f"{path}={value}"
            if isinstance(value, int | float) or redact(setting) == setting:
                return value
            report.problems.append(holds_secret(path))
    except (OmegaConfBaseException, RecursionError) as error:
        report.problems.append(unresolvable(path, raw._value(), error))
    return default(parent._get_root(), path)


_NO_CODE = ("A configuration never names code to be run.", "the options of the groups")


def _values(config: DictConfig, resolved: Config, report: Report) -> None:
    """Refuse each value that its key does not take; the default takes its place for the rules that follow.

    config: as composed; resolved: the same as an object, which is changed.
    """
    for key in keys_of(resolved):
        value = value_of(resolved, key.name)
        if fits(key, value):
            continue
        usual = default(config, key.name)
        if key.range and not fits(key, usual):
            usual = key.range[0]
        if value is not None:  # else `resolve` has said why
            reason = key.help or "Every key has a type."
            report.refuse_value(key.name, value, describe(key), reason, usual)
        setattr(value_of(resolved, key.group) if key.group else resolved, key.leaf, usual)
