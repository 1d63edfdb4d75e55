"""A sweep whose values Optuna proposes: they lie within the typed ranges, and the same results lead
to the same values."""

import statistics

import pytest

from pgtoolkit.config.launchers import Axis
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.launch.check import check, notes, problems
from pgtoolkit.launch.search import Result, Watched, run_search

SEARCHED = [
    *(
        "hydra/sweeper=optuna_search",
        "hydra.sweeper.n_trials=12",
        "hydra.sweeper.n_jobs=5",
        "loss=grpo",
    ),
    *(
        "seed=range(1,9,2)",
        "loss.epsilon_low=tag(log,interval(1e-4,1e-2))",
        "aggregation=constant,token_mean",
    ),
    "rollout.group_size=int(interval(2,8))",
]


def test_typed_ranges_and_lists_become_the_axes_of_a_search():
    search = compose_sweep(SEARCHED).search
    assert search.fixed == ["loss=grpo"]
    assert search.axes == {
        "seed": Axis(low=1, high=7, step=2),
        "loss.epsilon_low": Axis(low=1e-4, high=1e-2, log=True),
        "aggregation": Axis(values=("constant", "token_mean")),
        "rollout.group_size": Axis(low=2, high=8),
    }
    assert (search.settings["n_trials"], search.settings["n_jobs"], search.settings["seed"]) == (
        12,
        5,
        0,
    )


def test_a_typed_value_replaces_the_axis_of_a_sweep_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, override hydra/sweeper: optuna_search, _self_]\n"
        "hydra: {sweeper: {params: {seed: 'interval(1, 9)', loss: 'grpo,gspo'}}}\n"
    )
    search = compose_sweep(["loss=cispo"], sweep_file=tmp_path / "mine.yaml").search
    assert (search.axes, search.fixed) == ({"seed": Axis(low=1, high=9)}, ["loss=cispo"])


def search_by_epsilon() -> list[tuple[int, list[list[str]]]]:
    """Search for the best epsilon_low, with a failure of each job of seed 3; return the batches of
    jobs, each with the number of its first job."""
    batches = []

    def run(jobs: list[list[str]], first: int, watched: list[Watched]) -> list[Result]:
        batches.append((first, jobs))
        values = [dict(override.split("=") for override in job) for job in jobs]
        return [
            Result(None if job["seed"] == "3" else float(job["loss.epsilon_low"])) for job in values
        ]

    run_search(compose_sweep(SEARCHED).search, run)
    return batches


def test_proposed_values_lie_within_the_axes_and_are_the_same_for_the_same_results():
    pytest.importorskip("optuna")
    batches = search_by_epsilon()
    assert [(first, len(jobs)) for first, jobs in batches] == [(0, 5), (5, 5), (10, 2)]
    for _, jobs in batches:
        for job in jobs:
            values = dict(override.split("=") for override in job)
            assert values["loss"] == "grpo"
            assert values["seed"] in ("1", "3", "5", "7")
            assert 1e-4 <= float(values["loss.epsilon_low"]) <= 1e-2
            assert values["aggregation"] in ("constant", "token_mean")
            assert 2 <= int(values["rollout.group_size"]) <= 8
    assert search_by_epsilon() == batches


PRUNED = [
    "hydra/sweeper=optuna_search",
    "hydra.sweeper.n_trials=10",
    "hydra.sweeper.n_startup_trials=3",
    "optimizer.learning_rate=interval(0.1,1)",
]
EVALUATED = (20, 40, 60, 80, 100)


def curve(rate: float) -> list[float]:
    """Return the numbers of a job: it learns in proportion to its rate, and not evenly."""
    return [rate * step - 9 * (step == 60) for step in EVALUATED]


def result_of(rate: float, watched: Watched) -> Result:
    """Return what becomes of a job that is looked at after each evaluation."""
    points = [*zip(EVALUATED, curve(rate), strict=True), (101, 0.0)]
    for num_seen in range(1, len(EVALUATED) + 1):
        if watched.why_prune(points[:num_seen]) is not None:
            # It comes a step further until it has saved.
            return Result(None, points[: num_seen + 1], is_pruned=True)
    return Result(points[-2][1], points[:-1])


def searched(prune_after: int | None) -> tuple[list[float], list[int | None]]:
    """Search as jobs run: return the rate of each, and the step at which it was stopped early."""
    rates: list[float] = []
    stopped_at: list[int | None] = []

    def run(jobs: list[list[str]], first: int, watched: list[Watched]) -> list[Result]:
        rates.append(float(jobs[0][0].partition("=")[2]))
        result = result_of(rates[-1], watched[0])
        stopped_at.append(result.points[-2][0] if result.is_pruned else None)
        return [result]

    setting = "null" if prune_after is None else prune_after
    run_search(compose_sweep([*PRUNED, f"hydra.sweeper.prune_after={setting}"]).search, run)
    return rates, stopped_at


def test_a_job_is_stopped_early_where_its_best_number_is_below_the_median_of_complete_jobs():
    pytest.importorskip("optuna")
    rates, stopped_at = searched(prune_after=40)
    complete: list[float] = []
    for rate, stopped in zip(rates, stopped_at, strict=True):
        expected = None
        for place, step in enumerate(EVALUATED):
            best = max(curve(rate)[: place + 1])
            medians = [curve(other)[place] for other in complete]
            if len(complete) >= 3 and step >= 40 and best < statistics.median(medians):
                expected = step
                break
        assert stopped == expected
        if expected is None:
            complete.append(rate)
    assert 0 < len(complete) < len(rates)
    assert searched(prune_after=None)[1] == [None] * 10


def test_a_continued_search_knows_what_the_one_before_knew():
    """So it proposes the same values, also from jobs that were stopped early."""
    pytest.importorskip("optuna")
    studies = []
    kept: list[Result] = []

    def run(jobs: list[list[str]], first: int, watched: list[Watched]) -> list[Result]:
        studies.append(watched[0].trial.study)
        result = result_of(float(jobs[0][0].partition("=")[2]), watched[0])
        kept.append(result)
        return [result]

    def run_again(jobs: list[list[str]], first: int, watched: list[Watched]) -> list[Result]:
        studies.append(watched[0].trial.study)
        return [kept[first]]

    search = compose_sweep([*PRUNED, "hydra.sweeper.prune_after=0"]).search
    run_search(search, run)
    run_search(search, run_again)
    before, now = (
        [(trial.params, trial.state, trial.intermediate_values) for trial in study.trials]
        for study in (studies[0], studies[-1])
    )
    assert now == before
    assert any(result.is_pruned for result in kept)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("n_trials=0", "hydra.sweeper.n_trials=0 needs a whole number >= 1"),
        ("n_jobs=0", "hydra.sweeper.n_jobs=0 needs a whole number >= 1"),
        ("n_startup_trials=-1", "hydra.sweeper.n_startup_trials=-1 needs a whole number >= 0"),
        ("prune_after=soon", "hydra.sweeper.prune_after=soon needs a whole number >= 0"),
    ],
)
def test_impossible_numbers_of_a_search_are_refused(setting, problem):
    overrides = [*SEARCH, "seed=1,2", f"hydra.sweeper.{setting}"]
    assert any(problem in text for text in problems(check(overrides, multirun=True)))


SEARCH = ("hydra/sweeper=optuna_search", "tracking=none")


@pytest.mark.parametrize(
    ("axis", "use"),
    [
        ("rollout.temperature=interval(0.5,1)", "evaluation.every=20 evaluation.temperature=0.5"),
        ("rollout.overlong_buffer=1,2", "evaluation.every=20"),
        ("rollout.max_sampling_rounds=1,4", "evaluation.every=20"),
        ("task.num_digits=4,6", "evaluation.every=20 evaluation.sets.test.num_digits=4"),
        ("optimizer.learning_rate=interval(1e-4,1e-3)", None),
        ("loss=grpo,gspo", None),
        ("rollout.truncated=train,mask", None),
    ],
)
def test_a_search_by_a_number_that_its_own_values_change_is_refused(axis, use):
    """A search for the best temperature by the reward would find the lowest."""
    found = [text for text in problems(check([*SEARCH, axis], multirun=True)) if "means" in text]
    if use is None:
        assert found == []
        return
    assert f"a search over {axis.partition('=')[0]} needs a number that means the same" in found[0]
    assert found[0].endswith(f" Use {use}.")
    again = problems(check([*SEARCH, axis, *use.split()], multirun=True))
    assert [text for text in again if "means" in text] == []


def test_a_sweep_says_before_its_runs_which_number_they_will_not_have_in_common():
    typed = ["tracking=none", "rollout.lag=0,4"]
    assert notes(check(typed, multirun=True))[0] == (
        "reward does not mean the same in all runs: rollout.lag decides how old the weights are "
        "that wrote the completions of a step. Use evaluation.every=20 to compare all of them."
    )
    assert not any(
        "does not mean" in note
        for note in notes(check([*typed, "evaluation.every=20"], multirun=True))
    )
