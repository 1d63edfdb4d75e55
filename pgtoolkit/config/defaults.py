"""What the files in conf/ say of a key: its default under the options that a configuration has chosen, its comment."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.files import config_directory, default_options, options


def default(config: DictConfig, key: str) -> Any:
    """The value that the chosen option gives the key, as it resolves in this configuration; None without one."""
    file, name = _file(config, key), key.rpartition(".")[2]
    values = OmegaConf.create({name: (_values(file) if file else {}).get(name)})
    values._set_parent(config)  # for interpolations
    try:
        return values.get(name)
    except OmegaConfBaseException:
        return None


@functools.cache
def _values(file: Path) -> dict:
    return OmegaConf.to_container(OmegaConf.load(file))


def comment(config: DictConfig, key: str) -> str:
    """What stands above the key in the file of the chosen option, on its last line; empty without one."""
    file, leaf = _file(config, key), key.rpartition(".")[2]
    lines = file.read_text().splitlines() if file else []
    at = next((i for i, line in enumerate(lines) if line.startswith(f"{leaf}:")), 0)
    return lines[at - 1].lstrip("# ") if at else ""


def _file(config: DictConfig, key: str) -> Path | None:
    """The file of the chosen option; where it is not ours, of the one that the values name, or of the default."""
    group = key.rpartition(".")[0]
    if not group:
        return config_directory() / "config.yaml"
    chosen = OmegaConf.select(config, f"hydra.runtime.choices.{group}")
    nodes = config._get_node(group) if group in config else None
    named = [nodes._get_node(name)._value() for name in nodes] if isinstance(nodes, DictConfig) else []
    ours = options().get(group, [])
    option = next((name for name in (chosen, *named, default_options().get(group)) if name in ours), None)
    return config_directory() / group / f"{option}.yaml" if option else None
