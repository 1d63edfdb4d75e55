"""What a run keeps of the completions it trains on: which, in which files, and that it changes
nothing else."""

import json

import pytest
import torch
from builders.parallel_runs import run_on_ranks
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, run

from pgtoolkit.batch import Document
from pgtoolkit.comparison.samples import facts
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.rollouts import kept_completions
from pgtoolkit.rollouts.kept_completions import chosen
from pgtoolkit.runs.completion_files import completion_files, read_completions
from pgtoolkit.training import recorder
from pgtoolkit.training.train import train


def rows_of(folder):
    return [row for file in completion_files(folder) for row in read_completions(file.path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps that keeps all it trains on, in files of four steps, which is never
    stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_completions, "STEPS_PER_FILE", 4)
        yield run(tmp_path_factory.mktemp("whole") / "run", "rollout.keep_completions=99")


def test_rows_say_what_the_model_wrote_and_what_it_was_worth(whole):
    files = completion_files(whole)
    assert [(f.set, f.first, f.last) for f in files] == [("training", 1, 4), ("training", 5, 8)]
    rows, metrics = rows_of(whole), metrics_of(whole)
    assert [row.step for row in rows] == [1 + i // 8 for i in range(48)]
    assert [row.name for row in rows] == [f"prompt {i // 4}" for i in range(48)]
    for step, row in enumerate(metrics, start=1):
        own = [one for one in rows if one.step == step]
        assert sum(one.reward for one in own) / 8 == pytest.approx(row["reward"])
        assert sum(one.tokens for one in own) / 8 == row["completion_length"]
        assert sum(one.finish_reason == "length" for one in own) / 8 == row["truncated_fraction"]
        assert {one.version for one in own} == {step - 1 - (step - 1) % 2}
    for i, row in enumerate(rows):
        text, end, rest = row.completion.partition("<end>")
        assert len(text) + bool(end) == row.tokens
        assert rest == ""
        assert (end == "") == (row.finish_reason == "length")
        right = sum(a == b for a, b in zip(text, row.answer, strict=False)) + (
            bool(end) and len(text) == 3
        )
        assert row.reward == right / 4
        group = [other.reward for other in rows[i - i % 4 : i - i % 4 + 4]]
        assert row.advantage == pytest.approx(row.reward - sum(group) / 4, abs=1e-6)
        assert row.prompt == row.answer[::-1] + "="


@pytest.mark.parametrize("step", [0, 4, 5])
def test_a_resumed_run_has_the_files_of_one_that_was_never_stopped(
    whole, tmp_path, monkeypatch, step
):
    monkeypatch.setattr(kept_completions, "STEPS_PER_FILE", 4)
    stopped = copy_as_of(whole, step, tmp_path / "stopped")
    (stopped / "completions" / "evaluation_a_000006.parquet").write_bytes(
        b"of the attempt that was killed"
    )
    run(stopped, "rollout.keep_completions=99", resume=True)
    found, expected = (
        {file.path.name: file.path.read_bytes() for file in completion_files(f)}
        for f in (stopped, whole)
    )
    assert found.keys() == expected.keys()
    assert found == expected


def test_a_checkpoint_comes_after_the_completions_up_to_it(tmp_path, monkeypatch):
    """So that a run that is killed right after it loses none."""
    save, kept = recorder.save_checkpoint, []

    def spied(folder, state, *arguments):
        kept.append((state["step"], [row.step for row in rows_of(folder.parent)]))
        return save(folder, state, *arguments)

    monkeypatch.setattr(recorder, "save_checkpoint", spied)
    run(
        tmp_path / "run",
        "rollout.keep_completions=1",
        "trainer.max_steps=3",
        "trainer.checkpoint_every=2",
    )
    assert kept == [(2, [1, 2]), (3, [1, 2, 3])]


def test_training_is_the_same_whatever_is_kept(whole, tmp_path):
    without = run(tmp_path / "without", "rollout.keep_completions=0")
    assert not (without / "completions").exists()
    assert metrics_of(without) == metrics_of(whole)
    assert_equal(checkpoint_of(without, 6), checkpoint_of(whole, 6))
    digests = {
        digest(plain_config(compose([f"rollout.keep_completions={n}"]).config)) for n in (0, 8)
    }
    assert len(digests) == 1


def test_a_run_that_fails_keeps_those_of_its_last_steps(tmp_path):
    with pytest.raises(PgtoolkitError):
        run(
            tmp_path / "run",
            "optimizer.learning_rate=1e5",
            "optimizer.max_grad_norm=null",
            "trainer.checkpoint_every=99",
        )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert (
        {row.step for row in rows_of(tmp_path / "run")}
        == set(range(1, status["step"] + 1))
        != set()
    )


def test_ranks_keep_the_completions_of_all_in_one_file(tmp_path):
    settings = [*SHORT, "trainer.max_steps=2", "rollout.keep_completions=99"]
    folder = run_on_ranks(tmp_path / "run", settings, data_parallel=2)
    assert [(row.step, row.name) for row in rows_of(folder)] == [
        (1 + i // 8, f"prompt {i // 4}") for i in range(16)
    ]
    assert len(list((folder / "completions").iterdir())) == 1


def test_what_a_reward_function_logs_of_a_completion_is_kept_with_it(tmp_path):
    """Also of completions that wait in a checkpoint for their step."""
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
    rows = rows_of(tmp_path / "run")
    assert [row.step for row in rows] == [1] * 8 + [2] * 8
    assert [row.logged for row in rows] == [
        {"text": row.completion.partition("<end>")[0]} for row in rows
    ]
    texts = {row.logged["text"] for row in rows}
    assert len(texts) > 4
    assert facts(rows[0]).startswith(f"text {rows[0].logged['text']}, advantage ")


def documents(*groups):
    """Of each group's rewards its documents, one after the other."""
    return [
        Document(
            torch.tensor([1, 2]),
            torch.tensor([False, True]),
            None,
            torch.zeros(1),
            number,
            "",
            reward=reward,
        )
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
    """First of prompts that teach something, of each the best and the worst; the same prompts
    whenever they come."""
    of_step = documents([1.0, 1.0], [0.0, 1.0], [0.75, 0.0, 0.5], [0.0, 0.0])
    names = {0: "a", 1: "a.jsonl:1", 2: "a.jsonl:5", 3: "b"}
    assert [(one.group, one.reward) for one in chosen(of_step, names, count)] == expected
    backwards = chosen(of_step[::-1], names, count)
    assert sorted((one.group, one.reward) for one in backwards) == sorted(expected)
