"""The name of a run, and the digest by which a job is known."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import is_dataclass
from pathlib import Path

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves, plain
from pgtoolkit.system.redaction import redact


def plain_config(config: Config) -> dict:
    """Return the configuration in plain types."""
    groups = {name: vars(group) if is_dataclass(group) else group for name, group in vars(config).items()}
    return plain(groups)


def digest(config: dict) -> str:
    """Eight hexadecimal digits that tell plain configurations apart by what they learn; the same on every machine."""
    pairs = [pair for pair in leaves(config) if changes_learning(pair[0], config)]
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:8]


def changed(before: dict, now: dict) -> dict[str, list]:
    """The keys on which two configurations learn differently: {key: [value before, value now]}."""
    drift = config_drift(before, now)
    return {key: values for key, values in drift.items() if changes_learning(key, now) or changes_learning(key, before)}


def name_from(overrides: list[str], defaults: dict[str, str]) -> str:
    """What overrides change, as the name of a directory: letters, digits, '.', '_', '-', at most 80.

    defaults: group -> its default option, to be left out of the name.
    """
    pairs = [redact(override.lstrip("+~")).partition("=")[::2] for override in overrides]
    chosen = {key for key, _ in pairs}
    parts = {}
    for key, value in pairs:
        if key.split(".")[0].split("/")[0] in ("hydra", "tracking", "evaluation"):
            continue
        if defaults.get(key) == value and not chosen & {"experiment", "debug"}:
            continue
        if f"{key}.path" in chosen:  # the path says it: model=huggingface model.path=Qwen/Qwen3-0.6B
            continue
        leaf = key if key.endswith(".options") else key.rpartition(".")[2]
        if leaf.endswith("path") or key == "kl.reference":  # of a sweep, several
            value = "-".join(Path(path).name for path in value.strip("'\"").split(","))
        if leaf == "coefficient":  # of which penalty
            leaf = key.replace(".", "-")
        part = value if key == "experiment" or leaf == "path" else f"{leaf}-{value}"
        parts[key] = re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.")
    name = "_".join(filter(None, parts.values())) or "default"
    if len(name) > 80:
        # Cut at the end, which is then what it is trained on: runs more often differ in how.
        ordered = sorted(parts, key=lambda key: key.split(".")[0] in ("model", "task", "rollout"))
        whole = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{'_'.join(filter(None, map(parts.get, ordered)))[:73]}-{whole}"
    return name
