"""What the files in conf/ say of a key: its default under the options that a configuration has chosen, its comment."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.files import config_directory, default_options, options


def default(config: DictConfig, key: str) -> Any:
    """The value that the chosen option gives the key, as it resolves in this configuration; None without one."""
    value, leaf = written(config, key), key.rpartition(".")[2]
    if not is_computed(value):
        return copy.deepcopy(value)
    values = OmegaConf.create({leaf: value})
    values._set_parent(config)  # for interpolations
    try:
        return values.get(leaf)
    except OmegaConfBaseException:
        return None


def written(config: DictConfig, key: str) -> Any:
    """The same as it stands in the file."""
    group, _, leaf = key.rpartition(".")
    return values_of(group, _chosen(config, group)).get(leaf)


def is_computed(value: Any) -> bool:
    """Whether a value that stands in a file is made of others', or is still to be given."""
    return re.search(r"\$\{|\?\?\?", str(value)) is not None


def comment(config: DictConfig, key: str) -> str:
    """What stands above the key in the file of the chosen option; empty without one."""
    group, _, leaf = key.rpartition(".")
    return comment_of(group, _chosen(config, group), leaf)


@functools.cache
def values_of(group: str, option: str | None) -> dict[str, Any]:
    """The values of an option, not resolved, those of the options that it changes included; group "": of no group."""
    values: dict[str, Any] = {}
    for file in reversed(_files(group, option)):
        values |= OmegaConf.to_container(OmegaConf.load(file))
    return values


def comment_of(group: str, option: str | None, leaf: str) -> str:
    """What stands above a key of an option, on one line."""
    for file in _files(group, option):
        above = re.search(rf"((?:^#.*\n)+){leaf}:", file.read_text(), re.MULTILINE)
        if above:
            return " ".join(line.lstrip("# ") for line in above[1].splitlines())
    return ""


def group_comment(group: str) -> str:
    """What stands above a group in conf/config.yaml, without the list of its options, as a sentence."""
    above = re.search(rf"((?:^  #.*\n)+)  - {group}: ", (config_directory() / "config.yaml").read_text(), re.MULTILINE)
    says = " ".join(line.lstrip("# ") for line in above[1].splitlines()).rpartition(": ")[0]
    return f"{says[:1].upper()}{says[1:]}."


@functools.cache
def _files(group: str, option: str | None) -> list[Path]:
    """The file of an option, then those of the options that it changes; none for an option that is not ours."""
    if not group:
        return [config_directory() / "config.yaml"]
    file = config_directory() / group / f"{option}.yaml"
    if not file.is_file():
        return []
    bases = [name for name in OmegaConf.load(file).get("defaults", []) if not name.startswith(("schema", "_self_"))]
    return [file, *(base for name in bases for base in _files(group, name))]


def _chosen(config: DictConfig, group: str) -> str | None:
    """The chosen option; where it is not ours, the one that the values name, or the default."""
    chosen = OmegaConf.select(config, f"hydra.runtime.choices.{group}") if group else None
    nodes = config._get_node(group) if group in config else None
    named = [nodes._get_node(name)._value() for name in nodes] if isinstance(nodes, DictConfig) else []
    ours = options().get(group, [])
    return next((name for name in (chosen, *named, default_options().get(group)) if name in ours), None)
