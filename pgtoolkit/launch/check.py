"""Checks every run of a command line before any starts, and writes the page of pgtk check."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pgtoolkit.assembly.inputs import try_prompts, try_recorded
from pgtoolkit.assembly.machine import check_machine
from pgtoolkit.config import memory
from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.counts import ReadData
from pgtoolkit.config.evaluation_sets import held_out_sets, is_on, sets_beside_training
from pgtoolkit.config.hydra_keys import key_of_single_run, keys_of_sweeps
from pgtoolkit.config.keys import is_own_code
from pgtoolkit.config.models import compilation
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.config.paths import problems_of_folder
from pgtoolkit.config.plan import computed, plan_sections
from pgtoolkit.config.rules.executed import announce
from pgtoolkit.config.rules.launcher import launcher, search
from pgtoolkit.config.schema import Config
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import PgtoolkitError, StorageError, first_line
from pgtoolkit.launch.final_number import check_search, number_of, why_no_common_measure
from pgtoolkit.launch.jobs_on_gpus import jobs_on_gpus
from pgtoolkit.launch.seeds_to_find import lines_on_seeds
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.launch.sweep_report import count_jobs, in_one_folder, notes_on_code
from pgtoolkit.rollouts.recorded_folder import occupied_by_rollouts
from pgtoolkit.rollouts.settings import PolicyRolloutSettings, RecordedRolloutSettings
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.runs.records import leaves, read_sweep
from pgtoolkit.system.report import Report, identity, key_of, plural


def check(
    overrides: list[str],
    multirun: bool = False,
    sweep_file: Path | None = None,
    command: Sequence[str] = (),
) -> PlannedRun | Sweep:
    """Compose and check a run, or each job of a sweep.

    It is a sweep with `multirun`, or where the configuration itself asks for one.
    command: the words that were typed, for sweep.json.
    """
    if not multirun:
        composed = compose(overrides)
        if not composed.is_sweep:
            return _check_single(composed, overrides)
    return check_sweep(overrides, sweep_file, command)


def check_sweep(
    overrides: list[str], sweep_file: Path | None = None, command: Sequence[str] = ()
) -> Sweep:
    """Compose and check a sweep and each of its jobs."""
    config = compose_sweep(overrides, sweep_file)
    sweep = Sweep(config, list(command), Report([*config.problems]))
    if not config.jobs:
        nothing = Composed(None, config.problems)
        sweep.runs.append(PlannedRun(overrides, nothing, Report([*config.problems])))
        return sweep
    sweep.report.problems += key_of_single_run(overrides)
    if config.launcher is not None:
        launcher(config.launcher, config.sweeper, sweep.report)
    if config.search is not None:
        search(config.search, sweep.report)
    if config.folder is not None:
        folder_problems = problems_of_folder("hydra.sweep.dir", config.folder)
        sweep.report.problems += folder_problems
        sweep.has_folder = not folder_problems
    if sweep.has_folder and command:
        sweep.report.notes += _note_other_folder(sweep)
    for number, job_overrides in enumerate(config.jobs):
        sweep.runs.append(check_job(sweep, job_overrides, number))
    _name_sweeps_of_options(sweep)
    _note_equal_jobs(sweep)
    _check_measure(sweep)
    is_local = config.launcher is not None and config.launcher.kind == "local"
    if len(sweep.runs) == 1 and is_local:
        sweep.report.note(
            "the sweep has one job, since no key has several values. Use seed=0,1,2 for three, or "
            "pgtk without -m for a single run."
        )
    return sweep


def _note_other_folder(sweep: Sweep) -> list[str]:
    """Return a note where the same command has begun a sweep in a folder of another name, which
    another version gave it."""
    if sweep.folder.exists() or any(word.startswith("hydra.sweep.dir=") for word in sweep.command):
        return []
    for path in sorted(sweep.folder.parent.glob("*/sweep.json")):
        with contextlib.suppress(StorageError):
            if read_sweep(path.parent).get("command") == sweep.command:
                return [
                    f"{path.parent} has a sweep of the same command, under a name that another "
                    f"version of pgtk or of your files gave it. This one begins anew in "
                    f"{sweep.folder}. Use hydra.sweep.dir={shlex.quote(str(path.parent))} to go on "
                    "there."
                ]
    return []


def _name_sweeps_of_options(sweep: Sweep) -> None:
    """Add to the refusal of a parameter that only code of the user's has, beside other options of a
    sweep, the sweeps in one folder that train each option with the parameters that it has."""
    if not sweep.has_folder or sweep.config.search is not None:
        return
    for group, options in sweep.config.varying.items():
        keys = [key_of(override) for override in sweep.runs[0].overrides]
        parameters = [key for key in keys if key.startswith(f"{group}.")]
        lacking: dict[tuple[str, ...], list[str]] = {}
        for option in options:
            runs = [run for run in sweep.runs if f"{group}={option}" in run.overrides]
            lacks = (name for name in parameters if any(_is_refused(run, name) for run in runs))
            lacking.setdefault(tuple(lacks), []).append(option)
        refused = {
            name
            for name in parameters
            if any(name in lacks for lacks in lacking)
            and any(
                name not in lacks and is_own_code(group, option)
                for lacks, takers in lacking.items()
                for option in takers
            )
        }
        if not refused:
            continue
        commands = [
            [f"{key}={values}" for key, values in _typed(sweep, group, takers) if key not in lacks]
            for lacks, takers in lacking.items()
        ]
        if sweep.config.sweep_file is not None:
            commands = [["hydra.sweeper.params=null", *words] for words in commands]
        advice = (
            " To train each with what it has, use several sweeps in one folder: "
            f"{in_one_folder(sweep, commands)}"
        )
        for run in sweep.runs:
            run.report.problems = [
                problem + advice if _is_of_key(problem, refused) else problem
                for problem in run.report.problems
            ]


def _typed(sweep: Sweep, group: str, options: list[str]) -> list[tuple[str, str]]:
    """Return the keys of a sweep with their values as they are typed, with these options of a
    group."""
    values = {}
    for override in sweep.runs[0].overrides:
        key, _, value = override.partition("=")
        values[key] = ",".join(sweep.config.varying.get(key_of(override), [value]))
    return [*(values | {group: ",".join(options)}).items()]


def _is_of_key(problem: str, names: Collection[str]) -> bool:
    """Return whether a problem refuses one of these keys."""
    return any(problem.startswith((f"{name}=", f"Unknown key {name!r}")) for name in names)


def _is_refused(run: PlannedRun, name: str) -> bool:
    """Return whether a run is refused because of a key."""
    return any(_is_of_key(problem, [name]) for problem in run.report.problems)


def _note_equal_jobs(sweep: Sweep) -> None:
    """Note each job that is another one, but that one of them has the default of a parameter of the
    user's code as a value of its own."""
    known: dict[str, PlannedRun] = {}
    for job in sweep.jobs.values():
        config = plain_config(job.config)
        values = with_defaults(dict(leaves(config)))
        other = known.setdefault(identity(sorted(values.items())), job)
        if other is not job:
            words = [word for word in other.overrides if word not in job.overrides]
            job.report.note(
                f"the same configuration as with {' '.join(words) or 'the defaults'}, by the "
                "defaults of your code. Both are trained, with the same numbers: leave one out."
            )


def _check_measure(sweep: Sweep) -> None:
    """Refuse a search by a number that its own values change; note that of a sweep's runs."""
    configs = [run.config for run in sweep.runs if run.composed.config and not run.report.problems]
    if len(configs) < 2:
        return
    if sweep.config.search is not None:
        check_search(sweep.config.search, configs, sweep.report)
        return
    why, use = why_no_common_measure(configs)
    if why:
        sweep.report.note(
            f"{number_of(configs[0])} does not mean the same in all runs: {why}. "
            + (f"Use {use} to compare all of them." if use else "Only some can be compared.")
        )


def _check_single(composed: Composed, overrides: list[str]) -> PlannedRun:
    """Check a single run, also for this machine."""
    run = check_run(composed, overrides)
    run.report.problems += keys_of_sweeps(overrides)
    if composed.config is None:
        return run
    if composed.directory is None:
        run.report.problems += composed.problems_of_directory
    else:
        directory = Path(composed.directory)
        run.report.problems += problems_of_folder("hydra.run.dir", directory, ("sweep.json",))
    occupied = occupied_by_rollouts(getattr(run.config.rollout, "save_path", None))
    if occupied is not None:
        run.report.problems.append(occupied)
    if not run.report.is_refused:
        announce(run.config)
    check_machine(run.config, run.report)
    return run


def check_run(composed: Composed, overrides: list[str]) -> PlannedRun:
    """Check one composed configuration by the rules that hold on every machine."""
    config, report = validated(composed)
    composed = replace(composed, config=config)
    return PlannedRun(overrides, composed, report, refused_anywhere=bool(report.problems))


def check_job(sweep: Sweep, overrides: list[str], number: int) -> PlannedRun:
    """Check the job of these overrides, and add it to the jobs of the sweep's folder."""
    run = check_run(sweep.config.compose_job(overrides, number), overrides)
    if run.composed.config is None:
        return run
    if not run.report.is_refused:
        announce(run.config, sweep.announced)
    _check_machine_of_job(sweep, run)
    if sweep.has_folder and run.composed.directory is not None and not run.report.problems:
        run.composed = replace(run.composed, directory=sweep.directory_of(run))
        _add_job(sweep, run)
    return run


def _check_machine_of_job(sweep: Sweep, run: PlannedRun) -> None:
    """Check a job for this machine, if it is to run here."""
    launcher = sweep.config.launcher
    if launcher is None or launcher.kind != "local":
        return
    check_machine(run.config, run.report)
    jobs_per_gpu = launcher.settings.get("jobs_per_gpu")
    if jobs_per_gpu is not None and not sweep.report.problems:
        jobs_on_gpus(run.config, jobs_per_gpu, run.report)


def _add_job(sweep: Sweep, run: PlannedRun) -> None:
    """Add a run to the jobs of the sweep, and read how far it has come before."""
    job = sweep.jobs.setdefault(run.directory, run)
    if job is not run and job.named_config != run.named_config:
        run.report.refuse(
            setting="hydra.sweep.subdir",
            needs="a name of its own for each job",
            got=job.directory,
            reason="Two jobs would write to one directory.",
            use="the default",
        )
    elif job is not run:
        run.report.note("the configuration of another job; it is run once")
    else:
        try:
            job.update_from(sweep.folder)
        except PgtoolkitError as error:
            run.report.problems.append(str(error))


def problems(checked: PlannedRun | Sweep) -> list[str]:
    """Return each problem once.

    A problem that not all runs of a sweep have begins with the overrides of the first that has it,
    and the number of others.
    """
    if isinstance(checked, PlannedRun):
        return list(dict.fromkeys(checked.report.problems))
    of_runs = _without_repeats(checked, [run.report.problems for run in checked.runs])
    return list(dict.fromkeys([*checked.report.problems, *of_runs]))


def notes(checked: PlannedRun | Sweep) -> list[str]:
    """Return each note once, as `problems` does; of a sweep also those on code that has changed."""
    if isinstance(checked, PlannedRun):
        return list(dict.fromkeys(checked.report.notes))
    of_runs = _without_repeats(checked, [run.report.notes for run in checked.runs])
    of_code = notes_on_code(checked) if checked.has_folder else []
    return [*checked.report.notes, *of_runs, *of_code]


def _without_repeats(sweep: Sweep, sentences_of_runs: list[list[str]]) -> list[str]:
    """Return the sentences of all runs, each once, with the runs that have it unless all do."""
    runs_with: dict[str, list[PlannedRun]] = {}
    for run, sentences in zip(sweep.runs, sentences_of_runs, strict=True):
        for sentence in dict.fromkeys(sentences):
            runs_with.setdefault(sentence, []).append(run)
    result = []
    for sentence, runs in runs_with.items():
        if len(runs) < len(sweep.runs):
            sentence = f"{_named(sweep, runs)}: {sentence}"
        result.append(sentence)
    return result


def _named(sweep: Sweep, runs: Sequence[PlannedRun]) -> str:
    """Return the overrides of the first of some runs of a sweep, and how many more there are."""
    more = f", and {len(runs) - 1} more" if len(runs) > 1 else ""
    return distinctive(runs[0], sweep.config.varying) + more


def distinctive(run: PlannedRun, varying: dict[str, list[str]]) -> str:
    """Return the overrides that tell a run from the others of its sweep; all where none does."""
    different = [override for override in run.overrides if key_of(override) in varying]
    return " ".join(different or run.overrides)


def render_plan(checked: PlannedRun | Sweep, find: float | None = None) -> str:
    """Return the page of `pgtk check`: the first run's plan, then notes and problems of all.

    find: a difference; the page says how many seeds find it.
    """
    return "\n\n".join(
        title + "\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in page_sections(checked, find)
        if lines
    )


def plan_as_json(checked: PlannedRun | Sweep, find: float | None = None) -> str:
    """Return the same as a JSON object: lines by the title of their section, and a list of runs."""
    sections = {
        title.partition(" (")[0].lower().replace(" ", "_"): lines
        for title, lines in page_sections(checked, find)
        if lines
    }
    runs = []
    for run in checked.runs if isinstance(checked, Sweep) else [checked]:
        job = checked.job_of(run) if isinstance(checked, Sweep) else None
        runs.append(
            {
                "overrides": run.overrides,
                "directory": job and job.directory,
                "state": job and job.status,
                "problems": [*map(_checked_again, run.report.problems)],
            }
        )
    content = sections | {
        "notes": sections.get("notes", []),
        "problems": [*map(_checked_again, problems(checked))],
        "runs": runs,
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def page_sections(
    checked: PlannedRun | Sweep, find: float | None = None
) -> list[tuple[str, list[str]]]:
    """Return (title, lines) for each section of the page."""
    first = checked.runs[0] if isinstance(checked, Sweep) else checked
    sections = _sweep_sections(checked) if isinstance(checked, Sweep) else []
    if first.composed.config is not None:
        defaults = compose([]).config
        assert defaults is not None
        assert first.composed.name is not None
        sections += plan_sections(
            first.config,
            defaults,
            first.overrides,
            _read_prompts(checked, first),
            _prompts_in_sets(checked, first),
        )
        if first.config.model.name == "huggingface" and not first.report.problems:
            sections += _machine_sections(first.config)
        sections.append(("Run name", [first.composed.name]))
    for run in checked.runs if isinstance(checked, Sweep) else [checked]:
        if run.composed.config is None or run.report.problems:
            continue
        if run.config.rollout.name == "policy":
            lines = _first_prompt(run.config, run.report)
            if run is first:
                sections.append(("First prompt", lines))
    if isinstance(checked, Sweep):
        sections.append(("Other runs", _plans_that_differ(checked, first)))
    if find is not None:
        sections.append(("Seeds", lines_on_seeds(checked, find)))
    sections.append(("Notes", notes(checked)))
    all_problems = [*map(_checked_again, problems(checked))]
    title = f"Problems ({len(all_problems)})" if all_problems else "Problems"
    sections.append((title, all_problems or ["none"]))
    return sections


_MOST_PLANS = 12
"""Of the plans that differ from that of the first run, at most this number is shown."""


def _plans_that_differ(sweep: Sweep, first: PlannedRun) -> list[str]:
    """Return what further runs compute otherwise than the first: the lines that its plan lacks,
    below the overrides of the first run that has them."""
    if first.composed.config is None:
        return []
    shown = _computed_lines(sweep, first)
    runs_with: dict[tuple[str, ...], list[int]] = {}
    for number, run in enumerate(sweep.runs):
        if run.composed.config is not None:
            others = tuple(line for line in _computed_lines(sweep, run) if line not in shown)
            runs_with.setdefault(others, []).append(number)
    runs_with.pop((), None)
    lines = []
    for others, numbers in [*runs_with.items()][:_MOST_PLANS]:
        name = _named(sweep, [sweep.runs[number] for number in numbers])
        lines += [f"{numbers[0]}  {name}:", *(f"   {line}" for line in others)]
    left = len(runs_with) - _MOST_PLANS
    if left > 0:
        lines.append(f"{left} more plans: pgtk check with the overrides of a run prints its own")
    return lines


def _computed_lines(sweep: Sweep, run: PlannedRun) -> list[str]:
    """Return the lines of a run's plan on what it computes."""
    sections = computed(run.config, _read_prompts(sweep, run), _prompts_in_sets(sweep, run))
    return [line for _, lines in sections for line in lines]


def _checked_again(problem: str) -> str:
    """Return a problem whose remedy is another command with this command in front of it: who types
    the remedy of a check wants another check, and starts nothing."""
    return re.sub(r"\bpgtk (?=-m |sweep )", "pgtk check ", problem)


def _read_prompts(checked: PlannedRun | Sweep, first: PlannedRun) -> ReadData | None:
    """Return what the prompts or recorded documents tell that the check has read, which are those
    of runs on this machine without a problem."""
    if not _is_data_read(checked, first):
        return None
    config = first.config
    if isinstance(config.rollout, RecordedRolloutSettings):
        max_tokens = config.accumulation.max_tokens
        return try_recorded(config.rollout, config.model, config.task, config.seed, max_tokens)
    return try_prompts(config).prompts


def _prompts_in_sets(checked: PlannedRun | Sweep, run: PlannedRun) -> dict[str, int]:
    """Return how many prompts the evaluation sets of a run have, by their names; {} where the check
    has not read them."""
    config = run.config
    if not is_on(config) or not _is_data_read(checked, run):
        return {}
    return _count_prompts_in_sets(os.getcwd(), pickle.dumps(held_out_sets(config)))


@functools.cache  # the jobs of a sweep share it
def _count_prompts_in_sets(_directory: str, pickled_sets: bytes) -> dict[str, int]:
    """Do the work of `_prompts_in_sets`, whose sets are pickled to be a cache's key."""
    from pgtoolkit.assembly.preview import prompts_in_sets

    return prompts_in_sets(pickle.loads(pickled_sets))


def _is_data_read(checked: PlannedRun | Sweep, run: PlannedRun) -> bool:
    """Return whether a run without a problem is to run here, where the check has read its data."""
    if isinstance(checked, Sweep):
        launcher = checked.config.launcher
        if launcher is None or launcher.kind != "local":
            return False
    return not run.report.problems


def _machine_sections(config: Config) -> list[tuple[str, list[str]]]:
    """Return the sections on memory and on compiled code."""
    gpu_bytes = gpu_memory()
    on_gpu = gpu_bytes is not None and config.trainer.device != "cpu"
    sections = [("Memory", [*memory.memory_lines(config, gpu_bytes)])]
    sections.append(("Compiled", [compilation(config.model, on_gpu)]))
    return sections


def add_notes_on_prompts(sweep: Sweep) -> None:
    """Add the notes on the prompts of each run of a sweep to its report, as `pgtk check` does: the
    runs print them into their logs alone."""
    for run in sweep.runs:
        is_right = run.composed.config is not None and not run.report.problems
        if is_right and run.config.rollout.name == "policy":
            _first_prompt(run.config, run.report)


def _first_prompt(config: Config, report: Report) -> list[str]:
    """Return lines that show the first prompt, and add notes on the first prompts and their answers
    to a report.

    Prompts that no run could use, such as one that the tokenizer cannot encode, are refused.
    """
    assert isinstance(config.rollout, PolicyRolloutSettings)
    sets = sets_beside_training(config)
    arguments = (config.task, config.seed, config.rollout, config.model, sets)
    lines, notes, problem = _read_first_prompt(os.getcwd(), pickle.dumps(arguments))
    report.notes += notes
    report.problems += problem
    return lines


@functools.cache  # the jobs of a sweep share it
def _read_first_prompt(
    _directory: str, pickled_arguments: bytes
) -> tuple[list[str], list[str], list[str]]:
    """Return (lines, notes, problems) of `_first_prompt`, whose arguments are pickled to be a
    cache's key."""
    from pgtoolkit.assembly.make_task import held_out_numbers
    from pgtoolkit.assembly.preview import (
        notes_on_repeated_prompts,
        notes_on_shared_prompts,
        preview,
    )

    task, seed, rollout, model, sets = pickle.loads(pickled_arguments)
    try:
        lines, notes = preview(task, seed, rollout, model, held_out_numbers(task, sets))
        shared = notes_on_shared_prompts(task, seed, sets)
        return lines, [*notes, *shared, *notes_on_repeated_prompts(sets)], []
    except PgtoolkitError as error:
        return [], [], [first_line(error)]
    except Exception as error:  # the reader of a damaged tokenizer may raise anything
        return [f"cannot be shown: {first_line(error)}"], [], []


def _sweep_sections(sweep: Sweep) -> list[tuple[str, list[str]]]:
    """Return the list of runs, and what they have in common."""
    runs = sweep.runs
    varying = sweep.config.varying
    title = f"Sweep of {len(runs)} runs; the plan is that of the first"
    search = sweep.config.search
    if search is not None:
        trials = search.settings["n_trials"]
        title = f"Search of {trials} trials; the plan is that of the first of {len(runs)} corners"
    states = []
    first_of: dict[str, int] = {}  # directory -> the number of its first run
    for number, job in enumerate(map(sweep.job_of, runs)):
        state = job.status if job else "with problems"
        first = first_of.setdefault(job.directory, number) if job else number
        states.append(state if first == number else f"the same as {first}")
    state_width = max(map(len, states))
    number_width = len(str(len(runs) - 1))
    lines = [
        f"{number:>{number_width}}  {state:<{state_width}}  {distinctive(run, varying)}"
        for number, (run, state) in enumerate(zip(runs, states, strict=True))
    ]
    common = [f"folder: {sweep.folder}"] if sweep.has_folder else []
    common += [f"varies: {key} = {', '.join(values)}" for key, values in varying.items()]
    fixed = [override for override in runs[0].overrides if key_of(override) not in varying]
    if fixed:
        common.append("in all: " + " ".join(fixed))
    if sweep.jobs and search is None:
        refused = states.count("with problems")
        beside = f", beside {plural(refused, 'run')} with problems" if refused else ""
        common.append(count_jobs(sweep) + beside)
    return [(title, lines), ("The sweep", common)]
