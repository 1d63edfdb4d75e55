"""The name of a run, and the digest by which a job is known."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import is_dataclass
from pathlib import Path

from pgtoolkit.config.keys import OWN_CODE, changes_learning
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves, plain
from pgtoolkit.system.redaction import redact


def plain_config(config: Config) -> dict:
    """Return the configuration in plain types."""
    groups = {
        name: vars(group) if is_dataclass(group) else group for name, group in vars(config).items()
    }
    return plain(groups)


def digest(config: dict) -> str:
    """Eight hexadecimal digits that tell plain configurations apart by what they learn; the same on
    every machine."""
    pairs = [pair for pair in leaves(config) if changes_learning(pair[0], config)]
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:8]


def changed(before: dict, now: dict) -> dict[str, list]:
    """The keys on which two configurations learn differently: {key: [value before, value now]}."""
    drift = config_drift(before, now)
    return {
        key: values
        for key, values in drift.items()
        if changes_learning(key, now) or changes_learning(key, before)
    }


_LONGEST = 80
"""Characters of a name."""

_OF_LOSS = ("loss", "loss.path")
_OF_AGGREGATION = ("aggregation", "aggregation.reducer")
"""Keys whose values a run's name begins with."""


def name_from(overrides: list[str], defaults: dict[str, str]) -> str:
    """Return what overrides change as the name of a folder: letters, digits, '.', '_', '-', at most
    80.

    A repeated sweep finds its folder by this name, so it stays as it is.

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
    """Return the name of a run: its loss, its aggregation, and what else its overrides change.

    Loss and aggregation stand without their keys, so that names differ in their first letters:
    MLflow shows few more. A name of more than 80 characters has as many of its parts as there is
    room for, and a hash of all of them.

    defaults: group -> its default option, to be left out of the name.
    loss, aggregation: named in any case; None: only where an override sets them, as in a sweep,
        whose jobs are named
    by what varies.
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
    """Return key -> what the name says of it, for each override that belongs in a name."""
    pairs = [redact(override.lstrip("+~")).partition("=")[::2] for override in overrides]
    chosen = {key for key, _ in pairs}
    parts = {}
    for key, value in pairs:
        if key.split(".")[0].split("/")[0] in ("hydra", "tracking", "evaluation"):
            continue
        if defaults.get(key) == value and not chosen & {"experiment", "debug"}:
            continue
        # the path says it: model=huggingface model.path=Qwen/Qwen3-0.6B
        if f"{key}.path" in chosen:
            continue
        leaf = key if key.endswith(".options") else key.rpartition(".")[2]
        if leaf.endswith("path") or key == "kl.reference":  # of a sweep, several
            value = "-".join(Path(path).name for path in value.strip("'\"").split(","))
        if key in OWN_CODE:
            value = ",".join(map(_own_name, value.split(",")))
        if leaf == "coefficient" or key.startswith("critic."):  # of which penalty, of which model
            leaf = key.replace(".", "-")
        parts[key] = _letters(value if key == "experiment" or leaf == "path" else f"{leaf}-{value}")
    return {key: part for key, part in parts.items() if part}


def _own_name(option: str) -> str:
    """Return the name of an option: of own code that of the class or function, without its
    module."""
    return option.rpartition(".")[2]


def _by_importance(parts: dict[str, str]) -> list[str]:
    """Return the parts of a name, last what a run is trained on: runs more often differ in how they
    are trained."""
    return [
        parts[key]
        for key in sorted(parts, key=lambda key: key.split(".")[0] in ("model", "task", "rollout"))
    ]


def _letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:6]
