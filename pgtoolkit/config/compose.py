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

Evaluated = Literal["run", "model"]
"""What `pgtk evaluate` measures: the policy of a run, or a model's folder."""


@dataclass(frozen=True)
class Composed:
    """One run's configuration, without the overrides and values that are refused.

    config: None if nothing could be composed. problems: those of overrides and values. choices: the
    option of each group; empty for a saved run. overrides: those of the run, as its directory
    records them. name: the run's. is_sweep: whether the configuration itself asks for a sweep.
    directory: of the run; None if its name does not resolve, for which problems_of_directory says
    why.
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
    """A configuration as Hydra composes it, with its node `hydra`, on which all overrides are set.

    config: None if nothing could be composed.
    """

    config: DictConfig | None
    problems: list[str]


@dataclass
class _Overrides:
    """Overrides in Hydra's grammar, together and by their effect, and the problems with the others.

    parsed: all that have the right form. choices: those that choose an option. values: those that
    set keys. of_hydra: those on Hydra's own keys.
    """

    parsed: list[Override]
    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    of_hydra: list[Override] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compose(
    overrides: list[str],
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    run_dir: Path | None = None,
    evaluate: Evaluated | None = None,
) -> Composed:
    """Return the configuration of one run.

    config_dir: a folder of the user's with more options. sweep_file: the primary configuration, in
    place of the one in conf/. run_dir: a run to be continued or exported, whose saved configuration
    takes the place of the files; raises ConfigError if it has none. evaluate: what is evaluated,
    where nothing is trained: only the keys that declare it may be typed (see `Key`), and how a run
    was trained is left out.
    """
    if run_dir is not None:
        return _composed_on_run(overrides, run_dir, evaluate)
    return composed_of(compose_node(overrides, config_dir, sweep_file, evaluate))


def compose_node(
    overrides: list[str],
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    evaluate: Evaluated | None = None,
) -> Node:
    """Return what Hydra composes of the files, see `compose`, with the overrides of single keys set
    on it."""
    groups = options(config_dir)
    typed = _read(overrides, groups, evaluate)
    problems = typed.problems
    choices = [hydra_form(refusals.as_typed(override)) for override in typed.choices]
    for override in typed.of_hydra:
        without_effect = [*hydra_keys.without_effect(override)]
        problems += without_effect
        if not without_effect:
            choices.append(refusals.as_typed(override))
    config, problems_of_files = _of_files(choices, config_dir, sweep_file)
    problems += problems_of_files
    if config is None:
        return Node(None, problems)
    values, problems_of_values = _set_all(config, typed.values, groups)
    problems += problems_of_values
    # Hydra has seen the choices alone; the names of directories come from everything that was
    # typed.
    accepted = [*typed.choices, *values]
    config.hydra.overrides.task = [
        hydra_form(refusals.as_typed(override)) for override in typed.parsed if override in accepted
    ]
    hydra_keys.name_directories(config.hydra, config.hydra.job.config.override_dirname.exclude_keys)
    return Node(config, problems)


def composed_of(node: Node) -> Composed:
    """Return the configuration that Hydra has composed, as an object."""
    if node.config is None:
        return Composed(None, _unique(node.problems))
    problems_of_keys: dict[str, str] = {}
    choices = choices_of(node.config)
    config = in_range(resolve(node.config, problems_of_keys), problems_of_keys, choices)
    directory, problems_of_directory = hydra_keys.folder_in(node.config, "hydra.run.dir")
    return Composed(
        config=config,
        problems=_unique([*node.problems, *problems_of_keys.values()]),
        choices=choices,
        overrides=hydra_keys.recorded(node.config.hydra),
        name=hydra_keys.name_in(node.config),
        is_sweep=hydra_keys.is_sweep(node.config.hydra),
        directory=directory,
        problems_of_directory=problems_of_directory,
    )


def _composed_on_run(overrides: list[str], run_dir: Path, evaluate: Evaluated | None) -> Composed:
    """Return the configuration of a saved run with overrides on it."""
    groups = options()
    typed = _read(overrides, groups, evaluate, is_saved=True)
    register()
    saved = saved_config(run_dir)
    node = composed_again(saved)
    if evaluate:
        _use_default_options(node)
    chosen_groups = []
    for override in typed.choices:
        choice = hydra_form(refusals.as_typed(override))
        group = key_of(choice)
        node[group] = compose_choices([choice])[group]
        chosen_groups.append(group)
    # Hydra's own keys are unknown to a saved configuration, and refused as such.
    _, problems_of_values = _set_all(node, [*typed.values, *typed.of_hydra], groups)
    unresolved: dict[str, str] = {}
    config = absolute_paths(resolve(node, unresolved))
    values = [(override.key_or_group, override.value()) for override in typed.parsed]
    problems = [
        *typed.problems,
        *problems_of_values,
        *executed.commands_not_typed(config, values),
    ]
    if not evaluate:
        changed = []
        movable = set(read_data(run_dir))  # keys whose contents are known
        for key, problem in cannot_change(saved, config, movable):
            problems.append(problem)
            group = key.partition(".")[0]
            changed.append(group if group in chosen_groups else key)
        config = with_values(config, {key: value_of(saved, key) for key in changed})
        unresolved = {
            name: problem
            for name, problem in unresolved.items()
            if not any(is_inside(name, key) for key in changed)
        }
    config = in_range(config, unresolved, {})
    return Composed(config, _unique([*problems, *unresolved.values()]))


def _use_default_options(node: DictConfig) -> None:
    """Replace the groups that say how a run was trained, which evaluating does not need."""
    defaults = compose_choices([])
    groups_of_evaluation = {key.group for key in KEYS if key.evaluate}
    for group in {key.group for key in KEYS} - groups_of_evaluation:
        node[group] = defaults[group]


def _read(
    overrides: list[str],
    groups: dict[str, list[str]],
    evaluate: Evaluated | None,
    is_saved: bool = False,
) -> _Overrides:
    """Return the overrides in Hydra's grammar, by their effect, without those that have none, such
    as experiment=null.

    is_saved: whether they are set on a saved run.
    """
    parsed, problems = parse(overrides)
    problems = problems + refusals.given_twice(parsed)
    parsed = [override for override in parsed if refusals.as_typed(override) not in NO_CHOICE]
    typed = _Overrides(parsed, problems=problems)
    for override in parsed:
        key = override.key_or_group
        is_choice = key in groups and not isinstance(override.value(), dict)
        problem = _problem_of_key(override, groups, is_choice, evaluate, is_saved)
        if problem is not None:
            typed.problems.append(problem)
        elif is_choice:
            typed.choices.append(override)
        elif key.split(".")[0].split("/")[0] == "hydra":
            typed.of_hydra.append(override)
        else:
            typed.values.append(override)
    return typed


def _problem_of_key(
    override: Override,
    groups: dict[str, list[str]],
    is_choice: bool,
    evaluate: Evaluated | None,
    is_saved: bool,
) -> str | None:
    """Return what is wrong with an override before its value is looked at; None if nothing is."""
    key = override.key_or_group
    problem = refusals.wrong_form(override, groups)
    if problem is not None:
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
    config: DictConfig, values: list[Override], groups: dict[str, list[str]]
) -> tuple[list[Override], list[str]]:
    """Set single keys; returns the overrides that were set, and the problems with the others."""
    accepted = []
    problems = []
    for override in values:
        problems_of_value = set_value(config, override.key_or_group, override.value(), groups)
        problems += problems_of_value
        if not problems_of_value:
            accepted.append(override)
    return accepted, problems


def _unique(problems: list[str]) -> list[str]:
    return list(dict.fromkeys(problems))


def _of_files(
    choices: list[str], config_dir: Path | None, sweep_file: Path | None
) -> tuple[DictConfig | None, list[str]]:
    """Return the configuration of the chosen options, and the problems with keys that the user's
    files set in it."""
    try:
        config = compose_choices(choices, config_dir, sweep_file)
        node_without_files = None
        if config_dir or sweep_file:
            node_without_files = compose_choices(_choices_of_hydra(config, choices)).hydra
    except ConfigError as error:  # a file of the user's that is no YAML
        return None, [str(error)]
    except Exception as error:
        # Hydra refuses odd values of its own keys by many types of exception. An option that does
        # not exist is an OSError, too, and so is a name that is too long for a file.
        is_of_hydra = isinstance(error, HydraException)
        if isinstance(error, OSError) and not is_of_hydra and error.errno != errno.ENAMETOOLONG:
            raise  # a file that is there and cannot be read
        return None, [refusals.composition_problem(error)]
    problems = refusals.incomplete(config)
    if problems:
        return None, problems
    return config, hydra_keys.set_by_files(config.hydra, node_without_files)


def _choices_of_hydra(config: DictConfig, choices: list[str]) -> list[str]:
    """Return the choices among Hydra's own groups, with the launcher and the sweeper that a file
    chose among those in conf/, as it may."""
    typed = [choice for choice in choices if key_of(choice).startswith("hydra")]
    for kind, names in {"launcher": LAUNCHERS, "sweeper": (SEARCH,)}.items():
        option = OmegaConf.select(config.hydra, f"{kind}.kind")
        if option in names:
            typed = [choice for choice in typed if key_of(choice) != f"hydra/{kind}"]
            typed.append(f"hydra/{kind}={option}")
    return typed


def set_value(config: DictConfig, name: str, value: Any, groups: dict[str, list[str]]) -> list[str]:
    """Set a key, or several keys if the value is a dictionary of them.

    Returns the problems with the value; a key that has one is not set.
    """
    name = parameter_key(name, config)
    key = key_named(name, config)
    is_free = key is not None and key.free and (name != key.name or isinstance(value, dict))
    if isinstance(value, dict) and value and not is_free:
        problems = []
        for part in value:
            problems += set_value(config, f"{name}.{part}", value[part], groups)
        return problems
    if name in groups:
        return [
            refusal(
                setting=f"{name}={value}",
                needs="its keys one by one",
                got=value,
                reason="It is a group of keys.",
                use=f"{name}.KEY=VALUE",
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
            # An empty dictionary empties the key. Merged, it would change nothing.
            OmegaConf.update(config, name, value, force_add=is_free, merge=value != {})
    except OverflowError:  # a whole number that no float can hold
        assert isinstance(value, int)
        OmegaConf.update(config, name, math.copysign(math.inf, 1 if value > 0 else -1))
    except OmegaConfBaseException as error:
        problem = refusals.unresolvable(name, value, error) if is_free else None
        return [problem or refusals.wrong_type(key, value, default_in(config, key.name))]
    return []
