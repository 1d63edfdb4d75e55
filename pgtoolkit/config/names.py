"""Which job of a sweep is which: by its configuration, not by its place in the sweep."""

from __future__ import annotations

import hashlib
import json

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.files import leaves, plain

VOLATILE = ("tracking.", "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.accept_changed_data")
"""What begins thus changes nothing in what is learned: a finished job with other values of it is finished."""

NOT_COMPARED = (*VOLATILE, "rollout.save_path")
"""What tells no two runs apart. A job that shall record its rollouts is another job, though it learns the same."""


def learned(config: DictConfig) -> dict:
    """The resolved configuration in plain types, without Hydra's own node."""
    return {
        str(group): plain(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
        for group, value in config.items()
        if group != "hydra"
    }


def digest(resolved: dict) -> str:
    """Eight hexadecimal digits that tell configurations apart; the same on every machine."""
    pairs = sorted((key, value) for key, value in leaves(resolved) if not key.startswith(VOLATILE))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:8]


def changed(before: dict, now: dict) -> dict[str, list]:
    """The keys on which two configurations learn differently: {key: [value before, value now]}."""
    return {key: values for key, values in config_drift(before, now).items() if not key.startswith(VOLATILE)}
