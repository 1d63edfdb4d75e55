"""Finds runs below folders, and reads them: finished, unfinished and damaged ones."""

from __future__ import annotations

import contextlib
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
from pgtoolkit.system.plain_files import JsonObject, refuse_links
from pgtoolkit.system.report import near_path, say, shell_path

SWEEPS = Path("outputs/sweeps")
"""The folder of sweeps, below the directory that they were started from."""

HELD_OUT = "evaluation/"
"""Prefix of the metrics from evaluations.jsonl, as in evaluation/SET/pass@1."""

_NOT_METRICS = (
    "step",
    "time",
    "documents",
    "set",
    "prompts",
    "completions_per_prompt",
    "seconds",
)
"""Names in a row of evaluations.jsonl that are no metrics."""

DROPPED = ("dropped_prompt_fraction", "dropped_group_fraction")
"""Metrics of the share of a step's batch that was sampled and dropped."""

_WITHOUT_RUNS = ("artifacts", "checkpoints")
"""Folders that hold no runs, but perhaps MLflow's copy of a run's configuration."""

_IN_EVERY_RUN = ("seed", "trainer.max_steps")
"""Keys that every saved configuration has."""


@dataclass
class Run:
    """A run as its directory shows it.

    path: its directory.
    state: done, running, interrupted, failed, pruned (a search has stopped it early), killed (it
        says `running`, but no process holds it), incomplete (done, but its metrics lack steps),
        pending (a sweep's job that has not begun), or unreadable.
    reason: why it is in that state, or None.
    config: dotted keys with their values; empty for a run that cannot be read.
    columns: of metrics.jsonl, by `read_metrics`. Further columns are `seconds` since the first row,
        without evaluations and the time between a stop and its resume; `tokens_seen`, trained up to
        then; and metrics of evaluations, where the one before the first step has its own row.
        `documents_seen` counts those as well that were sampled and dropped.
    names: of all metrics that were recorded, whether they are in a column or not.
    code: commits and uncommitted changes, by `code_of`.
    trained_with: see runs/history.py.
    chosen: see `records.chosen_files`.
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
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def collapsed(self) -> bool:
        """True if numbers that were not finite ended the run: a result, unlike other failures."""
        return self.state == "failed" and (self.reason or "").startswith("NumericalError")

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric at the steps that have one."""
        return values(self.columns, metric)

    def points(self, axis: str, metric: str) -> np.ndarray:
        """Return the (2, points) values of an axis and a metric, at the steps that have both.

        Over documents_seen, the steps of several passes over the same documents are one point: a
        metric of training is their mean.
        """
        if axis not in self.columns or metric not in self.columns:
            return np.empty((2, 0))
        both = np.array([self.columns[axis], self.columns[metric]])
        both = both[:, ~np.isnan(both).any(0)]
        has_passes = int(str(self.config.get("rollout.passes") or 1)) > 1
        if axis != "documents_seen" or metric.startswith(HELD_OUT) or not has_passes:
            return both
        x, numbers = np.unique(both[0], return_inverse=True)
        if x.size == both[0].size:
            return both
        return np.array([x, np.bincount(numbers, both[1]) / np.bincount(numbers)])

    def last(self, name: str) -> float:
        """Return the value of a column in the last row; 0 where it has none."""
        column = self.columns.get(name)
        return 0.0 if column is None or not len(column) else float(np.nan_to_num(column[-1]))

    def why_not_counted(self, metric: str = "") -> str:
        """Return why averages exclude the run, with the value of the metric so far."""
        if metric and self.state == "done":
            return f"has no {metric}"
        if self.state == "pending":
            return "has not begun"
        if self.state == "unreadable":
            return f"unreadable: {self.reason}"
        text = f"{self.state} at step {self.step}"
        if self.config:
            text += f" of {self.config['trainer.max_steps']}"
        values_so_far = self.values(metric)
        if values_so_far:
            text += f", {metric} {final(values_so_far):z.3f} so far"
        if self.reason:
            text += f": {' '.join(self.reason.split())}"
        return text


def find_runs(paths: Sequence[str], metrics: Collection[str] | None = None) -> list[Run]:
    """Return the runs in or below these folders, each once, in the order of their names.

    metrics: those to read, see `read_metrics`. Raises ConfigError for a folder without runs.
    """
    directories = run_directories("pgtk compare", paths)
    # Two threads, since half of the work is Arrow's, which needs no Python.
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda path: read_run(path, metrics), directories))
    known = {run.path for run in runs}
    for path in paths:
        runs += [job for job in _jobs_without_run(sweep_folder(path)) if job.path not in known]
    return runs


def sweep_folder(text: str) -> Path:
    """Return the folder of a path, or of the name of a sweep in outputs/sweeps."""
    in_sweeps = SWEEPS / text
    return in_sweeps if not Path(text).exists() and in_sweeps.is_dir() else Path(text)


def run_directories(command: str, paths: Sequence[str]) -> list[Path]:
    """Return the directories of the runs in or below these folders, each once.

    Among folders with runs, files and folders without any are skipped with a note: a shell's
    SWEEP/* names them, too. command: for the error's message. Raises ConfigError where a path does
    not exist, or none has a run.
    """
    directories: dict[Path, None] = {}
    without_runs = []
    for text in paths:
        below = list(_run_directories(sweep_folder(text)))
        directories |= dict.fromkeys(directory.resolve() for directory in below)
        if not below:
            without_runs.append(text)
    refused = [text for text in without_runs if not Path(text).exists()]
    if not refused and not directories:
        refused = without_runs
    if refused:
        needs = "a run directory, a folder that holds runs, or a sweep's name"
        raise not_a_run(f"{command} {refused[0]}", sweep_folder(refused[0]), needs)
    if without_runs:
        skipped = " ".join(map(shell_path, without_runs))
        say(f"note: skipped, since there is no run: {skipped}", error=True)
    return list(directories)


def not_a_run(use: str, path: Path, needs: str) -> ConfigError:
    """Return the error for a path without a run. use: the command. needs: what it takes."""
    use_instead = "a folder that pgtk has trained in"
    runs_below = _runs_just_below(path)
    reason = "A run writes its config.yaml there when it starts."
    if path.is_file():
        got = "a file"
    elif runs_below:
        got = "a folder of runs"
        use_instead = " or ".join(map(shell_path, runs_below[:3]))
        command = records.command_of_sweep(path) if use.startswith("pgtk resume") else None
        if command is not None:
            reason = f"All jobs of this sweep go on with {command}."
    elif (path / "status.json").is_file():
        got = "a run without its config.yaml"
        reason = f"Somebody has deleted {path / 'config.yaml'}."
        use_instead = "the same command after you have put it back, from a backup or from MLflow"
    elif path.is_dir():
        got = "a folder without runs"
    else:
        got = "no such folder"
        near = near_path(path)
        use_instead = shell_path(near) if near and os.path.isdir(near) else use_instead
    similar = sorted(SWEEPS.glob(f"{glob.escape(path.name)}_*"))  # the same sweep with overrides
    if similar:
        use_instead = " or ".join(folder.name for folder in similar[:3])
    has_begun = runs_below or (path / "status.json").is_file()
    command = None if has_begun else _command_to_begin(path)
    if command is not None:
        got = "a sweep's folder without runs"
        reason = "The sweep was stopped before it had one; its own command goes on with it."
        use_instead = command
    return ConfigError(f"{use} needs {needs} (got {path}: {got}). {reason} Use {use_instead}.")


def _command_to_begin(path: Path) -> str | None:
    """Return the command of a sweep by its folder, that of one of its jobs, or the folder that it
    is in; None for any other, and where what the sweep has written is damaged."""
    if not path.is_dir():
        return None
    for folder in (path, path.parent, *sorted(path.glob("*/"))):
        with contextlib.suppress(StorageError):
            command = records.command_of_sweep(folder)
            if command is not None:
                return command
    return None


def _runs_just_below(path: Path) -> list[Path]:
    """Return the runs in the folders of a folder, or in theirs."""
    for pattern in ("*/provenance.json", "*/*/provenance.json"):
        runs = sorted(file.parent for file in path.glob(pattern) if is_run(file.parent))
        if runs:
            return runs
    return []


def is_run(path: Path) -> bool:
    """Return whether a run has begun in this folder."""
    return os.path.lexists(path / "config.yaml")


def _run_directories(top: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(top):
        if is_run(Path(folder)):
            names.clear()  # so that os.walk does not enter them
            yield Path(folder)
        else:
            names[:] = sorted(
                name for name in names if not name.startswith(".") and name not in _WITHOUT_RUNS
            )


def _jobs_without_run(folder: Path) -> Iterator[Run]:
    """Yield the jobs of a sweep that have not begun, or failed before they wrote config.yaml."""
    try:
        jobs = records.read_sweep(folder).get("jobs", [])
    except StorageError:
        return
    for job in jobs:
        path = (folder / job["directory"]).resolve()
        if not is_run(path):
            yield Run(path, path.name, job["status"], job.get("reason"))


def read_run(path: Path, metrics: Collection[str] | None = None) -> Run:
    """Return the run of this directory, whatever its state; a damaged one is unreadable.

    metrics: those to read, see `read_metrics`.
    """
    try:
        return _read_undamaged_run(path, metrics)
    except (PgtoolkitError, OSError) as error:
        return Run(path, path.name, "unreadable", first_line(error).rstrip("."))


def _read_undamaged_run(path: Path, metrics: Collection[str] | None) -> Run:
    """Return the run of this directory. Raises StorageError or OSError for a damaged one."""
    refuse_links(path)
    config = records.read_leaves(path)
    missing = [key for key in _IN_EVERY_RUN if key not in config]
    if missing:
        raise StorageError(f"{path / 'config.yaml'} is damaged (it lacks {', '.join(missing)})")
    status = records.read_status(path)
    provenance = records.known_provenance(path)
    if metrics is None:
        columns = read_metrics(path / "metrics.jsonl")
        names = set()
    else:
        needed = {*metrics, *DROPPED, "time", "documents_seen", "num_tokens"}
        columns = read_metrics(path / "metrics.jsonl", needed)
        names = metric_names(path / "metrics.jsonl")
    evaluations = records.read_evaluations(path)
    steps = columns["step"]
    step = int(steps[-1]) if steps.size else status.get("step", 0)
    state = status.get("state", "running")
    reason = status.get("reason")
    if state == "running" and not is_held(path):
        state = "killed"
    if (np.diff(steps) <= 0).any():
        raise StorageError(f"{path / 'metrics.jsonl'} is damaged (its steps do not rise)")
    if state == "done" and not np.array_equal(steps, np.arange(1, status["step"] + 1)):
        state = "incomplete"
        reason = f"metrics.jsonl has {steps.size} of its {status['step']} steps"
    # A run in the other states may have been set back to before a damaged checkpoint.
    if state not in ("running", "killed", "incomplete"):
        check_rows(path)
    _add_seconds(columns, [start["time"] for start in provenance.get("resumed", [])], evaluations)
    tokens = columns.get("num_tokens")
    if steps.size and tokens is not None and not np.isnan(tokens).any():
        columns["tokens_seen"] = np.cumsum(tokens)
    _count_dropped(columns, config)
    names |= _add_evaluations(columns, evaluations, metrics)
    names |= columns.keys()
    return Run(
        path,
        path.name,
        state,
        reason,
        step,
        config,
        columns,
        names,
        code_of(provenance),
        trained_with(path, provenance, step),
        records.read_chosen_files(path, config),
    )


def _add_seconds(columns: Columns, resumes: list[str], evaluations: list[JsonObject]) -> None:
    """Add the column `seconds` since the first row, if each row has a time.

    resumes: the times at which the run was resumed, from provenance.json.
    """
    time = columns.get("time", np.array([np.nan]))
    if np.isnan(time).any() or not time.size:
        return
    evaluation_seconds: dict[float, float] = defaultdict(float)
    for row in evaluations:
        # They were spent between the row of this step and the next one.
        evaluation_seconds[row["step"]] += row.get("seconds", 0.0)
    steps = columns["step"][:-1].tolist()
    seconds = np.maximum(0.0, np.diff(time) - [evaluation_seconds.get(step, 0.0) for step in steps])
    median = np.median(seconds) if seconds.size else 0.0
    for text in resumes:
        start = datetime.strptime(text, records.TIME).timestamp()
        # One second earlier counts, too, since the start is written in whole seconds.
        is_pause = (time[:-1] - 1 <= start) & (start <= time[1:])
        seconds = np.where(is_pause, np.minimum(seconds, median), seconds)
    columns["seconds"] = np.concatenate([[0.0], np.cumsum(seconds)])


def _count_dropped(columns: Columns, config: dict[str, object]) -> None:
    """Let documents_seen count those as well that were sampled and dropped.

    They are known by the share of their batch that was dropped. A batch that was dropped as a whole
    has no step, and is not counted.
    """
    seen = columns.get("documents_seen")
    if seen is None:
        return
    kept = np.ones(seen.size)
    for name in DROPPED:
        if name in columns:
            kept *= 1 - np.nan_to_num(columns[name])
    if config.get("accumulation.last_step") == "drop":
        kept *= _kept_of_batch(config)
    if (kept < 1).any():
        columns["documents_seen"] = np.round(np.cumsum(np.diff(seen, prepend=0.0) / kept))


def _kept_of_batch(config: dict[str, object]) -> float:
    """Return the share of a batch of rollouts that fills steps."""
    names = ("rollout.prompts_per_batch", "rollout.group_size", "accumulation.docs_per_step")
    sizes = [size for size in map(config.get, names) if isinstance(size, int) and size > 0]
    if len(sizes) < len(names):
        return 1.0
    prompts, completions, step = sizes
    batch = prompts * completions
    return max(step, batch // step * step) / batch


def _add_evaluations(
    columns: Columns, evaluations: list[JsonObject], metrics: Collection[str] | None
) -> set[str]:
    """Add metrics of evaluations to the rows of their steps; return the names of all of them.

    metrics: names of those to add, beside every pass@1 and avg; None: all.
    """
    if any(row["step"] == 0 for row in evaluations) and 0 not in columns["step"]:
        _add_row_of_start(columns)
    num_rows = columns["step"].size
    row_of_step = {step: number for number, step in enumerate(columns["step"].tolist())}
    names = set()
    for row in evaluations:
        for name, value in row.items():
            if name in _NOT_METRICS or row["step"] not in row_of_step or not isfinite(value):
                continue
            metric = f"{HELD_OUT}{row['set']}/{name}"
            names.add(metric)
            if metrics is None or metric in metrics or metric.endswith(("/pass@1", "/avg")):
                column = columns.setdefault(metric, np.full(num_rows, np.nan))
                column[row_of_step[row["step"]]] = value
    return names


def _add_row_of_start(columns: Columns) -> None:
    """Add a row of step 0 before the others, in which only counts have values."""
    counts = ("step", "documents_seen", "tokens_seen", "seconds")
    num_rows = columns["step"].size
    for name in dict.fromkeys([*counts, *columns]):
        value = 0.0 if name in counts else np.nan
        column = columns.get(name, np.full(num_rows, np.nan))
        columns[name] = np.concatenate([[value], column])
