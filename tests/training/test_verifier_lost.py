"""A judge that goes away ends the run, which goes on to the same bits once it is back."""

import json
from pathlib import Path

import pytest
from builders.rollout_rows import write_jsonl
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, metrics_of
from tasks import rewards_for_tests

from pgtoolkit.assembly.continuing import resume_command
from pgtoolkit.assembly.train import train
from pgtoolkit.errors import DataError, Interrupted, VerifierLost

JUDGE = "tasks.rewards_for_tests.judge"
STEPS = 4
"""Two batches of 16 completions."""


def overrides_of(folder: Path, verifier: str = JUDGE) -> list[str]:
    rows = [{"prompt": f"{digit}{digit}=", "answer": "1" * digit} for digit in range(1, 9)]
    path = write_jsonl(folder / "prompts.jsonl", rows)
    return [
        *(setting for setting in SHORT if not setting.startswith("task.")),
        "task=prompts",
        f"task.path={path}",
        f"task.verifier={verifier}",
        "task.verifier_retry_seconds=0",
        "trainer.checkpoint_every=100",
        f"trainer.max_steps={STEPS}",
    ]


def evaluations_of(folder: Path) -> list[dict]:
    path = folder / "evaluations.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [{**row, "time": 0, "seconds": 0} for row in rows]


def assert_same_end(folder: Path, expected: Path) -> None:
    """Check that two runs have the same metrics, evaluations and last checkpoint."""
    assert metrics_of(folder) == metrics_of(expected)
    assert evaluations_of(folder) == evaluations_of(expected)
    state, expected_state = checkpoint_of(folder, STEPS), checkpoint_of(expected, STEPS)
    assert_equal(state, expected_state)


@pytest.fixture(autouse=True)
def judge_is_there(monkeypatch):
    monkeypatch.setattr(rewards_for_tests, "judge_calls_left", 10**9)


CASES = {
    "on policy": (JUDGE, [], 21),
    "overlap, awaited": (
        f"{JUDGE}_async",
        ["rollout.max_staleness=5", "rollout.old_log_probs=sampling"],
        21,
    ),
    "further rounds": (
        JUDGE,
        ["rollout.lag=2", "rollout.max_sampling_rounds=3", "rollout.group_size=2"],
        0.7,
    ),
    "evaluation": (
        JUDGE,
        ["evaluation.every=2", "evaluation.prompts_per_set=4", "evaluation.seed=7"],
        43,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_judge_goes_away_goes_on_to_the_same_bits(tmp_path, case):
    verifier, more, calls = CASES[case]
    config = config_of(*overrides_of(tmp_path, verifier), *more)
    train(config, tmp_path / "whole")

    if calls < 1:  # that share of all calls
        calls = int(calls * (10**9 - rewards_for_tests.judge_calls_left))
    rewards_for_tests.judge_calls_left = calls
    folder = tmp_path / "run"
    with pytest.raises(Interrupted) as caught:
        train(config, folder)
    *_, last = str(caught.value).splitlines()
    step = len(metrics_of(folder))
    assert 0 < step < STEPS
    assert last == f"Saved up to step {step}. Continue with: {resume_command(folder)}"
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"

    with pytest.raises(VerifierLost) as caught:  # It is still away: no step, so no queue goes on.
        train(config, folder, resume=True)
    assert caught.value.exit_status == 3
    assert "Continue with: " in str(caught.value).splitlines()[-1]
    rewards_for_tests.judge_calls_left = 10**9
    train(config, folder, resume=True)
    assert_same_end(folder, tmp_path / "whole")


def test_a_judge_that_was_never_there_ends_the_run_with_status_3(tmp_path):
    rewards_for_tests.judge_calls_left = 0
    config = config_of(*overrides_of(tmp_path))
    with pytest.raises(VerifierLost) as caught:
        train(config, tmp_path / "run")
    assert caught.value.exit_status == 3
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    rewards_for_tests.judge_calls_left = 10**9
    train(config, tmp_path / "run", resume=True)
    assert len(metrics_of(tmp_path / "run")) == STEPS


def test_a_fault_of_a_reward_function_loses_no_step(tmp_path):
    config = config_of(*overrides_of(tmp_path, "tasks.rewards_for_tests.faulty_judge"))
    rewards_for_tests.judge_calls_left = 21
    with pytest.raises(DataError, match="Saved up to step 2") as caught:
        train(config, tmp_path / "run")
    assert caught.value.exit_status == 3
    assert checkpoint_of(tmp_path / "run", 2)["step"] == 2
