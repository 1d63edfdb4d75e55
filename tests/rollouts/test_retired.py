"""Prompts that are solved and asked no more: rollout.retire_at."""

import dataclasses
import json
from collections import Counter
from itertools import islice

import pytest
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

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.group_rollouts import is_solved
from pgtoolkit.runs.records import read_status
from pgtoolkit.training.train import train

PROMPTS = [setting for setting in SHORT if not setting.startswith("task.")]
RETIRE = "rollout.retire_at=0.9"


def solved(completion, answer):
    """Score a completion as the prompt's answer says: always, never, or by a length that some
    completions have."""
    return {"always": 1.0, "never": 0.0, "some": float(len(completion) % 2)}[answer]


def settings_of(folder, answers):
    """Settings of a run whose prompts, `0`, `1` and so on, have these answers."""
    rows = [
        json.dumps({"prompt": f"{number}", "answer": answer})
        for number, answer in enumerate(answers)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    verifier = "task.verifier=rollouts.test_retired.solved"
    return [*PROMPTS, "task=prompts", f"task.path={folder / 'prompts.jsonl'}", verifier]


def rows_of(source, batches):
    """The rows that each of the first batches asks, in their order."""
    groups = []
    for batch in range(batches):
        documents = [
            source.document(batch * source.batch_size + place) for place in range(source.batch_size)
        ]
        groups.append(
            [
                source.task.task.row(document.group)
                for document in documents[:: source._rollout.group_size]
            ]
        )
    return groups


@pytest.mark.parametrize("more", [(), ("rollout.max_sampling_rounds=2",)])
def test_solved_prompts_are_asked_once_and_others_in_every_pass(tmp_path, more):
    """Eight prompts in batches of four: after the first pass only five are left, in the order of
    every pass."""
    answers = ["always", "never", "some", "never", "always", "some", "always", "never"]
    settings = settings_of(tmp_path, answers)
    _, loader = module_and_loader(*settings, *more)
    plain = [row for batch in rows_of(loader.source, 8) for row in batch]
    _, loader = module_and_loader(*settings, RETIRE, *more)
    source = loader.source
    asked = []
    sample = source._sample
    source._sample = lambda numbers: (
        asked.extend(source.task.task.row(number) for number in numbers) or sample(numbers)
    )
    rows_of(source, 4)
    always = [row for row, answer in enumerate(answers) if answer == "always"]
    counts = Counter(asked)
    assert {row: counts[row] for row in always} == dict.fromkeys(always, 1)
    assert source.state_dict()["retired"] == always
    # Every pass asks each prompt that is left once, in the pass's own order.
    first, later = asked[:8], asked[8:]
    assert sorted(first) == list(range(8))
    if not more:
        assert first == plain[:8]
        expected = [row for row in plain[8:] if row not in always]
        assert later == expected[: len(later)]
    documents = [
        source.document(3 * source.batch_size + place) for place in range(source.batch_size)
    ]
    assert {document.retired_prompts for document in documents} == {3}


@pytest.mark.parametrize(
    ("least", "right", "is_retired"), [(0.5, 2, True), (0.75, 2, False), (0.75, 3, True)]
)
def test_a_prompt_retires_from_the_share_on(tmp_path, monkeypatch, least, right, is_retired):
    """Of four completions; those that could not be scored do not count."""
    _, loader = module_and_loader(
        *settings_of(tmp_path, ["some"] * 8), f"rollout.retire_at={least}"
    )
    calls = iter(range(16))
    task = loader.source.task.task
    score = task.scores
    monkeypatch.setattr(
        task,
        "scores",
        lambda responses: [
            dataclasses.replace(score_of, exact_match=next(calls) % 4 < right)
            for score_of in score(responses)
        ],
    )
    next(iter(loader))
    assert len(loader.source.state_dict()["retired"]) == (4 if is_retired else 0)


def test_completions_that_nobody_could_score_are_no_attempts():
    document = some_documents()[0]

    def group(*outcomes):
        return [
            dataclasses.replace(document, exact_match=outcome is True, score_failed=outcome is None)
            for outcome in outcomes
        ]

    assert is_solved(group(True, None, None), 1.0)
    assert not is_solved(group(True, False, None), 0.6)
    assert not is_solved(group(None, None), 0.1)
    assert is_solved(group(*[True] * 9, False), 0.9)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("rollout.max_staleness=3", "rollout.old_log_probs=sampling"),
        ("accumulation.last_step=carry", "accumulation.docs_per_step=12"),
    ],
)
def test_a_run_ends_once_every_prompt_is_solved_and_resumes_to_the_bit(tmp_path, more):
    """Eight prompts, all solved in the first pass, whose two batches of 16 completions are trained
    on."""
    settings = [*settings_of(tmp_path, ["always"] * 8), RETIRE, *more, "trainer.max_steps=20"]
    uninterrupted = tmp_path / "whole"
    train(config_of(*settings), uninterrupted)
    rows = metrics_of(uninterrupted)
    status = read_status(uninterrupted)
    assert status["state"] == "done"
    ended = (
        f"the data ended after step {len(rows)} of 20: every prompt is solved, by "
        "rollout.retire_at=0.9"
    )
    assert status["reason"].startswith(ended)
    assert len(rows) == (3 if "accumulation.last_step=carry" in more else 4)
    assert rows[-1]["retired_prompts"] == 8
    for step in (1, len(rows) - 1):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        train(config_of(*settings), resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, len(rows)), checkpoint_of(uninterrupted, len(rows)))


def test_a_resume_without_the_key_asks_solved_prompts_again(tmp_path):
    settings = [*settings_of(tmp_path, ["always", "never"] * 4), "trainer.max_steps=8"]
    uninterrupted = tmp_path / "whole"
    train(config_of(*settings, RETIRE), uninterrupted)
    _, loader = module_and_loader(*settings)
    loader.load_state_dict(checkpoint_of(uninterrupted, 4)["data"])
    assert loader.source.state_dict()["retired"] == []
    _, loader = module_and_loader(*settings, RETIRE)
    loader.load_state_dict(checkpoint_of(uninterrupted, 4)["data"])
    assert loader.source.state_dict()["retired"] == [0, 2, 4, 6]


def test_nothing_to_train_on_says_that_the_policy_solves_all(tmp_path):
    settings = settings_of(tmp_path, ["always"] * 4)
    _, loader = module_and_loader(*settings, RETIRE, "rollout.uninformative=drop")
    with pytest.raises(DataError, match=r"^the first batch has retired every prompt"):
        list(islice(loader, 1))
