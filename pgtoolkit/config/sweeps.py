"""The configurations of a sweep: the sweep as a whole as a command describes it, and its jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import hydra_keys
from pgtoolkit.config.compose import Composed, compose_node, composed_of, set_value
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.launchers import SEARCH, Launcher, Search
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.config.overrides import axes, intervals, is_swept, jobs, parse
from pgtoolkit.config.refusals import given_twice
from pgtoolkit.config.resolve import in_range, interpolated, resolve
from pgtoolkit.errors import first_line
from pgtoolkit.system.report import key_of, refusal


@dataclass(frozen=True)
class ComposedJob:
    """The configuration of a job.

    composed: the configuration with its problems. directory: the job's, in the sweep's folder; None
    if its name does not resolve. digest: of the configuration.
    """

    composed: Composed
    directory: str | None = None
    digest: str = ""


@dataclass
class SweepConfig:
    """A sweep as a whole, as a command describes it.

    unusable: problems after which nothing else is checked. problems: other problems of the sweep as
    a whole. jobs: the overrides of each job; of a search, the corners of the space that it
    searches. varying: key -> its values, for each override that is not the same in all jobs.
    folder: where the sweep is written; None if its name does not resolve. compose: returns the
    configuration of a job, from its overrides and its number.
    """

    unusable: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    jobs: list[list[str]] = field(default_factory=list)
    varying: dict[str, list[str]] = field(default_factory=dict)
    folder: Path | None = None
    launcher: Launcher | None = None
    sweeper: str = ""
    search: Search | None = None
    compose: Callable[[list[str], int], ComposedJob] | None = None


def compose_sweep(
    overrides: list[str], config_dir: Path | None = None, sweep_file: Path | None = None
) -> SweepConfig:
    """Return the sweep that overrides describe; see `compose` for the files."""
    # The sweep as a whole is composed without the keys that have several values.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    of_jobs = [override for override in overrides if override not in of_hydra]
    single = [override for override in of_jobs if not is_swept(override)]
    node = compose_node([*of_hydra, *single], config_dir, sweep_file)
    of_hydra_itself = [
        problem for problem in node.problems if problem.startswith(("hydra.", "hydra/"))
    ]
    if node.config is None or of_hydra_itself:
        return SweepConfig(unusable=of_hydra_itself or node.problems)
    hydra = node.config.hydra
    params = hydra.sweeper.get("params") or {}
    overrides_of_jobs = [*(f"{key}={value}" for key, value in params.items()), *of_jobs]
    described = jobs(overrides_of_jobs)
    varying = _varying(described)
    sweep = SweepConfig(problems=given_twice(parse(overrides)[0]), jobs=described, varying=varying)
    sweep.sweeper = str(hydra.runtime.choices.get("hydra/sweeper"))
    if hydra.sweeper.get("kind") == SEARCH:
        drawn = axes(overrides_of_jobs)
        fixed = [override for override in described[0] if key_of(override) not in drawn]
        sweep.search = Search(drawn, fixed, hydra_keys.settings_in(hydra.sweeper))
    else:
        sweep.problems += [_interval(override) for override in intervals(overrides_of_jobs)]
    hydra.overrides.task = of_jobs
    path, problems = hydra_keys.folder_in(node.config, "hydra.sweep.dir")
    sweep.problems += problems
    if path is not None:
        sweep.folder = Path(path)
    try:
        sweep.launcher = hydra_keys.launcher_of(hydra)
    except OmegaConfBaseException as error:
        sweep.problems.append(
            refusal(
                setting="hydra.launcher",
                needs="values that resolve",
                got=first_line(error),
                reason="It runs the jobs.",
                use="plain values of its keys",
            )
        )
    keys = dict.fromkeys(key_of(override) for job in described for override in job)
    unnamed = [key for key in keys if key not in varying] if varying else []
    sweep.compose = _Jobs(of_hydra, config_dir, sweep_file, sweep.folder, unnamed)
    return sweep


def _interval(override: str) -> str:
    """Refuse an interval in a sweep that is no search."""
    return refusal(
        setting=override,
        needs="hydra/sweeper=optuna_search",
        got="the default sweeper",
        reason="An interval is searched, not gone through value by value.",
        use=f"hydra/sweeper=optuna_search, or single values: {key_of(override)}=A,B",
    )


def _varying(described: list[list[str]]) -> dict[str, list[str]]:
    """Return key -> its values, for each override that is not the same in all jobs."""
    values_by_key: dict[str, dict[str, None]] = {}
    for overrides in described:
        for override in overrides:
            values_by_key.setdefault(key_of(override), {})[override.partition("=")[2]] = None
    return {key: [*values] for key, values in values_by_key.items() if len(values) > 1}


_PLAIN = {
    key.name for key in KEYS if not (key.option or key.free or key.code or key.reads or key.writes)
}
"""Keys whose values are numbers and words alone."""


def _decides_kind(override: str) -> bool:
    """Return whether jobs that differ in this override have to be composed by Hydra each: its value
    is more than a number or a word."""
    key, _, value = override.partition("=")
    return key not in _PLAIN or re.fullmatch(r"[\w.+-]+", value) is None


class _Jobs:
    """Composes the jobs of a sweep: Hydra composes one of each kind, and the others of the kind
    differ from it in numbers and words alone.

    of_hydra: overrides of Hydra's own keys. folder: of the sweep. unnamed: keys that are the same
    in all jobs.
    """

    def __init__(
        self,
        of_hydra: list[str],
        config_dir: Path | None,
        sweep_file: Path | None,
        folder: Path | None,
        unnamed: list[str],
    ):
        self._of_hydra = of_hydra
        self._files = (config_dir, sweep_file)
        self._folder = folder
        self._unnamed = unnamed
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def __call__(self, overrides: list[str], number: int) -> ComposedJob:
        """Return the configuration of a job, by its overrides and its number."""
        kind = tuple(
            override if _decides_kind(override) else key_of(override) for override in overrides
        )
        composed = self._kinds[kind].compose(overrides) if kind in self._kinds else None
        if composed is None:
            node = compose_node([*self._of_hydra, *overrides], *self._files)
            composed = composed_of(node)
            self._kinds.pop(kind, None)
            if node.config is None or composed.config is None or composed.problems:
                return ComposedJob(composed)
            self._kinds[kind] = _Kind(node.config, composed, overrides)
        return self._placed(composed, self._kinds[kind].config, number)

    def _placed(self, composed: Composed, config: DictConfig, number: int) -> ComposedJob:
        """Return the job with its name and its directory."""
        assert composed.config is not None  # else there is no kind of it
        hydra = config.hydra
        with open_dict(hydra):
            hydra.job.num = number
            hydra.job.id = str(number)
        hydra.job.config.override_dirname.exclude_keys = list(self._unnamed)
        name = hydra_keys.name_in(config)
        digest_of_job = digest(plain_config(composed.config))
        composed = replace(composed, name=name)
        if self._folder is None:
            return ComposedJob(composed, None, digest_of_job)
        hydra.sweep.dir = str(self._folder)
        directory, problems = hydra_keys.directory_of_job(
            config, name, digest_of_job, self._unnamed
        )
        if problems:
            composed = replace(composed, problems=[*composed.problems, *problems])
        return ComposedJob(composed, directory, digest_of_job)


class _Kind:
    """Jobs that choose the same options and set the same keys, to different numbers and words.

    Hydra composes one of them.

    config: of the job that was composed last, in which the values of the next one are set.
    """

    def __init__(self, config: DictConfig, composed: Composed, overrides: list[str]):
        assert composed.config is not None
        self.config = config
        self._composed = composed
        self._overrides = overrides
        self._keys = [key_of(override) for override in overrides if not _decides_kind(override)]
        self._keys += [
            name for name in interpolated(config, composed.config) if name not in self._keys
        ]

    def compose(self, overrides: list[str]) -> Composed | None:
        """Return the configuration of another job of the kind; None if it has problems."""
        changed = {
            old: new for old, new in zip(self._overrides, overrides, strict=True) if old != new
        }
        for override in parse([*changed.values()])[0]:
            if set_value(self.config, override.key_or_group, override.value(), options()):
                return None
        self._overrides = overrides
        typed = hydra_keys.typed_in(self.config.hydra)
        self.config.hydra.overrides.task = [changed.get(override, override) for override in typed]
        problems: dict[str, str] = {}
        config = resolve(self.config, problems, self._composed.config, self._keys)
        config = in_range(config, problems, self._composed.choices)
        if problems:
            return None
        self._composed = replace(
            self._composed, config=config, overrides=hydra_keys.recorded(self.config.hydra)
        )
        return self._composed
