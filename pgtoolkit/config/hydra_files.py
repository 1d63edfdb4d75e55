"""Reads files of options for Hydra: ours with the types of the schema, and those of a user only if
they are plain YAML."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, Node, OmegaConf, open_dict

from pgtoolkit.config import refusals
from pgtoolkit.config.composable import changeable
from pgtoolkit.config.conditions import value_of
from pgtoolkit.config.defaults import ByCondition, ByScores, ByWeights
from pgtoolkit.config.files import config_directory, options, own_folder, read_options
from pgtoolkit.config.hydra_keys import name_in
from pgtoolkit.config.keys import KEYS, OWN_CODE, is_own_code, key_named, keys_of
from pgtoolkit.config.names import digest, name_from
from pgtoolkit.config.overrides import NO_CHOICE, is_swept
from pgtoolkit.config.own_code import PARAMETERS, with_path
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.records import plain
from pgtoolkit.system.report import refusal


def compose_choices(choices: list[str], sweep_file: Path | None = None) -> DictConfig:
    """Return the files of the chosen options, put together by Hydra; raises its exceptions."""
    return copy.deepcopy(_compose_cached(tuple(choices), own_folder(), sweep_file))


@functools.cache
def _compose_cached(
    choices: tuple[str, ...], own: Path | None, sweep_file: Path | None
) -> DictConfig:
    # The runs of a sweep often choose the same files, and differ only in single keys.
    register()
    primary = sweep_file or config_directory() / "config.yaml"
    overrides = list(choices)
    # Hydra searches the primary file's folder first, then the user's, and conf/ last.
    places = [place for place in (own, sweep_file and config_directory()) if place]
    if places:
        folders = ",".join(f"'file://{Path(place).resolve()}'" for place in places)
        overrides.insert(0, f"hydra.searchpath=[{folders}]")
    with hydra.initialize_config_dir(str(primary.parent), version_base="1.3"):
        config = hydra.compose(primary.stem, overrides=overrides, return_hydra_config=True)
    _gather_parameters(config)
    return config


@dataclass
class _LocalLauncher:
    """The types of hydra/launcher=local."""

    kind: str
    n_jobs: int
    jobs_per_gpu: int | None
    fail_fast: bool


class UserFiles(FileConfigSource):
    """The reader of files of options.

    A file without a list `defaults` has the keys of its group's schema, with their types. The
    dotted path of own code in the place of an option counts as a file, too, see `own_code`.

    Raises ConfigError for a file of the user's that is no YAML without aliases, makes Hydra import
    packages, or sets options as keys.
    """

    def is_config(self, config_path: str) -> bool:
        return super().is_config(config_path) or self._is_own_code(config_path)

    def _is_own_code(self, config_path: str) -> bool:
        group, _, name = config_path.rpartition("/")
        return is_own_code(group, name) and Path(self.path) == config_directory()

    def load_config(self, config_path: str) -> ConfigResult:
        if not super().is_config(config_path) and self._is_own_code(config_path):
            group, _, name = config_path.rpartition("/")
            place = f"{self.scheme()}://{self.path}"
            return ConfigResult(
                self.provider, place, _own_option(group, name), header={"package": None}
            )
        file = Path(self.path, self._normalize_file_name(config_path))
        is_of_user = file.is_file() and not file.is_relative_to(config_directory())
        if is_of_user:
            values = read_options(file)
            if value_of(values, "hydra.searchpath"):
                raise ConfigError(refusals.SEARCH_PATH)
            problem = None
            if "/" not in config_path:
                problem = refusals.options_as_keys(values, options())
            if problem is not None:
                raise ConfigError(problem)
        result = super().load_config(config_path)
        keys = result.config
        group = config_path.rpartition("/")[0]
        if is_of_user and isinstance(keys, DictConfig):
            keys = result.config = _without_targets(keys, group)
        is_group = group in Config.__annotations__
        if is_group and isinstance(keys, DictConfig) and "defaults" not in keys:
            schema = "schema" if group in SCHEMAS else f"schema_{keys.get('name')}"
            if group in SCHEMAS or f"{group}/{keys.get('name')}" in SCHEMAS:
                keys.defaults = [schema, "_self_"]
        return result


def _own_option(
    group: str, path: str, parameters: Mapping[str, object] = MappingProxyType({})
) -> DictConfig:
    """Return the keys of an option that is own code, as if from a file."""
    key = OWN_CODE[group]
    option = OmegaConf.create({"defaults": [key.stands_for, "_self_"], key.leaf: path})
    if group in PARAMETERS:
        option[PARAMETERS[group].rpartition(".")[2]] = dict(parameters)
        # Files may set parameters of the class, see `_gather_parameters`.
        OmegaConf.set_struct(option, False)
    return option


def _without_targets(keys: DictConfig, group: str) -> DictConfig:
    """Return the keys of a file of the user's with own code in the form that keys have, where
    Hydra's `_target_` names it.

    group: of the file; empty for a file on the whole configuration. Other places with a `_target_`
    are left, and refused when the configuration is resolved.
    """
    if group == _CALLBACKS:
        return _gathered_callbacks(keys)
    if group in OWN_CODE and "_target_" in keys:
        parameters = {str(name): keys._get_node(name) for name in keys if name != "_target_"}
        return _own_option(group, _raw(keys, "_target_"), parameters)
    if group in Config.__annotations__:
        _name_functions(keys, group)
        return keys
    for name in [*keys]:
        values = keys._get_node(name)
        if not isinstance(values, DictConfig) or str(name) not in Config.__annotations__:
            continue
        if name in OWN_CODE and "_target_" in values:
            path = _raw(values, "_target_")
            raise ConfigError(
                refusal(
                    setting=f"{name}._target_",
                    needs="to stand in the list `defaults:`",
                    got=path,
                    reason="A class of your own is an option of its group.",
                    use=f"- override /{name}: {path}",
                )
            )
        _name_functions(values, str(name))
        if name == _CALLBACKS:
            keys[name] = _gathered_callbacks(values)
    return keys


def _raw(keys: DictConfig, name: str) -> str:
    """Return a value as it was written, an interpolation unresolved."""
    node = keys._get_node(name)
    assert isinstance(node, Node)  # only a slice of a list is several
    return str(node._value())


def _gathered_callbacks(keys: DictConfig) -> DictConfig:
    """Return the keys of a file on callbacks, in which those with the user's names are entries of
    `own`."""
    kept = {"defaults", "own"}
    own = {str(name): keys._get_node(name) for name in keys if name not in kept}
    gathered = OmegaConf.create({name: keys._get_node(name) for name in kept if name in keys})
    described = OmegaConf.to_container(OmegaConf.merge(gathered.get("own") or {}, own))
    assert isinstance(described, dict)
    gathered.own = {name: with_path(entry) for name, entry in described.items()}
    return gathered


def _name_functions(values: DictConfig, group: str) -> None:
    """Replace a node of nothing but a `_target_` by the path, for keys that name a function."""
    for leaf in [*values]:
        node = values._get_node(leaf)
        is_function = any(
            key.name == f"{group}.{leaf}" and key.code == "function" and not key.free
            for key in KEYS
        )
        if is_function and isinstance(node, DictConfig) and [*node] == ["_target_"]:
            values[leaf] = _raw(node, "_target_")


def _gather_parameters(config: DictConfig) -> None:
    """Move the parameters of own code, which files set as keys of its group, to the key that the
    schema has for them."""
    for group, parameters in PARAMETERS.items():
        values = config.get(group)
        if not isinstance(values, DictConfig) or key_named(parameters, config) is None:
            continue
        known = {key.leaf for key in keys_of(config) if key.group == group}
        with open_dict(values):
            for name in [name for name in values if name not in known]:
                OmegaConf.update(
                    config, f"{parameters}.{name}", values._get_node(name), force_add=True
                )
                del values[name]
        OmegaConf.set_struct(values, None)


_CALLBACKS = "callbacks"


@functools.cache
def register() -> None:
    """Register the schemas, conf/'s resolvers and the reader of files with Hydra, once."""
    Plugins.instance()  # it registers Hydra's own reader of files
    SourcesRegistry.instance().types["file"] = UserFiles
    store = ConfigStore.instance()
    store.store(name="schema", node=changeable(Config))
    store.store(group="hydra/launcher", name="local_schema", node=_LocalLauncher)
    for key, schema in SCHEMAS.items():
        group, _, option = key.partition("/")
        store.store(
            group=group, name=f"schema_{option}" if option else "schema", node=changeable(schema)
        )
    resolvers = {
        "run_name": _run_name,
        "sweep_name": _sweep_name,
        "divide": _divide,
        "by_weights": _by_weights,
        "by_scores": _by_scores,
        "if": _if,
        "digest": _digest,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"pgtk.{name}", resolver, replace=True)


def _run_name(_overrides: object = None, *, _root_: DictConfig) -> str:
    return name_in(_root_)


def _digest(*, _root_: DictConfig) -> str:
    groups = {}
    for group, value in _root_.items():
        if group != "hydra":
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            groups[str(group)] = plain(value)
    return digest(groups)


def _sweep_name(overrides: Sequence[str], *, _root_: DictConfig) -> str:
    typed = [override for override in overrides if override not in NO_CHOICE]
    # What varies comes first, since a long name is cut at its end.
    typed.sort(key=lambda override: not is_swept(override))
    file = _root_.hydra.job.config_name
    changed = name_from(typed, {}) if typed else "default"
    parts = [name for name in (file, changed) if name not in ("config", "default")]
    return "_".join(parts) or "default"


def _divide(dividend: float, divisor: float) -> float:
    """Return a quotient, for keys in files of sweeps that must change with another key, such as the
    steps of a number of documents."""
    return dividend // divisor if dividend % divisor == 0 else dividend / divisor


def _if(condition: str, value: float, otherwise: float, *, _root_: DictConfig) -> float:
    return ByCondition(condition, value, otherwise).resolve(_root_)


def _by_scores(*, _root_: DictConfig) -> str:
    return ByScores().resolve(_root_)


def _by_weights(
    random: float, trained: float, adapters: float | None = None, *, _root_: DictConfig
) -> float:
    return ByWeights(random, trained, adapters).resolve(_root_)
