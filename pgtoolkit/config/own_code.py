"""The user's own code as an option, as in `loss=my_module.MyFamily`: which keys it sets, and how it
is shown.

Such a path chooses the option for own code, and is the value of one of its keys, see
`Key.stands_for`. Keys that this option does not have are parameters of the class: `loss.tau=0.3`
means `loss.options.tau=0.3`. A saved configuration has this long form; the short one is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pgtoolkit.config.key import value_of
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
from pgtoolkit.runs.records import leaves

PARAMETERS = {key.group: key.name for key in KEYS if key.free and key.group in OWN_CODE}
"""Group -> the free-form key with the parameters of own code."""


def parameter_key(name: str, config: object) -> str:
    """Return the key that sets a parameter of own code, `loss.options.tau` for `loss.tau`; returns
    other names unchanged.

    config: with the chosen options, see `value_of`.
    """
    group, _, leaf = name.partition(".")
    is_parameter = leaf and group in PARAMETERS and key_named(name, config) is None
    if is_parameter and key_named(PARAMETERS[group], config) is not None:
        return f"{PARAMETERS[group]}.{leaf}"
    return name


def keys_set(name: str, value: Any) -> Iterator[str]:
    """Yield the keys that an override gives values to, by the same names however they were
    typed."""
    if is_own_code(name, value):
        yield OWN_CODE[name].name
    for key, _ in leaves({name: value}):
        yield short_name(key)


def chosen(config: object, group: str) -> str:
    """Return the option of a group in the form that is typed: the path of own code, or a name."""
    option = plain_value(config, OPTION_KEYS[group])
    key = OWN_CODE.get(group)
    path = value_of(config, key.name) if key is not None and option == key.stands_for else None
    return str(path or option)


def family_of_config(config: Config) -> Family | None:
    """Return the loss family of a configuration; None for own code, which only a run imports."""
    return configured(config.loss, FAMILIES)


def typed_key(name: str, config: object) -> str:
    """Return the name under which a key is typed: the group, for the path of own code that chooses
    its option.

    `aggregation.reducer` may also be set with an option such as `aggregation=prompt_mean`, and is
    typed as a key then.
    """
    group = name.partition(".")[0]
    is_option = (
        group in OWN_CODE
        and OWN_CODE[group].name == name
        and chosen(config, group) == value_of(config, name)
    )
    return group if is_option else name


def as_typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted keys as they are typed: own code as the option of its group, its
    parameters as keys of the group."""
    typed = {}
    hidden = set()
    options = {}
    for group, key in OWN_CODE.items():
        option = OPTION_KEYS[group]
        if option in values and chosen(values, group) != values[option]:
            options[option] = chosen(values, group)
            hidden.add(key.name)
    for name, value in values.items():
        if name not in hidden and not (name in PARAMETERS.values() and value in ({}, None)):
            typed[short_name(name)] = options.get(name, value)
    return typed


def short_name(name: str) -> str:
    """Return the short name of a key: `loss.tau` for `loss.options.tau`, which sets a parameter."""
    for group, parameters in PARAMETERS.items():
        if name != parameters and is_inside(name, parameters):
            return f"{group}.{name.removeprefix(f'{parameters}.')}"
    return name
