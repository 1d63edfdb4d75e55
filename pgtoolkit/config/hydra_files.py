"""Reads files of options for Hydra: ours with the types of the schema, and those of a user only if
they are plain YAML."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra._internal import config_loader_impl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, Node, OmegaConf, open_dict

from pgtoolkit.config import refusals
from pgtoolkit.config.composable import changeable
from pgtoolkit.config.defaults import ByCondition, ByScores, ByWeights
from pgtoolkit.config.files import OPTIONAL, config_directory, own_folder, read_options
from pgtoolkit.config.hydra_keys import name_in, typed_in
from pgtoolkit.config.keys import (
    KEYS,
    OPTION_KEYS,
    OWN_CODE,
    is_inside,
    is_own_code,
    keys_of,
)
from pgtoolkit.config.names import digest, name_from
from pgtoolkit.config.overrides import NO_CHOICE, is_swept
from pgtoolkit.config.own_code import PARAMETERS, takes_parameters, two_places, with_path
from pgtoolkit.config.own_files import (
    HYDRA_OPTIONS,
    OwnFile,
    Reading,
    RefusedFilesError,
    is_of_user,
    options_chosen,
)
from pgtoolkit.config.schema import OPTIONS, SCHEMAS, Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.records import plain
from pgtoolkit.system.conditions import value_of
from pgtoolkit.system.report import refusal, shortest_path


def compose_choices(choices: list[str]) -> DictConfig:
    """Return the files of the chosen options, put together by Hydra; raises its exceptions."""
    return compose_files(choices)[0]


def compose_files(
    choices: list[str], sweep_file: Path | None = None
) -> tuple[DictConfig, list[str]]:
    """Return the files of the chosen options, put together by Hydra, and what is wrong in those of
    the user's, which is left out.

    sweep_file: the primary configuration, in place of the one in conf/.
    Raises Hydra's exceptions, ConfigError for a file that cannot be read, and RefusedFilesError
    where nothing can be put together without what is left out.
    """
    folder = own_folder()
    if folder or sweep_file or any(choice.startswith(OPTIONAL) for choice in choices):
        config, problems = _compose_by_hand(tuple(choices), folder, sweep_file)
        return copy.deepcopy(config), [*problems]
    return copy.deepcopy(_compose_declared(tuple(choices))), []


def hydra_without_files(choices: list[str]) -> DictConfig:
    """Return the node `hydra` of our options alone, which nobody changes.

    choices: of Hydra's own groups.
    """
    return _compose_declared(tuple(choices)).hydra


def forget_files() -> None:
    """Read all files anew from here on that are written by hand: in a process that lives long they
    may have changed."""
    _compose_by_hand.cache_clear()


# Both are cached: the runs of a sweep often choose the same files, and differ only in single keys.


@functools.cache
def _compose_declared(choices: tuple[str, ...]) -> DictConfig:
    """Compose files that are written from declarations alone."""
    return _compose(choices, None, None)[0]


@functools.cache
def _compose_by_hand(
    choices: tuple[str, ...], folder: Path | None, sweep_file: Path | None
) -> tuple[DictConfig, tuple[str, ...]]:
    """Compose files among which are some of the user's, or experiments."""
    return _compose(choices, folder, sweep_file)


def _compose(
    choices: tuple[str, ...], folder: Path | None, sweep_file: Path | None
) -> tuple[DictConfig, tuple[str, ...]]:
    register()
    primary = sweep_file or config_directory() / "config.yaml"
    overrides = list(choices)
    # Hydra searches the primary file's folder first, then the user's, and conf/ last.
    places = [place for place in (folder, sweep_file and config_directory()) if place]
    if places:
        folders = ",".join(f"'file://{Path(place).resolve()}'" for place in places)
        overrides.insert(0, f"hydra.searchpath=[{folders}]")
    reading = None
    if places or any(choice.startswith(OPTIONAL) for choice in choices):
        reading = Reading([primary.parent, *places], _compose_declared(()))
    try:
        with _hydra_reads(reading, primary), contextlib.ExitStack() as block:
            if reading is not None:
                listed = _find_choices(reading, primary, overrides)
                block.enter_context(_taking_defaults(listed))
            config = hydra.compose(primary.stem, overrides=overrides, return_hydra_config=True)
    except Exception as error:
        if reading is not None and reading.problems:
            raise RefusedFilesError([*reading.problems]) from error
        raise
    _gather_parameters(config)
    return config, tuple(reading.problems if reading is not None else ())


def _find_choices(reading: Reading, primary: Path, overrides: list[str]) -> DefaultsList:
    """Have Hydra expand the lists of defaults, whose options decide which keys there are, and
    return the files that it has listed."""
    loader = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(primary.stem, overrides, RunMode.RUN)
    hydra_choices = []
    for group, names in HYDRA_OPTIONS.items():
        option = listed.overrides.known_choices.get(group)
        if option in names:
            hydra_choices.append(f"{group}={option}")
    reading.hydra = copy.deepcopy(_compose_declared(tuple(hydra_choices)))
    reading.own_options = {
        group
        for group, option in listed.overrides.known_choices.items()
        if group in OPTIONS and option not in OPTIONS[group]
    }
    reading.chosen = options_chosen([default.config_path for default in listed.defaults])
    return listed


@contextlib.contextmanager
def _taking_defaults(listed: DefaultsList) -> Iterator[None]:
    """Have Hydra compose these files in the block, without expanding the lists of defaults again,
    which is a fifth of its time."""
    expand = vars(config_loader_impl)[_EXPAND]
    setattr(config_loader_impl, _EXPAND, lambda **_: listed)
    try:
        yield
    finally:
        setattr(config_loader_impl, _EXPAND, expand)


_EXPAND = "create_defaults_list"
"""The function of Hydra's that expands the lists of defaults, as its loader has imported it."""


@contextlib.contextmanager
def _hydra_reads(reading: Reading | None, primary: Path) -> Iterator[None]:
    """Inside the block, Hydra finds files beside the primary one, and what is wrong in those of the
    user's is added to `reading`."""
    was_reading = UserFiles.reading
    UserFiles.reading = reading
    try:
        with (
            reading_as_pgtk(),
            hydra.initialize_config_dir(str(primary.parent), version_base="1.3"),
        ):
            yield
    finally:
        UserFiles.reading = was_reading


@contextlib.contextmanager
def reading_as_pgtk() -> Iterator[None]:
    """Let Hydra read all files as those of pgtk in the block.

    What the owner of this process has initialized of Hydra, as in a notebook, is put back after it.
    """
    was_reading = UserFiles.reads_all
    before = {kind: Singleton._instances.get(kind) for kind in (GlobalHydra, VersionBase)}
    for kind in before:
        Singleton._instances.pop(kind, None)
    UserFiles.reads_all = True
    try:
        yield
    finally:
        UserFiles.reads_all = was_reading
        for kind, instance in before.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


@dataclass
class _LocalLauncher:
    """The types of hydra/launcher=local."""

    kind: str
    n_jobs: int
    jobs_per_gpu: int | None
    fail_fast: bool


class UserFiles(FileConfigSource):
    """The reader of files of options.

    reading: gets what is wrong in files of the user's; None where there are none.
    reads_all: whether all files are pgtk's. Otherwise another program composes in this process:
        only what lies in conf/ is read as described here, and all else as Hydra does.

    A file without a list `defaults` has the keys of its group's schema, with their types. The
    dotted path of own code in the place of an option counts as a file, too, see `own_code`.

    Raises ConfigError for a file of the user's that is no YAML without aliases, or makes Hydra
    import packages.
    """

    reading: ClassVar[Reading | None] = None
    reads_all: ClassVar[bool] = False

    def is_config(self, config_path: str) -> bool:
        return super().is_config(config_path) or self._is_own_code(config_path)

    def _is_own_code(self, config_path: str) -> bool:
        group, _, name = config_path.rpartition("/")
        return is_own_code(group, name) and self._is_shipped()

    def _is_shipped(self) -> bool:
        return Path(self.path).resolve() == config_directory().resolve()

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.reads_all and not self._is_shipped():
            return super().load_config(config_path)
        if not super().is_config(config_path) and self._is_own_code(config_path):
            group, _, name = config_path.rpartition("/")
            place = f"{self.scheme()}://{self.path}"
            return ConfigResult(
                self.provider, place, _own_option(group, name), header={"package": None}
            )
        file = Path(self.path, self._normalize_file_name(config_path))
        is_own = is_of_user(file)
        if is_own:
            values = read_options(file)
            if value_of(values, "hydra.searchpath"):
                raise ConfigError(refusals.SEARCH_PATH)
        result = super().load_config(config_path)
        keys = result.config
        group = config_path.rpartition("/")[0]
        if is_own and isinstance(keys, DictConfig):
            keys = result.config = _without_targets(keys, group)
            if self.reading is not None:
                own_file = OwnFile(self.reading, file, group, result.header)
                own_file.check(keys)
                result.header["package"] = own_file.package
            _name_parameters(keys, "" if result.header["package"] == "_global_" else group, file)
        elif group in OPTIONAL and self.reading is not None and isinstance(keys, DictConfig):
            OwnFile(self.reading, file, group, result.header).check_options(keys)
        elif config_path in _WITH_PARAMETERS and isinstance(keys, DictConfig):
            # Files may set parameters of the class, see `_gather_parameters`.
            OmegaConf.set_struct(keys, False)
        is_group = group in Config.__annotations__
        if is_group and isinstance(keys, DictConfig) and "defaults" not in keys:
            schema = "schema" if group in SCHEMAS else f"schema_{keys.get('name')}"
            if group in SCHEMAS or f"{group}/{keys.get('name')}" in SCHEMAS:
                keys.defaults = [schema, "_self_"]
        return result


def _own_option(group: str, path: str) -> DictConfig:
    """Return the keys of an option that is own code, as if from a file."""
    return _own_code_at(OmegaConf.create({"_target_": path}), group)


def _own_code_at(keys: DictConfig, group: str) -> DictConfig:
    """Return the keys of an option with a `_target_` with its path at the key of the group for own
    code. The others stay: they are keys of the group, or parameters of the class, which
    `_gather_parameters` moves."""
    key = OWN_CODE[group]
    for name in ("defaults", OPTION_KEYS[group].rpartition(".")[2], key.leaf):
        if name in keys:
            raise ConfigError(
                refusal(
                    setting=f"{group}: {name} beside _target_",
                    needs="to be left out",
                    got=OmegaConf.to_container(keys, resolve=False)[name],  # type: ignore[index,call-overload]
                    reason="`_target_` alone chooses the option.",
                    use=f"a file with `_target_: {_raw(keys, '_target_')}` and without `{name}`",
                )
            )
    keys[key.leaf] = _raw(keys, "_target_")
    keys.defaults = [key.stands_for, "_self_"]
    del keys["_target_"]
    return keys


def _without_targets(keys: DictConfig, group: str) -> DictConfig:
    """Return the keys of a file of the user's with own code in the form that keys have, where
    Hydra's `_target_` names it.

    group: of the file; empty for a file on the whole configuration. Other places with a `_target_`
    are left, and refused when the configuration is resolved.
    """
    if group == _CALLBACKS:
        return _gathered_callbacks(keys)
    if group in OWN_CODE and "_target_" in keys:
        return _own_code_at(keys, group)
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
    of_user = {str(name): keys._get_node(name) for name in keys if name not in kept}
    gathered = OmegaConf.create({name: keys._get_node(name) for name in kept if name in keys})
    entries = gathered.get("own") or OmegaConf.create()
    for name in of_user.keys() & {*entries}:
        raise ConfigError(
            two_places(
                key=f"callbacks.{name}",
                value=_raw_values(keys, name),
                other=f"callbacks.own.{name}",
                other_value=_raw_values(entries, name),
            )
        )
    described = OmegaConf.to_container(OmegaConf.merge(entries, of_user))
    assert isinstance(described, dict)
    for name, entry in described.items():
        if isinstance(entry, dict) and {"_target_", "path"} <= {*entry}:
            place = f"callbacks.{name}"
            both = (f"{place}._target_", entry["_target_"], f"{place}.path", entry["path"])
            raise ConfigError(two_places(*both))
    gathered.own = {name: with_path(entry) for name, entry in described.items()}
    return gathered


def _name_functions(values: DictConfig, place: str) -> None:
    """Replace each node of nothing but a `_target_` by the path, for keys that name a function.

    place: the name of the group, or of the dictionary in a free-form key of it.
    """
    for leaf in [*values]:
        node = values._get_node(leaf)
        name = f"{place}.{leaf}"
        if not isinstance(node, DictConfig):
            continue
        is_in_free = any(is_inside(name, key) for key in _FREE_WITH_FUNCTIONS)
        is_function = leaf in _FUNCTIONS.values() if is_in_free else name in _FUNCTIONS
        if is_function and [*node] == ["_target_"]:
            values[leaf] = _raw(node, "_target_")
        elif is_in_free:
            _name_functions(node, name)


def _name_parameters(keys: DictConfig, group: str, file: Path) -> None:
    """Give parameters of own code that a file sets inside of the key for them, as in `options:
    {tau: 0.3}`, the names that other files set them by, so that the last file counts.

    group: of the file; empty for a file on the whole configuration. Raises ConfigError where the
    file has both names.
    """
    for of_group, name in PARAMETERS.items():
        values = keys if of_group == group else keys._get_node(of_group)
        if of_group == _CALLBACKS or not isinstance(values, DictConfig):
            continue
        leaf = name.rpartition(".")[2]
        parameters = values._get_node(leaf)
        if not isinstance(parameters, DictConfig):
            continue
        for parameter in [str(leaf) for leaf in parameters]:
            if parameter in _LEAVES[of_group]:
                continue
            if parameter in values:
                raise ConfigError(
                    two_places(
                        key=f"{of_group}.{parameter}",
                        value=_raw_values(values, parameter),
                        other=f"{name}.{parameter}",
                        other_value=_raw_values(parameters, parameter),
                        file=shortest_path(file),
                    )
                )
            values[parameter] = parameters._get_node(parameter)
            del parameters[parameter]


def _raw_values(keys: DictConfig, name: str) -> object:
    """Return a value in plain types, interpolations unresolved."""
    node = keys._get_node(name)
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False)  # type: ignore[arg-type]
    assert isinstance(node, Node)  # only a slice of a list is several
    return node._value()


def _gather_parameters(config: DictConfig) -> None:
    """Move the parameters of own code, which files set as keys of its group, to the key that the
    schema has for them."""
    for group, parameters in PARAMETERS.items():
        values = config.get(group)
        if not isinstance(values, DictConfig) or not takes_parameters(group, config):
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

_FUNCTIONS = {key.name: key.leaf for key in KEYS if key.code == "function" and not key.free}
"""The names of the keys for a function, and what they are called in their group."""

_FREE_WITH_FUNCTIONS = [key.name for key in KEYS if key.code == "function" and key.free]
"""The free-form keys whose entries have such keys."""

_WITH_PARAMETERS = {
    f"{group}/{key.stands_for}" for group, key in OWN_CODE.items() if group in PARAMETERS
}
"""The options for own code that has parameters."""

_LEAVES = {
    group: {of.leaf for of in keys_of({group: {"name": key.stands_for}}) if of.group == group}
    for group, key in OWN_CODE.items()
}
"""Group -> the keys that it has with own code, which are no parameters of it."""


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


def _sweep_name(_overrides: object = None, *, _root_: DictConfig) -> str:
    # As they are typed: a ${KEY} has another value in each job.
    typed = [override for override in typed_in(_root_.hydra) if override not in NO_CHOICE]
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


def _if(*cases: Any, _root_: DictConfig) -> float | str | None:
    """Return the default of a key by conditions on others: condition, value, and so on, and the
    value elsewhere at the end."""
    *pairs, otherwise = cases
    return ByCondition(tuple(zip(pairs[::2], pairs[1::2], strict=True)), otherwise).resolve(_root_)


def _by_scores(*, _root_: DictConfig) -> str:
    return ByScores().resolve(_root_)


def _by_weights(
    random: float, trained: float, adapters: float | None = None, *, _root_: DictConfig
) -> float:
    return ByWeights(random, trained, adapters).resolve(_root_)
