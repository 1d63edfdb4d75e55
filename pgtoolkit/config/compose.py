"""The one way to a configuration: overrides are set on the files in conf/ or on a saved run.

The result is a frozen `Config`, with all problems of the overrides and files. Hydra and OmegaConf
are used up to here, and nothing after it knows them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import hydra_keys, refusals, refused_keys
from pgtoolkit.config.composable import composed_again
from pgtoolkit.config.files import OPTIONAL, options, own_folder, taken_names
from pgtoolkit.config.foreign_values import foreign_values
from pgtoolkit.config.hydra_files import (
    compose_choices,
    compose_files,
    hydra_without_files,
    register,
)
from pgtoolkit.config.keys import KEYS, evaluated_keys, is_inside, key_named, switched_off
from pgtoolkit.config.launchers import LAUNCHERS, SEARCH
from pgtoolkit.config.meant_keys import option_meant
from pgtoolkit.config.new_run import new_run_command
from pgtoolkit.config.overrides import NO_CHOICE, hydra_form, parse
from pgtoolkit.config.own_code import keys_set, parameter_key, with_path
from pgtoolkit.config.own_files import RefusedFilesError, unknown_hydra_option
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.resolve import choices_of, default_in, in_range, resolve
from pgtoolkit.config.rules import executed
from pgtoolkit.config.rules.addresses import addresses_not_typed
from pgtoolkit.config.saved import cannot_change, saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.runs.records import leaves, read_data
from pgtoolkit.system.conditions import value_of, with_values
from pgtoolkit.system.report import key_of, refusal

Evaluated = Literal["run", "model"]
"""What `pgtk evaluate` measures: the policy of a run, or a model's folder."""


@dataclass(frozen=True)
class Composed:
    """The configuration of one run, and the problems of its parts.

    A refused override is left out, and a refused value is replaced, so that all problems can be
    found at once.

    config: None if nothing could be composed.
    problems: the problems with overrides and values.
    notes: what may surprise in how the files were read.
    choices: group -> its option; empty for a saved run.
    overrides: the overrides as the run directory records them; empty for a saved run.
    name: the name of the run; None for a saved run.
    is_sweep: whether the configuration itself asks for a sweep.
    directory: the run directory, of a job the one in its sweep's folder; None for a saved run, and
        if its name is refused.
    problems_of_directory: the reason why the name of the directory is refused.
    saved: the configuration of the run that is continued; None for a new run.
    """

    config: Config | None
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    choices: Mapping[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    name: str | None = None
    is_sweep: bool = False
    directory: str | None = None
    problems_of_directory: list[str] = field(default_factory=list)
    saved: Config | None = None


@dataclass
class Node:
    """A configuration in Hydra's form, with the accepted overrides set on it.

    config: has Hydra's own keys in its node `hydra`; None if nothing could be composed.
    problems: the problems with overrides and files.
    problems_of_files: those with files.
    typed: the keys that the accepted overrides set, and the groups whose option they choose.
    """

    config: DictConfig | None
    problems: list[str]
    problems_of_files: list[str] = field(default_factory=list)
    typed: set[str] = field(default_factory=set)


@dataclass
class _Overrides:
    """Overrides that Hydra's parser has read, sorted by their effect.

    parsed: all overrides that could be read, in the order in which they were typed.
    choices: those that choose the option of a group.
    values: those that set keys.
    of_hydra: those that set Hydra's own keys.
    problems: the problems that reading and sorting have found. A function says what is wrong of a
        configuration, whose keys it compares.
    """

    parsed: list[Override]
    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    of_hydra: list[Override] = field(default_factory=list)
    problems: list[str | Callable[[DictConfig], str]] = field(default_factory=list)

    def problems_in(self, config: DictConfig | None) -> list[str]:
        """Return the problems. config: what the other overrides give; None where they give none."""
        needs_config = any(callable(problem) for problem in self.problems)
        if config is None and needs_config:
            config = compose_choices([])
        return [
            problem(config) if callable(problem) else problem  # type: ignore[arg-type]
            for problem in self.problems
        ]


def compose(
    overrides: list[str],
    sweep_file: Path | None = None,
    run_dir: Path | None = None,
    evaluate: Evaluated | None = None,
) -> Composed:
    """Return the configuration of one run.

    sweep_file: the primary configuration, in place of the one in conf/.
    run_dir: a run to be continued, exported or evaluated. Its saved configuration takes the place
        of the files. Raises ConfigError if it has none.
    evaluate: what `pgtk evaluate` measures; None for training. Only keys that declare it
        (`Key.evaluate`) may then be typed, and the groups of training keep their defaults.
    """
    if run_dir is not None:
        return _composed_on_run(overrides, run_dir, evaluate)
    return composed_of(compose_node(overrides, sweep_file, evaluate))


def compose_node(
    overrides: list[str], sweep_file: Path | None = None, evaluate: Evaluated | None = None
) -> Node:
    """Return the files that the overrides choose, composed by Hydra, with the other overrides set
    on them.

    The arguments are those of `compose`.
    """
    taken = taken_names(sweep_file)
    if taken:
        return Node(None, taken)
    groups = options()
    by_effect = _sort_by_effect(overrides, groups, evaluate)
    problems: list[str] = []
    for_hydra = [hydra_form(refusals.as_typed(override)) for override in by_effect.choices]
    values_of_hydra = []
    for override in by_effect.of_hydra:
        without_effect = [*hydra_keys.without_effect(override)]
        problems += without_effect
        if without_effect:
            continue
        key = override.key_or_group
        if "/" not in key:
            values_of_hydra += leaves({key: override.value()})
            continue
        problem = unknown_hydra_option(key, override.value())
        if problem is None:
            for_hydra.append(refusals.as_typed(override))
        else:
            problems.append(problem)
    config, problems_of_files = _compose_files(for_hydra, sweep_file)
    problems = [*by_effect.problems_in(config), *problems, *problems_of_files]
    if config is None:
        return Node(None, problems)
    for key, value in values_of_hydra:
        problem = hydra_keys.set_typed(config, key, value)
        problems += [] if problem is None else [problem]
    values, problems_of_values = _set_values(config, by_effect.values, groups)
    problems += problems_of_values
    # Hydra has recorded only the overrides that it got. Record all accepted ones, since the names
    # of directories are made from them.
    accepted = [*by_effect.choices, *values]
    config.hydra.overrides.task = [
        hydra_form(refusals.as_typed(override))
        for override in by_effect.parsed
        if override in accepted
    ]
    hydra_keys.name_directories(config.hydra, config.hydra.job.config.override_dirname.exclude_keys)
    typed = {
        key for override in accepted for key in keys_set(override.key_or_group, override.value())
    }
    # Hydra records no choice of several files.
    several = {of.key_or_group: of.value() for of in by_effect.choices if type(of.value()) is list}
    problems += foreign_values(choices_of(config) | several, typed)
    return Node(config, problems, problems_of_files, typed)


def composed_of(node: Node) -> Composed:
    """Return the configuration in a node as a frozen object, with all problems found so far."""
    if node.config is None:
        return Composed(None, _unique(node.problems))
    problems_of_keys: dict[str, str] = {}
    choices = choices_of(node.config)
    config = in_range(resolve(node.config, problems_of_keys), problems_of_keys, choices)
    off = switched_off(config, node.typed, choices)
    config = with_values(config, off)
    # A required key whose value was refused is not refused again for having none.
    for key in [key for key in problems_of_keys if is_refused(key, node.problems)]:
        del problems_of_keys[key]
    directory, problems_of_directory = hydra_keys.folder_in(node.config, "hydra.run.dir")
    return Composed(
        config=config,
        problems=_unique([*node.problems, *problems_of_keys.values()]),
        notes=[f"{', '.join(off)}: a file's, without effect beside what was typed"] if off else [],
        choices=choices,
        overrides=hydra_keys.recorded(node.config.hydra),
        name=hydra_keys.name_in(node.config),
        is_sweep=hydra_keys.is_sweep(node.config.hydra),
        directory=directory,
        problems_of_directory=problems_of_directory,
    )


def _composed_on_run(overrides: list[str], run_dir: Path, evaluate: Evaluated | None) -> Composed:
    """Return the configuration of a saved run, with overrides set on it."""
    groups = options()
    by_effect = _sort_by_effect(overrides, groups, evaluate, run_dir)
    register()
    saved = saved_config(run_dir)
    node = composed_again(saved)
    if evaluate:
        _use_default_options(node)
    chosen_groups = []
    for override in by_effect.choices:
        choice = hydra_form(refusals.as_typed(override))
        group = key_of(choice)
        node[group] = compose_choices([choice])[group]
        chosen_groups.append(group)
    # A saved configuration has none of Hydra's own keys, so they are refused as unknown keys.
    _, problems_of_values = _set_values(node, [*by_effect.values, *by_effect.of_hydra], groups)
    unresolved: dict[str, str] = {}  # key -> the problem with it
    config = absolute_paths(resolve(node, unresolved))
    values = [(override.key_or_group, override.value()) for override in by_effect.parsed]
    problems = [
        *(taken_names() if by_effect.choices else ()),
        *by_effect.problems_in(node),
        *problems_of_values,
        *executed.commands_not_typed(config, values),
        *addresses_not_typed(config, run_dir, values),
    ]
    if not evaluate:
        # The data of these keys is recorded by its content, so their files may have moved.
        movable = set(read_data(run_dir))
        changed = []
        use = _as_new_run(run_dir, overrides)
        for key, problem in cannot_change(saved, config, movable, use):
            problems.append(problem)
            group = key.partition(".")[0]
            # If the option of a group was chosen anew, all of the group is taken back.
            changed.append(group if group in chosen_groups else key)
        # The refused changes are taken back, and so are the problems with their values.
        config = with_values(config, {key: value_of(saved, key) for key in changed})
        unresolved = {
            name: problem
            for name, problem in unresolved.items()
            if not any(is_inside(name, key) for key in changed)
        }
    config = in_range(config, unresolved, {})
    return Composed(config, _unique([*problems, *unresolved.values()]), saved=saved)


def _as_new_run(run_dir: Path, overrides: list[str]) -> str:
    """Return the command of a new run with these overrides; in words where the run's own, which
    follow them, are lost."""
    try:
        return new_run_command(run_dir, overrides)
    except StorageError:
        return "a new run"


def _use_default_options(node: DictConfig) -> None:
    """Set the groups that only training needs to their default options."""
    defaults = compose_choices([])
    groups_of_evaluation = {key.group for key in KEYS if key.evaluate}
    for group in {key.group for key in KEYS} - groups_of_evaluation:
        node[group] = defaults[group]


def _sort_by_effect(
    overrides: list[str],
    groups: dict[str, list[str]],
    evaluate: Evaluated | None,
    run_dir: Path | None = None,
) -> _Overrides:
    """Read overrides by Hydra's grammar, and sort them by their effect.

    Those without any, such as experiment=null, are left out.

    groups: group -> its options.
    run_dir: of the saved run that the overrides are set on; None for a new one.
    """
    parsed, unreadable = parse(overrides)
    by_effect = _Overrides(parsed)
    for words in unreadable:
        by_effect.problems.append(functools.partial(refused_keys.unreadable, words, groups=groups))
    by_effect.problems += refusals.given_twice(parsed)
    parsed = [override for override in parsed if refusals.as_typed(override) not in NO_CHOICE]
    by_effect.parsed = parsed
    for override in parsed:
        key = override.key_or_group
        is_choice = key in groups and not isinstance(override.value(), dict)
        problem = _problem_of_key(override, evaluate, run_dir)
        refuse = _refusal_by_keys(override, groups, is_choice)
        if problem is not None:
            by_effect.problems.append(problem)
        elif refuse is not None:
            by_effect.problems.append(functools.partial(refuse, override, groups=groups))
        elif is_choice:
            by_effect.choices.append(override)
        elif key.split(".")[0].split("/")[0] == "hydra":
            by_effect.of_hydra.append(override)
        else:
            by_effect.values.append(override)
    return by_effect


def _problem_of_key(
    override: Override, evaluate: Evaluated | None, run_dir: Path | None
) -> str | None:
    """Return what is wrong with an override before its value is looked at; None if nothing is."""
    key = override.key_or_group
    problem = refusals.wrong_form(override, run_dir is not None)
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
    if run_dir is not None and not evaluate and key in OPTIONAL:
        return refusal(
            setting=refusals.as_typed(override),
            needs="to be left out",
            got=key,
            reason="A run is continued as it was: these are chosen when it starts.",
            use=_as_new_run(run_dir, [refusals.as_typed(override)]),
        )
    return None


def _refusal_by_keys(
    override: Override, groups: dict[str, list[str]], is_choice: bool
) -> Callable[..., str] | None:
    """Return what says, of a configuration, what is wrong with an override; None if nothing is."""
    if override.is_delete():
        return refused_keys.removal
    if override.is_sweep_override():
        return refused_keys.several_values
    key = override.key_or_group
    if is_choice and refused_keys.unknown_options(key, override.value(), groups):
        return refused_keys.unknown_option
    return None


def _compose_files(
    choices: list[str], sweep_file: Path | None
) -> tuple[DictConfig | None, list[str]]:
    """Return the configuration of the chosen options, composed by Hydra, and the problems with it.

    If it is None, nothing could be composed. Otherwise the problems are those with Hydra's own keys
    in the user's files, which set only some of them.
    """
    try:
        config, problems = compose_files(choices, sweep_file)
        without_files = None
        if own_folder() or sweep_file:
            without_files = hydra_without_files(_hydra_choices(config, choices))
    except ConfigError as error:  # a file of the user's that is no YAML
        return None, [str(error)]
    except RefusedFilesError as error:
        return None, error.problems
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
        # What else Hydra cannot put together, such as files that include each other.
        return None, [
            f"the configuration cannot be composed: {first_line(error)}. Use the files in conf/ "
            "and sweeps/ as examples."
        ]
    incomplete = refusals.incomplete(config)
    if incomplete:
        return None, problems or incomplete
    if without_files is not None:
        problems = [*problems, *hydra_keys.set_by_files(config.hydra, without_files)]
    return config, problems


def _hydra_choices(config: DictConfig, choices: list[str]) -> list[str]:
    """Return the choices in Hydra's own groups, with the launcher and sweeper that `config` has.

    A file of the user's may choose these too, if they are among those in conf/.
    """
    hydra_choices = [choice for choice in choices if key_of(choice).startswith("hydra")]
    for kind, names in {"launcher": LAUNCHERS, "sweeper": (SEARCH,)}.items():
        option = OmegaConf.select(config.hydra, f"{kind}.kind")
        if option in names:
            group = f"hydra/{kind}"
            hydra_choices = [choice for choice in hydra_choices if key_of(choice) != group]
            hydra_choices.append(f"{group}={option}")
    return hydra_choices


def _set_values(
    config: DictConfig, values: list[Override], groups: dict[str, list[str]]
) -> tuple[list[Override], list[str]]:
    """Set keys, and return the overrides that were accepted and the problems with the others."""
    accepted = []
    problems = []
    for override in values:
        problems_of_value = set_value(config, override.key_or_group, override.value(), groups)
        problems += problems_of_value
        if not problems_of_value:
            accepted.append(override)
    return accepted, problems


def set_value(
    config: DictConfig, name: str, value: object, groups: dict[str, list[str]]
) -> list[str]:
    """Set a key; if the value is a dictionary, set the keys in it.

    name: of the key, or of a group. groups: group -> its options.

    Return the problems with the value; a key whose value has a problem is not set.
    """
    name = parameter_key(name, config)
    if is_inside(name, "callbacks.own"):
        name = name.replace("._target_", ".path")
        if name == "callbacks.own" and isinstance(value, dict):
            value = {part: with_path(entry) for part, entry in value.items()}
        elif name.count(".") == 2:
            value = with_path(value)
    key = key_named(name, config)
    # A free-form key takes any dictionary, and any key inside it is new to the schema.
    is_free = key is not None and key.free and (name != key.name or isinstance(value, dict))
    if isinstance(value, dict) and key is not None and name == key.name and not is_free:
        return [refused_keys.wrong_type(config, key, value)]
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
        return [refused_keys.unknown_key(config, name, value, groups)]
    if name == f"{key.group}.name":
        return [
            refusal(
                setting=f"{name}={value}",
                needs="to be left alone",
                got=value,
                reason=f"The other keys of {key.group} come with their option.",
                use=option_meant(config, key.group, value, groups),
            )
        ]
    if value == "" and key.type.startswith("str") and not is_free:
        return [refusals.empty_text(key, default_in(config, key.name))]
    try:
        with open_dict(config) if is_free else contextlib.nullcontext():
            # An empty dictionary empties the key. Merged, it would change nothing.
            OmegaConf.update(config, name, value, force_add=is_free, merge=value != {})
    except OverflowError:  # An integer that is too large for a float counts as infinite.
        assert isinstance(value, int)
        OmegaConf.update(config, name, math.copysign(math.inf, 1 if value > 0 else -1))
    except OmegaConfBaseException as error:
        if is_free:
            return [refusals.unresolvable(name, value, error)]
        return [refused_keys.wrong_type(config, key, value)]
    return []


def is_refused(key: str, problems: list[str]) -> bool:
    """Return whether one of the problems is with a value of this key."""
    return any(problem.startswith(f"{key}=") for problem in problems)


def _unique(problems: list[str]) -> list[str]:
    """Return each problem once."""
    return list(dict.fromkeys(problems))
