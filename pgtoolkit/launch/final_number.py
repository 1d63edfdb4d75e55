"""The number by which the runs of a sweep are shown and searched, and whether it means the same in
all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.defaults import ByScores
from pgtoolkit.config.evaluation_sets import DEFAULT_SET, is_on, watched
from pgtoolkit.config.launchers import Search
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.runs.records import leaves, read_evaluations
from pgtoolkit.runs.series import final, mean, read_metrics, values
from pgtoolkit.system.report import Report

TRAINING = "reward"
"""The number of a run without evaluations."""


def number_of(config: Config) -> str:
    """Return the name of a run's number: of held-out prompts where it is evaluated, by
    `evaluation.best`; else the reward."""
    if not is_on(config):
        return TRAINING
    first = next(iter(config.evaluation.sets), DEFAULT_SET)
    return f"evaluation/{'/'.join(watched(config) or (first, ByScores().resolve(config)))}"


def final_value(directory: Path, metric: str) -> float | None:
    """Return the final value of a run's number, as `pgtk compare` has it; None if not measured."""
    from pgtoolkit.comparison.measures import final_of

    numbers = _values(directory, metric)
    if not numbers:
        return None
    return final(numbers) if metric == TRAINING else final_of(numbers, metric)


def averaged(directories: Sequence[Path], metric: str) -> str:
    """Return in words of how many evaluations the final values of these runs are means; "" where
    each is that of one evaluation, or a reward."""
    from pgtoolkit.comparison.measures import num_last_evaluations

    if metric == TRAINING:
        return ""
    measured = [len(_values(directory, metric)) for directory in directories]
    counts = {num_last_evaluations(count) for count in measured if count}
    if max(counts, default=1) == 1:
        return ""
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(*counts)
    return f"mean of the last {number} evaluations"


def first_value(directory: Path, metric: str) -> float | None:
    """Return the first value of a run's number; None if not measured."""
    return next(iter(_values(directory, metric)), None)


def _values(directory: Path, metric: str) -> list[float]:
    """Return a run's number at each step or evaluation that has it; empty if not measured."""
    try:
        if metric == TRAINING:
            return values(read_metrics(directory / "metrics.jsonl", {TRAINING}), TRAINING)
        _, name, number = metric.split("/", 2)
        rows = [row for row in read_evaluations(directory) if row["set"] == name]
    except PgtoolkitError:
        return []
    return [row[number] for row in rows if number in row]


def points_of(directory: Path, metric: str, max_steps: int) -> list[tuple[int, float]]:
    """Return (step, value) of a run's number on its way: of each evaluation after a step, or the
    mean reward of each tenth of the steps; empty while there is none."""
    try:
        if metric != TRAINING:
            _, name, number = metric.split("/", 2)
            rows = [row for row in read_evaluations(directory) if row["set"] == name]
            return [(row["step"], row[number]) for row in rows if row["step"] and number in row]
        columns = read_metrics(directory / "metrics.jsonl", {TRAINING})
    except PgtoolkitError:
        return []
    steps = columns["step"].tolist()
    rewards = columns[TRAINING].tolist() if TRAINING in columns else []
    points = []
    begin = 0
    for end in sorted({max_steps * tenth // 10 for tenth in range(1, 11)} - {0}):
        rows = zip(steps, rewards, strict=False)
        between = [value for step, value in rows if begin < step <= end and math.isfinite(value)]
        if between and steps[-1] >= end:
            points.append((end, mean(between)))
        begin = end
    return points


def why_no_common_measure(configs: Sequence[Config]) -> tuple[str, str]:
    """Return (why the number of these runs means something else in some of them, the overrides with
    which all of them have one in common); empty texts where it means the same in all."""
    from pgtoolkit.comparison.common_measure import why_unlike
    from pgtoolkit.comparison.no_verdict import overrides_for_all
    from pgtoolkit.runs.find import Run

    runs = [
        Run("", "", "pending", config=as_typed(dict(leaves(plain_config(config)))))
        for config in configs
    ]
    reasons = why_unlike(runs[:1], runs[1:], number_of(configs[0]), ignore_code=True)
    return " and ".join(map(str, reasons)), overrides_for_all(runs[0], reasons)


def check_search(search: Search, configs: Sequence[Config], report: Report) -> None:
    """Refuse a search over keys that change the number by which it searches.

    configs: the corners of its space.
    """
    why, use = why_no_common_measure(configs)
    if why:
        report.refuse(
            setting=f"a search over {', '.join(search.axes)}",
            needs="a number that means the same for all values",
            got=number_of(configs[0]),
            reason=f"It would find what raises the number and not what is learned best: {why}.",
            use=use or "values of other keys",
        )
