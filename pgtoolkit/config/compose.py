"""The one way into a configuration: overrides on the files in conf/ or on a saved run, with every problem of theirs."""

from __future__ import annotations

import copy
import errno
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import override_problems
from pgtoolkit.config.files import config_directory, options, plugins
from pgtoolkit.config.keys import KEYS, evaluated_keys, is_inside, keys_of
from pgtoolkit.config.overrides import NO_CHOICE, hydra_form, parse, register
from pgtoolkit.config.paths import make_absolute
from pgtoolkit.config.rules import executed
from pgtoolkit.config.saved import cannot_change, saved_config
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.records import read_data
from pgtoolkit.system.report import key_of, refusal


@dataclass
class Composed:
    """One run's configuration with the problems of its overrides; those refused are left out of it.

    config: None if nothing could be composed; it holds the `hydra` node, but for that of a saved run.
    """

    config: DictConfig | None
    problems: list[str]


def compose(
    overrides: list[str],
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    typed: list[str] | None = None,
    run_dir: Path | None = None,
    evaluate: Literal["run", "model"] | None = None,
) -> Composed:
    """The configuration of one run.

    config_dir: a folder of the user's with more options. sweep_file: the primary configuration instead of conf/'s.
    typed: those of the overrides that come from the command line, where not all do. run_dir: a run to be continued or
    exported, whose saved configuration takes the place of the files. Raises ConfigError if it has none.
    evaluate: what is evaluated, where nothing is trained: only keys that say so may be typed (see `Key`), and how a run
    was trained is left out.
    """
    parsed, problems = parse(overrides)
    groups = options(config_dir)
    problems += override_problems.given_twice(parsed)
    parsed = [override for override in parsed if override.input_line not in NO_CHOICE]
    register()
    saved = saved_config(run_dir) if run_dir else None
    if saved and evaluate:
        usual = compose_choices([])
        for group in {key.group for key in KEYS} - {key.group for key in KEYS if key.evaluate}:
            saved[group] = usual[group]
    movable = set(read_data(run_dir)) if run_dir else set()  # keys whose contents are known
    choices, values, accepted = [], [], []
    for override in parsed:
        key = override.key_or_group
        problem = override_problems.wrong_form(override, groups)
        if evaluate and not problem and not any(is_inside(key, name) for name in evaluated_keys(evaluate)):
            reason, use = "Nothing is trained: it would be ignored.", f"the keys {', '.join(evaluated_keys(evaluate))}"
            problem = refusal(override.input_line, "to be left out", key, reason, use)
        if saved and not evaluate and key in ("experiment", "debug"):
            reason, use = "A run is continued as it was: these are chosen when it starts.", "a new run"
            problem = refusal(override.input_line, "to be left out", key, reason, use)
        if problem:
            problems.append(problem)
        elif key.split(".")[0].split("/")[0] == "hydra" and not saved:
            choices.append(override.input_line)
        elif key in groups and not isinstance(override.value(), dict):
            if problem := override_problems.unknown_option(override, groups):
                problems.append(problem)
            else:
                choices.append(hydra_form(override.input_line))
                accepted.append(override)
        else:
            values.append(override)
    if saved:
        config, before = saved, copy.deepcopy(saved)
        for choice in choices:
            config[key_of(choice)] = compose_choices([choice])[key_of(choice)]
    else:
        config, found = _of_files(choices, config_dir, sweep_file)
        problems += found
        if config is None:
            return Composed(None, problems)
    # What stands for the value of another key comes after it.
    for override in sorted(values, key=lambda one: "${" in one.input_line):
        if found := set_value(config, override.key_or_group, override.value(), groups):
            problems += found
        else:
            accepted.append(override)
    by_user = parsed if typed is None else parse(typed)[0]
    problems += executed.not_typed(config, by_user)
    if saved:
        make_absolute(config)
        for key, problem in () if evaluate else [*cannot_change(before, config, movable)]:
            problems.append(problem)
            group = key.partition(".")[0]
            key = group if group in map(key_of, choices) else key
            OmegaConf.update(config, key, OmegaConf.select(before, key), merge=False)
    else:  # Hydra has seen the choices alone; the names of directories come from everything that was typed
        config.hydra.overrides.task = [hydra_form(one.input_line) for one in parsed if one in accepted]
        name_directories(config.hydra, config.hydra.job.config.override_dirname.exclude_keys)
    return Composed(config, list(dict.fromkeys(problems)))


def name_directories(hydra: DictConfig, unnamed: list[str]) -> None:
    """Set what names of directories are made of; unnamed: keys that are left out of them."""
    hydra.job.config.override_dirname.exclude_keys = list(unnamed)
    form, task = hydra.job.config.override_dirname, OmegaConf.to_container(hydra.overrides.task)  # as it was typed
    overrides = parse(task)[0]
    hydra.job.override_dirname = get_overrides_dirname(overrides, form.exclude_keys, form.item_sep, form.kv_sep)


def _of_files(
    choices: list[str], config_dir: Path | None, sweep_file: Path | None
) -> tuple[DictConfig | None, list[str]]:
    """The configuration of the chosen options, and the problems with what files of the user's set."""
    try:
        config = compose_choices(choices, config_dir, sweep_file)
        without_files = compose_choices(_of_hydra(config, choices)).hydra if config_dir or sweep_file else None
    except ConfigError as error:  # a file of the user's that is no YAML
        return None, [str(error)]
    except Exception as error:  # Hydra refuses odd values of its own keys by many types of exception
        # To Hydra an option that is not there is an OSError, too.
        if isinstance(error, OSError) and not isinstance(error, HydraException) and error.errno != errno.ENAMETOOLONG:
            raise  # a file that is there and cannot be read
        return None, [override_problems.composition_problem(error)]
    if unusable := override_problems.incomplete(config):
        return None, unusable
    return config, executed.set_of_hydra(config.hydra, without_files)


def _of_hydra(config: DictConfig, choices: list[str]) -> list[str]:
    """The choices among Hydra's own, with launcher and sweeper, which files may choose among those in conf/."""
    typed = [choice for choice in choices if key_of(choice).startswith("hydra")]
    for kind in ("launcher", "sweeper"):
        if option := plugins(kind).get(OmegaConf.select(config.hydra, f"{kind}._target_")):
            typed = [*(one for one in typed if key_of(one) != f"hydra/{kind}"), f"hydra/{kind}={option}"]
    return typed


def set_value(config: DictConfig, key: str, value: Any, groups: dict[str, list[str]]) -> list[str]:
    """Set one key, or several given as a dictionary; returns the problems, with which nothing is set."""
    free = next((known for known in keys_of(config) if known.free and is_inside(key, known.name)), None)
    if free:
        if key == free.name and not isinstance(value, dict):
            return [override_problems.wrong_type(config, key, value, config[free.group]._get_node(free.leaf))]
        try:
            with open_dict(config):
                OmegaConf.update(config, key, value, force_add=True)
        except OmegaConfBaseException as error:
            return [override_problems.unresolvable(key, value, error)]
        return []
    if isinstance(value, dict) and value:
        return [problem for name in value for problem in set_value(config, f"{key}.{name}", value[name], groups)]
    group, _, leaf = key.partition(".")
    if leaf == "name" and group in groups:
        reason = f"The other keys of {group} come with their option."
        return [f"{key}={value} needs to be left alone (got {value!r}). {reason} Use {group}={value}."]
    node = config
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node.keys():  # noqa: SIM118 (`in node` misses unset keys)
            return [override_problems.unknown_key(config, key, value, groups)]
        node = node._get_node(part)
    if isinstance(node, DictConfig):
        return [f"{key}={value} needs its keys one by one (got {value!r}). It is a group of keys. Use {key}.KEY=VALUE."]
    before = node._value()
    try:
        OmegaConf.update(config, key, value)
    except OverflowError:  # a whole number that no float can hold
        OmegaConf.update(config, key, math.copysign(math.inf, 1 if value > 0 else -1))
    except OmegaConfBaseException:
        return [override_problems.wrong_type(config, key, value, node)]
    if isinstance(value, str) and "${" in value and "oc.env" not in value:
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            OmegaConf.update(config, key, before)
            return [override_problems.unresolvable(key, value, error)]
    return []


def compose_choices(choices: list[str], config_dir: Path | None = None, sweep_file: Path | None = None) -> DictConfig:
    """The files of the chosen options, put together by Hydra; raises its exceptions."""
    return copy.deepcopy(_compose_cached(tuple(choices), config_dir, sweep_file))


@functools.cache
def _compose_cached(choices: tuple[str, ...], config_dir: Path | None, sweep_file: Path | None) -> DictConfig:
    # The runs of a sweep often choose the same files and differ only in single keys.
    register()
    primary = sweep_file or config_directory() / "config.yaml"
    # Hydra looks beside the primary file first, in --config-dir next, and in conf/ last.
    if places := [place for place in (config_dir, sweep_file and config_directory()) if place]:
        folders = ",".join(f"'file://{Path(place).resolve()}'" for place in places)
        choices = [f"hydra.searchpath=[{folders}]", *choices]
    with hydra.initialize_config_dir(str(primary.parent), version_base="1.3"):
        return hydra.compose(primary.stem, overrides=list(choices), return_hydra_config=True)
