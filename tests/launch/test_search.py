"""A sweep whose values Optuna proposes: what they are drawn from, and that the same results lead to
the same values."""

import pytest

from pgtoolkit.config.launchers import Axis
from pgtoolkit.config.sweeps import compose_sweep
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


def test_values_are_drawn_from_what_was_typed():
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


def test_an_axis_of_a_file_is_replaced_by_what_is_typed(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, override hydra/sweeper: optuna_search, _self_]\n"
        "hydra: {sweeper: {params: {seed: 'interval(1, 9)', loss: 'grpo,gspo'}}}\n"
    )
    search = compose_sweep(["loss=cispo"], sweep_file=tmp_path / "mine.yaml").search
    assert (search.axes, search.fixed) == ({"seed": Axis(low=1, high=9)}, ["loss=cispo"])


def test_the_same_results_lead_to_the_same_values():
    pytest.importorskip("optuna")

    def searched():
        launched = []

        def run(jobs, first):
            launched.append((first, jobs))
            values = [dict(override.split("=") for override in job) for job in jobs]
            return [
                None if job["seed"] == "3" else float(job["loss.epsilon_low"]) for job in values
            ]

        run_search(compose_sweep(SEARCHED).search, run)
        return launched

    launched = searched()
    assert [(first, len(jobs)) for first, jobs in launched] == [(0, 5), (5, 5), (10, 2)]
    for _, jobs in launched:
        for job in jobs:
            chosen = dict(override.split("=") for override in job)
            assert chosen["loss"] == "grpo"
            assert chosen["seed"] in ("1", "3", "5", "7")
            assert 1e-4 <= float(chosen["loss.epsilon_low"]) <= 1e-2
            assert chosen["aggregation"] in ("constant", "token_mean")
            assert 2 <= int(chosen["rollout.group_size"]) <= 8
    assert searched() == launched
