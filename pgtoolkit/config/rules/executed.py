"""Settings that only the command line may choose, because they run code: plug-ins, functions, commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.defaults import default
from pgtoolkit.config.key import value_of
from pgtoolkit.config.keys import keys_of
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.report import refusal, text

if TYPE_CHECKING:  # loads Hydra, which what only reads runs has no use for
    from hydra.core.override_parser.types import Override

_TARGETS = {
    ("launcher", "_target_"): ("hydra_plugins.", "hydra._internal.core_plugins."),
    ("sweeper", "_target_"): ("hydra_plugins.", "hydra._internal.core_plugins."),
    ("sweeper", "sampler", "_target_"): ("optuna.samplers.",),
}
"""Places where Hydra instantiates what a plug-in needs, and what the names of those begin with."""

_OF_FILES = {("mode",), ("output_subdir",), ("run", "dir"), ("sweep", "dir"), ("sweep", "subdir"), ("job", "name")}
"""Keys below `hydra` that a file of the user's may set, beside those of its launcher and sweeper."""

_ONLY_TYPED = {"_target_", "setup", "additional_parameters", "submitit_folder", "address"}
_ONLY_TYPED |= {"storage", "search_space", "custom_search_space"}
"""Keys of launchers and sweepers whose values are run, or name a place or a server that is given what runs."""

_COMPUTED = {("runtime",), ("overrides",), ("searchpath",), ("job", "override_dirname"), ("job", "config_name")}
"""What Hydra or pgtk itself fills in, whatever a file says."""


def targets(hydra: DictConfig) -> list[str]:
    """Problems with what the node `hydra` has Hydra instantiate, besides launchers and sweepers that are installed."""
    reason, use = "A configuration never names code to be run.", "the options of hydra/launcher, hydra/sweeper"
    foreign = [(path, value) for path, value in _leaves(hydra) if _is_foreign(path, value)]
    return [refusal(_dotted(path), "to be left out", value, reason, use) for path, value in foreign]


def set_by_files(hydra: DictConfig, typed: DictConfig) -> list[str]:
    """Problems with what files of the user's set in the node `hydra`; typed: the node without these files."""
    problems, known = [], dict(_leaves(typed))
    for path, value in _leaves(hydra):
        is_known = (path in known and known[path] == value) or _is_foreign(path, value)  # of which `targets` says more
        is_computed = any(path[:length] in _COMPUTED for length in (1, 2))
        if not (is_known or is_computed or _harmless(path, value, known)):
            reason = "Only the command line may set what can run code."
            use = f"{_dotted(path)}=VALUE on the command line, or leave it out"
            got = "it from a file of a sweep or of --config-dir"
            problems.append(refusal(_dotted(path), "to be typed", got, reason, use))
    return problems


def search_path(typed: list[Override], primary: DictConfig) -> list[str]:
    """The problem with a search path of one's own: Hydra imports the packages in it, before anything can be seen.

    primary: the keys in the file of a sweep.
    """
    if not any(override.key_or_group == "hydra.searchpath" for override in typed) and not (
        OmegaConf.select(primary, "hydra.searchpath")
    ):
        return []
    reason, use = "Options of your own lie in one folder, laid out as conf/ is.", "--config-dir=FOLDER"
    return [refusal("hydra.searchpath", "to be left out", "a search path", reason, use)]


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
    written = {key.name: _selected(config, key.name) for key in keys_of(config) if key.writes}
    top = Path(run_dir).resolve()
    return {
        name: value
        for name, value in written.items()
        if isinstance(value, str) and not Path(value).resolve().is_relative_to(top)
    }


def named_code(config: object, kind: str) -> dict[str, Any]:
    """By key: the functions of the user's own, or the commands, that a configuration names; kind: as `Key.code`."""
    named = {}
    for key in keys_of(config):
        if key.code == kind:
            value = _selected(config, key.name)
            entries = value if key.free and isinstance(value, dict) else {}
            named |= {f"{key.name}.{name}.verifier": value_of(entries, f"{name}.verifier") for name in entries}
            if not key.free:
                named[key.name] = value
    if kind == "function":
        return {key: value for key, value in named.items() if isinstance(value, str) and "." in value}
    return {key: value for key, value in named.items() if value not in (None, default(config, key))}


_RUNS = {
    "function": "To import it runs its code, which only the command line asks for.",
    "command": "It is run as a command, which only the command line asks for.",
}


def _selected(config: DictConfig, key: str) -> Any:
    """A plain value; None where it does not resolve, of which `validate` says more."""
    try:
        value = value_of(config, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return None


def _is_foreign(path: tuple, value: Any) -> bool:
    return "_target_" in path and not str(value).startswith(_TARGETS.get(path, ()))


def _harmless(path: tuple, value: Any, known: dict[tuple, Any]) -> bool:
    """Whether a file may set a key; known: those of the launcher and the sweeper that conf/ has."""
    if isinstance(value, str) and ("\n" in value or "oc.env" in value):
        return False  # a line of its own in a job's script; a secret in the name of a folder
    if path[0] in ("launcher", "sweeper", "job") and "${" in str(value):
        return False  # it could stand for anything
    if path[:2] == ("sweeper", "params") and len(path) == 3:
        return not path[2].lstrip("+~").startswith("hydra")
    if path[0] in ("launcher", "sweeper"):
        return path in known and not _ONLY_TYPED & {*path}
    return path in _OF_FILES


def _leaves(node: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    """(path, value) of everything in nested dictionaries and lists, empty ones included."""
    node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in items for leaf in _leaves(value, (*path, str(key)))]
    return [(path, node)]


def _dotted(path: tuple) -> str:
    return ".".join(("hydra", *path))
