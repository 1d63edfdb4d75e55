"""Checks every run that a command line describes before any of them starts; the page that pgtk check prints of it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import memory
from pgtoolkit.config.compose import Composed, compose, set_value
from pgtoolkit.config.defaults import Computed
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import KEYS, declared_default, default
from pgtoolkit.config.names import name_in
from pgtoolkit.config.overrides import NO_CHOICE, intervals, is_swept, jobs, parse
from pgtoolkit.config.paths import occupied_by_rollouts, problems_of_folder, problems_of_job
from pgtoolkit.config.plan import compilation, describe
from pgtoolkit.config.refusals import given_twice
from pgtoolkit.config.rules.executed import announce
from pgtoolkit.config.rules.run import launcher
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import interpolated, resolve_and_validate, validated
from pgtoolkit.errors import PgtoolkitError, first_line
from pgtoolkit.launch.sweep import LOCAL, Job, Sweep
from pgtoolkit.launch.sweep_report import summary
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training.machine import check_machine, jobs_on_gpus


@dataclass
class PlannedRun:
    """One run. config: as composed; None if nothing could be, and in a sweep for all jobs but the first.

    values: the same, resolved, as the rules have seen it; None if nothing could be composed. job: what it is in its
    sweep. refused_anywhere: whether the problems are not those of this machine.
    """

    overrides: list[str]
    config: DictConfig | None
    report: Report
    values: Config | None = None
    job: Job | None = None
    refused_anywhere: bool = False


@dataclass
class Checked:
    """runs: what would be trained. report: on all of them together.

    Of several: master: the sweep's own configuration. arguments: what its sweeper is given. plan: checks another job,
    of these overrides and this number. sweep: where they lie; None if its folder is not known for all the problems.
    varying: key -> its values, of each override that is not the same in all runs. searches: the sweeper chooses the
    values as it goes, and `runs` are the ends of their intervals.
    """

    runs: list[PlannedRun] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    is_sweep: bool = False
    master: DictConfig | None = None
    arguments: list[str] = field(default_factory=list)
    plan: Callable[[list[str], int], PlannedRun] | None = None
    sweep: Sweep | None = None
    varying: dict[str, list[str]] = field(default_factory=dict)
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
                if not run.report.problems:
                    announce(run.values)
                check_machine(run.values, run.report)
            return Checked([run])
    # What concerns the sweep as a whole is said without a value for each key.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    of_jobs = [override for override in overrides if override not in of_hydra]
    whole = compose([*of_hydra, *(one for one in of_jobs if not is_swept(one))], config_dir, sweep_file)
    of_hydra_itself = [problem for problem in whole.problems if problem.startswith("hydra.")]
    if whole.config is None or of_hydra_itself:  # nothing of such a file is looked at any further
        return Checked([PlannedRun(of_hydra, None, Report(of_hydra_itself or whole.problems))], is_sweep=True)
    checked = Checked(is_sweep=True, master=(master := whole.config))
    checked.report.problems += given_twice(parse(overrides)[0])
    launcher(master.hydra, checked.report)
    checked.arguments = [override for override in of_jobs if override not in NO_CHOICE]
    checked.searches = not master.hydra.sweeper._target_.endswith(".BasicSweeper")
    given = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    for override in intervals([*given, *of_jobs]) if not checked.searches else ():
        reason = "An interval is searched, not gone through value by value."
        use = f"hydra/sweeper=optuna_search, or single values: {key_of(override)}=A,B"
        checked.report.refuse(override, "hydra/sweeper=optuna_search", "the usual sweeper", reason, use)
    described = jobs([*given, *of_jobs])
    checked.varying = _varying(described)
    try:
        master.hydra.overrides.task = of_jobs
        if found := problems_of_folder(master, "hydra.sweep.dir"):
            checked.report.problems += found
        else:
            keys = dict.fromkeys(key_of(override) for of_job in described for override in of_job)
            unnamed = [key for key in keys if key not in checked.varying] if checked.varying else []
            checked.sweep = Sweep(Path(master.hydra.sweep.dir), list(command), unnamed)
    except OmegaConfBaseException:
        pass  # no folder has a name of what does not resolve; the runs say so

    kinds: dict[tuple, _Kind] = {}
    announced: set[str] = set()

    def plan(of_job: list[str], number: int) -> PlannedRun:
        kind = tuple(override if _only(override) else key_of(override) for override in of_job)
        run = kinds[kind].run(of_job) if kind in kinds else None
        if run is None:
            run = check_run(compose([*of_hydra, *of_job], config_dir, sweep_file), of_job)
            kinds.pop(kind, None)
            if not run.report.problems:
                kinds[kind] = _Kind(run)
        if run.values is not None and not run.report.problems:
            announce(run.values, announced)
        if run.values is not None and master.hydra.launcher._target_ == LOCAL:  # the jobs run here
            check_machine(run.values, run.report)
            if (jobs_per_gpu := master.hydra.launcher.jobs_per_gpu) is not None and not checked.report.problems:
                jobs_on_gpus(run.values, jobs_per_gpu, run.report)
        if checked.sweep is not None and not run.report.problems:
            _place(checked.sweep, run, number)
        return run

    checked.plan = plan
    for number, of_job in enumerate(described):
        checked.runs.append(plan(of_job, number))
        if number > 0:
            checked.runs[-1].config = None  # of thousands of jobs, gigabytes
    return checked


def check_run(composed: Composed, overrides: list[str]) -> PlannedRun:
    """One composed configuration under the rules that hold on every machine."""
    values, report = validated(composed)
    return PlannedRun(overrides, composed.config, report, values, refused_anywhere=bool(report.problems))


_PLAIN = {key.name for key in KEYS if not (key.option or key.free or key.code or key.reads or key.writes)}


def _only(override: str) -> bool:
    """Whether jobs that differ in this override are of different kinds: it is more than a number or a word."""
    key, _, value = override.partition("=")
    return key not in _PLAIN or re.fullmatch(r"[\w.+-]+", value) is None


class _Kind:
    """Jobs that choose the same options and set the same keys, to other numbers and words: composed once, by Hydra.

    run: one of them, without problems.
    """

    def __init__(self, run: PlannedRun):
        self._config, self._values, self._overrides = copy.deepcopy(run.config), run.values, run.overrides
        self._keys = [key_of(override) for override in run.overrides if not _only(override)]
        self._declared = functools.cache(functools.partial(declared_default, self._config))
        self._keys += [name for name in interpolated(run.config, run.values) if name not in self._keys]

    def run(self, overrides: list[str]) -> PlannedRun | None:
        """The checked job of these overrides, of whose configuration the next job is made; None if it has problems."""
        changed = {old: new for old, new in zip(self._overrides, overrides, strict=True) if old != new}
        for override in parse([*changed.values()])[0]:
            if set_value(self._config, override.key_or_group, override.value(), options()):
                return None
        self._overrides, hydra = overrides, self._config.hydra
        hydra.overrides.task = [changed.get(override, override) for override in hydra.overrides.task]
        values, report = resolve_and_validate(self._config, self._values, self._keys, self._usual)
        return None if report.problems else PlannedRun(overrides, self._config, report, values)

    def _usual(self, key: str) -> Any:
        """The default of a key: what its option declares is the same for all of the kind."""
        value = self._declared(key)
        return default(self._config, key) if isinstance(value, Computed) else value


def _place(sweep: Sweep, run: PlannedRun, number: int) -> None:
    """Find the place of a job in the sweep's folder and what became of it before."""
    job = sweep.plan(run.config, run.values, number)
    run.report.problems += problems_of_job(job.directory)
    run.job = sweep.jobs.setdefault(job.directory, job)
    if run.job is not job and run.job.config != job.config:
        needs, reason = "a name of its own for each job", "Two jobs would write to one directory."
        run.report.refuse("hydra.sweep.subdir", needs, job.directory, reason, "the default")
    elif run.job is not job:
        run.report.note("the configuration of another job; it is run once")
    elif not run.report.problems:
        try:
            job.update_from(sweep.folder)
        except PgtoolkitError as error:
            run.report.problems.append(str(error))


def problems(checked: Checked) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all have it."""
    return list(dict.fromkeys([*checked.report.problems, *_once(checked, "problems")]))


def notes(checked: Checked) -> list[str]:
    """The same for notes."""
    return [*checked.report.notes, *_once(checked, "notes")]


def _once(checked: Checked, kind: str) -> list[str]:
    having: dict[str, list[PlannedRun]] = {}
    for run in checked.runs:
        for sentence in dict.fromkeys(getattr(run.report, kind)):
            having.setdefault(sentence, []).append(run)
    return [
        sentence if len(of) == len(checked.runs) else f"{distinctive(of[0], checked.varying)}: {sentence}"
        for sentence, of in having.items()
    ]


def _varying(described: list[list[str]]) -> dict[str, list[str]]:
    values: dict[str, dict[str, None]] = {}
    for override in (override for of_job in described for override in of_job):
        values.setdefault(key_of(override), {})[override.partition("=")[2]] = None
    return {key: [*several] for key, several in values.items() if len(several) > 1}


def distinctive(run: PlannedRun, varying: dict[str, list[str]]) -> str:
    """What tells a run from the others of its sweep; all of its overrides where nothing does."""
    return " ".join([override for override in run.overrides if key_of(override) in varying] or run.overrides)


def render_plan(checked: Checked) -> str:
    """The plan of the (first) run, then notes and problems of all."""
    first, of_prompts = checked.runs[0], []
    sections = _sweep_sections(checked) if checked.is_sweep else []
    if first.config is not None:
        sections += describe(first.values, resolve_and_validate(compose([]).config)[0])
        if first.values.model.name == "huggingface" and not first.report.problems:
            gpu = gpu_memory()
            sections.append(("Memory", [*memory.describe(first.values, gpu)]))
            compiles, reason = compilation(first.values, gpu is not None and first.values.trainer.device != "cpu")
            sections.append(("Compiled", [f"{'yes' if compiles else 'no'}, {reason}"]))
        sections.append(("Run name", [name_in(first.config.hydra, first.values.tracking.run_name)]))
        if first.config.rollout.name == "policy" and not first.report.problems:
            lines, of_prompts = _first_prompt(first.values)
            sections.append(("First prompt", lines))
    sections.append(("Notes", [*notes(checked), *of_prompts]))
    found = problems(checked)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return "\n\n".join(title + "\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if lines)


def _first_prompt(config: Config) -> tuple[list[str], list[str]]:
    """Return lines that show the first prompt, and notes on the first prompts and their answers."""
    from pgtoolkit.tasks.preview import preview

    try:
        return preview(config)
    except Exception as error:  # a damaged tokenizer raises whatever its reader stumbles over
        return [f"cannot be shown: {first_line(error)}"], []


def _sweep_sections(checked: Checked) -> list[tuple[str, list[str]]]:
    runs, sweep, varying = checked.runs, checked.sweep, checked.varying
    title = f"Sweep of {len(runs)} runs; the plan is that of the first"
    if checked.searches:
        trials = checked.master.hydra.sweeper.get("n_trials")
        title = f"Search of {trials} trials; the plan is that of the first of {len(runs)} corners"
    states = [run.job.status if run.job else "with problems" for run in runs]
    width, last = max(map(len, states)), len(str(len(runs) - 1))
    lines = [
        f"{number:>{last}}  {state:<{width}}  {distinctive(run, varying)}"
        for number, (run, state) in enumerate(zip(runs, states, strict=True))
    ]
    whole = [f"folder: {sweep.folder}"] if sweep else []
    whole += [f"varies: {key} = {', '.join(values)}" for key, values in varying.items()]
    fixed = [override for override in runs[0].overrides if key_of(override) not in varying]
    whole += ["in all: " + " ".join(fixed)] if fixed else []
    whole += [summary(sweep)] if sweep and sweep.jobs and not checked.searches else []
    return [(title, lines), ("The sweep", whole)]
