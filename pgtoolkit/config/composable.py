"""The schema and a configuration in a form that OmegaConf can change, since it changes nothing that
is frozen."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Literal, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.keys import keys_of
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config


@functools.cache
def changeable(schema: type) -> type:
    """Return a class with the keys and types of a schema, whose objects OmegaConf can change."""
    types = get_type_hints(schema)
    declared = []
    for field in fields(schema):
        if field.name in schema.__annotations__:
            kind = types[field.name]
            if get_origin(kind) is Literal:  # OmegaConf knows none
                kind = str
            declared.append((field.name, changeable(kind) if is_dataclass(kind) else kind))
    bases = tuple(changeable(base) for base in schema.__bases__ if is_dataclass(base))
    return make_dataclass(schema.__name__, declared, bases=bases)


def composed_again(config: Config) -> DictConfig:
    """Return a configuration as OmegaConf has it, so that overrides can be set on it."""
    kinds = {name: type(group) for name, group in vars(config).items() if is_dataclass(group)}
    composed = copy.deepcopy(_schema(tuple(kinds.items())))
    for key in keys_of(config):
        if key.free:
            OmegaConf.update(composed, key.name, {})
            OmegaConf.set_struct(OmegaConf.select(composed, key.name), False)
    merged = OmegaConf.merge(composed, plain_config(config))
    assert isinstance(merged, DictConfig)  # as `composed` is
    return merged


@functools.cache
def _schema(kinds: tuple[tuple[str, type], ...]) -> DictConfig:
    """Return the schema as OmegaConf has it, with a class of settings for each group."""
    composed = OmegaConf.structured(changeable(Config))
    for name, kind in kinds:
        composed[name] = OmegaConf.structured(changeable(kind))
    OmegaConf.set_struct(composed, True)
    return composed
