"""Checks every run that a command line describes before any of them starts; the page that pgtk
check prints of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config import memory
from pgtoolkit.config.compilation import compilation
from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.key import with_values
from pgtoolkit.config.paths import absolute_paths, occupied_by_rollouts, problems_of_folder
from pgtoolkit.config.plan import plan_sections
from pgtoolkit.config.rules.executed import announce
from pgtoolkit.config.rules.run import launcher
from pgtoolkit.config.schema import Config
from pgtoolkit.config.sweeps import SweepConfig, compose_sweep
from pgtoolkit.config.validate import validated
from pgtoolkit.config.ways import ways_in_words
from pgtoolkit.errors import PgtoolkitError, first_line
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.launch.sweep_report import summary
from pgtoolkit.runs.provenance import gpu_memory, gpus
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training.machine import check_machine, jobs_on_gpus


@dataclass
class PlannedRun:
    """One run. config: None if nothing could be composed.

    overrides: what was typed for it.
    recorded: what its run directory has of them.
    name: of the run.
    directory: of a single run, None if its name does not resolve.
    job: what it is in its sweep.
    refused_anywhere: whether the problems are not those of this machine.
    """

    overrides: list[str]
    report: Report
    config: Config | None = None
    recorded: list[str] = field(default_factory=list)
    name: str | None = None
    directory: Path | None = None
    job: Job | None = None
    refused_anywhere: bool = False

    @property
    def named_config(self) -> Config:
        """The configuration as the run begins with it: with its name, and paths that mean the same
        from everywhere."""
        assert self.config is not None
        return absolute_paths(with_values(self.config, {"tracking.run_name": self.name}))


@dataclass
class Checked:
    """What a command describes: a run, or the jobs of a sweep.

    runs: what would be trained; of a search, the corners of what it searches. report: on all of
        them together.
    sweep_config: what is said of a sweep as a whole; None for a single run.
    sweep: where its jobs lie; None if its folder is not known for all the problems.
    plan: checks another job, of these overrides and this number.
    """

    runs: list[PlannedRun] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    sweep_config: SweepConfig | None = None
    sweep: Sweep | None = None
    plan: Callable[[list[str], int], PlannedRun] | None = None

    @property
    def varying(self) -> dict[str, list[str]]:
        """Key -> its values, of each override that is not the same in all runs."""
        return {} if self.sweep_config is None else self.sweep_config.varying


def check(
    overrides: list[str],
    multirun: bool = False,
    config_dir: Path | None = None,
    sweep_file: Path | None = None,
    command: Sequence[str] = (),
) -> Checked:
    """Compose and validate each run; several with `multirun` or where the configuration itself asks
    for a sweep.

    command: what was typed, for sweep.json.
    """
    if not multirun:
        composed = compose(overrides, config_dir)
        if not composed.is_sweep:
            return Checked([_check_single(composed, overrides)])
    described = compose_sweep(overrides, config_dir, sweep_file)
    if described.unusable:
        return Checked([PlannedRun(overrides, Report(described.unusable))], sweep_config=described)
    checked = Checked(sweep_config=described, report=Report(described.problems))
    if described.launcher is not None:
        launcher(described.launcher, described.sweeper, checked.report)
    if described.folder is not None:
        if occupied := problems_of_folder("hydra.sweep.dir", described.folder):
            checked.report.problems += occupied
        else:
            checked.sweep = Sweep(described.folder, list(command))
    checked.plan = _Plan(checked)
    checked.runs = [checked.plan(of_job, number) for number, of_job in enumerate(described.jobs)]
    return checked


def _check_single(composed: Composed, overrides: list[str]) -> PlannedRun:
    """Check a run by itself, also on this machine."""
    run = check_run(composed, overrides)
    if run.config is None:
        return run
    problems = composed.problems_of_directory
    if run.directory is not None:
        problems = problems_of_folder("hydra.run.dir", run.directory, ("sweep.json",))
    run.report.problems += problems
    if problem := occupied_by_rollouts(getattr(run.config.rollout, "save_path", None)):
        run.report.problems.append(problem)
    if not run.report.problems:
        announce(run.config)
    check_machine(run.config, run.report)
    return run


def check_run(composed: Composed, overrides: list[str]) -> PlannedRun:
    """Check one composed configuration by the rules that hold on every machine."""
    config, report = validated(composed)
    return PlannedRun(
        overrides=overrides,
        report=report,
        config=config,
        recorded=composed.overrides,
        name=composed.name,
        directory=None if composed.directory is None else Path(composed.directory),
        refused_anywhere=bool(report.problems),
    )


class _Plan:
    """Checks the jobs of a sweep, one at a time."""

    def __init__(self, checked: Checked):
        self._checked = checked
        self._announced: set[str] = set()

    def __call__(self, overrides: list[str], number: int) -> PlannedRun:
        """Check the job of these overrides and this number, and find its place in the sweep's
        folder."""
        described, sweep = self._checked.sweep_config, self._checked.sweep
        assert described is not None
        assert described.compose is not None
        job = described.compose(overrides, number)
        run = check_run(job.composed, overrides)
        if run.config is None:
            return run
        if not run.report.problems:
            announce(run.config, self._announced)
        if described.launcher is not None and described.launcher.kind == "local":
            check_machine(run.config, run.report)
            jobs_per_gpu = described.launcher.settings.get("jobs_per_gpu")
            if jobs_per_gpu is not None and not self._checked.report.problems:
                jobs_on_gpus(run.config, jobs_per_gpu, run.report)
        if sweep is not None and job.directory is not None and not run.report.problems:
            assert run.name is not None
            _place(
                sweep,
                run,
                sweep.plan(run.config, run.recorded, run.name, job.directory, job.digest),
            )
        return run


def _place(sweep: Sweep, run: PlannedRun, job: Job) -> None:
    """Add a job to those of the sweep, and find out what became of it before."""
    run.job = sweep.jobs.setdefault(job.directory, job)
    if run.job is not job and run.job.config != job.config:
        run.report.refuse(
            setting="hydra.sweep.subdir",
            needs="a name of its own for each job",
            got=job.directory,
            reason="Two jobs would write to one directory.",
            use="the default",
        )
    elif run.job is not job:
        run.report.note("the configuration of another job; it is run once")
    else:
        try:
            job.update_from(sweep.folder)
        except PgtoolkitError as error:
            run.report.problems.append(str(error))


def problems(checked: Checked) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all
    have it."""
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
        sentence
        if len(of) == len(checked.runs)
        else f"{distinctive(of[0], checked.varying)}: {sentence}"
        for sentence, of in having.items()
    ]


def distinctive(run: PlannedRun, varying: dict[str, list[str]]) -> str:
    """What tells a run from the others of its sweep; all of its overrides where nothing does."""
    return " ".join(
        [override for override in run.overrides if key_of(override) in varying] or run.overrides
    )


def render_plan(checked: Checked) -> str:
    """The plan of the (first) run, then notes and problems of all."""
    sections = _sections(checked)
    return "\n\n".join(
        title + "\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in sections
        if lines
    )


def plan_as_json(checked: Checked) -> str:
    """Return the same as one JSON object: lines by the title of their section, and what it trains,
    run by run."""
    sections = {
        title.partition(" (")[0].lower().replace(" ", "_"): lines
        for title, lines in _sections(checked)
        if lines
    }
    runs = [
        {
            "overrides": run.overrides,
            "directory": run.job and str(run.job.directory),
            "state": run.job and run.job.status,
            "problems": run.report.problems,
        }
        for run in checked.runs
    ]
    told = sections | {
        "notes": sections.get("notes", []),
        "problems": problems(checked),
        "runs": runs,
    }
    return json.dumps(told, indent=1, ensure_ascii=False)


def _sections(checked: Checked) -> list[tuple[str, list[str]]]:
    """Return (title, lines) for each section of the page."""
    first, of_prompts = checked.runs[0], []
    sections = _sweep_sections(checked) if checked.sweep_config is not None else []
    if first.config is not None:
        defaults = compose([]).config
        assert defaults is not None
        assert first.name is not None
        sections += plan_sections(first.config, defaults, first.overrides)
        if first.config.model.name == "huggingface" and not first.report.problems:
            gpu = gpu_memory()
            sections.append(("Memory", [*memory.memory_lines(first.config, gpu)]))
            if gpu is not None and first.config.trainer.device != "cpu":
                sections.append(("Several GPUs", [*ways_in_words(first.config, len(gpus()), gpu)]))
            compiles, reason = compilation(
                first.config, gpu is not None and first.config.trainer.device != "cpu"
            )
            sections.append(("Compiled", [f"{'yes' if compiles else 'no'}, {reason}"]))
        sections.append(("Run name", [first.name]))
        if first.config.rollout.name == "policy" and not first.report.problems:
            lines, of_prompts = _first_prompt(first.config)
            sections.append(("First prompt", lines))
    sections.append(("Notes", [*notes(checked), *of_prompts]))
    found = problems(checked)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return sections


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
    assert checked.sweep_config is not None
    search = checked.sweep_config.search
    if search is not None:
        trials = search.settings["n_trials"]
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
    whole += [summary(sweep)] if sweep and sweep.jobs and search is None else []
    return [(title, lines), ("The sweep", whole)]
