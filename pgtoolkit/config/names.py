"""The name of a run, and the digest by which a job is known."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TypeVar

from pgtoolkit.config.keys import OWN_CODE, changes_learning, declared, key_named, shown
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves, plain
from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.system.redaction import redact

Value = TypeVar("Value")


def plain_config(config: Config) -> dict:
    """Return the configuration in plain types."""
    groups = {
        name: vars(group) if is_dataclass(group) else group for name, group in vars(config).items()
    }
    return plain(groups)


_IN_ALL_DIGESTS = {"model.gradient_checkpointing": False}
"""Keys that change nothing that is learned, but were in digests when that was not yet known, with
the value that stands for all others: sweeps that began then still find their jobs."""


def digest(config: dict) -> str:
    """Return eight hexadecimal digits that differ between plain configurations which learn
    differently; they are the same on every machine."""
    pairs = [
        (name, _IN_ALL_DIGESTS.get(name, value))
        for name, value in leaves(config)
        if name in _IN_ALL_DIGESTS or changes_learning(name, config)
    ]
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:8]


def changed(before: dict, now: dict) -> dict[str, list]:
    """Return {key: [value before, value now]} of the keys that make two runs learn differently."""
    drift = config_drift(before, now)
    return {
        key: values
        for key, values in drift.items()
        if changes_learning(key, now) or changes_learning(key, before)
    }


def retrained(before: dict, now: dict) -> dict[str, list]:
    """Return {key: [value before, value now]} of the keys with which a run that goes on would be
    another training than the one that began.

    Where another option of a group is chosen, only the group is named.
    """
    options = {
        shown(name): values
        for name, values in config_drift(before, now).items()
        if decides_training(name, now) or decides_training(name, before)
    }
    return without_options(options)


def without_options(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return those entries of shown keys that do not follow from another option of their group."""
    return {
        name: value
        for name, value in values.items()
        if "." not in name or name.partition(".")[0] not in values
    }


def decides_training(name: str, config: object) -> bool:
    """Return whether steps that are made with another value of a key belong to another training."""
    key = key_named(name, config)
    is_free = key is not None and (
        declared(key.last_counts, config) or declared(key.machine, config)
    )
    return changes_learning(name, config) and not is_free


_LONGEST = 80
"""Characters of a name."""

_OF_LOSS = ("loss", "loss.path")
_OF_AGGREGATION = ("aggregation", "aggregation.reducer")
"""Keys whose values a run's name begins with."""


def name_from(overrides: list[str], defaults: dict[str, str]) -> str:
    """Return the name of a folder that tells what overrides change: at most 80 letters, digits,
    '.', '_' and '-'.

    A repeated sweep finds its folder by this name, so the name must not change between versions.

    defaults: group -> its default option, to be left out of the name.
    """
    parts = _parts(overrides, defaults)
    name = "_".join(parts.values()) or "default"
    if len(name) <= _LONGEST:
        return name
    return f"{'_'.join(_by_importance(parts))[: _LONGEST - 7]}-{_hash(name)}"


def run_name(
    overrides: list[str], defaults: dict[str, str], loss: str | None, aggregation: str | None
) -> str:
    """Return the name of a run: its loss, its aggregation, and whatever else its overrides change.

    Loss and aggregation have no keys in it, so that names differ in their first letters: MLflow
    shows few more. A name of more than 80 characters is shortened to the parts that fit, and a hash
    of all parts.

    defaults: group -> its default option, to be left out of the name. loss, aggregation: always
    named; None to name them only if an override sets them, as in a sweep, whose jobs are named by
    the keys that vary.
    """
    parts = _parts(overrides, defaults)
    leading = []
    for value, keys in ((loss, _OF_LOSS), (aggregation, _OF_AGGREGATION)):
        typed = [
            re.sub(r"^(loss|aggregation|reducer)-", "", parts.pop(key))
            for key in keys
            if key in parts
        ]
        leading += typed if value is None else [_letters(_own_name(value))]
    name = "_".join([*leading, *parts.values()]) or "default"
    if len(name) <= _LONGEST:
        return name
    room = _LONGEST - 7
    kept: list[str] = []
    for part in [*leading, *_by_importance(parts)]:
        if len("_".join([*kept, part])) <= room:
            kept.append(part)
    beginning = "_".join(kept) or name[: name.rfind("-", 1, room + 1)][:room]
    return f"{beginning}-{_hash(name)}"


def _parts(overrides: list[str], defaults: dict[str, str]) -> dict[str, str]:
    """Return key -> its part of the name, for each override that belongs in a name."""
    pairs = [redact(override.lstrip("+~")).partition("=")[::2] for override in overrides]
    chosen = {key for key, _ in pairs}
    parts = {}
    for key, value in pairs:
        if key.split(".")[0].split("/")[0] in ("hydra", "tracking", "evaluation"):
            continue
        if defaults.get(key) == value and not chosen & {"experiment", "debug"}:
            continue
        # The path is enough of model=huggingface model.path=Qwen/Qwen3-0.6B.
        if f"{key}.path" in chosen:
            continue
        leaf = key if key.endswith(".options") else key.rpartition(".")[2]
        if leaf.endswith("path") or key == "kl.reference":  # a sweep may have several values
            value = "-".join(Path(path).name for path in value.strip("'\"").split(","))
        if key in OWN_CODE:
            value = ",".join(map(_own_name, value.split(",")))
        if leaf == "coefficient" or key.startswith("critic."):
            # These leaves have other meanings in other groups.
            leaf = key.replace(".", "-")
        parts[key] = _letters(value if key == "experiment" or leaf == "path" else f"{leaf}-{value}")
    return {key: part for key, part in parts.items() if part}


def _own_name(option: str) -> str:
    """Return the name of an option, as `clip_0.1`; of a dotted path only the class or function."""
    return option.rpartition(".")[2] if is_dotted_path(option) else option


def _by_importance(parts: dict[str, str]) -> list[str]:
    """Return the parts of a name, with model, task and rollout last: runs more often differ in the
    other keys."""

    def is_last(key: str) -> bool:
        return key.split(".")[0] in ("model", "task", "rollout")

    return [parts[key] for key in sorted(parts, key=is_last)]


def _letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:6]
