"""Finished, unfinished and broken runs, read from their directories."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from pathlib import Path

import numpy as np

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError, first_line
from pgtoolkit.runs import records
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.directory import is_held
from pgtoolkit.runs.history import trained_with
from pgtoolkit.runs.provenance import code_of
from pgtoolkit.runs.series import Columns, final, metric_names, read_metrics, values
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.system.report import say, shell_path

SWEEPS = Path("outputs/sweeps")
"""Where the folders of sweeps are, below the directory that they were started from."""

HELD_OUT = "evaluation/"
"""Beginning of the names of metrics that evaluations.jsonl has: evaluation/SET/pass@1."""

_OF_AN_EVALUATION = (
    "step",
    "time",
    "documents",
    "set",
    "prompts",
    "completions_per_prompt",
    "seconds",
)
"""What a row of evaluations.jsonl says of itself; the rest are its metrics."""

_PASSED_OVER = ("artifacts", "checkpoints")
"""Folders that hold no runs, though perhaps the copy of a run's configuration that MLflow keeps."""

_IN_EVERY_RUN = ("seed", "trainer.max_steps")
"""Keys that every saved configuration has."""


@dataclass
class Run:
    """One run.

    path: where it lies. state: done, running, interrupted, failed, killed (it says `running`, but
        no process holds
    it), incomplete (done, and its metrics lack steps), pending (a sweep's job that has not begun),
    or unreadable.
    reason: why it is in that state, or None. config:
    dotted key to value; empty for a run that cannot be read. columns: of metrics.jsonl, by
    `read_metrics`; `seconds` since the first row, the time of evaluations and between a stop and
    its resume left out; `tokens_seen`, trained up to then; and the metrics of evaluations, the one
    before the first step in a row of its own. names: of the metrics
    that were recorded, also of those that are in no column. code: commits and uncommitted changes.
    trained_with: see runs/history.py.
    """

    path: Path | str
    name: str
    state: str
    reason: str | None = None
    step: int = 0
    config: dict[str, object] = field(default_factory=dict)
    columns: Columns = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    code: tuple = ()
    trained_with: dict[str, object] = field(default_factory=dict)

    @property
    def collapsed(self) -> bool:
        """Whether numbers that were not finite ended it: a result, unlike other failures."""
        return self.state == "failed" and (self.reason or "").startswith("NumericalError")

    def values(self, metric: str) -> list[float]:
        """The metric at every step that has it."""
        return values(self.columns, metric)

    def points(self, axis: str, metric: str) -> np.ndarray:
        """(2, points): a metric and what it is drawn over, at every step that has both."""
        if axis not in self.columns or metric not in self.columns:
            return np.empty((2, 0))
        both = np.array([self.columns[axis], self.columns[metric]])
        return both[:, ~np.isnan(both).any(0)]

    def last(self, name: str) -> float:
        """What the last row has of a column; 0 where that has none."""
        column = self.columns.get(name)
        return 0.0 if column is None or not len(column) else float(np.nan_to_num(column[-1]))

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


def find_runs(paths: Sequence[str], metrics: Collection[str] | None = None) -> list[Run]:
    """The runs that are or lie below the given folders, each once, in the order of their names.

    metrics: those that are read, see `read_metrics`. Raises ConfigError for a folder without any.
    """
    directories = run_directories("pgtk compare", paths)
    # half of the work is Arrow's, which parses beside the other's Python
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda path: read_run(path, metrics), directories))
    known = {run.path for run in found}
    return found + [
        job
        for text in paths
        for job in _jobs_without_run(sweep_folder(text))
        if job.path not in known
    ]


def sweep_folder(text: str) -> Path:
    """The folder that a path, or the name of a sweep in outputs/sweeps, stands for."""
    named = SWEEPS / text
    return named if not Path(text).exists() and named.is_dir() else Path(text)


def run_directories(command: str, paths: Sequence[str]) -> list[Path]:
    """As `find_runs`, without reading them or jobs of a sweep whose run never began.

    Beside folders with runs, files and folders without any are passed over with a word: a shell's
    SWEEP/* names them.
    """
    found: dict[Path, None] = {}
    without: list[str] = []
    for text in paths:
        below = list(_run_directories(sweep_folder(text)))
        found |= dict.fromkeys(directory.resolve() for directory in below)
        without += [] if below else [text]
    missing = [text for text in without if not Path(text).exists()] or (
        without if not found else []
    )
    if missing:
        needs = "a run directory, a folder that holds runs, or a sweep's name"
        raise not_a_run(f"{command} {missing[0]}", sweep_folder(missing[0]), needs)
    if without:
        say(f"note: passed over, there is no run: {' '.join(map(shell_path, without))}", error=True)
    return list(found)


def not_a_run(use: str, path: Path, needs: str) -> ConfigError:
    """The refusal of a path that holds no run. use: the command as typed, needs: what it takes."""
    got = (
        "a file"
        if path.is_file()
        else "a folder without runs"
        if path.is_dir()
        else "no such folder"
    )
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
        names[:] = (
            []
            if begun
            else sorted(n for n in names if not n.startswith(".") and n not in _PASSED_OVER)
        )
        if begun:
            yield Path(folder)


def _jobs_without_run(folder):
    """The jobs of a sweep that have not begun, or failed before they wrote their configuration."""
    try:
        jobs = records.read_sweep(folder).get("jobs", [])
    except StorageError:
        return
    for job in jobs:
        path = (folder / job["directory"]).resolve()
        if not is_run(path):
            yield Run(path, path.name, job["status"], job.get("reason"))


def read_run(path: Path, metrics: Collection[str] | None = None) -> Run:
    """The run of this directory, whatever state it is in; never an exception for what is damaged.

    metrics: those that are read, see `read_metrics`.
    """
    try:
        refuse_links(path)
        config = records.read_leaves(path)
        if missing := [key for key in _IN_EVERY_RUN if key not in config]:
            raise StorageError(f"{path / 'config.yaml'} is damaged (it lacks {', '.join(missing)})")
        status, provenance = records.read_status(path), records.known_provenance(path)
        needed = None if metrics is None else {*metrics, "time", "documents_seen", "num_tokens"}
        columns = read_metrics(path / "metrics.jsonl", needed)
        names = set() if metrics is None else metric_names(path / "metrics.jsonl")
        evaluations, steps = records.read_evaluations(path), columns["step"]
        state, step = (
            status.get("state", "running"),
            int(steps[-1]) if steps.size else status.get("step", 0),
        )
        reason = status.get("reason")
        if state == "running" and not is_held(path):
            state = "killed"
        if (np.diff(steps) <= 0).any():
            raise StorageError(f"{path / 'metrics.jsonl'} is damaged (its steps do not rise)")
        if state == "done" and not np.array_equal(steps, np.arange(1, status["step"] + 1)):
            state, reason = (
                "incomplete",
                f"metrics.jsonl has {steps.size} of its {status['step']} steps",
            )
        # others may be before a damaged checkpoint
        if state not in ("running", "killed", "incomplete"):
            check_rows(path)
        _add_seconds(
            columns, [start["time"] for start in provenance.get("resumed", [])], evaluations
        )
        if steps.size and not np.isnan(tokens := columns.get("num_tokens", np.nan)).any():
            columns["tokens_seen"] = np.cumsum(tokens)
        names |= _add_evaluations(columns, evaluations, metrics)
        names |= columns.keys()
        code, beside = code_of(provenance), trained_with(path, provenance, step)
        return Run(path, path.name, state, reason, step, config, columns, names, code, beside)
    except (PgtoolkitError, OSError) as error:
        return Run(path, path.name, "unreadable", first_line(error).rstrip("."))


def _add_seconds(columns: Columns, resumes: list[str], evaluations: list[dict]) -> None:
    """Add `seconds` since the first row, if each has a time; resumes: when the run was resumed, by
    provenance.json."""
    time = columns.get("time", np.array([np.nan]))
    if np.isnan(time).any() or not time.size:
        return
    spent: dict[float, float] = defaultdict(float)
    for row in evaluations:
        spent[row["step"]] += row.get("seconds", 0.0)  # between this step's row and the next
    evaluating = [spent.get(step, 0.0) for step in columns["step"][:-1].tolist()]
    lengths = np.maximum(0.0, np.diff(time) - evaluating)
    usual = np.median(lengths) if lengths.size else 0.0
    for start in (datetime.strptime(text, records.TIME).timestamp() for text in resumes):
        # the start is written in whole seconds
        resumed = (time[:-1] - 1 <= start) & (start <= time[1:])
        lengths = np.where(resumed, np.minimum(lengths, usual), lengths)
    columns["seconds"] = np.concatenate([[0.0], np.cumsum(lengths)])


def _add_evaluations(
    columns: Columns, evaluations: list[dict], metrics: Collection[str] | None
) -> set[str]:
    """Add what evaluations measured to the rows of their steps; returns the names of all their
    metrics."""
    if any(row["step"] == 0 for row in evaluations) and 0 not in columns["step"]:
        at_start: dict[str, float] = dict.fromkeys(
            ("step", "documents_seen", "tokens_seen", "seconds"), 0.0
        )
        rows = columns["step"].size
        for name in at_start | columns:
            first = np.array([at_start.get(name, np.nan)])
            columns[name] = np.concatenate([first, columns.get(name, np.full(rows, np.nan))])
    rows = columns["step"].size
    place = {step: number for number, step in enumerate(columns["step"].tolist())}
    names = set()
    for row in evaluations:
        for name, value in row.items():
            if name not in _OF_AN_EVALUATION and row["step"] in place and isfinite(value):
                name = f"{HELD_OUT}{row['set']}/{name}"
                names.add(name)
                if metrics is None or name in metrics or name.endswith("/pass@1"):
                    columns.setdefault(name, np.full(rows, np.nan))[place[row["step"]]] = value
    return names
