"""Evaluations of a run: the training is as without them, to the last bit; their numbers; best
checkpoint; goal."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    replace_rows,
    run,
)
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.rollouts.evaluator import mean_and_error, pass_at_k
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations, read_status
from pgtoolkit.training.build import build
from pgtoolkit.training.checkpoint import list_checkpoints
from pgtoolkit.training.train import train

EVALUATED = (
    *("evaluation.every=2", "evaluation.prompts_per_set=6", "evaluation.completions_per_prompt=2"),
    *(
        "evaluation.sets.held_out.seed=77",
        "evaluation.sets.shorter.num_digits=1",
        "evaluation.best=held_out/avg",
    ),
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return run(tmp_path_factory.mktemp("evaluated") / "run", *EVALUATED)


def rows_of(folder):
    """The rows of evaluations.jsonl without what depends on the clock."""
    return [
        {k: v for k, v in row.items() if k not in ("time", "seconds")}
        for row in read_evaluations(folder)
    ]


def assert_same_training(found, expected, steps):
    assert metrics_of(found) == metrics_of(expected)
    for step in steps:
        assert_equal(checkpoint_of(found, step), checkpoint_of(expected, step))


def steps_of(folder):
    return [
        int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints")
    ]


def test_an_evaluation_changes_no_bit_of_the_training(short, evaluated):
    """Metrics, weights, moments, batches in use and random states, after every step."""
    assert_same_training(evaluated, short, range(1, 7))


def test_the_numbers_are_those_of_the_completions(evaluated):
    rows = read_evaluations(evaluated)
    assert [(row["step"], row["set"]) for row in rows] == [
        (s, n) for s in (0, 2, 4, 6) for n in ("held_out", "shorter")
    ]
    documents = {row["step"]: row["documents_seen"] for row in metrics_of(evaluated)} | {0: 0}
    for row in rows:
        assert row["documents"] == documents[row["step"]]
        assert (row["prompts"], row["completions_per_prompt"]) == (6, 2)
        assert row["seconds"] > 0
        name = f"evaluation_{row['set']}_{row['step']:06d}.parquet"
        completions = read_completions(evaluated / "completions" / name)
        digits = 3 if row["set"] == "held_out" else 1
        rewards, right = {}, {}
        for one in completions:
            assert len(one.prompt) == digits + 1
            wanted, text = one.prompt[-2::-1], one.completion.removesuffix("<end>")
            ended = one.finish_reason == "stop"
            same = sum(a == b for a, b in zip(text, wanted, strict=False)) + (
                ended and len(text) == digits
            )
            assert one.reward == pytest.approx(same / (digits + 1))
            rewards.setdefault(one.name, []).append(one.reward)
            right.setdefault(one.name, []).append(ended and text == wanted)
        assert len(rewards) == 6
        expected = {"avg": [sum(group) / 2 for group in rewards.values()]}
        expected |= {
            f"pass@{k}": [pass_at_k(2, sum(group), k) for group in right.values()] for k in (1, 2)
        }
        for number, values in expected.items():
            mean, error = mean_and_error(values)
            assert row[number] == pytest.approx(mean, rel=1e-12)
            assert row[f"{number}_error"] == pytest.approx(error, rel=1e-12)
        assert row["length"] == pytest.approx(sum(one.tokens for one in completions) / 12)
        assert row["truncated"] == pytest.approx(
            sum(one.finish_reason == "length" for one in completions) / 12
        )
    assert len({row["avg"] for row in rows}) > 3


def test_a_resumed_run_goes_on_with_the_same_training_and_evaluations(evaluated, tmp_path):
    """From step 3; the rows of later steps are there, as after a kill before the next
    checkpoint."""
    folder = copy_as_of(evaluated, 3, tmp_path / "run")
    rows = [row | ({"avg": 9.0} if row["step"] > 3 else {}) for row in read_evaluations(folder)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(folder, *EVALUATED, resume=True)
    assert_same_training(folder, evaluated, range(1, 7))
    assert rows_of(folder) == rows_of(evaluated)


def test_an_evaluation_that_was_not_made_is_made_when_the_run_goes_on(evaluated, tmp_path):
    """A signal came before it, or the server that was to sample for it was lost: that of the last
    step."""
    step = 6
    folder = copy_as_of(evaluated, step, tmp_path / "run")
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    (folder / "evaluations.jsonl").write_text(
        "".join(f"{line}\n" for line in lines if json.loads(line)["step"] < step)
    )
    run(folder, *EVALUATED, resume=True)
    assert_same_training(folder, evaluated, range(1, 7))
    assert rows_of(folder) == rows_of(evaluated)


def test_the_best_checkpoint_is_kept_and_of_equal_ones_the_latest(evaluated, tmp_path):
    few = ("trainer.checkpoint_every=100", "trainer.keep_checkpoints=1")
    folder = run(tmp_path / "run", *EVALUATED, *few)
    rows = [row for row in read_evaluations(folder) if row["set"] == "held_out" and row["step"] > 0]
    best = max(rows, key=lambda row: (row["avg"], row["step"]))["step"]
    assert steps_of(folder) == sorted({best, 6})
    # pass@1 is 0 throughout: the latest is the best, and each was until the next came.
    folder = run(tmp_path / "equal", *EVALUATED, *few, "evaluation.best=held_out/pass@2")
    assert {row["pass@2"] for row in read_evaluations(folder) if row["set"] == "held_out"} == {0.0}
    assert steps_of(folder) == [6]


def test_the_best_checkpoint_survives_later_ones_and_a_resume(evaluated, tmp_path):
    """An evaluation of step 2 that is better than all others; the rest is as it was."""
    folder = copy_as_of(evaluated, 3, tmp_path / "run")
    rows = [row | ({"avg": 5.0} if row["step"] == 2 else {}) for row in read_evaluations(folder)]
    replace_rows(folder, "evaluations.jsonl", rows)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    run(folder, *EVALUATED, "trainer.keep_checkpoints=1", resume=True)
    assert steps_of(folder) == [2, 6]


def test_a_goal_ends_the_run_which_can_be_resumed(evaluated, tmp_path, monkeypatch):
    """By a value that is exactly the goal as well."""
    goal = max(
        row["avg"]
        for row in read_evaluations(evaluated)
        if row["set"] == "held_out" and row["step"] in (2, 4)
    )
    first = next(
        row["step"]
        for row in read_evaluations(evaluated)
        if row["set"] == "held_out" and row["step"] > 0 and row["avg"] >= goal
    )
    assert first < 6
    folder = run(
        tmp_path / "run", *EVALUATED, f"trainer.stop_at={goal}", "trainer.checkpoint_every=100"
    )
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("done", first)
    assert status["reason"].startswith(f"trainer.stop_at={goal:g} was reached: held_out/avg is ")
    assert "trainer.stop_at=null" in (folder / "run.log").read_text()
    run(folder, *EVALUATED, f"trainer.stop_at={goal}", resume=True)  # it is reached already
    assert read_status(folder)["step"] == first
    run(folder, *EVALUATED, resume=True)
    assert (read_status(folder)["step"], read_status(folder)["reason"]) == (6, None)
    assert_same_training(folder, evaluated, [6])
    assert rows_of(folder) == rows_of(evaluated)


def test_pgtk_evaluate_gives_the_numbers_of_the_run_and_writes_them(
    evaluated, tmp_path, monkeypatch, capsys
):
    """Of a checkpoint, and of the model that the configuration begins with: to the last bit."""
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(evaluated), "--step", "4"]) == 0
    said = capsys.readouterr().out
    more = [one for one in EVALUATED if not one.startswith(("evaluation.every", "evaluation.best"))]
    settings = ("task.num_digits=3", "model.hidden_size=32", "rollout.max_completion_length=4")
    assert main(["evaluate", *settings, *more]) == 0
    found = {
        row["step"]: folder
        for folder in Path("outputs/evaluations").iterdir()
        for row in rows_of(folder)
    }
    assert sorted(found) == [0, 4]
    for step, folder in found.items():
        assert rows_of(folder) == [row for row in rows_of(evaluated) if row["step"] == step]
        for name in ("held_out", "shorter"):
            file = f"completions/evaluation_{name}_{step:06d}.parquet"
            assert read_completions(folder / file) == read_completions(evaluated / file)
    row = next(row for row in rows_of(evaluated) if row["step"] == 4)
    assert f"{row['avg']:.4f} ± {row['avg_error']:.4f}" in said


def test_the_best_checkpoint_is_exported_and_evaluated(
    short, evaluated, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(short), "folder", "--best"]) == 2
    assert (
        "--best needs a run with evaluations and checkpoints (got none)" in capsys.readouterr().err
    )
    rows = [
        row for row in read_evaluations(evaluated) if row["set"] == "held_out" and row["step"] > 0
    ]
    best = max(rows, key=lambda row: (row["avg"], row["step"]))["step"]
    assert main(["export", str(evaluated), "folder", "--best"]) == 0
    assert f"step {best} of" in capsys.readouterr().out
    assert main(["evaluate", str(evaluated), "--best"]) == 0
    assert f"{evaluated.name}, step {best}\n" in capsys.readouterr().out


def test_prompts_of_training_in_another_file_are_counted_in_a_note(tmp_path, caplog):
    for name, numbers in (("train", range(6)), ("test", (4, 5, 40, 51))):
        text = "".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in numbers)
        (tmp_path / f"{name}.jsonl").write_text(text)
    more = [
        "task=prompts",
        f"task.path={tmp_path}/train.jsonl",
        f"evaluation.sets.test.path={tmp_path}/test.jsonl",
    ]
    shorter = [one for one in SHORT if not one.startswith("task.")]
    with caplog.at_level("WARNING", logger="pgtoolkit"):
        build(config_of(*shorter, "evaluation.every=1", *more))
    assert "2 of the 4 prompts of evaluation set test are also prompts of training" in caplog.text


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A run on prompts of one file with a verifier of its own; evaluated on none, and on another
    file."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "rewards_of_evaluation.py").write_text(
        "def right(completion, answer):\n    return float(completion == answer)\n"
        "def always(completions, **others):\n    return [1.0] * len(completions)\n"
    )
    for name, numbers in (("train", range(6)), ("test", range(40, 45)), ("other", range(50, 54))):
        rows = [{"prompt": f"{i}=", "answer": str(i)} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += ["trainer.max_steps=1", "task=prompts", f"task.path={folder}/train.jsonl"]
    settings += ["task.verifier=rewards_of_evaluation.right"]
    sets = ["evaluation.every=1", f"evaluation.sets.test.path={folder}/test.jsonl"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(folder)
        for name, more in (("without", ()), ("with", sets)):
            train_in(folder / name, *settings, *more)
        yield folder


def train_in(folder, *overrides):
    train(config_of(*overrides), folder, overrides=list(overrides))


def sets_of(said):
    """The name, number of prompts and source of each set that `pgtk evaluate` has shown."""
    words = next(shlex.split(line) for line in said.splitlines() if line.startswith("results"))
    folder = Path(words[1]).parent
    config = OmegaConf.load(folder / "evaluation.yaml")
    rows = read_evaluations(folder)
    return {
        row["set"]: (row["prompts"], Path(config.evaluation.sets[row["set"]].path).name)
        for row in rows
    }


VERIFIER = "task.verifier=rewards_of_evaluation.right"


def test_typing_a_verifier_keeps_the_sets_of_the_run(of_files, capsys):
    assert main(["evaluate", "with", VERIFIER]) == 0
    said = capsys.readouterr().out
    assert sets_of(said) == {"test": (5, "test.jsonl")}
    assert "training prompts" not in said


def test_a_set_that_is_typed_stands_beside_those_of_the_run(of_files, capsys):
    assert main(["evaluate", "with", VERIFIER, "evaluation.sets.more.path=other.jsonl"]) == 0
    expected = {"test": (5, "test.jsonl"), "more": (4, "other.jsonl")}
    assert sets_of(capsys.readouterr().out) == expected


@pytest.mark.parametrize("run", ["with", "without"])
def test_prompts_of_ones_own_take_the_place_of_all_sets(of_files, capsys, run):
    """A run, with the verifier that it was trained with, which scores nothing else."""
    assert main(["evaluate", run, "--on", "other.jsonl", "--on", f"{of_files}/test.jsonl"]) == 0
    said = capsys.readouterr()
    assert sets_of(said.out) == {"other": (4, "other.jsonl"), "test": (5, "test.jsonl")}
    assert "imports rewards_of_evaluation.right (task.verifier)" in said.err


def test_a_run_on_other_prompts_is_scored_by_verifiers_of_ones_own(short, of_files, capsys):
    """A run on numbers backwards, on a file, by two verifiers, here of the task, and there of a
    set."""
    several = (
        "{right: {verifier: exact_match}, always: {verifier: rewards_of_evaluation.always, "
        "weight: 0.5}}"
    )
    few = ["evaluation.completions_per_prompt=2", "evaluation.max_completion_length=7"]
    for words, name, key in (
        (
            ["--on", "other.jsonl", f"task.verifiers={several}"],
            "other",
            "evaluation.sets.other.verifiers",
        ),
        (
            [f"evaluation.sets.mine={{task: prompts, path: other.jsonl, verifiers: {several}}}"],
            "mine",
            "evaluation.sets.mine.verifiers",
        ),
    ):
        assert main(["evaluate", str(short), *words, *few]) == 0
        said = capsys.readouterr()
        assert sets_of(said.out) == {name: (4, "other.jsonl")}
        assert f"imports rewards_of_evaluation.always ({key}.always.verifier)" in said.err
        shown = {
            words[0]: words[1] for words in map(str.split, said.out.splitlines()) if len(words) > 1
        }
        assert float(shown["reward/always"]) == 1
        assert float(shown["avg"]) >= 0.5


def test_prompts_that_are_typed_twice_are_refused(of_files, capsys):
    assert main(["evaluate", "with", "--on", "other.jsonl", "task.path=test.jsonl"]) == 2
    assert (
        "--on other.jsonl needs no other prompts (got task.path=test.jsonl)."
        in capsys.readouterr().err
    )
    assert main(["evaluate", "with", "--on", "train.jsonl"]) == 2
    assert "(got set train: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["with", VERIFIER, "task.path=other.jsonl"],
            "task.path=other.jsonl needs a set that takes it (got none). It would be ignored: the "
            "sets test have their own. Use evaluation.sets.NAME.path=VALUE, for one of them or for "
            "a new set.",
        ),
        (
            ["with", "task=reverse"],
            "task=reverse needs the task of the run, prompts (got reverse). The run has the sets "
            "test, and typing a task does not change them. Use 'evaluation.sets.NAME={task: "
            "reverse, ...}'.",
        ),
        (
            ["without", VERIFIER],
            "pgtk evaluate without needs prompts that training did not ask (got set held_out: ",
        ),
        (["with", VERIFIER, "evaluation.sets.test.path=train.jsonl"], "(got set test: "),
        (
            ["without", VERIFIER],
            "Use evaluation.sets.NAME.path=FILE with other prompts, or --training-prompts to",
        ),
        (
            ["model=tiny", "--training-prompts"],
            "--training-prompts needs a run directory (got null).",
        ),
    ],
)
def test_prompts_that_are_no_set_of_the_run_are_refused(of_files, capsys, words, message):
    assert main(["evaluate", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "results" not in said.out


def test_training_prompts_are_evaluated_on_where_that_is_asked_for(of_files, capsys):
    assert main(["evaluate", "without", VERIFIER, "--training-prompts"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "Warning: evaluated on training prompts."
    assert f"held_out     {of_files}/train.jsonl" in said


def test_the_generator_with_the_seed_of_training_is_refused(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seed = OmegaConf.load(short / "config.yaml").seed
    assert main(["evaluate", str(short), f"evaluation.seed={seed}"]) == 2
    assert (
        "with the same seed asks the same questions. Use another evaluation.seed, or"
        in capsys.readouterr().err
    )


def test_a_run_is_evaluated_with_the_vocabulary_that_it_was_trained_with(
    short, tmp_path, monkeypatch, capsys
):
    """The same prompt from a file, whose characters are fewer: the same completions, to the last
    one."""
    monkeypatch.chdir(tmp_path)
    few = ("evaluation.prompts_per_set=1", "evaluation.completions_per_prompt=8")
    assert main(["evaluate", str(short), *few]) == 0
    (folder,) = Path("outputs/evaluations").iterdir()
    expected = read_completions(folder / "completions" / "evaluation_held_out_000006.parquet")
    (prompt,) = {row.prompt for row in expected}
    assert len({*prompt}) < 6  # the task of the run has all digits
    Path("same.jsonl").write_text(json.dumps({"prompt": prompt, "answer": prompt[-2::-1]}) + "\n")
    of_file = ("task=prompts", "task.path=same.jsonl", "task.verifier=exact_match")
    assert main(["evaluate", str(short), *few, *of_file]) == 0
    (other,) = [path for path in Path("outputs/evaluations").iterdir() if path != folder]
    found = read_completions(other / "completions" / "evaluation_held_out_000006.parquet")
    assert [(row.prompt, row.completion) for row in found] == [
        (row.prompt, row.completion) for row in expected
    ]
