"""The user's own code as an option, as in `loss=my_module.MyFamily`.

Such a path chooses the option for own code, and is the value of one of its keys, see
`Key.stands_for`. Keys that this option does not have are parameters of the class: `loss.tau=0.3`
means `loss.options.tau=0.3`. A saved configuration has the long form; users type and see the short
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pgtoolkit.config.keys import (
    KEYS,
    OPTION_KEYS,
    OWN_CODE,
    is_inside,
    is_own_code,
    key_named,
    plain_value,
)
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import Family, configured
from pgtoolkit.losses.function import ASKED
from pgtoolkit.runs.history import CODE, in_words, spans, values_of
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.conditions import holds, value_of
from pgtoolkit.system.functions import defaults_in_file
from pgtoolkit.system.report import refusal, text

PARAMETERS = {key.group: key.name for key in KEYS if key.gathers}
"""Group -> the free-form key that names of the user's own belong to: parameters of own code, and
callbacks."""


def parameter_key(name: str, config: object) -> str:
    """Return the key that sets a parameter of own code: `loss.options.tau` for `loss.tau`.

    Other names are returned unchanged. config: with the chosen options, see `value_of`.
    """
    group, _, leaf = name.partition(".")
    is_parameter = leaf and group in PARAMETERS and key_named(name, config) is None
    if is_parameter and takes_parameters(group, config):
        return f"{PARAMETERS[group]}.{leaf}"
    return name


def takes_parameters(group: str, config: object) -> bool:
    """Return whether names that a group does not have are parameters of own code there."""
    key = key_named(PARAMETERS[group], config)
    return key is not None and (not key.only_if or holds(key.only_if, config))


def with_path(entry: object) -> object:
    """Return the description of an object of own code with its class at `path`, where `_target_`,
    Hydra's word for it, or the path alone may have been written."""
    if isinstance(entry, str):
        return {"path": entry}
    if not isinstance(entry, dict):
        return entry
    return {"path" if name == "_target_" else name: value for name, value in entry.items()}


def two_places(key: str, value: object, other: str, other_value: object, file: str = "") -> str:
    """Refuse a setting that has a value under each of its two names.

    file: where both stand, if in a file.
    """
    return refusal(
        setting=f"{key} in {file}" if file else key,
        needs=f"to be left out beside {other}",
        got=f"{text(value)}, and {text(other_value)} as {other}",
        reason="These are two names of one setting, and one of the two values would be ignored.",
        use=f"{key} or {other} alone",
    )


def keys_set(name: str, value: object) -> Iterator[str]:
    """Yield the keys that an override sets, by the same names in whichever form it was typed."""
    if is_own_code(name, value):
        yield OWN_CODE[name].name
    for key, _ in leaves({name: value}):
        of_object = is_inside(key, "callbacks")
        yield short_name(key.replace("._target_", ".path") if of_object else key)


def chosen(config: object, group: str) -> str:
    """Return the chosen option of a group as the user types it: a name, or the path of own code."""
    option = plain_value(config, OPTION_KEYS[group])
    key = OWN_CODE.get(group)
    path = value_of(config, key.name) if key is not None and option == key.stands_for else None
    return str(path or option)


def family_of_config(config: Config) -> Family | None:
    """Return the loss family of a configuration; None for own code, which only a run imports."""
    return configured(config.loss, FAMILIES)


def typed_key(name: str, config: object) -> str:
    """Return the name under which the user types a key.

    For the path of own code that chooses the option of a group, it is the group. But
    `aggregation.reducer` may also be set next to an option such as `aggregation=prompt_mean`, and
    is typed as a key then.
    """
    group = name.partition(".")[0]
    is_option = (
        group in OWN_CODE
        and OWN_CODE[group].name == name
        and chosen(config, group) == value_of(config, name)
    )
    return group if is_option else name


def as_typed(values: Mapping[str, object]) -> dict[str, object]:
    """Return values by dotted keys as the user types them.

    The path of own code becomes the option of its group, and its parameters keys of the group.
    """
    typed: dict[str, object] = {}
    hidden: set[str] = set()
    options: dict[str, str] = {}
    for group, key in OWN_CODE.items():
        option = OPTION_KEYS[group]
        if option in values and chosen(values, group) != values[option]:
            options[option] = chosen(values, group)
            hidden.add(key.name)
    for name, value in values.items():
        has_no_parameters = name in PARAMETERS.values() and value in ({}, None)
        if name not in hidden and not has_no_parameters:
            typed[short_name(name)] = options.get(name, value)
    return typed


def with_defaults(
    values: Mapping[str, object], copies: Path | None = None, trained_with: Mapping = {}
) -> dict[str, object]:
    """Return values as the user types them, with the defaults of parameters of own code, which a
    saved configuration lacks. They are read from the file of the code; nothing is imported.

    copies: the folder of a run's copies of the code, whose digests are in trained_with, see
        `history.trained_with`; None to read the file that the path leads to now. Of a run that was
        resumed with other code it is the last one.
    """
    typed = as_typed(values)
    for changes in _defaults_over_steps(typed, copies, trained_with):
        for name, default in changes[-1][1].items():
            typed.setdefault(name, default)
    return typed


def changed_defaults(
    values: Mapping[str, object], copies: Path, trained_with: Mapping
) -> dict[str, object]:
    """Return, in the words of `history.trained_with`, the parameters of own code that a run had at
    defaults which changed: they were others in some of the versions that it has used, or a resume
    has set the parameter.

    Arguments: see `with_defaults`.
    """
    typed = as_typed(values)
    set_later = as_typed(trained_with)
    described: dict[str, object] = {}
    for changes in _defaults_over_steps(typed, copies, trained_with):
        for name in dict.fromkeys(name for _, defaults in changes for name in defaults):
            steps = spans([(step, defaults.get(name)) for step, defaults in changes], sys.maxsize)
            if len(steps) > 1 and name not in typed:
                described[name] = in_words(steps)
        for name, default in changes[0][1].items():
            words = str(set_later.get(name))
            if words.startswith("null to step "):
                described[name] = text(default) + words.removeprefix("null")
    return described


def _defaults_over_steps(
    typed: Mapping[str, object], copies: Path | None, trained_with: Mapping
) -> Iterator[list[tuple[int, dict[str, object]]]]:
    """Yield, for each group with own code, the defaults of its parameters by their keys in each
    version that a run has used, with the step after which it was used."""
    for group in OWN_CODE.keys() & PARAMETERS.keys():
        path = typed.get(OPTION_KEYS[group])
        if not isinstance(path, str) or not is_own_code(group, path):
            continue
        module = path.rpartition(".")[0]
        files: list[tuple[int, Path | None]] = [(0, None)]
        if copies is not None:
            digests = values_of(str(trained_with.get(f"{CODE}{module}")))
            files = [(step, copies / f"{module}-{digest}.py") for step, digest in digests]
        changes = []
        for step, file in files:
            defaults = {
                f"{group}.{name}": [*default] if isinstance(default, tuple) else default
                for name, default in defaults_in_file(path, file).items()
                if group != "loss" or name not in ASKED
            }
            changes.append((step, defaults))
        yield changes


def short_name(name: str) -> str:
    """Return the short name of a key: `loss.tau` for `loss.options.tau`, which sets a parameter."""
    for group, parameters in PARAMETERS.items():
        if name != parameters and is_inside(name, parameters):
            return f"{group}.{name.removeprefix(f'{parameters}.')}"
    return name
