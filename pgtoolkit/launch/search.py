"""Runs a sweep whose values are chosen as it goes: Optuna proposes them from earlier results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pgtoolkit.config.launchers import Axis, Search

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution  # pyright: ignore[reportMissingImports]  (an extra)


def run_search(search: Search, run: Callable[[list[list[str]], int], list[float | None]]) -> None:
    """Run the jobs of a search.

    run: runs jobs, by the overrides of each and the number of the first; returns the final value of
        each, see `number_of`, which the search maximizes; None for a job that failed.
    """
    import optuna  # pyright: ignore[reportMissingImports]  (an extra)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = search.settings
    sampler = optuna.samplers.TPESampler(
        seed=settings["seed"], n_startup_trials=settings["n_startup_trials"]
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {key: _distribution(axis) for key, axis in search.axes.items()}
    number = 0
    while number < settings["n_trials"]:
        count = min(settings["n_jobs"], settings["n_trials"] - number)
        trials = [study.ask(distributions) for _ in range(count)]
        overrides = [
            [*search.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            for trial in trials
        ]
        for trial, value in zip(trials, run(overrides, number), strict=True):
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)
        number += count


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna import distributions  # pyright: ignore[reportMissingImports]  (an extra)

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return distributions.IntDistribution(
            axis.low, axis.high, log=axis.log, step=int(axis.step or 1)
        )
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)
