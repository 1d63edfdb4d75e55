"""Settings that only the command line may choose, because they run code: plug-ins, functions, commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.key import resolved, value_of
from pgtoolkit.config.keys import default, keys_of
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.report import refusal, text

if TYPE_CHECKING:  # loads Hydra, which what only reads runs has no use for
    from hydra.core.override_parser.types import Override

_PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")
_TARGETS = {("launcher", "_target_"): _PLUGINS, ("sweeper", "_target_"): _PLUGINS}
_TARGETS |= {("sweeper", "sampler", "_target_"): ("optuna.samplers.",)}
"""Places where Hydra instantiates what a plug-in needs, and what the names of those begin with."""

_OF_FILES = {("mode",), ("output_subdir",), ("run", "dir"), ("sweep", "dir"), ("sweep", "subdir"), ("job", "name")}
"""Keys below `hydra` that a file of the user's may set, beside those of its launcher and sweeper."""

_ONLY_TYPED = {"_target_", "setup", "additional_parameters", "submitit_folder", "address"}
_ONLY_TYPED |= {"storage", "search_space", "custom_search_space"}
"""Keys of launchers and sweepers whose values are run, or name a place or a server that is given what runs."""

_COMPUTED = {("runtime",), ("overrides",), ("searchpath",), ("job", "override_dirname"), ("job", "config_name")}
"""What Hydra or pgtk itself fills in, whatever a file says."""


def set_of_hydra(hydra: DictConfig, without_files: DictConfig | None) -> list[str]:
    """Problems with the node `hydra`: what it instantiates besides plug-ins, and what files of the user's set in it.

    without_files: the node as it is without these files; None where there are none. A file sets where runs are
    written, what is swept, and plain values of those keys of its launcher and sweeper that are in conf/.
    """
    problems, known = [], dict(_leaves(without_files))
    for path, value in _leaves(hydra):
        setting = ".".join(("hydra", *path))
        if path in (("launcher",), ("sweeper",)):
            needs, reason = f"one of the options of hydra/{path[0]}", "It names the plug-in of Hydra, and its settings."
            problems.append(refusal(setting, needs, value, reason, f"hydra/{path[0]}=OPTION"))
        elif "_target_" in path and not str(value).startswith(_TARGETS.get(path, ())):
            reason, use = "A configuration never names code to be run.", "the options of hydra/launcher, hydra/sweeper"
            problems.append(refusal(setting, "to be left out", value, reason, use))
        elif without_files is not None and not (
            _COMPUTED & {path[:1], path[:2]}
            or (path in known and known[path] == value)
            or _may_stand_in_files(path, value, known)
        ):
            reason, use = "Only the command line may set what can run code.", f"{setting}=VALUE on the command line"
            got = "it from a file of a sweep or of --config-dir"
            problems.append(refusal(setting, "to be typed", got, reason, use))
    return problems


def _may_stand_in_files(path: tuple, value: Any, known: dict[tuple, Any]) -> bool:
    """known: the values without the files."""
    is_plain = not isinstance(value, str) or not re.search(r"\n|oc\.env", value)  # a line of a job's script; a secret
    if path[0] in ("launcher", "sweeper", "job") and "${" in str(value):
        return False  # it could stand for anything
    if path[:2] == ("sweeper", "params") and len(path) == 3:
        return is_plain and not path[2].lstrip("+~").startswith("hydra")
    if path[0] in ("launcher", "sweeper"):
        return is_plain and path in known and not _ONLY_TYPED & {*path}
    return is_plain and path in _OF_FILES


def not_typed(config: DictConfig, typed: list[Override]) -> list[str]:
    """Problems with functions and commands that a file names and nobody who types."""
    values = dict(pair for override in typed for pair in leaves({override.key_or_group: override.value()}))
    problems = []
    for kind, reason in _RUNS.items():
        for key, value in named_code(config, kind).items():
            if "${" in str(values.get(key, "${")):
                setting = f"{key}={text(value)}"
                use = f"{setting} on the command line"
                problems.append(refusal(setting, "to be typed", "it from a file", reason, use))
    return problems


def written_elsewhere(config: DictConfig, run_dir: Path, typed: list[Override]) -> list[str]:
    """Problems with folders outside of a run's directory that its own file has it write to, and nobody who types."""
    problems, keys = [], {override.key_or_group for override in typed}
    for name, value in folders_outside(config, run_dir).items():
        if name not in keys:
            reason, use = "The run would write outside of its directory.", f"{name}={value} on the command line"
            problems.append(refusal(f"{name}={value}", "to be typed", "it from the run's file", reason, use))
    return problems


def folders_outside(config: object, run_dir: Path) -> dict[str, str]:
    """By key: the folders that a run of this configuration writes to, other than its own directory."""
    written, top = {key.name: resolved(config, key.name) for key in keys_of(config) if key.writes}, run_dir.resolve()
    return {name: value for name, value in written.items() if value and not Path(value).resolve().is_relative_to(top)}


def named_code(config: object, kind: str) -> dict[str, Any]:
    """By key: the functions of the user's own, or the commands, that a configuration names; kind: as `Key.code`."""
    named = {}
    for key in keys_of(config):
        if key.code == kind:
            value = resolved(config, key.name)
            entries = value if key.free and isinstance(value, dict) else {}
            for leaf in ("verifier", "environment"):
                named |= {f"{key.name}.{name}.{leaf}": value_of(entries, f"{name}.{leaf}") for name in entries}
            if not key.free:
                named[key.name] = value
    if kind == "function":
        return {key: value for key, value in named.items() if isinstance(value, str) and "." in value}
    return {key: value for key, value in named.items() if value not in (None, default(config, key))}


_RUNS = {
    "function": "To import it runs its code, which only the command line asks for.",
    "command": "It is run as a command, which only the command line asks for.",
}


def _leaves(node: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    """(path, value) of everything in nested dictionaries and lists, empty ones included."""
    node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in items for leaf in _leaves(value, (*path, str(key)))]
    return [(path, node)]
