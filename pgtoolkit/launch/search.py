"""Runs a sweep whose values are chosen as it goes: Optuna proposes them from earlier results, and
its median pruner names the jobs that need not go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgtoolkit.config.launchers import Axis, Search

if TYPE_CHECKING:
    from optuna import Trial  # pyright: ignore[reportMissingImports]  (an extra)
    from optuna.distributions import BaseDistribution  # pyright: ignore[reportMissingImports]  (an extra)

Point = tuple[int, float]
"""A step, and the value of a job's number there."""


@dataclass
class Result:
    """Holds the outcome of a job.

    value: its final value, which the search maximizes; None for a job that has none.
    points: of its number on the way, see `points_of`.
    is_pruned: whether the search has stopped it early.
    """

    value: float | None
    points: list[Point] = field(default_factory=list)
    is_pruned: bool = False


@dataclass
class Watched:
    """A job that runs, as the search sees it."""

    trial: Trial
    prunes: bool
    _last: int = -1
    _why: str | None = None

    def why_prune(self, points: list[Point]) -> str | None:
        """Return why the job need not go on, by its points so far; None where it has to."""
        for step, value in points:
            if step <= self._last or self._why is not None:
                continue
            self._last = step
            # To 12 digits, so that a value which is the median but for rounding is not below it.
            self.trial.report(float(f"{value:.12g}"), step)
            if self.prunes and self.trial.should_prune():
                self._why = (
                    f"at step {step} its best number so far is below the median of the earlier "
                    "runs of the search"
                )
        return self._why


Run = Callable[[list[list[str]], int, list[Watched]], list[Result]]


def run_search(search: Search, run: Run) -> None:
    """Run the jobs of a search.

    run: runs jobs, by the overrides of each, the number of the first, and what watches each;
        returns the result of each. Results that an earlier search had give the same proposals.
    """
    import optuna  # pyright: ignore[reportMissingImports]  (an extra)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = search.settings
    num_first = settings["n_startup_trials"]
    sampler = optuna.samplers.TPESampler(seed=settings["seed"], n_startup_trials=num_first)
    pruner = optuna.pruners.MedianPruner(num_first, n_warmup_steps=search.prune_after or 0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    distributions = {key: _distribution(axis) for key, axis in search.axes.items()}
    number = 0
    while number < settings["n_trials"]:
        count = min(settings["n_jobs"], settings["n_trials"] - number)
        trials = [study.ask(distributions) for _ in range(count)]
        overrides = [
            [*search.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            for trial in trials
        ]
        watched = [Watched(trial, search.prune_after is not None) for trial in trials]
        for job, result in zip(watched, run(overrides, number, watched), strict=True):
            _tell(job, result)
        number += count


def _tell(job: Watched, result: Result) -> None:
    """Tell the study what became of a job, in the words that it had while the job ran."""
    from optuna.trial import TrialState  # pyright: ignore[reportMissingImports]  (an extra)

    study = job.trial.study
    if result.is_pruned:
        # A search that is continued has not seen the points before.
        job.why_prune(result.points)
        study.tell(job.trial, state=TrialState.PRUNED)
    elif result.value is None:
        study.tell(job.trial, state=TrialState.FAIL)
    else:
        job.prunes = False  # all of its points count in the medians of later jobs
        job.why_prune(result.points)
        study.tell(job.trial, result.value)


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna import distributions  # pyright: ignore[reportMissingImports]  (an extra)

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return distributions.IntDistribution(
            axis.low, axis.high, log=axis.log, step=int(axis.step or 1)
        )
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)
