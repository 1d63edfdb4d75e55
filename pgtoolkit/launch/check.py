"""Checks every run that a command line describes before any of them starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import memory, override_problems
from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.names import name_in, name_of
from pgtoolkit.config.overrides import NO_CHOICE, is_swept, jobs, parse
from pgtoolkit.config.paths import problems_of_folder, problems_of_job
from pgtoolkit.config.plan import describe, documents_per_step
from pgtoolkit.config.rules.run import launcher
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.errors import PgtoolkitError, first_line
from pgtoolkit.launch.sweep import LOCAL, Sweep, plan
from pgtoolkit.runs.provenance import gpus
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training.machine import check_machine


@dataclass
class PlannedRun:
    """One run. config: None if nothing could be composed. values: the same, resolved, as the rules have seen it.

    directory: of a job in its sweep's folder. refused_anywhere: whether the problems are not those of this machine.
    """

    overrides: list[str]
    config: DictConfig | None
    report: Report
    values: Any = None
    directory: str | None = None
    refused_anywhere: bool = False


@dataclass
class Checked:
    """runs: what would be trained. report: on all of them together.

    Of several: master: the sweep's own configuration. arguments: what its sweeper is given. compose_job: composes
    another job from its overrides. sweep: where they lie; None if its folder is not known for all the problems.
    searches: the sweeper chooses the values as it goes, and `runs` are the ends of their intervals. unnamed: keys that
    are the same in all runs of a sweep, and therefore in no run's name.
    """

    runs: list[PlannedRun]
    report: Report = field(default_factory=Report)
    is_sweep: bool = False
    master: DictConfig | None = None
    arguments: list[str] = field(default_factory=list)
    compose_job: Callable[[list[str]], Composed] | None = None
    sweep: Sweep | None = None
    searches: bool = False
    unnamed: list[str] = field(default_factory=list)


def check(
    overrides: list[str],
    multirun: bool = False,
    config_dir: str | None = None,
    rules: bool = True,
    sweep_file: Path | None = None,
    command: list[str] = (),
) -> Checked:
    """Compose and validate each run; several with `multirun` or where the configuration itself asks for a sweep.

    rules: False looks only at whether it can be composed. command: what was typed, for sweep.json.
    """
    folder = Path(config_dir) if config_dir else None
    if not multirun:
        run = check_run(compose(overrides, folder), overrides, rules)
        if run.config is None or run.config.hydra.mode != RunMode.MULTIRUN:
            if run.config is not None and rules:
                run.report.problems += problems_of_folder(run.config, "hydra.run.dir", ("sweep.json",))
                check_machine(run.values, run.report)
            return Checked([run])
    # What concerns the sweep as a whole is said without a value for each key.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    of_jobs = [override for override in overrides if override not in of_hydra]
    whole = compose([*of_hydra, *(one for one in of_jobs if not is_swept(one))], folder, sweep_file)
    of_hydra_itself = [problem for problem in whole.problems if problem.startswith("hydra.")]
    if whole.config is None or of_hydra_itself:  # nothing of such a file is looked at any further
        return Checked([PlannedRun(of_hydra, None, Report(of_hydra_itself or whole.problems))], is_sweep=True)
    master = whole.config
    given = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    compose_job = partial(_compose_job, of_hydra, config_dir=folder, sweep_file=sweep_file, typed=overrides)
    runs = [check_run(compose_job(job), job, rules) for job in jobs([*given, *of_jobs])]
    checked = Checked(runs, is_sweep=True, master=master, compose_job=compose_job)
    checked.arguments = [override for override in of_jobs if override not in NO_CHOICE]
    checked.searches = not master.hydra.sweeper._target_.endswith(".BasicSweeper")
    checked.report.problems += override_problems.given_twice(parse(overrides)[0])
    if rules:
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


def check_resumed(run_dir: Path, overrides: list[str]) -> Checked:
    """The same for a run that is continued; functions that it names have been typed, and are imported as it starts."""
    run = check_run(compose(overrides, run_dir=run_dir), overrides)
    check_machine(run.values, run.report)
    return Checked([run])


def check_run(composed: Composed, overrides: list[str], rules: bool = True) -> PlannedRun:
    """One composed configuration under the rules that hold on every machine."""
    run = PlannedRun(overrides, composed.config, Report())
    if rules and composed.config is not None:
        run.values, run.report = resolve_and_validate(composed.config)
    run.report.problems[:0] = composed.problems
    run.refused_anywhere = bool(run.report.problems)
    return run


def _compose_job(of_hydra: list[str], overrides: list[str], **more: Any) -> Composed:
    return compose([*of_hydra, *overrides], **more)


def _plan(checked: Checked, folder: Path, command: list[str]) -> None:
    """Find the place of each job in the sweep's folder and what became of it before."""
    sweep = checked.sweep = Sweep(folder, folder.name, command)
    varying = varying_keys(checked.runs)
    keys = list(dict.fromkeys(key_of(override) for run in checked.runs for override in run.overrides))
    checked.unnamed = [key for key in keys if key not in varying] if varying else []
    not_recorded = 0
    for number, run in enumerate(checked.runs):
        if run.config is None or run.report.problems:
            continue
        job = plan(run.config, run.overrides, number, folder, checked.unnamed)
        run.report.problems += problems_of_job(job.directory)
        run.directory = job.directory
        first = sweep.jobs.setdefault(job.directory, job)
        if first is not job and first.config != job.config:
            needs, reason = "a name of its own for each job", "Two jobs would write to one directory."
            run.report.refuse("hydra.sweep.subdir", needs, job.directory, reason, "the default")
        elif first is not job:
            run.report.note("the configuration of another job; it is run once")
        elif not run.report.problems:
            try:
                job.update_from(folder)
                not_recorded += job.began_without_recording(folder)
            except PgtoolkitError as error:
                run.report.problems.append(str(error))
    if not_recorded:
        checked.report.note(
            f"{not_recorded} of {len(sweep.jobs)} jobs began without this rollout.save_path: what they have sampled is "
            "not recorded, and a job that is done is not trained again. To record them, use another hydra.sweep.dir or "
            "remove the folders of these jobs."
        )


def problems(checked: Checked) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all have it."""
    return list(dict.fromkeys([*checked.report.problems, *_once(checked.runs, "problems")]))


def notes(checked: Checked) -> list[str]:
    """The same for notes."""
    return [*checked.report.notes, *_once(checked.runs, "notes")]


def _once(runs: list[PlannedRun], which: str) -> list[str]:
    found: dict[str, list[PlannedRun]] = {}
    for run in runs:
        for sentence in dict.fromkeys(getattr(run.report, which)):
            found.setdefault(sentence, []).append(run)
    return [
        sentence if len(having) == len(runs) else f"{_short(having[0], varying_keys(runs))}: {sentence}"
        for sentence, having in found.items()
    ]


def render_plan(checked: Checked) -> str:
    """What `pgtk check` prints: the plan of the (first) run, then notes and problems of all."""
    first = checked.runs[0]
    sections = _sweep_sections(checked) if checked.is_sweep else []
    if first.config is not None:
        sections += describe(first.values, resolve_and_validate(compose([]).config)[0])
        chosen, hydra = first.values.tracking.run_name, first.config.hydra
        if first.values.model.name == "huggingface" and not first.report.problems:
            sizes = [float(gpu["memory"].split()[0]) * 2**20 for gpu in gpus()]
            sections.append(("Memory", [*memory.describe(first.values, min(sizes, default=None))]))
        name = name_in(hydra, chosen) if checked.is_sweep else name_of(chosen, first.overrides)
        sections.append(("Run name", [name]))
        if first.config.rollout.name == "policy" and not first.report.problems:
            sections.append(("First prompt", _first_prompt(first.config)))
    sections.append(("Notes", notes(checked)))
    found = problems(checked)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return "\n\n".join(title + "\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if lines)


def _first_prompt(config: DictConfig) -> list[str]:
    from pgtoolkit.tasks.prompts import preview

    try:
        return preview(OmegaConf.to_object(config.model), OmegaConf.to_object(config.task), config.seed)
    except Exception as error:  # a damaged tokenizer raises whatever its reader stumbles over
        return [f"cannot be shown: {first_line(error)}"]


def _sweep_sections(checked: Checked) -> list[tuple[str, list[str]]]:
    runs, sweep = checked.runs, checked.sweep
    of = sweep.jobs if sweep else {}
    states = [of[run.directory].status if run.directory in of else "with problems" for run in runs]
    varying = varying_keys(runs)
    title = f"Sweep of {len(runs)} runs; the plan is that of the first"
    if checked.searches:
        trials = checked.master.hydra.sweeper.get("n_trials")
        title = f"Search of {trials} trials; the plan is that of the first of {len(runs)} corners"
    width, last = max(map(len, states)), len(str(len(runs) - 1))
    lines = [
        f"{number:>{last}}  {state:<{width}}  {_short(run, varying)}"
        for number, (run, state) in enumerate(zip(runs, states, strict=True))
    ]
    whole = [f"folder: {sweep.folder}"] if sweep else []
    whole += [f"varies: {key} = {', '.join(values)}" for key, values in varying.items()]
    fixed = [override for override in runs[0].overrides if key_of(override) not in varying]
    whole += ["in all: " + " ".join(fixed)] if fixed else []
    if not checked.searches:
        whole.append("jobs: " + ", ".join(f"{count} {state}" for state, count in Counter(states).items()))
        plans = [run.values for run in runs if run.config is not None]
        counts = [plan.trainer.max_steps * documents_per_step(plan) for plan in plans]
        if len(plans) == len(runs) and 0 not in counts:  # as where steps count micro-batches
            rest = sum(count for count, state in zip(counts, states, strict=True) if state != "done")
            line = f"documents: at most {sum(counts)} in all"
            whole.append(line + (f", {rest} of them in jobs that are not done" if rest < sum(counts) else ""))
    return [(title, lines), ("The sweep", whole)]


def varying_keys(runs: list[PlannedRun]) -> dict[str, list[str]]:
    """Key -> its values, of each override that is not the same in all runs."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for override in run.overrides:
            key, value = key_of(override), override.partition("=")[2]
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found for key, found in values.items() if len(found) > 1}


def _short(run: PlannedRun, varying: dict[str, list[str]]) -> str:
    """What tells a run from the others of its sweep; all of its overrides where nothing does."""
    own = [override for override in run.overrides if key_of(override) in varying]
    return " ".join(own or run.overrides)
