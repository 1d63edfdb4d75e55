"""Completions whose score failed: they are left out of baselines and of the loss, or get the score
that is configured, and are counted. References are the same functions on the scored completions."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders.documents import document_of
from builders.rollout_rows import all_documents, good_row, recorded_rollouts, write_jsonl
from builders.runs import SHORT, config_of, copy_as_of, metrics_of, module_and_loader

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.assembly.train import train
from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import ESTIMATORS, group_advantages, over_batch
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.evaluator import _numbers
from pgtoolkit.rollouts.group_rollouts import check_scores, has_signal
from pgtoolkit.rollouts.recording import write_batch
from pgtoolkit.rollouts.settings import Mixed
from pgtoolkit.runs.completion_files import CompletionRow
from pgtoolkit.tasks.failed_scores import FailedScore, FailedScores
from pgtoolkit.tasks.process_pool import CRASH, TIMEOUT, Failure
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.settings import PromptsTaskSettings, VerifierFailure
from pgtoolkit.tasks.tasks import Score


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_baseline_is_that_of_the_scored_completions(estimator):
    rewards = [[1.0, None, 0.0, 0.25], [None, None], [None, 2.0], [3.0, 1.0]]
    groups = [
        [Attempt(reward, 2 + place) for place, reward in enumerate(group)] for group in rewards
    ]
    advantages = Estimator(estimator).advantages(groups, refuse=None)

    # These two refuse a group of one, which has an advantage of 0 here.
    needs_others = estimator in ("rloo", "pass_at_k")
    parts = [
        group_advantages(estimator, [1.0, 0.0, 0.25], [2, 4, 5]),
        [0.0] if needs_others else group_advantages(estimator, [2.0], [3]),
        group_advantages(estimator, [3.0, 1.0], [2, 3]),
    ]
    first, second, third = over_batch(estimator, parts, [[1.0, 0.0, 0.25], [2.0], [3.0, 1.0]])
    assert advantages == [[first[0], 0.0, *first[1:]], [0.0, 0.0], [0.0, *second], third]


def test_a_users_function_gets_the_scored_completions_alone():
    calls = []

    def advantages(
        rewards: list[list[float]], lengths: list[list[int]], measures: object
    ) -> list[list[float]]:
        calls.append((rewards, lengths))
        return [[reward + 1 for reward in group] for group in rewards]

    estimator = Estimator("custom", {}, "mine", advantages)
    groups = [[Attempt(None, 1), Attempt(0.5, 2)], [Attempt(None, 1)]]
    assert estimator.advantages(groups, refuse=None) == [[0.0, 1.5], [0.0]]
    assert calls == [([[0.5]], [[2]])]


def document(
    reward: float | None, failed: bool = False, group: int = 0, exact_match: bool = False
) -> Document:
    """Return a document of one prompt token and one trained token."""
    return document_of(
        2,
        old_log_probs=-1.0,
        advantages=1.0,
        group=group,
        reward=reward,
        score_failed=failed,
        exact_match=exact_match,
    )


@pytest.mark.parametrize("mixed", Mixed)
def test_a_failed_score_gives_a_group_no_signal(mixed):
    failed = document(None, failed=True)
    estimator = Estimator("grpo")
    assert not has_signal([document(1.0, exact_match=True), failed], estimator, mixed)
    assert has_signal([document(1.0, exact_match=True), document(0.0), failed], estimator, mixed)
    assert not has_signal([failed, failed], estimator, mixed)


def test_metrics_count_failed_scores_and_average_the_rewards_that_exist():
    documents = [
        document(1.0),
        document(None, failed=True),
        document(0.5),
        document(-3.0, failed=True, group=1),
    ]
    metrics = data_metrics(documents, 0)
    assert metrics["reward"] == -0.5
    assert metrics["failed_score_fraction"] == 0.5
    scored = [documents[0], documents[2]]
    assert "failed_score_fraction" not in data_metrics(scored, 0)
    failed = [document(None, failed=True, group=2)]
    assert data_metrics(failed, 0)["zero_advantage_group_fraction"] == 1


def test_a_batch_in_which_every_score_failed_is_refused():
    check_scores([[document(None, failed=True)], [document(0.0)]])
    for reward in (None, -1.0):  # -1: with a score that takes the place of the failed one
        with pytest.raises(DataError, match="the score of each of 2 completions of a batch failed"):
            check_scores([[document(reward, failed=True)] * 2])


def test_the_note_on_failed_scores_comes_again_when_their_share_doubles(caplog):
    """Notes are counted for each giver and each kind of failure."""
    settings = SimpleNamespace(verifier_failure=VerifierFailure.score, failure_score=-1.0)
    scores = FailedScores(settings)
    late = ("a", Failure(TIMEOUT, "was late"))
    broken = ("a", Failure(CRASH, "broke"))
    other = ("b", Failure(TIMEOUT, "was late"))
    batches = ([late], [late], [late] * 2, [late] * 3 + [other], [broken] * 2, [late] * 4, [])
    for number, failures in enumerate(batches):
        scores.note([FailedScore(*failed, str(number)) for failed in failures], 100)
    ending = (
        "This note comes again when the share doubles; the metric failed_score_fraction counts all "
        "kinds."
    )
    scored = f"scored with task.failure_score=-1. {ending}"
    assert caplog.messages == [
        f"note: a was late on 0. For this reason 1 of 100 completions is {scored}",
        f"note: a was late on 2. For this reason 2 of 100 completions are {scored}",
        f"note: b was late on 3. For this reason 1 of 100 completions is {scored}",
        f"note: a broke on 4. For this reason 2 of 100 completions are {scored}",
        f"note: a was late on 5. For this reason 4 of 100 completions are {scored}",
    ]


@pytest.mark.parametrize("held_out", [False, True])
def test_each_verifier_that_fails_is_named_with_its_own_count(tmp_path, caplog, held_out):
    functions = {name: f"tasks.verifiers_for_tests.{name}" for name in ("silent", "sometimes")}
    verifiers = {name: {"verifier": path} for name, path in functions.items()}
    settings = PromptsTaskSettings(path=str(four_prompts(tmp_path)), verifiers=verifiers)
    task = make_task(settings, 0, held_out=held_out)
    prompt = task.prompt(0)
    # `silent` scores none, and `sometimes` those that do not begin with a 2.
    texts = ["1", "2", "3", "22", "4"]
    task.scores([Response(prompt, text, True) for text in texts])
    out = "the mean reward avg" if held_out else "training and of mean rewards"
    consequence = f"of 5 completions are out of {out} (task.verifier_failure=exclude). "
    firsts = [("silent", "1", 5), ("sometimes", "2", 2)]
    assert len(caplog.messages) == len(firsts)
    for message, (name, text, count) in zip(caplog.messages, firsts, strict=True):
        assert message.startswith(
            f"note: task.verifiers.{name}.verifier={functions[name]} returned None on the "
            f"completion {text!r} of the prompt at "
        )
        assert f"For this reason {count} {consequence}" in message


def test_in_an_evaluation_a_failed_score_is_wrong_and_not_in_the_mean_reward():
    def answer(
        reward: float | None,
        exact_match: bool | None = False,
        failed: bool = False,
        measures: dict[str, float] | None = None,
    ) -> tuple[CompletionRow, Score]:
        row = CompletionRow(0, "p", reward=reward, tokens=3)
        return row, Score(reward, exact_match, measures or {}, failed)

    failed = answer(None, failed=True)
    right = answer(1.0, exact_match=True, measures={"reward/a": 2.0})
    unknown = answer(-2.0, exact_match=None)  # not scored by the first verifier
    groups = [[right, failed], [answer(-1.0), unknown], [failed, failed]]
    numbers = _numbers(groups)
    assert numbers["avg"] == -0.25
    assert _numbers([*groups, [unknown, unknown]])["pass@1"] == numbers["pass@1"]
    assert numbers["pass@1"] == pytest.approx(1 / 6)
    assert numbers["pass@2"] == pytest.approx(1 / 3)
    assert numbers["avg_error"] == pytest.approx(math.sqrt(2 * 1.25**2) / math.sqrt(2))
    assert numbers["failed_score_fraction"] == 0.5
    assert numbers["reward/a"] == 2.0


def four_prompts(folder: Path) -> Path:
    rows = [{"prompt": f"{digit}{digit}=", "answer": str(digit)} for digit in range(4)]
    return write_jsonl(folder / "prompts.jsonl", rows)


def run_with_verifier(folder: Path, verifier: str) -> list[str]:
    """Write four prompts into `folder`; return the overrides of a run with this verifier."""
    path = four_prompts(folder)
    return [
        *(setting for setting in SHORT if not setting.startswith("task.")),
        "task=prompts",
        f"task.path={path}",
        f"task.verifier={verifier}",
    ]


@pytest.mark.slow
def test_a_run_with_failed_scores_resumes_and_trains_again_from_its_recording(tmp_path, capsys):
    overrides = [
        *run_with_verifier(tmp_path, "tasks.verifiers_for_tests.sometimes"),
        "advantage=grpo",
        f"rollout.save_path={tmp_path / 'saved'}",
    ]
    train(config_of(*overrides), tmp_path / "uninterrupted")
    rows = metrics_of(tmp_path / "uninterrupted")
    assert 0 < rows[0]["failed_score_fraction"] < 1
    note = "tasks.verifiers_for_tests.sometimes returned None on the completion"
    assert note in capsys.readouterr().out

    resumed = copy_as_of(tmp_path / "uninterrupted", 1, tmp_path / "resumed")
    train(config_of(*overrides), resumed, resume=True)
    assert metrics_of(resumed) == rows

    shared = [
        setting for setting in overrides if not setting.startswith(("rollout", "task", "advantage"))
    ]
    recorded = [
        "rollout=recorded",
        f"rollout.path={tmp_path / 'saved'}",
        "aggregation.divisor=4",
        "rollout.shuffle=false",
    ]
    repeated = {}
    for estimator in ("given", "grpo"):
        folder = tmp_path / estimator
        train(config_of(*shared, *recorded, f"advantage={estimator}"), folder)
        repeated[estimator] = metrics_of(folder)
        # The loss differs from the first run's, since the model is another one.
        for name in ("reward", "failed_score_fraction", "zero_advantage_group_fraction"):
            numbers = [row.get(name) for row in repeated[estimator]]
            assert numbers == [row.get(name) for row in rows], name
    for name in ("loss", "grad_norm"):
        losses = [row[name] for row in repeated["given"]]
        assert losses == [row[name] for row in repeated["grpo"]]


def test_a_recording_says_which_scores_failed(tmp_path):
    scored = replace(document(0.5), name="1")
    write_batch(tmp_path, 0, [document(None, failed=True), scored])
    first, second = all_documents(recorded_rollouts(tmp_path, "dr_grpo"))
    assert (first.reward, first.score_failed, first.is_excluded) == (None, True, True)
    assert (second.reward, second.score_failed, second.is_excluded) == (0.5, False, False)


def test_recorded_rows_may_lack_the_reward_only_where_the_score_failed(tmp_path):
    rows = [good_row(i, 0, reward=reward) for i, reward in enumerate((1.0, 0.0, None, 4.0))]
    rows[2]["score_failed"] = True
    rollouts = recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", rows), "dr_grpo")
    mean = 5 / 3
    advantages = [float(document.advantages[0]) for document in all_documents(rollouts)]
    assert advantages == pytest.approx([1 - mean, -mean, 0, 4 - mean], rel=1e-6)
    excluded = [rollouts.outline(place).is_excluded for place in range(4)]
    assert excluded == [False, False, True, False]

    for each in (50.0, [0, 0, 50.0, 50.0, 50.0]):
        given = [row | {"advantage": 0.5} for row in rows]
        given[2]["advantage"] = each
        of_given = recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", given), "given")
        advantages = [document.advantages.tolist() for document in all_documents(of_given)]
        assert advantages == [[0.5] * 3, [0.5] * 3, [0] * 3, [0.5] * 3]

    del rows[2]["score_failed"]
    with pytest.raises(DataError, match=r"rows.jsonl:3:reward: is missing"):
        recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", rows), "dr_grpo")

    failed = [row | {"reward": None, "score_failed": True} for row in rows]
    with pytest.raises(DataError, match="needs a document that was scored"):
        recorded_rollouts(write_jsonl(tmp_path / "rows.jsonl", failed), "dr_grpo")


def test_a_run_in_which_every_score_fails_ends(tmp_path):
    overrides = run_with_verifier(tmp_path, "tasks.verifiers_for_tests.silent")
    with pytest.raises(DataError, match=r"the score of each of \d+ completions of a batch failed"):
        train(config_of(*overrides), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "reward", "measures"),
    [
        ([], None, {"reward/right": 0.0}),
        (
            ["task.verifier_failure=score", "task.failure_score=-3"],
            -6.0,
            {"reward/right": 0.0, "reward/other": -3.0},
        ),
    ],
    ids=["left out", "scored"],
)
def test_a_score_failed_if_that_of_one_of_its_verifiers_did(tmp_path, settings, reward, measures):
    right = "right: {verifier: tasks.verifiers_for_tests.right}"
    other = "other: {verifier: tasks.verifiers_for_tests.scripted, weight: 2}"
    verifiers = f"task.verifiers={{{right}, {other}}}"
    _, loader = module_and_loader(*run_with_verifier(tmp_path, "null"), verifiers, *settings)
    task = loader.source.task.task
    score = task.score(task.prompt(0), "none", True)
    loader.source.close()
    assert score.reward == reward
    assert score.exact_match is False
    assert score.failed is True
    assert score.measures == measures
