"""The lines that a sweep prints: one per job, and a table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.files import sweep_files
from pgtoolkit.config.keys import OPTION_KEYS, changes_learning
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.new_run import own_options_flag
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.errors import StorageError
from pgtoolkit.launch.final_number import (
    TRAINING,
    averaged,
    final_value,
    first_value,
    number_of,
    why_no_common_measure,
)
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.runs.history import EVALUATION_CODE, trained_with
from pgtoolkit.runs.modules import COPIES
from pgtoolkit.runs.provenance import changed_modules
from pgtoolkit.runs.records import known_provenance, leaves, read_status, read_sweep
from pgtoolkit.runs.series import mean, ranks, without_rounding
from pgtoolkit.system.report import identity, key_of, plural, shell_path, shortest_path, text
from pgtoolkit.tracking.next_commands import pgtk_command, pgtk_commands

_RATE = "optimizer.learning_rate"
_STATES = ("done", "pruned", "failed", "interrupted", "running", "pending")


def logs(sweep: Sweep) -> str:
    """Return the command that shows what a job prints as it goes."""
    folder = shell_path(sweep.folder)
    return f"log of a job: tail -f {folder}/JOB/output.log (* for JOB: of all that have begun)"


def started(job: PlannedRun, number: int, count: int) -> str:
    """Return the line of a job that starts, the number-th of `count`."""
    action = f"continues after step {job.step}" if job.step else "starts"
    return f"{_place(number, count)} {action:<20} {job.directory}"


def ended(job: PlannedRun, folder: Path, number: int, count: int, seconds: float) -> str:
    """Return the line of a job that has ended, with its final number or the reason."""
    line = f"{_place(number, count)} {job.status:<12}{seconds:>6.0f} s {job.directory}"
    if job.status == "done":
        metric = number_of(job.config)
        value = final_value(folder / job.directory, metric)
        if value is None:
            return line
        return f"{line}  {_number(metric, value, [folder / job.directory])}"
    return f"{line}: {_one_line(job.reason)} (log: {shell_path(folder / job.log)})"


def _place(number: int, count: int) -> str:
    return f"[{number:>{len(str(count))}}/{count}]"


def _short(metric: str) -> str:
    """Return the name of a number as it stands in a line: `held_out pass@1`, `reward`."""
    return metric.removeprefix("evaluation/").replace("/", " ")


def _number(metric: str, value: float, directories: Sequence[Path]) -> str:
    """Return a final number of these runs by name, and of which evaluations it is a mean."""
    of_several = averaged(directories, metric)
    return f"{_short(metric)} {value:z.3f}" + (f" ({of_several})" if of_several else "")


def table(sweep: Sweep) -> str:
    """Return a table of all jobs, then the errors and logs of those that are not done."""
    metrics = [number_of(job.config) for job in sweep.jobs.values()]
    # Jobs of which some are evaluated have the reward in common.
    metric = metrics[0] if len(set(metrics)) == 1 else TRAINING
    name = _short(metric)
    width = max(9, len(name) + 2)
    lines = [
        "",
        f"{'state':<12}{'steps':>6}{'seconds':>9}{name:>{width}}  run in "
        f"{shell_path(sweep.folder)}",
    ]
    for job in sweep.jobs.values():
        value = final_value(sweep.folder / job.directory, metric)
        value_text = "" if value is None else f"{value:z.3f}"
        seconds = f"{job.seconds:.0f}" if job.seconds else ""
        lines.append(
            f"{job.status:<12}{_steps_made(sweep, job):>6}{seconds:>9}{value_text:>{width}}  "
            f"{job.directory}"
        )
    of_several = averaged([sweep.folder / job.directory for job in sweep.jobs.values()], metric)
    if of_several:
        lines.append(f"{name}: the {of_several}, as in pgtk compare")
    why, use = why_no_common_measure([job.config for job in sweep.jobs.values()])
    if why:
        lines.append(
            f"{name} does not mean the same in all of them: {why}."
            + (f" To compare all, train with {use}." if use else "")
        )
    for job in sweep.jobs.values():
        if job.status in ("done", "pruned", "pending"):
            continue
        lines += [f"{job.status}: {job.directory}", f"  {_one_line(job.reason)}"]
        log = sweep.folder / job.log
        if log.exists():
            lines.append(f"  log: {shell_path(log)}")
    lines.append(count_jobs(sweep))
    return "\n".join(lines)


def _steps_made(sweep: Sweep, job: PlannedRun) -> int:
    """Return the steps that a job has made, with those after its last checkpoint."""
    try:
        return read_status(sweep.folder / job.directory).get("step", job.step)
    except StorageError:
        return job.step


def count_jobs(sweep: Sweep) -> str:
    """Return the number of jobs in each state, in one line."""
    if not sweep.jobs:
        return f"search {sweep.name}"
    counts = Counter(job.status for job in sweep.jobs.values())
    states = [f"{counts[state]} {state}" for state in _STATES if counts[state]]
    return f"sweep {sweep.name}: {plural(len(sweep.jobs), 'job')}, " + ", ".join(states)


def notes_on_code(sweep: Sweep) -> list[str]:
    """Return a sentence on each of the user's modules that has changed since jobs were trained,
    which may be done or go on."""
    kept: Counter[str] = Counter()
    going_on: Counter[str] = Counter()
    for directory, status, step in _begun(sweep):
        if _is_kept(sweep, status):
            kept.update(changed_modules(directory))
        elif step > 0:  # without a checkpoint a job starts anew
            going_on.update(changed_modules(directory))
    folder = shell_path(sweep.folder.with_name(f"{sweep.folder.name}-2"))
    notes = []
    for name, count in (kept + going_on).items():
        parts = []
        if kept[name]:
            verb = "is" if kept[name] == 1 else "are"
            parts.append(f"{kept[name]} {verb} done and kept")
        if going_on[name]:
            verb = "goes" if going_on[name] == 1 else "go"
            parts.append(
                f"{going_on[name]} {verb} on with the new code after steps with the old, which "
                "pgtk compare counts as another configuration"
            )
        notes.append(
            f"{name} has changed since {plural(count, 'job')} of this sweep trained with it: "
            f"{', '.join(parts)}. Use hydra.sweep.dir={folder} to train all with the new code."
        )
    return notes


def _is_kept(sweep: Sweep, status: str) -> bool:
    """Return whether a job of this status is not run again."""
    return status == "done" or (status == "pruned" and sweep.config.search is not None)


def _begun(sweep: Sweep) -> list[tuple[Path, str, int]]:
    """Return the directory of each job, its status and its last saved step.

    Those of a search are the ones that it has had in this folder, which it will draw again.
    """
    if sweep.config.search is None:
        jobs = sweep.jobs.values()
        return [(sweep.folder / job.directory, job.status, job.step) for job in jobs]
    begun = []
    for row in read_sweep(sweep.folder).get("jobs", []):
        directory = sweep.folder / row["directory"]
        status = read_status(directory)
        step = status.get("saved", status.get("step", 0))
        begun.append((directory, status.get("state", row["status"]), step))
    return begun


def next_steps(sweep: Sweep, again: bool) -> list[str]:
    """Return the commands that go on from here; with `again` the same command is among them."""
    lines = []
    states = {job.status for job in sweep.jobs.values()}
    if again and states - {"done", "pruned"}:
        lines.append("again, skipping what is done: " + command_of(sweep))
    line = best(sweep)
    if line is not None:
        lines.append(line)
    lines += rates_that_learn(sweep)
    if "done" in states:
        lines.append(f"compare: {pgtk_command('compare', shortest_path(sweep.folder))}")
    return lines


def best(sweep: Sweep) -> str | None:
    """Return the best configuration's number, as a mean over its seeds, and the command that trains
    two seeds more of it and of another to compare it with; None where there is nothing to choose
    from. Where all are the same it says so.

    A configuration with a job that is not done has no result of equal length. Where the others
    have different seeds, those that all of them have count, if there are any. Jobs that have used
    several versions of the user's code are of several configurations, as in `pgtk compare`.
    """
    jobs = [*sweep.jobs.values()]
    metrics = {number_of(job.config) for job in jobs}
    if len(metrics) != 1 or why_no_common_measure([job.config for job in jobs])[0]:
        return None
    metric = metrics.pop()
    jobs_of: dict[str, dict[int, PlannedRun]] = {}
    for job in jobs:
        jobs_of.setdefault(_configuration(sweep, job), {})[job.config.seed] = job
    finals: dict[str, dict[int, float]] = {}
    for configuration, seeds in jobs_of.items():
        values = {
            seed: final_value(sweep.folder / job.directory, metric) for seed, job in seeds.items()
        }
        known = {seed: value for seed, value in values.items() if value is not None}
        if all(job.status == "done" for job in seeds.values()) and len(known) == len(seeds):
            finals[configuration] = known
    if len(finals) < 2:
        return None
    seeds_of = [{*of} for of in finals.values()]
    common = set.intersection(*seeds_of)
    means = {
        configuration: mean([value for seed, value in of.items() if seed in (common or of)])
        for configuration, of in finals.items()
    }
    places = ranks([*means.values()])
    if max(places) == 0:
        return _no_best(sweep, metric, next(iter(means.values())))
    ordered = [
        [*jobs_of[configuration].values()]
        for _, configuration in sorted(
            zip(places, means, strict=True), key=lambda pair: pair[0], reverse=True
        )
    ]
    seeds = [job for job in ordered[0] if job.config.seed in common] or ordered[0]
    directories = [sweep.folder / job.directory for job in seeds]
    number = _number(metric, max(means.values()), directories)
    of_seeds = "of one seed" if len(seeds) == 1 else f"the mean of {len(seeds)} seeds"
    if any(of != common for of in seeds_of):
        of_seeds += " that all have" if common else " that not all have"
    modules = _changed_since(sweep, seeds)
    if modules:
        return (
            f"best: {number}, {of_seeds}: {_words_of(seeds[0])}, before {' and '.join(modules)} "
            "changed. Further seeds would be of the new code."
        )
    line = f"best: {number}, {of_seeds}; two seeds more"
    others = [
        each[0]
        for each in ordered[1:]
        if _words_of(each[0]) != _words_of(seeds[0]) and not _changed_since(sweep, each)
    ]
    if not others:
        return f"{line}: {_more_seeds(sweep, [seeds[0]])}"
    other = _to_compare_with(seeds[0], others)
    named = " ".join(word for word in _without_seed(other) if word not in _without_seed(seeds[0]))
    return f"{line}, also of {named} to compare it with: {_more_seeds(sweep, [seeds[0], other])}"


def _changed_since(sweep: Sweep, jobs: Sequence[PlannedRun]) -> set[str]:
    """Return the user's modules that are other code now than these jobs were trained with."""
    return {name for job in jobs for name in changed_modules(sweep.folder / job.directory)}


def _to_compare_with(best_job: PlannedRun, others: Sequence[PlannedRun]) -> PlannedRun:
    """Return the best of the others that has another option, such as another loss; without one the
    best of them.

    others: a job of each configuration, the best one first.
    """
    options = _options(best_job)
    return next((job for job in others if _options(job) != options), others[0])


def _options(job: PlannedRun) -> list[str]:
    return [word for word in job.overrides if key_of(word) in OPTION_KEYS]


def _configuration(sweep: Sweep, job: PlannedRun) -> str:
    """Return a text that jobs have in common which differ in nothing that counts but their seed."""
    history = _history(sweep, job)
    config = dict(leaves(plain_config(job.config)))
    copies = sweep.folder / job.directory / COPIES
    counting = {
        name: value
        for name, value in with_defaults(config, copies, history).items()
        if name != "seed" and (name.startswith("evaluation.") or changes_learning(name, config))
    }
    return identity(sorted((counting | history).items()))


def _history(sweep: Sweep, job: PlannedRun) -> dict[str, object]:
    """Return what a job was trained with besides its configuration, such as versions of code; {}
    where its files are damaged."""
    directory = sweep.folder / job.directory
    try:
        history = trained_with(directory, known_provenance(directory), job.step)
    except StorageError:
        return {}
    return {name: of for name, of in history.items() if not name.startswith(EVALUATION_CODE)}


def _no_best(sweep: Sweep, metric: str, value: float) -> str:
    """Return that no configuration is better than another, and a measure to search by."""
    line = f"best: none, since all configurations end at {_short(metric)} {value:z.3f}"
    if sweep.config.search is None:
        return line
    line += ", by which the search could neither choose values nor stop a job"
    average = f"{metric.rpartition('/')[0]}/avg"
    scores = [final_value(sweep.folder / job.directory, average) for job in sweep.jobs.values()]
    known = [score for score in scores if score is not None]
    if metric in (TRAINING, average) or max(ranks(known), default=0) == 0:
        return line
    key = f"evaluation.best={average.removeprefix('evaluation/')}"
    return f"{line}. Their mean scores differ: add {key} to search by these"


def rates_that_learn(sweep: Sweep) -> list[str]:
    """Return a line with the learning rates that learn, of a sweep over three or more of them and
    seeds alone; none for another sweep, and before all of its jobs have ended.

    A rate learns where the number rises by at least half as much as with the best rate. The range
    is that around the best one.
    """
    jobs_at: dict[float, list[PlannedRun]] = {}
    others = set()
    for job in sweep.jobs.values():
        jobs_at.setdefault(job.config.optimizer.learning_rate, []).append(job)
        words = [word for word in _without_seed(job) if key_of(word) != _RATE]
        others.add(identity([words, _history(sweep, job)]))
    states = {job.status for job in sweep.jobs.values()}
    if len(jobs_at) < 3 or len(others) > 1 or states - {"done", "failed"}:
        return []
    metric = number_of(next(iter(sweep.jobs.values())).config)
    rates = sorted(jobs_at)
    rises = [mean([_rise(sweep, job, metric) for job in jobs_at[rate]]) for rate in rates]
    if max(rises) <= 0:
        return [f"learns: {_short(metric)} rises with none of these rates"]
    best = rises.index(max(rises))
    low = high = best
    while low > 0 and rises[low - 1] >= max(rises) / 2:
        low -= 1
    while high < len(rates) - 1 and rises[high + 1] >= max(rises) / 2:
        high += 1
    largest = "the largest tried" if high == len(rates) - 1 else "the largest that does"
    return [
        f"learns: {_RATE} from {text(rates[low])} to {text(rates[high])}, {largest}. "
        f"{_short(metric)} rises there by at least half as much as with {text(rates[best])}: "
        f"{max(rises):z.3f}"
    ]


def _rise(sweep: Sweep, job: PlannedRun, metric: str) -> float:
    """Return by how much the number of a job is higher at its end; 0 for one that has failed."""
    directory = sweep.folder / job.directory
    first, final = first_value(directory, metric), final_value(directory, metric)
    if job.status == "failed" or first is None or final is None:
        return 0.0
    return float(without_rounding(final - first, max(abs(final), abs(first))))


def _without_seed(job: PlannedRun) -> list[str]:
    return [override for override in job.overrides if key_of(override) != "seed"]


def _words_of(job: PlannedRun) -> str:
    return " ".join(_without_seed(job))


def _more_seeds(sweep: Sweep, jobs: Sequence[PlannedRun]) -> str:
    """Return the command that trains two seeds more of the configurations of one or two jobs: a
    sweep in the same folder, in which `pgtk compare` finds them beside those that are done. Where
    the two differ in several keys there is a command for each."""
    taken = [each.config.seed for each in sweep.jobs.values()]
    for row in sweep.earlier.values():
        pairs = [override.partition("=") for override in row.get("overrides", [])]
        taken += [int(value) for key, _, value in pairs if key == "seed" and value.isdecimal()]
    seeds = f"seed={max(taken) + 1},{max(taken) + 2}"
    configurations = _in_one([_without_seed(job) for job in jobs])
    return in_one_folder(sweep, [[*overrides, seeds] for overrides in configurations])


def in_one_folder(sweep: Sweep, overrides: Sequence[Sequence[str]]) -> str:
    """Return the commands of sweeps in the folder of this one, by its launcher.

    overrides: of each command.
    """
    words = own_options_flag({"command": sweep.command})
    if sweep.config.sweep_file is None:
        words.append("-m")
    else:
        words = ["sweep", _name_of(sweep.config.sweep_file), *words]
        if sweep.config.search is not None:
            words.append("hydra/sweeper=basic")
    end = [
        override
        for override in sweep.config.of_hydra
        if override.startswith(("hydra/launcher=", "hydra.launcher."))
    ]
    end.append(f"hydra.sweep.dir={shortest_path(sweep.folder)}")
    return pgtk_commands([[*words, *of_command, *end] for of_command in overrides])


def _in_one(configurations: list[list[str]]) -> list[list[str]]:
    """Return the overrides of one sweep over configurations that differ in the value of one key, as
    in loss=grpo,gspo; otherwise those of each."""
    first, last = configurations[0], configurations[-1]
    if [*map(key_of, first)] != [*map(key_of, last)]:
        return configurations
    differing = [place for place, word in enumerate(first) if word != last[place]]
    if len(differing) != 1:
        return configurations if differing else [first]
    place = differing[0]
    value = last[place].partition("=")[2]
    return [[*first[:place], f"{first[place]},{value}", *first[place + 1 :]]]


def _name_of(file: Path) -> str:
    """Return how `pgtk sweep` names a file: that of a sweep that ships by its name alone."""
    return file.stem if sweep_files().get(file.stem) == file else shortest_path(file)


def command_of(sweep: Sweep) -> str:
    """Return the command that was typed, or the call."""
    return pgtk_command(*sweep.command[1:])


def last_line(log: Path, start: int) -> str | None:
    """Return the last line of a log that was written from byte `start` on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _one_line(reason: str | None) -> str:
    return " ".join(reason.split()) if reason else "no reason was written"
