"""`rollout.retire_at`: solved prompts are sampled no more. The order of the others is that of a run
without it."""

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from builders.rollout_rows import write_jsonl
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    module_and_loader,
    some_documents,
)

from pgtoolkit.assembly.train import train
from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.group_rollouts import is_solved
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.runs.records import read_status
from pgtoolkit.tasks.tasks import Score

RETIRE = "rollout.retire_at=0.9"


def score_as_the_answer_says(completion: str, answer: str) -> float:
    """A verifier: 1 for "always", 0 for "never", and for "some" 1 if the length is odd."""
    return {"always": 1.0, "never": 0.0, "some": float(len(completion) % 2)}[answer]


def run_with_answers(folder: Path, answers: list[str]) -> list[str]:
    """Write prompts `0`, `1` and so on with these answers; return the settings of their run."""
    rows = [{"prompt": str(number), "answer": answer} for number, answer in enumerate(answers)]
    path = write_jsonl(folder / "prompts.jsonl", rows)
    return [
        *(setting for setting in SHORT if not setting.startswith("task.")),
        "task=prompts",
        f"task.path={path}",
        "task.verifier=rollouts.test_retired.score_as_the_answer_says",
    ]


def documents_of_batch(source: SampledRollouts, batch: int) -> list[Document]:
    first = batch * source.batch_size
    return [source.document(first + place) for place in range(source.batch_size)]


ANSWERS = ["always", "never", "some", "never", "always", "some", "always", "never"]
ALWAYS = [0, 4, 6]


@pytest.mark.parametrize("overrides", [(), ("rollout.max_sampling_rounds=2",)])
def test_solved_prompts_are_asked_once_and_others_in_every_pass(tmp_path, overrides):
    """Eight prompts in batches of four. From the second pass on five are left, in the order that
    the pass has without the key."""
    settings = run_with_answers(tmp_path, ANSWERS)
    _, loader = module_and_loader(*settings, RETIRE, *overrides)
    source = loader.source
    asked = []
    sample = source._sample

    def noted_sample(numbers: list[int]) -> list[list[Document]]:
        asked.extend(source.task.task.row(number) for number in numbers)
        return sample(numbers)

    source._sample = noted_sample
    batches = [documents_of_batch(source, batch) for batch in range(4)]

    counts = Counter(asked)
    assert [counts[row] for row in ALWAYS] == [1, 1, 1]
    assert sorted(asked[:8]) == list(range(8))
    assert source.state_dict()["retired"] == ALWAYS
    assert {document.retired_prompts for document in batches[3]} == {3}
    if not overrides:
        _, loader = module_and_loader(*settings)
        row_of = loader.source.task.task.row
        without = []
        for batch in range(8):
            documents = documents_of_batch(loader.source, batch)
            without += [row_of(document.group) for document in documents[::4]]
        assert asked[:8] == without[:8]
        later = [row for row in without[8:] if row not in ALWAYS]
        assert asked[8:] == later[: len(asked) - 8]


@pytest.mark.parametrize(
    ("retire_at", "num_right", "is_retired"), [(0.5, 2, True), (0.75, 2, False), (0.75, 3, True)]
)
def test_a_prompt_retires_if_the_share_of_right_completions_reaches_retire_at(
    tmp_path, monkeypatch, retire_at, num_right, is_retired
):
    """Groups have four completions, of which the first `num_right` are right."""
    settings = run_with_answers(tmp_path, ["some"] * 8)
    _, loader = module_and_loader(*settings, f"rollout.retire_at={retire_at}")
    task = loader.source.task.task
    scores = task.scores
    numbers = iter(range(16))

    def fixed_scores(responses: list) -> list[Score]:
        return [
            dataclasses.replace(score, exact_match=next(numbers) % 4 < num_right)
            for score in scores(responses)
        ]

    monkeypatch.setattr(task, "scores", fixed_scores)
    next(iter(loader))
    assert len(loader.source.state_dict()["retired"]) == (4 if is_retired else 0)


def test_completions_whose_score_failed_do_not_count_for_retirement():
    document = some_documents()[0]

    def group(*outcomes: bool | None) -> list[Document]:
        """outcomes: of each completion whether it is right; None: its score failed."""
        return [
            dataclasses.replace(document, exact_match=outcome is True, score_failed=outcome is None)
            for outcome in outcomes
        ]

    assert is_solved(group(True, None, None), 1.0)
    assert not is_solved(group(True, False, None), 0.6)
    assert not is_solved(group(None, None), 0.1)
    assert is_solved(group(*[True] * 9, False), 0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "num_steps"),
    [
        ((), 4),
        (("rollout.max_staleness=3", "rollout.old_log_probs=sampling"), 4),
        (("accumulation.last_step=carry", "accumulation.docs_per_step=12"), 3),
    ],
    ids=["short", "asynchronous", "carry"],
)
def test_a_run_ends_when_every_prompt_is_solved_and_resumes_to_the_bit(
    tmp_path, overrides, num_steps
):
    """Eight prompts, all solved in the first pass, in two batches of 16 completions."""
    settings = run_with_answers(tmp_path, ["always"] * 8)
    config = config_of(*settings, RETIRE, *overrides, "trainer.max_steps=20")
    uninterrupted = tmp_path / "uninterrupted"
    train(config, uninterrupted)
    rows = metrics_of(uninterrupted)
    assert len(rows) == num_steps
    assert rows[-1]["retired_prompts"] == 8
    status = read_status(uninterrupted)
    assert status["state"] == "done"
    assert status["reason"].startswith(
        f"the data ended after step {num_steps} of 20: every prompt is solved, by "
        "rollout.retire_at=0.9"
    )
    for step in (1, num_steps - 1):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        train(config, resumed, resume=True)
        assert metrics_of(resumed) == rows
        expected = checkpoint_of(uninterrupted, num_steps)
        assert_equal(checkpoint_of(resumed, num_steps), expected)


def test_a_resume_without_retire_at_asks_solved_prompts_again(tmp_path):
    settings = [*run_with_answers(tmp_path, ["always", "never"] * 4), "trainer.max_steps=4"]
    train(config_of(*settings, RETIRE), tmp_path / "run")
    state = checkpoint_of(tmp_path / "run", 4)["data"]
    _, loader = module_and_loader(*settings)
    loader.load_state_dict(state)
    assert loader.source.state_dict()["retired"] == []
    _, loader = module_and_loader(*settings, RETIRE)
    loader.load_state_dict(state)
    assert loader.source.state_dict()["retired"] == [0, 2, 4, 6]


def test_a_run_whose_first_batch_retires_every_prompt_and_leaves_nothing_to_train_is_refused(
    tmp_path,
):
    settings = run_with_answers(tmp_path, ["always"] * 4)
    _, loader = module_and_loader(*settings, RETIRE, "rollout.uninformative=drop")
    with pytest.raises(DataError, match=r"^the first batch has retired every prompt"):
        list(islice(loader, 1))
