"""Overrides as Hydra reads them, with the files that they choose from."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep, ValueType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import refusals
from pgtoolkit.config.defaults import ByWeights
from pgtoolkit.config.files import OPTIONAL, config_directory, options, read_options
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.names import digest, name_from, name_in, plain_config
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError

NO_CHOICE = tuple(f"{group}=null" for group in OPTIONAL)
"""What the groups that change others are by default; Hydra accepts it in its files but not as an override."""


def parse(overrides: list[str]) -> tuple[list[Override], list[str]]:
    """The overrides in Hydra's grammar, and a problem for each that is not one."""
    parsed, problems = [], []
    for typed in overrides:
        try:
            override = _parsed(typed)
            if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
                problems.append(refusals.pattern(override, options()))
                continue
            if isinstance(override.value(), RangeSweep):
                _refuse_endless(override.value())
            parsed.append(override)
        except (HydraException, ValueError, RecursionError) as error:  # of thousands of digits, of lists in lists
            problems.append(refusals.unreadable(typed, error))
    return parsed, problems


def _refuse_endless(values: RangeSweep) -> None:
    """Raise ValueError for a range without values, without an end, or longer than any sweep."""
    count = (values.stop - values.start) / values.step if values.step else math.inf
    if not 0 < count <= _LONGEST_RANGE:
        raise ValueError(f"A range has from 1 to {_LONGEST_RANGE} values")


_LONGEST_RANGE = 10_000


@functools.lru_cache(4096)  # the jobs of a sweep have the same values again and again
def _parsed(typed: str) -> Override:
    return OverridesParser.create().parse_override(typed)


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: all combinations of the values separated by commas, of two overrides of
    one key the later: a sweep's file comes before what is typed. Of an interval, which a searching sweeper draws from,
    the two ends."""
    parsed, problems = parse([override for override in overrides if override not in NO_CHOICE])
    if problems:  # `compose` says them
        return [overrides]
    last = {one.key_or_group: one for one in parsed if not one.is_hydra_override()}
    ends = {key: one.value() for key, one in last.items() if one.is_interval_sweep()}
    last |= {key: parse([f"{key}={of.start},{of.end}"])[0][0] for key, of in ends.items()}
    return BasicSweeper.split_arguments([*last.values()], None)[0]


def intervals(overrides: list[str]) -> list[str]:
    """Return those of the overrides whose values are drawn from an interval."""
    parsed, _ = parse(overrides)
    return [override.input_line for override in parsed if override.is_interval_sweep()]


def is_swept(override: str) -> bool:
    """Whether an override stands for several values."""
    parsed, _ = parse([override])
    return bool(parsed) and parsed[0].is_sweep_override()


def reading(path: str) -> tuple[str, str]:
    """The overrides that read recorded rollouts from a path, whatever characters it has."""
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return "rollout=recorded", f"rollout.path='{quoted}'"


def hydra_form(override: str) -> str:
    """The override as Hydra needs it: without a plus where the key exists, with it where it does not."""
    plain = override.lstrip("+")
    return f"++{plain}" if plain.startswith(tuple(key.name for key in KEYS if key.free)) else plain


class UserFiles(FileConfigSource):
    """Files of options as Hydra reads them, those of a user's own only if they are YAML without aliases.

    A file without a list `defaults` has the keys of its group's schema, with their types.

    Raises ConfigError for such a file, for one that has Hydra import packages, and for a sweep's with options as keys.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file() and not file.is_relative_to(config_directory()):
            values = read_options(file)
            if OmegaConf.is_dict(values) and OmegaConf.select(values, "hydra.searchpath"):
                raise ConfigError(refusals.SEARCH_PATH)
            if "/" not in config_path and (problem := refusals.options_as_keys(values, options())):
                raise ConfigError(problem)
        result, group = super().load_config(config_path), config_path.rpartition("/")[0]
        if group in Config.__annotations__ and OmegaConf.is_dict(result.config) and "defaults" not in result.config:
            schema = "schema" if group in SCHEMAS else f"schema_{result.config.get('name')}"
            if group in SCHEMAS or f"{group}/{result.config.get('name')}" in SCHEMAS:
                result.config.defaults = [schema, "_self_"]
        return result


@functools.cache
def register() -> None:
    """Make the schemas and the resolvers of conf/ known, and how files are read; once in a process."""
    Plugins.instance()  # which names Hydra's own reader of files
    SourcesRegistry.instance().types["file"] = UserFiles
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for key, schema in SCHEMAS.items():
        group, _, option = key.partition("/")
        store.store(group=group, name=f"schema_{option}" if option else "schema", node=schema)
    resolvers = {"run_name": _run_name, "sweep_name": _sweep_name, "divide": _divide, "by_weights": _by_weights}
    resolvers["digest"] = lambda *, _root_: digest(plain_config(_root_))
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"pgtk.{name}", resolver, replace=True)


def _run_name(_overrides=None, *, _root_: DictConfig) -> str:
    try:
        chosen = OmegaConf.select(_root_, "tracking.run_name")
    except OmegaConfBaseException:
        chosen = None  # `validate` says what is wrong with it
    return name_in(_root_.hydra, chosen)


def _sweep_name(overrides, *, _root_: DictConfig) -> str:
    # What varies comes first: a long name is cut at its end.
    typed = sorted((one for one in overrides if one not in NO_CHOICE), key=lambda one: not is_swept(one))
    file = _root_.hydra.job.config_name
    changed = name_from(typed, {}) if typed else "default"
    return "_".join(name for name in (file, changed) if name not in ("config", "default")) or "default"


def _divide(dividend: float, divisor: float) -> float:
    """For files of sweeps: what must change as another key does, such as steps for a number of documents."""
    return dividend // divisor if dividend % divisor == 0 else dividend / divisor


def _by_weights(random: Any, trained: Any, adapters: Any = None, *, _root_: DictConfig) -> Any:
    return ByWeights(random, trained, adapters).resolve(_root_)
