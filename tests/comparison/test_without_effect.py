"""Options that were set and changed no number are named, from the metrics that a run has."""

import contextlib
import json

import numpy as np
import pytest
from builders.runs import SHORT, run

from pgtoolkit.assembly.without_effect import SILENT, without_effect
from pgtoolkit.cli import main

CASES = [
    # typed, the rest of its configuration, metrics that show nothing, metrics that show an effect
    ("loss.epsilon_low=0.3", {"loss.name": "grpo"}, {"clipped_low_fraction": [0, 0]}, [0, 1e-9]),
    ("loss.epsilon_high=0.3", {"loss.name": "gspo"}, {"clipped_high_fraction": [0, 0]}, [1e-9, 0]),
    ("loss.epsilon_low=0.25", {"loss.name": "cispo"}, {"min_ratio_new_old": [0.75, 1]}, [0.74, 1]),
    ("loss.epsilon_high=0.25", {"loss.name": "cispo"}, {"max_ratio_new_old": [1.25]}, [1.26]),
    ("loss.dual_clip=3", {"loss.name": "grpo"}, {"max_ratio_new_old": [1, 3]}, [1, 3.01]),
    ("loss.ratio_cap=4", {"loss.name": "dppo"}, {"max_ratio_new_old": [4, 1]}, [4.01, 1]),
    ("loss.low=0.5", {"loss.name": "icepop"}, {"min_ratio_new_old": [0.5]}, [0.49]),
    ("loss.high=2", {"loss.name": "icepop"}, {"max_ratio_new_old": [2]}, [2.01]),
    ("correction=token_mask", {}, {"min_correction_factor": [1 - 1e-6]}, [1 - 1e-4]),
    ("correction=token_truncate", {}, {"max_correction_factor": [1 + 1e-6]}, [1 + 1e-4]),
    (
        "correction.low=0.4",
        {"correction.name": "token_mask"},
        {"correction_outside_fraction": [0]},
        [1e-9],
    ),
    (
        "correction.high=4",
        {"correction.name": "sequence_truncate"},
        {"correction_outside_fraction": [0]},
        [1e-9],
    ),
    ("kl=k3", {"kl.place": "loss"}, {"kl_ref": [0, 0]}, [0, 1e-12]),
    ("kl=k2", {"kl.place": "reward"}, {"kl_reward": [0, 0]}, [0, -1e-12]),
    ("entropy.top_fraction=0.9", {}, {"entropy_kept_fraction": [1]}, [1 - 1e-7]),
    ("advantage.clip_low=-2", {}, {"min_advantage": [-1.9]}, [-2]),
    ("advantage.clip_high=2", {}, {"max_advantage": [1.9]}, [2]),
    ("critic.clip=0.3", {}, {"value_clipped_fraction": [0]}, [1e-9]),
    ("rollout.overlong_buffer=4", {}, {"overlong_penalty": [0]}, [-1e-9]),
    ("rollout.truncated=mask", {}, {"truncated_fraction": [0]}, [1e-9]),
    ("rollout.max_sampling_rounds=4", {}, {"dropped_prompt_fraction": [0]}, [1e-9]),
    ("rollout.uninformative=drop", {}, {"dropped_group_fraction": [0]}, [1e-9]),
    ("rollout.retire_at=0.5", {}, {"retired_prompts": [0, 0]}, [0, 1]),
    ("loss=gspo", {}, {"grad_norm": [0, 0]}, [0, 1e-30]),
    ("optimizer.max_grad_norm=5", {}, {"grad_norm": [5]}, [5.01]),
]
"""Where a key is shown by two metrics, the other one shows nothing."""

SHOWN_BY_TWO = {"min_correction_factor": [1], "max_correction_factor": [1]}
OPTIONS = {"correction": "correction.name", "kl": "kl.kind", "loss": "loss.name"}
DEFAULTS = {"rollout.name": "policy", "advantage.estimator": "grpo", "model.name": "transformer"}


def saved(typed: str, rest: dict) -> dict:
    key, _, value = typed.partition("=")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return {**DEFAULTS, **rest, OPTIONS.get(key, key): value}


def told(config: dict, metrics: dict) -> list[str]:
    columns = {name: np.array(values, float) for name, values in metrics.items()}
    return [line.partition(":")[0] for line in without_effect(config, columns)]


@pytest.mark.parametrize(("typed", "rest", "silent", "acted"), CASES)
def test_a_key_is_named_where_its_metric_shows_that_it_never_acted(typed, rest, silent, acted):
    config = saved(typed, rest)
    more = SHOWN_BY_TWO if typed.startswith("correction=") else {}
    assert told(config, {**more, **silent}) == [typed]
    (metric,) = silent
    assert told(config, {**more, metric: acted}) == []
    assert told(config, {"loss": [0.0]}) == []  # what was not measured tells nothing


def test_every_row_has_a_case():
    keys = {
        (OPTIONS.get(key, key), name)
        for key, name in ((case[0].partition("=")[0], next(iter(case[2]))) for case in CASES)
    }
    assert {(row.key, name) for row in SILENT for name in row.shown_by} == keys


def test_a_loss_of_ones_own_without_a_gradient_is_named_as_it_is_typed():
    config = {**DEFAULTS, "loss.name": "custom", "loss.path": "mine.loss"}
    assert told(config, {"grad_norm": [0, 0]}) == ["loss=mine.loss"]


def test_a_key_at_its_default_is_not_named():
    for typed, loss in (("loss.epsilon_low=0.2", "grpo"), ("loss.low=0.2", "icepop")):
        metrics = {"clipped_low_fraction": [0], "min_ratio_new_old": [1]}
        assert told(saved(typed, {"loss.name": loss}), metrics) == []


def test_a_run_says_it_early_and_at_its_end_and_doctor_afterwards(tmp_path, capsys):
    overrides = ("loss=grpo", "loss.epsilon_low=0.99", "loss.dual_clip=50", "trainer.max_steps=12")
    run(tmp_path / "run", *SHORT, *overrides)
    log = (tmp_path / "run" / "run.log").read_text()
    early = "loss.dual_clip=50 has changed no number so far: no ratio was above it."
    assert log.count(early) == 1
    assert log.index(early) < log.index("step 12/12")
    end = (
        "no effect    loss.epsilon_low=0.99: no ratio was below it where the advantage is negative"
    )
    assert log.count(end) == 1
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "run"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["without_effect"][1] == "loss.dual_clip=50: no ratio was above it"


def test_compare_names_the_key_between_runs_of_the_same_numbers(tmp_path, capsys):
    for clip in (40, 50):
        overrides = ("loss=grpo", f"loss.dual_clip={clip}", "trainer.max_steps=3")
        run(tmp_path / str(clip), *SHORT, *overrides)
    assert main(["compare", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "recorded the same numbers to the last bit: loss.dual_clip changed nothing between them"
    ) in shown
