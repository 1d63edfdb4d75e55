"""The one way into a configuration: overrides on the files in conf/ or on a saved run, with every problem of theirs."""

from __future__ import annotations

import contextlib
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

from pgtoolkit.config import refusals
from pgtoolkit.config.files import OPTIONAL, config_directory, options, plugins
from pgtoolkit.config.keys import KEYS, evaluated_keys, is_inside, key_named
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
    run_dir: Path | None = None,
    evaluate: Literal["run", "model"] | None = None,
) -> Composed:
    """The configuration of one run.

    config_dir: a folder of the user's with more options. sweep_file: the primary configuration instead of conf/'s.
    run_dir: a run to be continued or
    exported, whose saved configuration takes the place of the files. Raises ConfigError if it has none.
    evaluate: what is evaluated, where nothing is trained: only keys that say so may be typed (see `Key`), and how a run
    was trained is left out.
    """
    parsed, problems = parse(overrides)
    groups = options(config_dir)
    problems += refusals.given_twice(parsed)
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
        problem = refusals.wrong_form(override, groups)
        is_choice = key in groups and not isinstance(override.value(), dict)
        if evaluate and not problem and not any(is_inside(key, name) for name in evaluated_keys(evaluate)):
            reason, use = "Nothing is trained: it would be ignored.", f"the keys {', '.join(evaluated_keys(evaluate))}"
            problem = refusal(override.input_line, "to be left out", key, reason, use)
        elif saved and not evaluate and key in OPTIONAL:
            reason, use = "A run is continued as it was: these are chosen when it starts.", "a new run"
            problem = refusal(override.input_line, "to be left out", key, reason, use)
        if problem := problem or (refusals.unknown_option(override, groups) if is_choice else None):
            problems.append(problem)
        elif is_choice:
            choices.append(hydra_form(override.input_line))
            accepted.append(override)
        elif key.split(".")[0].split("/")[0] == "hydra" and not saved:
            choices.append(override.input_line)
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
    for override in values:
        if found := set_value(config, override.key_or_group, override.value(), groups):
            problems += found
        else:
            accepted.append(override)
    if saved:
        problems += executed.commands_not_typed(config, parsed)
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
        return None, [refusals.composition_problem(error)]
    if unusable := refusals.incomplete(config):
        return None, unusable
    return config, executed.set_of_hydra(config.hydra, without_files)


def _of_hydra(config: DictConfig, choices: list[str]) -> list[str]:
    """The choices among Hydra's own, with launcher and sweeper, which files may choose among those in conf/."""
    typed = [choice for choice in choices if key_of(choice).startswith("hydra")]
    for kind in ("launcher", "sweeper"):
        if option := plugins(kind).get(OmegaConf.select(config.hydra, f"{kind}._target_")):
            typed = [*(one for one in typed if key_of(one) != f"hydra/{kind}"), f"hydra/{kind}={option}"]
    return typed


def set_value(config: DictConfig, name: str, value: Any, groups: dict[str, list[str]]) -> list[str]:
    """Set one key, or several given as a dictionary; returns the problems, with which nothing is set."""
    key = key_named(name, config)
    is_free = key is not None and key.free and (name != key.name or isinstance(value, dict))
    if isinstance(value, dict) and value and not is_free:
        return [problem for part in value for problem in set_value(config, f"{name}.{part}", value[part], groups)]
    if name in groups:
        return [refusal(f"{name}={value}", "its keys one by one", value, "It is a group of keys.", f"{name}.KEY=VALUE")]
    if key is None:
        return [refusals.unknown_key(config, name, value, groups)]
    if name == f"{key.group}.name":
        reason = f"The other keys of {key.group} come with their option."
        return [refusal(f"{name}={value}", "to be left alone", value, reason, f"{key.group}={value}")]
    try:
        with open_dict(config) if is_free else contextlib.nullcontext():
            OmegaConf.update(config, name, value, force_add=is_free)
    except OverflowError:  # a whole number that no float can hold
        OmegaConf.update(config, name, math.copysign(math.inf, 1 if value > 0 else -1))
    except OmegaConfBaseException as error:
        wrong = refusals.unresolvable(name, value, error) if is_free else None
        return [wrong or refusals.wrong_type(config, key, value)]
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
