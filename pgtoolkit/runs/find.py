"""Finished, unfinished and broken runs, read from their directories."""

from __future__ import annotations

import glob
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError, first_line
from pgtoolkit.runs.directory import is_held
from pgtoolkit.runs.provenance import code_of
from pgtoolkit.runs.records import (
    TIME,
    known_provenance,
    leaves,
    read_evaluations,
    read_metrics,
    read_resolved,
    read_status,
    read_sweep,
)
from pgtoolkit.runs.series import final
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.system.report import say
from pgtoolkit.system.shell import shell_path

SWEEPS = Path("outputs/sweeps")
"""Where the folders of sweeps are, below the directory that they were started from."""

HELD_OUT = "evaluation/"
"""Beginning of the names of metrics that evaluations.jsonl has: evaluation/SET/pass@1."""

_OF_AN_EVALUATION = ("step", "time", "documents", "set", "prompts", "completions_per_prompt", "seconds")
"""What a row of evaluations.jsonl says of itself; the rest are its metrics."""

_PASSED_OVER = ("artifacts", "checkpoints")
"""Folders that hold no runs, though perhaps the copy of a run's configuration that MLflow keeps."""

_IN_EVERY_RUN = ("seed", "trainer.max_steps")
"""Keys that every saved configuration has."""


@dataclass
class Run:
    """One run.

    path: where it lies. state: done, running, interrupted, failed, killed (it says `running`, but no process holds
    it), incomplete (done, and its metrics lack steps), pending (a sweep's job that has not begun), or unreadable.
    reason: why it is in that state, or None. config:
    dotted key to value; empty for a run that cannot be read. rows: of metrics.jsonl, each with `seconds` since the
    first, the time of evaluations and between a stop and its resume left out; with `tokens_seen`, trained up to then;
    and with the metrics of that step's evaluations, the one before the first step as a row of its own. code: commits
    and uncommitted changes.
    """

    path: Path | str
    name: str
    state: str
    reason: str | None = None
    step: int = 0
    config: dict[str, object] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    code: tuple = ()

    def values(self, metric: str) -> list[float]:
        """The metric at every step that has it."""
        return [row[metric] for row in self.rows if metric in row]

    def why_not_counted(self, metric: str = "") -> str:
        """Why the run is excluded from averages, with what it has reached of the metric so far."""
        if metric and self.state == "done":
            return f"has no {metric}"
        if self.state == "pending":
            return "has not begun"
        if self.state == "unreadable":
            return f"unreadable: {self.reason}"
        why = f"{self.state} at step {self.step}"
        why += f" of {self.config['trainer.max_steps']}" if self.config else ""
        so_far = self.values(metric)
        why += f", {metric} {final(so_far):.3f} so far" if so_far else ""
        return why + (f": {' '.join(self.reason.split())}" if self.reason else "")


def find_runs(paths: Sequence[str]) -> list[Run]:
    """The runs that are or lie below the given folders, each once, in the order of their names.

    Raises ConfigError for a folder without any.
    """
    found = [read_run(path) for path in run_directories("pgtk compare", paths)]
    known = {run.path for run in found}
    return found + [job for text in paths for job in _jobs_without_run(sweep_folder(text)) if job.path not in known]


def sweep_folder(text: str) -> Path:
    """The folder that a path, or the name of a sweep in outputs/sweeps, stands for."""
    named = SWEEPS / text
    return named if not Path(text).exists() and named.is_dir() else Path(text)


def run_directories(command: str, paths: Sequence[str]) -> list[Path]:
    """As `find_runs`, without reading them or jobs of a sweep whose run never began.

    Beside folders with runs, files and folders without any are passed over with a word: a shell's SWEEP/* names them.
    """
    found: dict[Path, None] = {}
    without: list[str] = []
    for text in paths:
        below = list(_run_directories(sweep_folder(text)))
        found |= dict.fromkeys(directory.resolve() for directory in below)
        without += [] if below else [text]
    missing = [text for text in without if not Path(text).exists()] or (without if not found else [])
    if missing:
        needs = "a run directory, a folder that holds runs, or a sweep's name"
        raise not_a_run(f"{command} {missing[0]}", sweep_folder(missing[0]), needs)
    if without:
        say(f"note: passed over, there is no run: {' '.join(map(shell_path, without))}", error=True)
    return list(found)


def not_a_run(use: str, path: Path, needs: str) -> ConfigError:
    """The refusal of a path that holds no run. use: the command as typed, needs: what it takes."""
    got = "a file" if path.is_file() else "a folder without runs" if path.is_dir() else "no such folder"
    instead = "a folder that pgtk has trained in"
    if near := sorted(SWEEPS.glob(f"{glob.escape(path.name)}_*")):  # the same sweep with overrides
        instead = " or ".join(folder.name for folder in near[:3])
    reason = "A run writes its config.yaml there when it starts."
    return ConfigError(f"{use} needs {needs} (got {path}: {got}). {reason} Use {instead}.")


def is_run(path: Path) -> bool:
    """Whether a run has begun in this folder."""
    return os.path.lexists(path / "config.yaml")


def _run_directories(top: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(top):
        begun = is_run(Path(folder))
        names[:] = [] if begun else sorted(n for n in names if not n.startswith(".") and n not in _PASSED_OVER)
        if begun:
            yield Path(folder)


def _jobs_without_run(folder):
    """The jobs of a sweep that have not begun, or failed before they wrote their configuration."""
    try:
        jobs = read_sweep(folder).get("jobs", [])
    except StorageError:
        return
    for job in jobs:
        path = (folder / job["directory"]).resolve()
        if not is_run(path):
            yield Run(path, path.name, job["status"], job.get("reason"))


def read_run(path: Path) -> Run:
    """The run of this directory, whatever state it is in; never an exception for what is damaged."""
    try:
        refuse_links(path)
        config = dict(leaves(read_resolved(path)))
        if missing := [key for key in _IN_EVERY_RUN if key not in config]:
            raise StorageError(f"{path / 'config.yaml'} is damaged (it lacks {', '.join(missing)})")
        status, provenance = read_status(path), known_provenance(path)
        rows, evaluations = read_metrics(path / "metrics.jsonl"), read_evaluations(path)
        state, step = status.get("state", "running"), rows[-1]["step"] if rows else status.get("step", 0)
        reason = status.get("reason")
        if state == "running" and not is_held(path):
            state = "killed"
        if state == "done" and [row["step"] for row in rows] != [*range(1, status["step"] + 1)]:
            state, reason = "incomplete", f"metrics.jsonl has {len(rows)} of its {status['step']} steps"
        _add_seconds(rows, [start["time"] for start in provenance.get("resumed", [])], evaluations)
        _add_tokens(rows)
        _add_evaluations(rows, evaluations)
        return Run(path, path.name, state, reason, step, config, rows, code_of(provenance))
    except (PgtoolkitError, OSError) as error:
        return Run(path, path.name, "unreadable", first_line(error).rstrip("."))


def _add_seconds(rows: list[dict[str, float]], resumes: list[str], evaluations: list[dict]) -> None:
    """Give each row `seconds` since the first; resumes: when the run was resumed, as provenance.json has it."""
    if not rows or any("time" not in row for row in rows):
        return
    starts = [datetime.strptime(text, TIME).timestamp() for text in resumes]
    evaluated: dict[int, float] = defaultdict(float)
    for one in evaluations:
        evaluated[one["step"]] += one.get("seconds", 0.0)  # between this step's row and the next
    steps = [max(0.0, after["time"] - before["time"] - evaluated[before["step"]]) for before, after in pairwise(rows)]
    usual = statistics.median(steps) if steps else 0.0
    rows[0]["seconds"] = 0.0
    for length, (before, after) in zip(steps, pairwise(rows), strict=True):
        # The start is written in whole seconds.
        resumed = any(before["time"] - 1 <= start <= after["time"] for start in starts)
        after["seconds"] = before["seconds"] + (min(length, usual) if resumed else length)


def _add_tokens(rows):
    """Give each row the trained tokens up to its end, where every row says how many it has."""
    if all("num_tokens" in row for row in rows):
        for row, total in zip(rows, accumulate(row["num_tokens"] for row in rows), strict=True):
            row["tokens_seen"] = total


def _add_evaluations(rows, evaluations):
    by_step = {row["step"]: row for row in rows}
    for one in evaluations:
        if one["step"] == 0 and 0 not in by_step:
            start = dict.fromkeys(("step", "documents_seen", "tokens_seen", "seconds"), 0)
            rows.insert(0, by_step.setdefault(0, start))
        found = {name: value for name, value in one.items() if name not in _OF_AN_EVALUATION and isfinite(value)}
        by_step.get(one["step"], {}).update({f"{HELD_OUT}{one['set']}/{name}": value for name, value in found.items()})
