"""A run keeps completions that it trains on: which, in which files, with which numbers.

Rewards and advantages are computed again from the texts; training is bit-equal without any kept.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders.documents import document_of
from builders.parallel_runs import run_on_ranks
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, run

from pgtoolkit.assembly.train import train
from pgtoolkit.comparison.samples import facts
from pgtoolkit.completion import Prompt
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.document import Document
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.rollouts import kept_completions
from pgtoolkit.rollouts.kept_completions import chosen, row_of
from pgtoolkit.runs.completion_files import (
    CompletionRow,
    completion_files,
    drop_completions_after,
    read_completions,
    write_completions,
)
from pgtoolkit.training import recorder


def kept_rows(folder: Path) -> list[CompletionRow]:
    return [row for file in completion_files(folder) for row in read_completions(file.path)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Iterator[Path]:
    """Train six steps and keep all completions, in files of four steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_completions, "STEPS_PER_FILE", 4)
        yield run(tmp_path_factory.mktemp("uninterrupted") / "run", "rollout.keep_completions=99")


def test_kept_rows_make_up_the_metrics_of_their_steps(uninterrupted):
    files = completion_files(uninterrupted)
    assert [(file.set, file.first, file.last) for file in files] == [
        ("training", 1, 4),
        ("training", 5, 8),
    ]
    rows = kept_rows(uninterrupted)
    assert [row.step for row in rows] == [1 + i // 8 for i in range(48)]
    assert [row.name for row in rows] == [f"prompt {i // 4}" for i in range(48)]
    for step, metrics in enumerate(metrics_of(uninterrupted), start=1):
        of_step = [row for row in rows if row.step == step]
        num_truncated = sum(row.finish_reason == "length" for row in of_step)
        assert sum(row.reward for row in of_step) / 8 == pytest.approx(metrics["reward"])
        assert sum(row.exact_match for row in of_step) / 8 == metrics["exact_match"]
        assert sum(row.tokens for row in of_step) / 8 == metrics["completion_length"]
        assert num_truncated / 8 == metrics["truncated_fraction"]
        assert {row.version for row in of_step} == {step - 1 - (step - 1) % 2}


def test_kept_rows_have_the_reward_and_advantage_of_their_texts(uninterrupted):
    rows = kept_rows(uninterrupted)
    for i, row in enumerate(rows):
        text, end, rest = row.completion.partition("<end>")
        assert len(text) + bool(end) == row.tokens
        assert rest == ""
        assert (end == "") == (row.finish_reason == "length")
        right = sum(a == b for a, b in zip(text, row.answer, strict=False)) + (
            bool(end) and len(text) == 3
        )
        assert row.reward == right / 4
        assert row.exact_match is (text == row.answer and bool(end))
        group = [other.reward for other in rows[i - i % 4 : i - i % 4 + 4]]
        assert row.advantage == pytest.approx(row.reward - sum(group) / 4, abs=1e-6)
        assert row.prompt == row.answer[::-1] + "="


def bytes_of_files(folder: Path) -> dict[str, bytes]:
    return {file.path.name: file.path.read_bytes() for file in completion_files(folder)}


@pytest.mark.parametrize("step", [0, 4, 5])
def test_a_resumed_run_has_the_files_of_an_uninterrupted_one(
    uninterrupted, tmp_path, monkeypatch, step
):
    """A later file of the attempt that was killed is removed."""
    monkeypatch.setattr(kept_completions, "STEPS_PER_FILE", 4)
    resumed = copy_as_of(uninterrupted, step, tmp_path / "resumed")
    (resumed / "completions" / "evaluation_a_000006.parquet").write_bytes(b"of step 6")
    run(resumed, "rollout.keep_completions=99", resume=True)
    assert bytes_of_files(resumed) == bytes_of_files(uninterrupted)


def test_a_damaged_file_is_set_aside_and_said(uninterrupted, tmp_path):
    folder = copy_as_of(uninterrupted, 5, tmp_path / "damaged")
    path = folder / "completions" / "steps_000001-000004.parquet"
    path.write_bytes(path.read_bytes()[:-60])
    (note,) = drop_completions_after(folder, 5)
    assert f"{path} is damaged (" in note
    assert "up to step 4, are not made again. The file is now steps_000001-000004.damaged." in note
    assert {row.step for row in kept_rows(folder)} == {5}
    assert drop_completions_after(folder, 5) == []


def test_completions_are_written_before_the_checkpoint_of_their_step(tmp_path, monkeypatch):
    """A run that is killed right after a checkpoint loses none."""
    steps_at_checkpoints = []

    def record_steps_and(save, folder, state, *arguments):
        steps = [row.step for row in kept_rows(folder.parent)]
        steps_at_checkpoints.append((state["step"], steps))
        return save(folder, state, *arguments)

    for name in ("save_behind", "save_checkpoint"):
        save = functools.partial(record_steps_and, getattr(recorder, name))
        monkeypatch.setattr(recorder, name, save)
    run(
        tmp_path / "run",
        "rollout.keep_completions=1",
        "trainer.max_steps=3",
        "trainer.checkpoint_every=2",
    )
    assert steps_at_checkpoints == [(2, [1, 2]), (3, [1, 2, 3])]


def test_keeping_completions_changes_neither_training_nor_digest(uninterrupted, tmp_path):
    without = run(tmp_path / "without", "rollout.keep_completions=0")
    assert not (without / "completions").exists()
    assert metrics_of(without) == metrics_of(uninterrupted)
    assert_equal(checkpoint_of(without, 6), checkpoint_of(uninterrupted, 6))
    digests = {
        digest(plain_config(compose([f"rollout.keep_completions={n}"]).config)) for n in (0, 8)
    }
    assert len(digests) == 1


def test_a_run_that_fails_keeps_the_completions_of_all_its_steps(tmp_path):
    with pytest.raises(PgtoolkitError):
        run(
            tmp_path / "run",
            "optimizer.learning_rate=1e5",
            "optimizer.max_grad_norm=null",
            "trainer.checkpoint_every=99",
        )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["step"] > 0
    assert {row.step for row in kept_rows(tmp_path / "run")} == set(range(1, status["step"] + 1))


def test_completions_of_all_ranks_are_kept_in_one_file(tmp_path):
    settings = [*SHORT, "trainer.max_steps=2", "rollout.keep_completions=99"]
    folder = run_on_ranks(tmp_path / "run", settings, data_parallel=2)
    assert [(row.step, row.name) for row in kept_rows(folder)] == [
        (1 + i // 8, f"prompt {i // 4}") for i in range(16)
    ]
    assert len(list((folder / "completions").iterdir())) == 1


def test_values_logged_by_a_reward_function_are_kept_with_their_completion(tmp_path):
    """Also of completions that wait for their step in a checkpoint."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(8))
    )
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += [
        "task=prompts",
        f"task.path={questions}",
        "task.verifier=tasks.rewards_for_tests.logs_its_text",
    ]
    for steps in (1, 2):
        config = config_of(*settings, f"trainer.max_steps={steps}", "rollout.keep_completions=99")
        train(config, tmp_path / "run", resume=steps == 2)
    rows = kept_rows(tmp_path / "run")
    assert [row.step for row in rows] == [1] * 8 + [2] * 8
    assert [row.logged for row in rows] == [
        {"text": row.completion.partition("<end>")[0]} for row in rows
    ]
    texts = {row.logged["text"] for row in rows}
    assert len(texts) > 4
    assert facts(rows[0]).startswith(f"wrong, text {rows[0].logged['text']}, advantage ")


@pytest.mark.parametrize(
    ("reward", "exact_match", "score_failed", "expected"),
    [
        (1.0, True, False, ["right"]),
        (0.5, False, False, ["wrong"]),
        (0.5, None, False, []),
        (None, False, True, ["scoring failed"]),
        (0.5, False, True, ["scoring failed"]),  # task.failure_score
        # By two verifiers, of which the first says that it is right, and the second fails.
        (None, True, True, ["right", "scoring failed"]),
    ],
)
def test_a_completion_that_could_not_be_scored_is_not_called_wrong(
    reward, exact_match, score_failed, expected, tmp_path
):
    fields = {"reward": reward, "exact_match": exact_match, "score_failed": score_failed}
    document = document_of(3, model_version=0, **fields)
    prompt = Prompt("1+1=", "2", 0, "p.jsonl:1")
    path = tmp_path / "steps_000001-000100.parquet"
    write_completions(path, [row_of(1, document, prompt, character_tokenizer("012+="), 0.0)])
    (row,) = read_completions(path)
    assert facts(row).split(", ") == [*expected, *facts(row).split(", ")[-4:]]
    # An earlier version said False where scoring had failed, and had no such column.
    if reward is None:
        former = replace(row, exact_match=exact_match, score_failed=False)
        assert facts(former) == facts(row)


def documents_of_groups(*groups: list[float]) -> list[Document]:
    """Return a document for each reward of each group."""
    return [
        document_of(2, group=number, reward=reward)
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, []),
        (1, [(2, 0.75)]),
        (2, [(2, 0.75), (2, 0.0)]),
        (3, [(2, 0.75), (2, 0.0), (2, 0.5)]),
        (4, [(1, 1.0), (2, 0.75), (2, 0.0), (2, 0.5)]),
        (5, [(1, 0.0), (1, 1.0), (2, 0.75), (2, 0.0), (2, 0.5)]),
        (
            99,
            [
                (0, 1.0),
                (0, 1.0),
                (1, 0.0),
                (1, 1.0),
                (2, 0.75),
                (2, 0.0),
                (2, 0.5),
                (3, 0.0),
                (3, 0.0),
            ],
        ),
    ],
)
def test_the_best_and_worst_of_several_prompts_are_kept(count, expected):
    """Prompts whose rewards differ come first, whatever the order of the documents."""
    documents = documents_of_groups([1.0, 1.0], [0.0, 1.0], [0.75, 0.0, 0.5], [0.0, 0.0])
    # The checksum of "g", whose rewards are equal, is the lowest.
    names = {0: "g", 1: "a.jsonl:1", 2: "a.jsonl:5", 3: "b"}
    kept = chosen(documents, names, count)
    assert [(document.group, document.reward) for document in kept] == expected
    backwards = chosen(documents[::-1], names, count)
    assert sorted((document.group, document.reward) for document in backwards) == sorted(expected)


def test_completions_are_kept_once_where_they_are_trained_twice(tmp_path):
    """A batch makes two steps in each of two passes."""
    folder = run(tmp_path / "run", "rollout.passes=2", "trainer.max_steps=5")
    assert [row.step for row in kept_rows(folder)] == [1] * 8 + [2] * 8 + [5] * 8
