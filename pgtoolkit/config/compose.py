"""The one way into a configuration, where Hydra ends: overrides on the files in conf/ or on a saved
run become a frozen `Config`, with every problem of theirs."""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import hydra_keys, refusals
from pgtoolkit.config.composable import composed_again
from pgtoolkit.config.files import OPTIONAL, options
from pgtoolkit.config.hydra_files import compose_choices, register
from pgtoolkit.config.key import value_of, with_values
from pgtoolkit.config.keys import KEYS, evaluated_keys, is_inside, key_named
from pgtoolkit.config.launchers import LAUNCHERS, SEARCH
from pgtoolkit.config.overrides import NO_CHOICE, hydra_form, parse
from pgtoolkit.config.own_code import parameter_key
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.resolve import choices_of, default_in, in_range, resolve
from pgtoolkit.config.rules import executed
from pgtoolkit.config.saved import cannot_change, saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.records import read_data
from pgtoolkit.system.report import key_of, refusal


@dataclass(frozen=True)
class Composed:
    """One run's configuration with the problems of its overrides and values; what is refused is
    left out of it.

    config: None if nothing could be composed. choices: the option of each group; empty for a saved
        run.
    overrides: of the run, as they are recorded. name: the run's. is_sweep: whether the
        configuration itself asks for
    one. directory: of the run, None if its name does not resolve, for the problems with it.
    """

    config: Config | None
    problems: list[str]
    choices: Mapping[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    name: str | None = None
    is_sweep: bool = False
    directory: str | None = None
    problems_of_directory: list[str] = field(default_factory=list)


@dataclass
class Node:
    """What Hydra composes: a configuration with its node `hydra`, on which all overrides are set.

    config: None if nothing could be composed.
    """

    config: DictConfig | None
    problems: list[str]


def compose(
    overrides: list[str],
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    run_dir: Path | None = None,
    evaluate: Literal["run", "model"] | None = None,
) -> Composed:
    """Return the configuration of one run.

    config_dir: a folder of the user's with more options. sweep_file: the primary configuration
        instead of conf/'s.
    run_dir: a run to be continued or exported, whose saved configuration takes the place of the
        files. Raises
    ConfigError if it has none.
    evaluate: what is evaluated, where nothing is trained: only keys that say so may be typed (see
        `Key`), and how a run
    was trained is left out.
    """
    if run_dir is not None:
        return _composed_on_run(overrides, run_dir, evaluate)
    return composed_of(compose_node(overrides, config_dir, sweep_file, evaluate))


def compose_node(
    overrides: list[str],
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    evaluate: Literal["run", "model"] | None = None,
) -> Node:
    """Return what Hydra composes of the files, see `compose`, with the overrides of single keys set
    on it."""
    parsed, problems = _parsed(overrides)
    groups = options(config_dir)
    choices: list[str] = []
    values: list[Override] = []
    accepted: list[Override] = []
    for override in parsed:
        key = override.key_or_group
        is_choice = key in groups and not isinstance(override.value(), dict)
        is_of_hydra = key.split(".")[0].split("/")[0] == "hydra"
        if wrong := _wrong_here(override, groups, is_choice, evaluate):
            problems.append(wrong)
        elif is_choice:
            choices.append(hydra_form(refusals.as_typed(override)))
            accepted.append(override)
        elif not is_of_hydra:
            values.append(override)
        elif without_effect := [*hydra_keys.without_effect(override)]:
            problems += without_effect
        else:
            choices.append(refusals.as_typed(override))
    config, of_files = _of_files(choices, config_dir, sweep_file)
    problems += of_files
    if config is None:
        return Node(None, problems)
    problems += _set_all(config, values, groups, accepted)
    # Hydra has seen the choices alone; the names of directories come from everything that was
    # typed.
    config.hydra.overrides.task = [
        hydra_form(refusals.as_typed(override)) for override in parsed if override in accepted
    ]
    hydra_keys.name_directories(config.hydra, config.hydra.job.config.override_dirname.exclude_keys)
    return Node(config, problems)


def composed_of(node: Node) -> Composed:
    """Return the configuration that Hydra has composed, as an object."""
    if node.config is None:
        return Composed(None, _once(node.problems))
    wrong: dict[str, str] = {}
    choices = choices_of(node.config)
    config = in_range(resolve(node.config, wrong), wrong, choices)
    directory, problems_of_directory = hydra_keys.folder_in(node.config, "hydra.run.dir")
    return Composed(
        config=config,
        problems=_once([*node.problems, *wrong.values()]),
        choices=choices,
        overrides=hydra_keys.recorded(node.config.hydra),
        name=hydra_keys.name_in(node.config),
        is_sweep=hydra_keys.is_sweep(node.config.hydra),
        directory=directory,
        problems_of_directory=problems_of_directory,
    )


def _composed_on_run(
    overrides: list[str], run_dir: Path, evaluate: Literal["run", "model"] | None
) -> Composed:
    """Return the configuration of a saved run with overrides on it."""
    parsed, problems = _parsed(overrides)
    groups = options()
    register()
    before = saved_config(run_dir)
    choices: list[str] = []
    values: list[Override] = []
    for override in parsed:
        key = override.key_or_group
        is_choice = key in groups and not isinstance(override.value(), dict)
        wrong = _wrong_here(override, groups, is_choice, evaluate, is_saved=True)
        if wrong:
            problems.append(wrong)
        elif is_choice:
            choices.append(hydra_form(refusals.as_typed(override)))
        else:
            values.append(override)
    node = composed_again(before)
    if evaluate:
        usual = compose_choices([])
        for group in {key.group for key in KEYS} - {key.group for key in KEYS if key.evaluate}:
            node[group] = usual[group]
    for choice in choices:
        node[key_of(choice)] = compose_choices([choice])[key_of(choice)]
    problems += _set_all(node, values, groups, [])
    unresolved: dict[str, str] = {}
    config = absolute_paths(resolve(node, unresolved))
    problems += executed.commands_not_typed(
        config, [(one.key_or_group, one.value()) for one in parsed]
    )
    if not evaluate:
        movable = set(read_data(run_dir))  # keys whose contents are known
        changed = {}
        for key, problem in cannot_change(before, config, movable):
            problems.append(problem)
            group = key.partition(".")[0]
            key = group if group in map(key_of, choices) else key
            changed[key] = value_of(before, key)
            unresolved = {
                name: said for name, said in unresolved.items() if not is_inside(name, key)
            }
        config = with_values(config, changed)
    config = in_range(config, unresolved, {})
    return Composed(config, _once([*problems, *unresolved.values()]))


def _parsed(overrides: list[str]) -> tuple[list[Override], list[str]]:
    """Return the overrides in Hydra's grammar, and the problems with what was typed."""
    parsed, problems = parse(overrides)
    problems = problems + refusals.given_twice(parsed)
    return [
        override for override in parsed if refusals.as_typed(override) not in NO_CHOICE
    ], problems


def _wrong_here(
    override: Override,
    groups: dict[str, list[str]],
    is_choice: bool,
    evaluate: Literal["run", "model"] | None,
    is_saved: bool = False,
) -> str | None:
    """Return what is wrong with an override before its value is looked at."""
    key = override.key_or_group
    if problem := refusals.wrong_form(override, groups):
        return problem
    if evaluate and not any(is_inside(key, name) for name in evaluated_keys(evaluate)):
        return refusal(
            setting=refusals.as_typed(override),
            needs="to be left out",
            got=key,
            reason="Nothing is trained: it would be ignored.",
            use=f"the keys {', '.join(evaluated_keys(evaluate))}",
        )
    if is_saved and not evaluate and key in OPTIONAL:
        return refusal(
            setting=refusals.as_typed(override),
            needs="to be left out",
            got=key,
            reason="A run is continued as it was: these are chosen when it starts.",
            use="a new run",
        )
    return refusals.unknown_option(override, groups) if is_choice else None


def _set_all(
    config: DictConfig,
    values: list[Override],
    groups: dict[str, list[str]],
    accepted: list[Override],
) -> list[str]:
    """Set single keys, and add the overrides that did to `accepted`; returns the problems with the
    others."""
    problems = []
    for override in values:
        if wrong := set_value(config, override.key_or_group, override.value(), groups):
            problems += wrong
        else:
            accepted.append(override)
    return problems


def _once(problems: list[str]) -> list[str]:
    return list(dict.fromkeys(problems))


def _of_files(
    choices: list[str], config_dir: Path | None, sweep_file: Path | None
) -> tuple[DictConfig | None, list[str]]:
    """Return the configuration of the chosen options, and the problems with what files of the
    user's set."""
    try:
        config = compose_choices(choices, config_dir, sweep_file)
        without_files = (
            compose_choices(_of_hydra(config, choices)).hydra if config_dir or sweep_file else None
        )
    except ConfigError as error:  # a file of the user's that is no YAML
        return None, [str(error)]
    except (
        Exception
    ) as error:  # Hydra refuses odd values of its own keys by many types of exception
        # To Hydra an option that is not there is an OSError, too.
        if (
            isinstance(error, OSError)
            and not isinstance(error, HydraException)
            and error.errno != errno.ENAMETOOLONG
        ):
            raise  # a file that is there and cannot be read
        return None, [refusals.composition_problem(error)]
    if unusable := refusals.incomplete(config):
        return None, unusable
    return config, hydra_keys.set_by_files(config.hydra, without_files)


def _of_hydra(config: DictConfig, choices: list[str]) -> list[str]:
    """Return the choices among Hydra's own, with launcher and sweeper, which files may choose among
    those in conf/."""
    typed = [choice for choice in choices if key_of(choice).startswith("hydra")]
    known = {"launcher": LAUNCHERS, "sweeper": (SEARCH,)}
    for kind, names in known.items():
        if (option := OmegaConf.select(config.hydra, f"{kind}.kind")) in names:
            typed = [
                *(choice for choice in typed if key_of(choice) != f"hydra/{kind}"),
                f"hydra/{kind}={option}",
            ]
    return typed


def set_value(config: DictConfig, name: str, value: Any, groups: dict[str, list[str]]) -> list[str]:
    """Set one key, or several given as a dictionary; returns the problems, with which nothing is
    set."""
    name = parameter_key(name, config)
    key = key_named(name, config)
    is_free = key is not None and key.free and (name != key.name or isinstance(value, dict))
    if isinstance(value, dict) and value and not is_free:
        return [
            problem
            for part in value
            for problem in set_value(config, f"{name}.{part}", value[part], groups)
        ]
    if name in groups:
        return [
            refusal(
                f"{name}={value}",
                "its keys one by one",
                value,
                "It is a group of keys.",
                f"{name}.KEY=VALUE",
            )
        ]
    if key is None:
        return [refusals.unknown_key(config, name, value, groups)]
    if name == f"{key.group}.name":
        return [
            refusal(
                setting=f"{name}={value}",
                needs="to be left alone",
                got=value,
                reason=f"The other keys of {key.group} come with their option.",
                use=f"{key.group}={value}",
            )
        ]
    try:
        with open_dict(config) if is_free else contextlib.nullcontext():
            OmegaConf.update(config, name, value, force_add=is_free)
    except OverflowError:  # a whole number that no float can hold
        assert isinstance(value, int)
        OmegaConf.update(config, name, math.copysign(math.inf, 1 if value > 0 else -1))
    except OmegaConfBaseException as error:
        wrong = refusals.unresolvable(name, value, error) if is_free else None
        return [wrong or refusals.wrong_type(key, value, default_in(config, key.name))]
    return []
