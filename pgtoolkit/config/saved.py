"""Saved configurations: reading them with their types, and the keys that a resumed run keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from pgtoolkit.config.keys import (
    default,
    existing_key,
    has_type,
    keys_of,
    plain_value,
    shown,
    values_in_words,
)
from pgtoolkit.config.names import decides_training, without_options
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.runs.records import leaves, plain, read_resolved
from pgtoolkit.system.conditions import holds, parts, singles, value_of, with_values
from pgtoolkit.system.declared import Key, Settings
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import say, text

FORMER_TASKS = {
    "chain_sum": "task=reasoning_gym task.dataset=chain_sum",
    "shortest_path": "task=reasoning_gym task.dataset=shortest_path",
}
"""Task of an earlier version -> what to type in its place."""


def saved_config(run_dir: Path) -> Config:
    """Return the configuration that a run was started with.

    Raises ConfigError where there is none, or an unknown one.
    """
    if not os.path.lexists(run_dir / "config.yaml"):
        from pgtoolkit.runs.find import not_a_run  # Here, since it loads NumPy.

        raise not_a_run(f"pgtk resume {run_dir}", run_dir, "a run directory")
    config = typed(read_resolved(run_dir), f"{run_dir}/config.yaml")
    # Paths are made absolute, so that they can be compared with paths that are typed now.
    return with_values(absolute_paths(config), {"trainer.accept_changed_data": False})


def compiled_as_begun(config: Config, run_dir: Path) -> Config:
    """Return the configuration of a job for the run of it that has begun in a directory.

    Where the job leaves it open whether the model is compiled, it is as the run began.
    """
    if config.model.compile is not None:
        return config
    return with_values(config, {"model.compile": read_resolved(run_dir)["model"].get("compile")})


def typed(values: JsonObject, file: str) -> Config:
    """Return the configuration that was saved in a file.

    values: of the file, as `plain_config` made them.

    Keys that were added after the file was written get their defaults, with a note. Raises
    ConfigError for keys and values that do not fit the schema.
    """
    option = values.get("task", {}).get("name")
    if option in FORMER_TASKS:
        raise ConfigError(
            f"{file} needs a task that this version of pgtoolkit has (got task={option}). Its "
            "prompts cannot be made here. Use the version that provenance.json names, or a new run "
            f"with {FORMER_TASKS[option]}."
        )
    try:
        values = _completed(values, file)
        groups = _group_names()
        typed_values: JsonObject = {}
        for field in fields(Config):
            name = field.name
            if name in groups:
                schema = _schema_of(name, values)
                typed_values[name] = schema.unchecked(_typed_values_of_group(name, values))
            else:
                typed_values[name] = _with_type(existing_key(name, values), values[name])
        return Config(**typed_values)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(
            f"{file} does not fit this version of pgtoolkit: {reason}. Use the version that "
            "provenance.json names, or start a new run."
        ) from error


def _group_names() -> list[str]:
    """Return the groups of the schema, each once, in its order."""
    return list(dict.fromkeys(schema.partition("/")[0] for schema in SCHEMAS))


def _schema_of(group: str, values: JsonObject) -> type[Settings]:
    """Return the class of a group's keys.

    Raises KeyError for an unknown option, and for a group that is missing.
    """
    return SCHEMAS[group] if group in SCHEMAS else SCHEMAS[f"{group}/{values[group]['name']}"]


def _completed(values: JsonObject, file: str) -> JsonObject:
    """Return the values with the defaults of keys that were added after the file was written.

    Raises KeyError for any other key that is missing.
    """
    groups = _group_names()
    complete = values | {group: dict(values.get(group, {})) for group in groups}
    missing = sorted(
        f"{group}.{field.name}"
        for group in groups
        for field in fields(_schema_of(group, values))
        if field.name not in complete[group]
    )
    for name in missing:
        if not existing_key(name, complete).added:
            raise KeyError(name)
        group, _, leaf = name.partition(".")
        complete[group][leaf] = default(complete, name)
    if missing:
        defaults = ", ".join(f"{name}={text(value_of(complete, name))}" for name in missing)
        say(f"note: {file} is older than these keys, whose defaults hold: {defaults}", error=True)
    return complete


def _typed_values_of_group(group: str, values: JsonObject) -> dict[str, object]:
    """Return the values of a group by their keys, in the types of these.

    Raises ValueError for a key that the schema of the group does not have.
    """
    known = {field.name for field in fields(_schema_of(group, values))}
    unknown = [leaf for leaf in values[group] if leaf not in known]
    if unknown:
        raise ValueError(f"it has the unknown key '{group}.{unknown[0]}'")
    keys = {leaf: existing_key(f"{group}.{leaf}", values) for leaf in known}
    return {leaf: _with_type(keys[leaf], value) for leaf, value in values[group].items()}


def _with_type(key: Key, value: object) -> object:
    """Return a value in the type of its key; raises ValueError where it has no such value."""
    kind = key.type.partition(" | ")[0]
    if key.names and value in key.names:
        return key.names[key.names.index(value)]
    if kind == "float" and isinstance(value, int | str) and not isinstance(value, bool):
        value = float(value)
    elif kind == "str" and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not has_type(key, value):
        raise ValueError(f"{key.name}={text(value)} is not {values_in_words(key)}")
    return value


def fixed_keys(config: object) -> Iterator[Key]:
    """Yield the keys that must keep their values when a run of this configuration is continued."""
    for key in keys_of(config):
        if key.fixed and (not key.fixed_if or holds(key.fixed_if, config)):
            yield key


def record_of(config: object) -> JsonObject:
    """Return the part of its configuration that a checkpoint keeps, by dotted names.

    It has the values of the fixed keys, of the keys in their conditions, and of all keys that
    decide what is learned.
    """
    names = {key.name for key in keys_of(config) if decides_training(key.name, config)}
    for key in fixed_keys(config):
        names.add(key.name)
        if key.fixed_if:
            names |= {parts(condition)[0] for condition in singles(key.fixed_if)}
    return {name: plain(value_of(config, name)) for name in sorted(names)}


def edited(
    record: JsonObject, written: JsonObject, drift: Sequence[JsonObject]
) -> dict[str, list[object]]:
    """Return {key: [old value, value]} of each key that decides what is learned and was changed in
    config.yaml by hand.

    record: what a checkpoint keeps. written: config.yaml. drift: the changes that resumes made
        since the checkpoint.
    """
    values = dict(leaves(written))
    for entry in reversed(drift):
        values |= {key: old for key, (old, _) in entry["changes"].items()}
    changes = {
        shown(name): [old, values[name]]
        for name, old in leaves(record)
        if name in values and old != values[name] and decides_training(name, written)
    }
    return without_options(changes)


def cannot_change(
    before: object, now: object, movable: set[str], use: str = "a new run"
) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) of each fixed key whose value would change in a resumed run.

    Where another option of a group is chosen, only the group is named.
    before, now: the configurations of the run and of its continuation, see `value_of`.
    movable: keys whose files may lie elsewhere now, since their contents are known.
    use: what to do instead.
    """
    changed_groups = set()
    for key in fixed_keys(before):
        if key.group in changed_groups:
            continue
        old = dict(_leaves(before, key))
        new = dict(_leaves(now, key))
        for name in old | new:
            if old.get(name) == new.get(name) or name in movable:
                continue
            value = text(new.get(name))
            yield (
                key.group if key.option else key.name,
                f"{shown(name)}={value} needs to stay as the run began (got {value}, was "
                f"{text(old.get(name))}). A run is continued as it was: {key.fixed}. Use "
                f"{use}.",
            )
            if key.option:
                changed_groups.add(key.group)


def _leaves(config: object, key: Key) -> list[tuple[str, object]]:
    """Return the name of the key with its value; for a free-form key, those of its entries.

    A record that is older than the key means its default.
    """
    value = plain_value(config, key.name)
    if value is None and key.added:
        value = key.default
    if key.free:
        return leaves({key.name: value}) if value else []
    return [(key.name, value)]
