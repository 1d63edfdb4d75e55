"""A configuration that was saved before: with its types again, and what of it a resumed run cannot change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.key import Key, holds, parts, value_of
from pgtoolkit.config.keys import default, key_named, keys_of, resolved, shown
from pgtoolkit.config.paths import make_absolute
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.runs.records import leaves, plain, read_resolved
from pgtoolkit.system.report import say, text


def saved_config(run_dir: Path) -> DictConfig:
    """The configuration that a run was started with. Raises ConfigError where there is none, or an unknown one."""
    if not os.path.lexists(run_dir / "config.yaml"):
        from pgtoolkit.runs.find import not_a_run  # which loads NumPy

        raise not_a_run(f"pgtk resume {run_dir}", run_dir, "a run directory")
    config = typed(read_resolved(run_dir), f"{run_dir}/config.yaml")
    make_absolute(config)  # so that a path means the same file as one that is typed now
    config.trainer.accept_changed_data = False
    return config


def typed(values: dict, file: str) -> DictConfig:
    """Return the values saved in a file, in the schema of their options, so that they are checked as at the start.

    Keys that were added after the file was written get their defaults, with a note.
    """
    config = OmegaConf.structured(Config)
    try:
        for group in {schema.partition("/")[0] for schema in SCHEMAS}:
            schema = group if group in SCHEMAS else f"{group}/{values[group]['name']}"
            config[group] = OmegaConf.structured(SCHEMAS[schema])
        OmegaConf.set_struct(config, True)
        for key in keys_of(values):
            if key.free:
                OmegaConf.update(config, key.name, {})
                OmegaConf.set_struct(OmegaConf.select(config, key.name), False)
        config = OmegaConf.merge(config, values)
        lacking = sorted(OmegaConf.missing_keys(config))
        for name in lacking:
            if not key_named(name, values).added:
                raise KeyError(name)
            OmegaConf.update(config, name, default(config, name))
        if lacking:
            holds_now = ", ".join(f"{name}={text(OmegaConf.select(config, name))}" for name in lacking)
            say(f"note: {file} is older than these keys, whose defaults hold: {holds_now}", error=True)
        return config
    except (KeyError, TypeError, OmegaConfBaseException) as error:
        reason = first_line(error) if isinstance(error, OmegaConfBaseException) else f"it has no {error}"
        raise ConfigError(
            f"{file} does not fit this version of pgtoolkit: {reason}. Use the version that "
            "provenance.json names, or start a new run."
        ) from error


def fixed_keys(config: object) -> Iterator[Key]:
    """The keys that a run of this configuration cannot be continued without."""
    return (key for key in keys_of(config) if key.fixed and (not key.fixed_if or holds(key.fixed_if, config)))


def record_of(config: object) -> dict[str, Any]:
    """What a checkpoint keeps of its configuration: the values of the fixed keys, and of those that make them fixed."""
    names = set()
    for key in fixed_keys(config):
        names |= {key.name, *(parts(condition)[0] for condition in key.fixed_if.split(" or ") if condition)}
    return {name: plain(value_of(config, name)) for name in sorted(names)}


def cannot_change(before: object, now: object, movable: set[str]) -> Iterator[tuple[str, str]]:
    """(key, problem) of each value that differs, where a run of the configuration `before` is continued as `now`.

    before, now: see `value_of`. movable: keys whose files may lie elsewhere now, since their contents are known. Where
    another option is chosen, the group is named alone.
    """
    groups = set()
    for key in fixed_keys(before):
        old, new = (dict(_leaves(config, key)) for config in (before, now))
        differing = [name for name in {**old, **new} if old.get(name) != new.get(name) and name not in movable]
        if key.group not in groups:
            for name in differing:
                value, was = text(new.get(name)), text(old.get(name))
                yield (
                    key.group if key.option else key.name,
                    f"{shown(name)}={value} needs to stay as the run began (got {value}, was {was}). "
                    f"A run is continued as it was: {key.fixed}. Use a new run.",
                )
        if key.option and differing:
            groups.add(key.group)


def _leaves(config: object, key: Key) -> list[tuple[str, Any]]:
    """The key with its value, or the entries of a free-form one with theirs."""
    value = resolved(config, key.name)
    if key.free:
        return leaves({key.name: value}) if value else []
    return [(key.name, value)]
