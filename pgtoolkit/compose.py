"""Composes the configuration from overrides, and says every refusal in its own words, all of them together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit import refusals
from pgtoolkit.config import register_schemas
from pgtoolkit.plan import run_name
from pgtoolkit.refusals import config_directory

FREE_FORM = "task.options"
"""The one place where keys are not in the schema: they belong to the data set."""


@dataclass
class Composed:
    """config is None if nothing could be composed; overrides: as Hydra is to be given them; base: before single keys."""

    config: DictConfig | None
    problems: list[str]
    overrides: list[str]
    base: DictConfig | None = None


def register() -> None:
    """Make the schemas and the resolver that names runs known; may be called again."""
    register_schemas()
    OmegaConf.register_new_resolver("pgtk.run_name", _run_name, replace=True)


def options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Group -> its options, from the YAML files in conf/ and in a directory of one's own."""
    found: dict[str, set[str]] = {}
    for root in filter(None, (config_directory(), config_dir)):
        for file in root.glob("*/*.yaml"):
            if file.parent.name != "hydra":
                found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in found.items()}


def compose(overrides: list[str], config_dir: Path | None = None) -> Composed:
    """The configuration of one run, with every problem of its overrides; those refused are left out of it."""
    parsed, problems = parse(overrides)
    groups = options(config_dir)
    choices, values = [], []
    for override in parsed:
        key = override.key_or_group
        if problem := refusals.wrong_form(override, groups):
            problems.append(problem)
        elif key.split(".")[0].split("/")[0] == "hydra":
            choices.append(override.input_line)
        elif key in groups and not isinstance(override.value(), dict):
            if problem := refusals.unknown_option(override, groups[key]):
                problems.append(problem)
            else:
                choices.append(_plain(override))
        else:
            values.append(override)
    used = [*choices, *map(_plain, values)]
    try:
        base = _compose_choices(choices, config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        return Composed(None, [*problems, refusals.composition_problem(error)], used)
    config = base.copy()
    for override in values:
        if problem := apply(config, override, groups):
            problems.append(problem)
    return Composed(config, problems, used, base)


def jobs(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of each run of a sweep: all combinations of the values separated by commas."""
    parsed, problems = parse(overrides)
    if problems:  # `compose` says them
        yield overrides
        return
    axes = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [override.input_line]
        for override in parsed
    ]
    yield from map(list, itertools.product(*axes))


def parse(overrides: list[str]) -> tuple[list[Override], list[str]]:
    """The overrides in Hydra's grammar, and a problem for each that is not one."""
    parsed, problems = [], []
    for text in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(
                f"{text} needs the form key=value (got {text!r}). It cannot be read: {reason}. "
                f"Use key=value, with quotes around special characters: \"key='a, b'\"."
            )
    return parsed, problems


def apply(config: DictConfig, override: Override, groups: dict[str, list[str]]) -> str | None:
    """Set one key; or the problem why not."""
    key, value = override.key_or_group, override.value()
    if key == FREE_FORM or key.startswith(FREE_FORM + "."):
        if config.task.name == "reasoning_gym":
            with open_dict(config):
                OmegaConf.update(config, key, value, force_add=True)
            return None
    elif key.endswith(".name") and key.count(".") == 1:
        group = key.split(".")[0]
        if group in groups:
            return (
                f"{key}={value} needs the option of a group (got a single key). The other keys of {group} come with "
                f"their option. Use {group}={value}."
            )
    node = config
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node.keys():  # noqa: SIM118 (`in node` misses unset keys)
            return refusals.unknown_key(config, key, value, groups)
        node = node._get_node(part)
    before = OmegaConf.select(config, key)
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        if isinstance(node, DictConfig):
            return f"{key}={value} needs keys and values of {key} (got {value!r}). {refusals.first_line(error)}. Use key=value."
        return refusals.wrong_type(config, key, value, node, before)
    return None


def _compose_choices(choices: list[str], config_dir: Path | None) -> DictConfig:
    register()
    if config_dir is not None:
        choices = [*choices, f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    with hydra.initialize_config_dir(str(config_directory()), version_base="1.3"):
        return hydra.compose("config", overrides=choices, return_hydra_config=True)


def _run_name(overrides, *, _root_: DictConfig) -> str:
    chosen = OmegaConf.select(_root_, "tracking.run_name")
    return chosen or run_name(list(overrides))


def _plain(override: Override) -> str:
    """The override as Hydra needs it: without a plus where the key exists, with it where it does not."""
    plain = override.input_line.lstrip("+")
    return f"++{plain}" if override.key_or_group.startswith(FREE_FORM) else plain
