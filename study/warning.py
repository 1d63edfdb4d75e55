"""Tell whether the effective sample size falls before a run collapses (arXiv 2602.17616).

The runs of the first part kept `kl_new_old`, of which exp(-2 KL) is the effective sample size where
log-ratios are small and normal; newer ones keep `effective_sample_size` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.records import read_evaluations

_SIZE = "effective_sample_size"

WINDOW = 20
"""Steps that a value is averaged over."""

LEVELS = (0.9, 0.5)
"""What the mean must fall below to be a warning."""


@dataclass(frozen=True)
class Course:
    """The steps at which a run collapsed and at which its effective sample size fell below LEVELS.

    None stands for never.
    """

    lag: int
    collapsed: int | None
    warned: tuple[int | None, ...]


def table_rows(sweeps: list[Path]) -> list[list[str]]:
    """Return a row for each lag: collapses and warnings before them, other runs and warnings."""
    head = ["rollout.lag", "collapsed"]
    head += [f"warned before, below {level:g}" for level in LEVELS]
    head += ["not collapsed", *(f"warned, below {level:g}" for level in LEVELS)]
    courses = [course(run) for run in find_runs([*map(str, sweeps)], {_SIZE, "kl_new_old"})]
    rows = [head]
    lags = sorted({run.lag for run in courses})
    for lag in lags:
        of_lag = [run for run in courses if run.lag == lag]
        rows.append([str(lag), *_counts(of_lag)])
    if len(lags) > 1:
        rows.append(["all", *_counts(courses)])
    return rows


def course(run: Run) -> Course:
    """Return the course of a run.

    It collapses at the first evaluation that solves less than half as much as the start.
    """
    solved = [
        (row["step"], row["pass@1"])
        for row in read_evaluations(Path(run.path))
        if row["set"] == "held_out"
    ]
    start = solved[0][1]
    collapsed = next((step for step, share in solved if share < start / 2), None)
    if _SIZE in run.columns:
        sizes = run.columns[_SIZE]
    else:
        sizes = np.exp(-2 * np.maximum(run.columns["kl_new_old"], 0))
    # The evaluation before the first step has a row of its own, without these.
    sizes = sizes[run.columns["step"] > 0]
    warned = tuple(_below(sizes, level) for level in LEVELS)
    lag = run.config["rollout.lag"]
    assert isinstance(lag, int)
    return Course(lag, collapsed, warned)


def _below(sizes: np.ndarray, level: float) -> int | None:
    """Return the first step at which the mean of the last WINDOW is below the level."""
    means = np.convolve(sizes, np.full(WINDOW, 1 / WINDOW), mode="valid")
    places = np.flatnonzero(means < level)
    return int(places[0]) + WINDOW if places.size else None


def _counts(courses: list[Course]) -> list[str]:
    collapsed = [run for run in courses if run.collapsed is not None]
    others = [run for run in courses if run.collapsed is None]
    cells = [str(len(collapsed))]
    for place in range(len(LEVELS)):
        cells.append(str(sum(_is_before(run.warned[place], run.collapsed) for run in collapsed)))
    cells.append(str(len(others)))
    for place in range(len(LEVELS)):
        cells.append(str(sum(run.warned[place] is not None for run in others)))
    return cells


def _is_before(warned: int | None, collapsed: int | None) -> bool:
    return warned is not None and collapsed is not None and warned < collapsed
