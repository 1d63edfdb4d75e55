"""Checks every run that a command line describes before any of them starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import override_problems, paths
from pgtoolkit.config.compose import compose, is_swept, jobs, name_in, name_of, parse
from pgtoolkit.config.plan import describe, documents
from pgtoolkit.config.rules.launcher import launcher
from pgtoolkit.config.validate import resolve, validate
from pgtoolkit.errors import PgtoolkitError, first_line
from pgtoolkit.launch.sweep import Sweep, plan
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training import machine


@dataclass
class Run:
    """One run: config is None if nothing could be composed. directory: of a job in its sweep's folder."""

    overrides: list[str]
    config: DictConfig | None
    report: Report = field(default_factory=Report)
    directory: str | None = None


@dataclass
class Checked:
    """runs: what would be trained. sweep: where, for several; None if its folder is not known for all the problems.

    searches: the sweeper chooses the values as it goes, and `runs` are the ends of their intervals.
    unnamed: keys that are the same in all runs of a sweep, and therefore in no run's name.
    """

    runs: list[Run]
    sweep: Sweep | None = None
    is_sweep: bool = False
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
        first = _check_one(overrides, folder, rules)
        if first.config is None or first.config.hydra.mode != RunMode.MULTIRUN:
            if first.config is not None and rules:
                first.report.problems += paths.of_run(first.config)
                machine.look(_plain(first.config), first.report)
            return Checked([first])
    # What concerns the sweep as a whole is said without a value for each key.
    of_hydra = [override for override in overrides if override.startswith(("hydra.", "hydra/"))]
    fixed = [override for override in overrides if override not in of_hydra and not is_swept(override)]
    whole = compose([*of_hydra, *fixed], folder, sweep_file)
    of_hydra_itself = [problem for problem in whole.problems if problem.startswith("hydra.")]
    if whole.config is None or of_hydra_itself:  # nothing of such a file is looked at any further
        return Checked([Run(of_hydra, None, Report(of_hydra_itself or whole.problems))], is_sweep=True)
    sweeper = whole.config.hydra.sweeper
    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    runs = [_check_one([*of_hydra, *job], folder, rules, sweep_file, overrides) for job in jobs([*given, *overrides])]
    twice = override_problems.given_twice(parse(overrides)[0])
    for run in runs:
        run.report.problems[:0] = twice
        run.overrides = [override for override in run.overrides if override not in of_hydra]
    checked = Checked(runs, is_sweep=True, searches=not sweeper._target_.endswith(".BasicSweeper"))
    if rules:
        for run in runs:
            launcher(whole.config.hydra, run.report)
            if run.config is not None and "fail_fast" in whole.config.hydra.launcher:  # ours: the jobs run here
                machine.look(_plain(run.config), run.report, begins=False)
        try:
            whole.config.hydra.overrides.task = [override for override in overrides if override not in of_hydra]
        except OmegaConfBaseException:
            return checked  # no folder has a name of what does not resolve; the runs have said so
        if found := paths.of_sweep(whole.config):
            runs[0].report.problems += found
        else:
            _plan(checked, Path(whole.config.hydra.sweep.dir), list(command))
    return checked


def _check_one(
    overrides: list[str],
    config_dir: Path | None,
    rules: bool,
    sweep_file: Path | None = None,
    typed: list[str] | None = None,
) -> Run:
    composed = compose(overrides, config_dir, sweep_file, typed)
    run = Run(overrides, composed.config)
    if rules and composed.config is not None:
        run.report = validate(composed.config)
    run.report.problems[:0] = composed.problems
    return run


def _plan(checked: Checked, folder: Path, command: list[str]) -> None:
    """Find the place of each job in the sweep's folder and what became of it before."""
    sweep = Sweep(folder, folder.name, command)
    varying = varying_keys(checked.runs)
    keys = list(dict.fromkeys(key_of(one) for run in checked.runs for one in run.overrides))
    checked.unnamed = [key for key in keys if key not in varying] if varying else []
    for number, run in enumerate(checked.runs):
        if run.config is None or run.report.problems:
            continue
        run.config.hydra.job.config.override_dirname.exclude_keys = checked.unnamed
        job = plan(run.config, run.overrides, number, folder)
        own = run.config.hydra
        run.report.problems += paths.of_job(
            folder, job.directory, None if "fail_fast" in own.launcher else own.output_subdir
        )
        first = sweep.jobs.setdefault(job.directory, job)
        if first is not job and first.config != job.config:
            needs, reason = "a name of its own for each job", "Two jobs would write to one directory."
            run.report.refuse("hydra.sweep.subdir", needs, job.directory, reason, "the default")
        elif first is not job:
            run.report.note("the configuration of another job; it is run once")
        if first is job and not run.report.problems:
            try:
                job.update_from(folder)
            except PgtoolkitError as error:
                run.report.problems.append(str(error))
        run.directory = job.directory
    checked.sweep = sweep


def problems(checked: Checked) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all have it."""
    return _once(checked.runs, "problems")


def notes(checked: Checked) -> list[str]:
    """The same for notes."""
    return _once(checked.runs, "notes")


def _once(runs: list[Run], which: str) -> list[str]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        for sentence in dict.fromkeys(getattr(run.report, which)):
            found.setdefault(sentence, []).append(run)
    return [
        sentence if len(having) == len(runs) else f"{_short(having[0], varying_keys(runs))}: {sentence}"
        for sentence, having in found.items()
    ]


def page(checked: Checked) -> str:
    """What `pgtk check` prints: the plan of the (first) run, then notes and problems of all."""
    sections = []
    first = checked.runs[0]
    if checked.is_sweep:
        sections += _sweep_sections(checked)
    if first.config is not None:
        plain = _plain(first.config)
        sections += describe(plain, _plain(compose([]).config))
        chosen, own = plain.tracking.run_name, first.config.hydra
        name = name_in(own, chosen) if checked.is_sweep else name_of(chosen, first.overrides)
        sections.append(("Run name", [name]))
        if first.config.rollout.name == "policy" and not first.report.problems:
            sections.append(("First prompt", _first_prompt(first.config)))
    sections.append(("Notes", notes(checked)))
    found = problems(checked)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return "\n\n".join(title + "\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if lines)


def _first_prompt(config: DictConfig) -> list[str]:
    from pgtoolkit.rollouts.prompts import preview

    try:
        return preview(OmegaConf.to_object(config.model), OmegaConf.to_object(config.task), config.seed)
    except Exception as error:  # a damaged tokenizer raises whatever its reader stumbles over
        return [f"cannot be shown: {first_line(error)}"]


def _sweep_sections(checked: Checked) -> list[tuple[str, list[str]]]:
    runs, sweep = checked.runs, checked.sweep
    of = sweep.jobs if sweep else {}
    states = [of[run.directory].status if run.directory in of else "with problems" for run in runs]
    varying = varying_keys(runs)
    if checked.searches:
        title = f"Search of {_trials(runs)} trials; the plan is that of the first of {len(runs)} corners"
    else:
        title = f"Sweep of {len(runs)} runs; the plan is that of the first"
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
    counts = [documents(_plain(run.config)) if run.config is not None else None for run in runs]
    if None not in counts and not checked.searches:
        rest = sum(count for count, state in zip(counts, states, strict=True) if state != "done")
        line = f"documents: at most {sum(counts)} in all"
        whole.append(line + (f", {rest} of them in jobs that are not done" if rest < sum(counts) else ""))
    return [(title, lines), ("The sweep", whole)]


def varying_keys(runs: list[Run]) -> dict[str, list[str]]:
    """Key -> its values, of each override that is not the same in all runs."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for override in run.overrides:
            key, value = key_of(override), override.partition("=")[2]
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found for key, found in values.items() if len(found) > 1}


def _short(run: Run, varying: dict[str, list[str]]) -> str:
    """What tells a run from the others of its sweep; all of its overrides where nothing does."""
    own = [override for override in run.overrides if key_of(override) in varying]
    return " ".join(own or run.overrides)


def _trials(runs: list[Run]) -> Any:
    return runs[0].config.hydra.sweeper.get("n_trials") if runs[0].config is not None else "?"


def _plain(config: DictConfig) -> Any:
    return resolve(config, Report())
