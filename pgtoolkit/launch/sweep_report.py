"""The lines that a sweep prints: one per job, and a table at the end."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

from pgtoolkit.launch.final_number import (
    TRAINING,
    final_value,
    number_of,
    why_no_common_measure,
)
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.tracking.next_commands import program

_STATES = ("done", "failed", "interrupted", "running", "pending")


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
        return line + (f"  {_short(metric)} {value:.3f}" if value is not None else "")
    return f"{line}: {_one_line(job.reason)} (log: {shell_path(folder / job.log)})"


def _place(number: int, count: int) -> str:
    return f"[{number:>{len(str(count))}}/{count}]"


def _short(metric: str) -> str:
    """Return the name of a number as it stands in a line: `held_out pass@1`, `reward`."""
    return metric.removeprefix("evaluation/").replace("/", " ")


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
        value_text = "" if value is None else f"{value:.3f}"
        seconds = f"{job.seconds:.0f}" if job.seconds else ""
        lines.append(
            f"{job.status:<12}{job.step:>6}{seconds:>9}{value_text:>{width}}  {job.directory}"
        )
    why, use = why_no_common_measure([job.config for job in sweep.jobs.values()])
    if why:
        lines.append(
            f"{name} does not mean the same in all of them: {why}."
            + (f" To compare all, train with {use}." if use else "")
        )
    for job in sweep.jobs.values():
        if job.status in ("done", "pending"):
            continue
        lines += [f"{job.status}: {job.directory}", f"  {_one_line(job.reason)}"]
        log = sweep.folder / job.log
        if log.exists():
            lines.append(f"  log: {shell_path(log)}")
    lines.append(count_jobs(sweep))
    return "\n".join(lines)


def count_jobs(sweep: Sweep) -> str:
    """Return the number of jobs in each state, in one line."""
    if not sweep.jobs:
        return f"search {sweep.name}"
    counts = Counter(job.status for job in sweep.jobs.values())
    states = [f"{counts[state]} {state}" for state in _STATES if counts[state]]
    return f"sweep {sweep.name}: {plural(len(sweep.jobs), 'job')}, " + ", ".join(states)


def next_steps(sweep: Sweep, again: bool) -> list[str]:
    """Return the commands that go on from here; with `again` the same command is among them."""
    lines = []
    states = {job.status for job in sweep.jobs.values()}
    if again and states != {"done"}:
        lines.append("again, skipping what is done: " + command_of(sweep))
    if "done" in states:
        lines.append(f"compare: {program('pgtk')} compare {shell_path(sweep.folder)}")
    return lines


def command_of(sweep: Sweep) -> str:
    """Return the command that was typed, for a shell."""
    return " ".join([program("pgtk"), *map(shlex.quote, sweep.command[1:])])


def last_line(log: Path, start: int) -> str | None:
    """Return the last line of a log that was written from byte `start` on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _one_line(reason: str | None) -> str:
    return " ".join(reason.split()) if reason else "no reason was written"
