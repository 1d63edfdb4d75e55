"""The name of a run, and the digest by which a job is known."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import is_dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.schema import Config, default_options
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves, plain
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import key_of


def plain_config(config: DictConfig) -> dict:
    """The resolved configuration in plain types, without Hydra's own node."""
    return {
        str(group): plain(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
        for group, value in config.items()
        if group != "hydra"
    }


def plain_values(values: Config) -> dict:
    """The same of a configuration that is an object."""
    groups = {name: vars(group) if is_dataclass(group) else group for name, group in vars(values).items()}
    return plain(groups)


def digest(config: dict) -> str:
    """Eight hexadecimal digits that tell plain configurations apart by what they learn; the same on every machine."""
    pairs = [pair for pair in leaves(config) if changes_learning(pair[0], config)]
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()[:8]


def changed(before: dict, now: dict) -> dict[str, list]:
    """The keys on which two configurations learn differently: {key: [value before, value now]}."""
    drift = config_drift(before, now)
    return {key: values for key, values in drift.items() if changes_learning(key, now) or changes_learning(key, before)}


def name_in(hydra: DictConfig, chosen: str | None) -> str:
    """A run's name by the node `hydra` of its configuration: `chosen`, or what its overrides change.

    In a sweep also options that are the default, for comparison.
    """
    unnamed = hydra.job.config.override_dirname.exclude_keys
    typed = OmegaConf.to_container(hydra.overrides.task)  # as it was typed: a ${KEY} need not resolve
    overrides = [override for override in typed if key_of(override) not in unnamed]
    return chosen or name_from(overrides, default_options() if OmegaConf.is_missing(hydra.job, "num") else {})


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
