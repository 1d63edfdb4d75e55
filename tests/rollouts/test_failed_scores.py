"""Completions that nobody could score: out of the baseline with weight 0, or scored as configured;
counted and told."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders.rollout_rows import all_documents as read_documents
from builders.rollout_rows import good_row, recorded_rollouts, write_jsonl
from builders.runs import (
    SHORT,
    config_of,
    copy_as_of,
    last_of_each_key,
    metrics_of,
    module_and_loader,
)

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_rollouts import Mixed
from pgtoolkit.config.schema_tasks import VerifierFailure
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import ESTIMATORS, group_advantages, over_batch
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.evaluator import _numbers
from pgtoolkit.rollouts.group_rollouts import check_scores, has_signal
from pgtoolkit.rollouts.recording import write_batch
from pgtoolkit.runs.completion_files import CompletionRow
from pgtoolkit.tasks.failed_scores import FailedScores
from pgtoolkit.tasks.process_pool import CRASH, TIMEOUT, Failure
from pgtoolkit.tasks.tasks import Score
from pgtoolkit.training.train import train


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_baseline_is_that_of_the_other_completions(name):
    rewards = [[1.0, None, 0.0, 0.25], [None, None], [None, 2.0], [3.0, 1.0]]
    groups = [[Attempt(reward, 2 + i) for i, reward in enumerate(group)] for group in rewards]
    found = Estimator(name).advantages(groups, refuse=None)
    alone = [0.0] if name in ("rloo", "pass_at_k") else group_advantages(name, [2.0], [3])
    parts = [
        group_advantages(name, [1.0, 0.0, 0.25], [2, 4, 5]),
        alone,
        group_advantages(name, [3.0, 1.0], [2, 3]),
    ]
    first, second, third = over_batch(name, parts, [[1.0, 0.0, 0.25], [2.0], [3.0, 1.0]])
    assert found == [[first[0], 0.0, *first[1:]], [0.0, 0.0], [0.0, *second], third]


def test_a_function_of_ones_own_sees_the_scored_ones_alone():
    seen = []

    def advantages(rewards, lengths, measures):
        seen.append((rewards, lengths))
        return [[reward + 1 for reward in group] for group in rewards]

    estimator = Estimator("custom", {}, "mine", advantages)
    groups = [[Attempt(None, 1), Attempt(0.5, 2)], [Attempt(None, 1)]]
    assert estimator.advantages(groups, refuse=None) == [[0.0, 1.5], [0.0]]
    assert seen == [([[0.5]], [[2]])]


def document(reward, failed=False, group=0, exact=False):
    ones, mask = torch.ones(1), torch.tensor([False, True])
    known = {"reward": reward, "score_failed": failed, "exact_match": exact}
    return Document(torch.tensor([1, 2]), mask, -ones, ones, group, f"{group}", **known)


def test_what_is_left_out_tells_nothing_about_its_prompt():
    lost = document(None, failed=True)
    for mixed in Mixed:
        assert not has_signal([document(1.0, exact=True), lost], mixed)
        assert has_signal([document(1.0, exact=True), document(0.0), lost], mixed)
        assert not has_signal([lost, lost], mixed)


def test_metrics_are_those_of_the_scored_ones_and_count_the_others():
    some = [
        document(1.0),
        document(None, failed=True),
        document(0.5),
        document(-3.0, failed=True, group=1),
    ]
    found = data_metrics(some, 0)
    assert (found["reward"], found["failed_score_fraction"]) == (-0.5, 0.5)
    assert "failed_score_fraction" not in data_metrics(some[::2], 0)
    silent = [document(None, failed=True, group=2)]
    assert data_metrics(silent, 0)["zero_advantage_group_fraction"] == 1


def test_a_batch_in_which_every_score_failed_ends_the_run():
    check_scores([[document(None, failed=True)], [document(0.0)]])
    for reward in (None, -1.0):  # also where another score took its place
        with pytest.raises(DataError, match="the score of each of 2 completions of a batch failed"):
            check_scores([[document(reward, failed=True)] * 2])


def test_the_note_comes_again_as_the_share_doubles(caplog):
    kept = FailedScores(SimpleNamespace(verifier_failure=VerifierFailure.score, failure_score=-1.0))
    late, broken = Failure(TIMEOUT, "was late"), Failure(CRASH, "broke")
    for number, failures in enumerate(
        ([late], [late], [late] * 2, [late] * 3, [broken] * 2, [late] * 4)
    ):
        kept.note(
            [(f"{number}.{i} {failure.reason}", failure) for i, failure in enumerate(failures)], 100
        )
    kept.note([], 100)
    ending = (
        "This note comes again when the share doubles; the metric failed_score_fraction counts all "
        "kinds."
    )
    scored = f"scored with task.failure_score=-1. {ending}"
    assert caplog.messages == [
        f"note: 0.0 was late. For this reason 1 of 100 completions is {scored}",
        f"note: 2.0 was late. For this reason 2 of 100 completions are {scored}",
        f"note: 4.0 broke. For this reason 2 of 100 completions are {scored}",
        f"note: 5.0 was late. For this reason 4 of 100 completions are {scored}",
    ]


def test_in_an_evaluation_they_are_not_right_and_not_in_the_mean_reward():
    def answer(reward, exact=False, failed=False, measures=None):
        return CompletionRow(0, "p", reward=reward, tokens=3), Score(
            reward, exact, measures or {}, failed
        )

    lost = answer(None, failed=True)
    right = answer(1.0, exact=True, measures={"reward/a": 2.0})
    found = _numbers([[right, lost], [answer(-1.0), answer(-2.0)], [lost, lost]])
    assert (found["avg"], found["pass@1"], found["pass@2"]) == (
        -0.25,
        pytest.approx(1 / 6),
        pytest.approx(1 / 3),
    )
    assert found["avg_error"] == pytest.approx(math.sqrt(2 * 1.25**2) / math.sqrt(2))
    assert (found["failed_score_fraction"], found["reward/a"]) == (0.5, 2.0)


def prompts(tmp_path):
    """Overrides of a run of which some scores fail."""
    rows = [{"prompt": f"{i}{i}=", "answer": str(i)} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [
        "task=prompts",
        f"task.path={tmp_path / 'p.jsonl'}",
        "task.verifier=tasks.verifiers_for_tests.sometimes",
    ]
    return [*(one for one in SHORT if not one.startswith("task.")), *chosen]


def test_a_run_goes_on_without_them_also_resumed_and_from_its_recording(tmp_path, capsys):
    chosen = [*prompts(tmp_path), "advantage=grpo", f"rollout.save_path={tmp_path / 'saved'}"]
    train(config_of(*chosen), tmp_path / "whole")
    rows = metrics_of(tmp_path / "whole")
    assert 0 < rows[0]["failed_score_fraction"] < 1
    assert (
        "tasks.verifiers_for_tests.sometimes returned None on the completion"
        in capsys.readouterr().out
    )
    train(config_of(*chosen), copy_as_of(tmp_path / "whole", 1, tmp_path / "cut"), resume=True)
    assert metrics_of(tmp_path / "cut") == rows
    shared = [one for one in chosen if not one.startswith(("rollout", "task", "advantage"))]
    replayed = {}
    for estimator in ("given", "grpo"):
        again = ["rollout=recorded", f"rollout.path={tmp_path / 'saved'}", "aggregation.divisor=4"]
        train(
            config_of(*shared, *again, "rollout.shuffle=false", f"advantage={estimator}"),
            tmp_path / estimator,
        )
        replayed[estimator] = metrics_of(tmp_path / estimator)
        # the model is another one
        for name in ("reward", "failed_score_fraction", "zero_advantage_group_fraction"):
            assert [row.get(name) for row in replayed[estimator]] == [
                row.get(name) for row in rows
            ], name
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in replayed["given"]] == [row[name] for row in replayed["grpo"]]


def test_a_recording_says_which_they_are(tmp_path):
    first = [document(None, failed=True), replace(document(0.5), name="1")]
    write_batch(tmp_path, 0, [replace(one, group=0) for one in first])
    found = read_documents(recorded_rollouts(tmp_path, "dr_grpo"))
    assert [(one.reward, one.score_failed, one.is_excluded) for one in found] == [
        (None, True, True),
        (0.5, False, False),
    ]
    rows = [good_row(i, 0, reward=reward) for i, reward in enumerate((1.0, 0.0, None, 4.0))]
    rows[2] |= {"score_failed": True}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    rollouts = recorded_rollouts(path, "dr_grpo")
    mean = 5 / 3
    expected = [1 - mean, -mean, 0, 4 - mean]
    assert [float(one.advantages[0]) for one in read_documents(rollouts)] == pytest.approx(
        expected, rel=1e-6
    )
    assert [rollouts.outline(i).is_excluded for i in range(4)] == [False, False, True, False]
    rows[2].pop("score_failed")
    with pytest.raises(DataError, match=r"rows.jsonl:3:reward: is missing"):
        recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", rows), "dr_grpo")
    lost = [{**row, "reward": None, "score_failed": True} for row in rows]
    with pytest.raises(DataError, match="needs a document that was scored"):
        recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", lost), "dr_grpo")


def test_a_run_whose_every_score_fails_ends(tmp_path):
    chosen = [*prompts(tmp_path)[:-1], "task.verifier=tasks.verifiers_for_tests.silent"]
    with pytest.raises(DataError, match=r"the score of each of \d+ completions of a batch failed"):
        train(config_of(*chosen), tmp_path / "run")


def test_a_failure_of_one_of_several_verifiers_is_one_of_the_whole_score(tmp_path):
    others = "{verifier: tasks.verifiers_for_tests.scripted, weight: 2}"
    several = (
        f"task.verifiers={{right: {{verifier: tasks.verifiers_for_tests.right}}, other: {others}}}"
    )
    chosen = [*prompts(tmp_path)[:-1], "task.verifier=null", several]
    for more, reward, measures in (
        ([], None, {"reward/right": 0.0}),
        (
            ["task.verifier_failure=score", "task.failure_score=-3"],
            -6.0,
            {"reward/right": 0.0, "reward/other": -3.0},
        ),
    ):
        _, loader = module_and_loader(*last_of_each_key(*chosen, *more))
        task = loader.source.task.task
        found = task.score(task.prompt(0), "none", True)
        assert (found.reward, found.exact_match, found.failed, found.measures) == (
            reward,
            False,
            True,
            measures,
        )
        loader.source.close()
