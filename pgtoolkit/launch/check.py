"""Checks every run that a command line describes before any of them starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.overrides import NO_CHOICE, given_twice, is_swept, jobs, parse
from pgtoolkit.config.paths import occupied_by_rollouts, problems_of_folder, problems_of_job
from pgtoolkit.config.rules.run import launcher
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.launch.sweep import LOCAL, Job, Sweep
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training.machine import check_machine


@dataclass
class PlannedRun:
    """One run. config: None if nothing could be composed. values: the same, resolved, as the rules have seen it.

    job: what it is in its sweep. refused_anywhere: whether the problems are not those of this machine.
    """

    overrides: list[str]
    config: DictConfig | None
    report: Report
    values: Any = None
    job: Job | None = None
    refused_anywhere: bool = False


@dataclass
class Checked:
    """runs: what would be trained. report: on all of them together.

    Of several: master: the sweep's own configuration. arguments: what its sweeper is given. compose_job: composes
    another job from its overrides. sweep: where they lie; None if its folder is not known for all the problems.
    searches: the sweeper chooses the values as it goes, and `runs` are the ends of their intervals.
    """

    runs: list[PlannedRun]
    report: Report = field(default_factory=Report)
    is_sweep: bool = False
    master: DictConfig | None = None
    arguments: list[str] = field(default_factory=list)
    compose_job: Callable[[list[str]], Composed] | None = None
    sweep: Sweep | None = None
    searches: bool = False


def check(
    overrides: list[str],
    multirun: bool = False,
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    command: list[str] = (),
) -> Checked:
    """Compose and validate each run; several with `multirun` or where the configuration itself asks for a sweep.

    command: what was typed, for sweep.json.
    """
    if not multirun:
        run = check_run(compose(overrides, config_dir), overrides)
        if run.config is None or run.config.hydra.mode != RunMode.MULTIRUN:
            if run.config is not None:
                run.report.problems += problems_of_folder(run.config, "hydra.run.dir", ("sweep.json",))
                if problem := occupied_by_rollouts(getattr(run.values.rollout, "save_path", None)):
                    run.report.problems.append(problem)
                check_machine(run.values, run.report)
            return Checked([run])
    # What concerns the sweep as a whole is said without a value for each key.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    of_jobs = [override for override in overrides if override not in of_hydra]
    whole = compose([*of_hydra, *(one for one in of_jobs if not is_swept(one))], config_dir, sweep_file)
    of_hydra_itself = [problem for problem in whole.problems if problem.startswith("hydra.")]
    if whole.config is None or of_hydra_itself:  # nothing of such a file is looked at any further
        return Checked([PlannedRun(of_hydra, None, Report(of_hydra_itself or whole.problems))], is_sweep=True)

    def compose_job(of_job: list[str]) -> Composed:
        return compose([*of_hydra, *of_job], config_dir, sweep_file, typed=overrides)

    master = whole.config
    given = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    runs = [check_run(compose_job(of_job), of_job) for of_job in jobs([*given, *of_jobs])]
    checked = Checked(runs, is_sweep=True, master=master, compose_job=compose_job)
    checked.arguments = [override for override in of_jobs if override not in NO_CHOICE]
    checked.searches = not master.hydra.sweeper._target_.endswith(".BasicSweeper")
    checked.report.problems += given_twice(parse(overrides)[0])
    launcher(master.hydra, checked.report)
    for run in runs:
        if run.config is not None and master.hydra.launcher._target_ == LOCAL:  # the jobs run here
            check_machine(run.values, run.report)
    try:
        master.hydra.overrides.task = of_jobs
    except OmegaConfBaseException:
        return checked  # no folder has a name of what does not resolve; the runs have said so
    if found := problems_of_folder(master, "hydra.sweep.dir"):
        checked.report.problems += found
    else:
        _plan(checked, Path(master.hydra.sweep.dir), list(command))
    return checked


def check_run(composed: Composed, overrides: list[str]) -> PlannedRun:
    """One composed configuration under the rules that hold on every machine."""
    run = PlannedRun(overrides, composed.config, Report())
    if composed.config is not None:
        run.values, run.report = resolve_and_validate(composed.config)
    run.report.problems[:0] = composed.problems
    run.refused_anywhere = bool(run.report.problems)
    return run


def _plan(checked: Checked, folder: Path, command: list[str]) -> None:
    """Find the place of each job in the sweep's folder and what became of it before."""
    varying = varying_keys(checked.runs)
    keys = list(dict.fromkeys(key_of(override) for run in checked.runs for override in run.overrides))
    unnamed = [key for key in keys if key not in varying] if varying else []
    sweep = checked.sweep = Sweep(folder, command, unnamed)
    for number, run in enumerate(checked.runs):
        if run.config is None or run.report.problems:
            continue
        job = sweep.plan(run.config, number)
        run.report.problems += problems_of_job(job.directory)
        run.job = sweep.jobs.setdefault(job.directory, job)
        if run.job.config != job.config:
            needs, reason = "a name of its own for each job", "Two jobs would write to one directory."
            run.report.refuse("hydra.sweep.subdir", needs, job.directory, reason, "the default")
        elif run.job is not job:
            run.report.note("the configuration of another job; it is run once")
        elif not run.report.problems:
            try:
                job.update_from(folder)
            except PgtoolkitError as error:
                run.report.problems.append(str(error))


def problems(checked: Checked) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all have it."""
    return list(dict.fromkeys([*checked.report.problems, *_once(checked.runs, "problems")]))


def notes(checked: Checked) -> list[str]:
    """The same for notes."""
    return [*checked.report.notes, *_once(checked.runs, "notes")]


def _once(runs: list[PlannedRun], which: str) -> list[str]:
    having: dict[str, list[PlannedRun]] = {}
    for run in runs:
        for sentence in dict.fromkeys(getattr(run.report, which)):
            having.setdefault(sentence, []).append(run)
    varying = varying_keys(runs)
    return [
        sentence if len(of) == len(runs) else f"{distinctive(of[0], varying)}: {sentence}"
        for sentence, of in having.items()
    ]


def varying_keys(runs: list[PlannedRun]) -> dict[str, list[str]]:
    """Key -> its values, of each override that is not the same in all runs."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for override in run.overrides:
            key, value = key_of(override), override.partition("=")[2]
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: several for key, several in values.items() if len(several) > 1}


def distinctive(run: PlannedRun, varying: dict[str, list[str]]) -> str:
    """What tells a run from the others of its sweep; all of its overrides where nothing does."""
    return " ".join([override for override in run.overrides if key_of(override) in varying] or run.overrides)
