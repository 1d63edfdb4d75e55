"""What files may have run and where credentials go: what has to be typed, and what is said before it happens."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config.evaluation_sets import samples
from pgtoolkit.config.key import value_of
from pgtoolkit.config.keys import default, keys_of, resolved
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, say, text

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
    if hydra.job.chdir:
        reason = "Relative paths of the configuration, and those that are printed, are seen from where pgtk is started."
        problems.append(refusal("hydra.job.chdir=true", "to be left out", True, reason, "hydra.job.chdir=false"))
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
    if path[0] in ("launcher", "sweeper", "job", "mode") and "${" in str(value):
        return False  # it could stand for anything
    if path[:2] == ("sweeper", "params") and len(path) == 3:
        return is_plain and not path[2].lstrip("+~").startswith("hydra")
    if path[0] in ("launcher", "sweeper"):
        return is_plain and path in known and not _ONLY_TYPED & {*path}
    return is_plain and path in _OF_FILES


def commands_not_typed(config: DictConfig, typed: list[Override]) -> list[str]:
    """Return a problem for each program that a run's file has started and nobody who types."""
    values = dict(pair for override in typed for pair in leaves({override.key_or_group: override.value()}))
    problems = []
    for key, value in named_commands(config).items():
        if "${" in str(values.get(key, "${")):  # a reference could stand for anything
            reason = "It is run as a command, which the file of a run does not decide."
            use = f"{key}=VALUE on the command line"
            problems.append(refusal(f"{key}={text(value)}", "to be typed", "it from the run's file", reason, use))
    return problems


def written_elsewhere(config: DictConfig, run_dir: Path, typed: list[Override]) -> list[str]:
    """Problems with folders outside of a run's directory that its own file has it write to, and nobody who types."""
    problems, keys = [], {override.key_or_group for override in typed}
    for name, value in folders_outside(config, run_dir).items():
        if name not in keys:
            reason, use = "The run would write outside of its directory.", f"{name}=FOLDER on the command line"
            problems.append(refusal(f"{name}={value}", "to be typed", "it from the run's file", reason, use))
    return problems


def folders_outside(config: object, run_dir: Path) -> dict[str, str]:
    """By key: the folders that a run of this configuration writes to, other than its own directory."""
    written, top = {key.name: resolved(config, key.name) for key in keys_of(config) if key.writes}, run_dir.resolve()
    return {name: value for name, value in written.items() if value and not Path(value).resolve().is_relative_to(top)}


def named_commands(config: object) -> dict[str, Any]:
    """Return, by key, the programs and their arguments that a configuration names, other than the default's."""
    named = {key.name: resolved(config, key.name) for key in keys_of(config) if key.code == "command"}
    return {name: value for name, value in named.items() if value not in (None, default(config, name))}


def named_functions(config: object) -> dict[str, str]:
    """Return, by key, the dotted paths of functions and classes that a configuration names."""
    named: dict[str, Any] = {}
    for key in keys_of(config):
        if key.code == "function":
            value = resolved(config, key.name)
            if not key.free:
                named[key.name] = value
            elif isinstance(value, dict):
                for name in value:
                    for leaf in ("verifier", "environment"):
                        named[f"{key.name}.{name}.{leaf}"] = value_of(value, f"{name}.{leaf}")
    return {key: path for key, path in named.items() if isinstance(path, str) and "." in path}


def before_start(config: Config) -> list[str]:
    """Return what is said before anything is computed: the code that is imported, and who gets which credentials."""
    return [*imports(config), *credentials(config)]


def imports(*configs: Config) -> list[str]:
    """Return a line with the code of the user's that configurations name, if any, and the keys that name it."""
    paths: dict[str, dict[str, None]] = {}
    for config in configs:
        for key, path in named_functions(config).items():
            if not path.startswith("pgtoolkit."):
                paths.setdefault(path, {})[key] = None
    imported = [f"{path} ({', '.join(keys)})" for path, keys in paths.items()]
    return [f"imports {', '.join(imported)}"] if imported else []


def credentials(config: Config) -> list[str]:
    """Return a line for each kind of credentials of this machine, with the addresses that they are sent to."""
    lines = []
    uri = config.tracking.uri
    if config.tracking.name != "none" and is_server(uri) and (names := mlflow_credentials()):
        lines.append(f"sends {names} to {redact(uri)} (tracking.uri)")
    urls = getattr(config.sampler, "urls", None)
    if urls and samples(config) and _VLLM_KEY in os.environ:
        lines.append(f"sends {_VLLM_KEY} to {redact(', '.join(urls))} (sampler.urls)")
    return lines


def announce(config: Config, before: set[str] | None = None) -> None:
    """Print `before_start` of a run, leaving out the lines that are in `before`, and add its lines to them."""
    lines = [line for line in before_start(config) if line not in (before or ())]
    for line in lines:
        say(f"note: {line}", error=True)
    if before is not None:
        before.update(lines)


def address_not_typed(command: str, uri: str) -> str | None:
    """Return the problem with sending credentials to an address that stands in a run's file alone."""
    is_in_environment = uri.rstrip("/") == os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    names = mlflow_credentials()
    if not is_server(uri) or is_in_environment or not names:
        return None
    reason = f"It would be sent {names}."
    use = "--uri=ADDRESS, or MLFLOW_TRACKING_URI=ADDRESS in the environment, if it may have them"
    return refusal(command, "the server's address to be typed", f"{redact(uri)} from the run's file", reason, use)


def is_server(uri: str | None) -> bool:
    """Return whether a store is a server that is asked over the network."""
    return bool(uri) and "://" in uri and not uri.startswith("sqlite:")


def mlflow_credentials() -> str:
    """Return the names of MLflow's credentials on this machine, which it sends to any server; empty without any."""
    names = [name for name in _MLFLOW_CREDENTIALS if os.environ.get(name)]
    file = Path.home() / ".mlflow" / "credentials"
    if file.is_file():
        names.append(str(file))
    return " and ".join(names)


_MLFLOW_CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_VLLM_KEY = "VLLM_API_KEY"
"""The environment variable with the key that `sampling/vllm.py` sends."""


def _leaves(node: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    """(path, value) of everything in nested dictionaries and lists, empty ones included."""
    node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in items for leaf in _leaves(value, (*path, str(key)))]
    return [(path, node)]
