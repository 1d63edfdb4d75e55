"""A sweep whose values Optuna proposes: they lie within the typed ranges, and the same results lead
to the same values."""

import pytest

from pgtoolkit.config.launchers import Axis
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.launch.check import check, notes, problems
from pgtoolkit.launch.search import run_search

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

    def run(jobs: list[list[str]], first: int) -> list[float | None]:
        batches.append((first, jobs))
        values = [dict(override.split("=") for override in job) for job in jobs]
        return [None if job["seed"] == "3" else float(job["loss.epsilon_low"]) for job in values]

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
