"""The configurations of a sweep: the sweep as a whole as a command describes it, and its jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import hydra_keys
from pgtoolkit.config.compose import Composed, compose_node, composed_of
from pgtoolkit.config.launchers import SEARCH, Launcher, Search
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.config.overrides import axes, intervals, is_swept, jobs, parse
from pgtoolkit.config.refusals import given_twice
from pgtoolkit.errors import first_line
from pgtoolkit.system.report import key_of, refusal


@dataclass
class SweepConfig:
    """The configuration of a sweep as a whole, and the problems of its parts.

    problems: the problems of the sweep as a whole.
    jobs: the overrides of each job; of a search, the corners of the space that it searches. Empty
        if the problems leave nothing else to check.
    varying: key -> its values, for each override that is not the same in all jobs.
    unnamed: keys that are the same in all jobs, and so in no job's name.
    folder: where the sweep is written; None if its name does not resolve.
    of_hydra: overrides of Hydra's own keys.
    sweep_file: see `compose`.
    """

    problems: list[str] = field(default_factory=list)
    jobs: list[list[str]] = field(default_factory=list)
    varying: dict[str, list[str]] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    folder: Path | None = None
    launcher: Launcher | None = None
    sweeper: str = ""
    search: Search | None = None
    of_hydra: list[str] = field(default_factory=list)
    sweep_file: Path | None = None

    def compose_job(self, overrides: list[str], number: int) -> Composed:
        """Return the configuration of a job, by its overrides and its number, with the job's name
        and its directory in the sweep's folder: None if that does not resolve."""
        node = compose_node([*self.of_hydra, *overrides], self.sweep_file)
        composed = replace(composed_of(node), directory=None, problems_of_directory=[])
        config = composed.config
        if node.config is None or config is None or composed.problems:
            return composed
        hydra = node.config.hydra
        with open_dict(hydra):
            hydra.job.num = number
            hydra.job.id = str(number)
        hydra.job.config.override_dirname.exclude_keys = list(self.unnamed)
        name = hydra_keys.name_in(node.config)
        composed = replace(composed, name=name)
        if self.folder is None:
            return composed
        hydra.sweep.dir = str(self.folder)
        directory, problems = hydra_keys.directory_of_job(
            node.config, name, digest(plain_config(config)), self.unnamed
        )
        return replace(composed, directory=directory, problems=[*composed.problems, *problems])


def compose_sweep(overrides: list[str], sweep_file: Path | None = None) -> SweepConfig:
    """Return the sweep that overrides describe; see `compose` for the files."""
    # The sweep as a whole is composed without the keys that have several values.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    of_jobs = [override for override in overrides if override not in of_hydra]
    single = [override for override in of_jobs if not is_swept(override)]
    node = compose_node([*of_hydra, *single], sweep_file)
    of_hydra_itself = [
        problem for problem in node.problems if problem.startswith(("hydra.", "hydra/"))
    ]
    if node.config is None or (of_hydra_itself and node.problems_of_files):
        # What a refused file says for Hydra is not read: to resolve it may run code.
        return SweepConfig(of_hydra_itself or node.problems)
    hydra = node.config.hydra
    params = hydra.sweeper.get("params") or {}
    overrides_of_jobs = [*(f"{key}={value}" for key, value in params.items()), *of_jobs]
    described = jobs(overrides_of_jobs)
    varying = _varying(described)
    keys = dict.fromkeys(key_of(override) for job in described for override in job)
    sweep = SweepConfig(
        problems=[*of_hydra_itself, *given_twice(parse(overrides)[0]), *node.problems_of_files],
        jobs=described,
        varying=varying,
        unnamed=[key for key in keys if key not in varying] if varying else [],
        of_hydra=[] if of_hydra_itself else of_hydra,
        sweep_file=sweep_file,
    )
    if of_hydra_itself:  # where the jobs are to run is not known, only what they are
        return sweep
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
    return sweep


def _interval(override: str) -> str:
    """Refuse an interval in a sweep that is no search."""
    return refusal(
        setting=override,
        needs="hydra/sweeper=optuna_search",
        got="the default sweeper",
        reason="An interval is searched, not gone through value by value.",
        use=f"{_ends_of(override)} for its two ends, or hydra/sweeper=optuna_search",
    )


def _ends_of(override: str) -> str:
    """Return the override that takes the two ends of an interval."""
    ends = re.findall(r"[-+.\de]+(?=[,)])", override.partition("=")[2])
    return f"{key_of(override)}={','.join(ends[:2])}"


def _varying(described: list[list[str]]) -> dict[str, list[str]]:
    """Return key -> its values, for each override that is not the same in all jobs."""
    values_by_key: dict[str, dict[str, None]] = {}
    for overrides in described:
        for override in overrides:
            values_by_key.setdefault(key_of(override), {})[override.partition("=")[2]] = None
    return {key: [*values] for key, values in values_by_key.items() if len(values) > 1}
