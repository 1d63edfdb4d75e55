"""Evaluations of a run: their numbers, best checkpoints, goals, and `pgtk evaluate`.

Training is compared bit for bit with a run without evaluations, numbers with the completions.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from builders.refusals import refusal
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

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.launch.evaluate import Evaluation, differences
from pgtoolkit.rollouts.evaluator import mean_and_error, pass_at_k
from pgtoolkit.runs.completion_files import CompletionRow, read_completions, write_completions
from pgtoolkit.runs.records import read_evaluations, read_status
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.training.checkpoint import list_checkpoints

EVALUATED = (
    "evaluation.every=2",
    "evaluation.prompts_per_set=6",
    "evaluation.completions_per_prompt=2",
    "evaluation.sets.held_out.seed=77",
    "evaluation.sets.shorter.num_digits=1",
    "evaluation.best=held_out/avg",
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """Return the short run, evaluated on two sets at steps 0, 2, 4 and 6."""
    return run(tmp_path_factory.mktemp("evaluated") / "run", *EVALUATED)


def rows_without_clock(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if key not in ("time", "seconds")}
        for row in read_evaluations(folder)
    ]


def held_out_rows(folder: Path) -> list[dict]:
    """Return the evaluations on held_out that may make a checkpoint the best."""
    return [row for row in read_evaluations(folder) if row["set"] == "held_out" and row["step"] > 0]


def best_step(folder: Path) -> int:
    return max(held_out_rows(folder), key=lambda row: (row["avg"], row["step"]))["step"]


def assert_same_training(folder: Path, expected: Path, steps: Iterable[int]) -> None:
    assert metrics_of(folder) == metrics_of(expected)
    for step in steps:
        assert_equal(checkpoint_of(folder, step), checkpoint_of(expected, step))


def checkpoint_steps(folder: Path) -> list[int]:
    return [
        int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints")
    ]


def test_an_evaluation_changes_no_bit_of_the_training(short, evaluated):
    """Metrics, weights, moments, batches in use and random states, after every step."""
    assert_same_training(evaluated, short, range(1, 7))


def share_of_right_places(row: CompletionRow, num_digits: int) -> float:
    """Return the reward of the task: the share of digits, and the end, at their right places."""
    text = row.completion.removesuffix("<end>")
    right = sum(a == b for a, b in zip(text, row.prompt[-2::-1], strict=False))
    ended = row.finish_reason == "stop" and len(text) == num_digits
    return (right + ended) / (num_digits + 1)


def test_the_numbers_of_an_evaluation_are_those_of_its_completions(evaluated):
    rows = read_evaluations(evaluated)
    assert [(row["step"], row["set"]) for row in rows] == [
        (step, name) for step in (0, 2, 4, 6) for name in ("held_out", "shorter")
    ]
    documents = {row["step"]: row["documents_seen"] for row in metrics_of(evaluated)} | {0: 0}
    for row in rows:
        assert row["documents"] == documents[row["step"]]
        assert (row["prompts"], row["completions_per_prompt"]) == (6, 2)
        assert row["seconds"] > 0
        name = f"evaluation_{row['set']}_{row['step']:06d}.parquet"
        completions = read_completions(evaluated / "completions" / name)
        digits = 3 if row["set"] == "held_out" else 1
        rewards = {}
        num_right = {}
        for completion in completions:
            assert len(completion.prompt) == digits + 1
            reward = share_of_right_places(completion, digits)
            assert completion.reward == pytest.approx(reward)
            rewards.setdefault(completion.name, []).append(reward)
            num_right[completion.name] = num_right.get(completion.name, 0) + (reward == 1)
        assert len(rewards) == 6
        expected = {
            "avg": [sum(group) / 2 for group in rewards.values()],
            "pass@1": [pass_at_k(2, count, 1) for count in num_right.values()],
            "pass@2": [pass_at_k(2, count, 2) for count in num_right.values()],
        }
        for number, values in expected.items():
            mean, error = mean_and_error(values)
            assert row[number] == pytest.approx(mean, rel=1e-12)
            assert row[f"{number}_error"] == pytest.approx(error, rel=1e-12)
        num_truncated = sum(completion.finish_reason == "length" for completion in completions)
        num_tokens = sum(completion.tokens for completion in completions)
        assert row["length"] == pytest.approx(num_tokens / 12)
        assert row["truncated"] == pytest.approx(num_truncated / 12)
    assert len({row["avg"] for row in rows}) > 3


def test_a_resumed_run_has_the_training_and_evaluations_of_an_uninterrupted_one(
    evaluated, tmp_path
):
    """From step 3, with rows of later steps, as a kill before the next checkpoint leaves them."""
    folder = copy_as_of(evaluated, 3, tmp_path / "run")
    rows = [row | ({"avg": 9.0} if row["step"] > 3 else {}) for row in read_evaluations(folder)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(folder, *EVALUATED, resume=True)
    assert_same_training(folder, evaluated, range(1, 7))
    assert rows_without_clock(folder) == rows_without_clock(evaluated)


def test_a_missing_evaluation_of_the_last_step_is_made_at_a_resume(evaluated, tmp_path):
    """A signal came before it, or the server that was to sample for it was lost."""
    folder = copy_as_of(evaluated, 6, tmp_path / "run")
    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    (folder / "evaluations.jsonl").write_text(
        "".join(f"{line}\n" for line in lines if json.loads(line)["step"] < 6)
    )
    run(folder, *EVALUATED, resume=True)
    assert_same_training(folder, evaluated, range(1, 7))
    assert rows_without_clock(folder) == rows_without_clock(evaluated)


KEEP_ONE = ("trainer.checkpoint_every=100", "trainer.keep_checkpoints=1")


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    folder = run(tmp_path / "run", *EVALUATED, *KEEP_ONE)
    assert checkpoint_steps(folder) == sorted({best_step(folder), 6})


def test_the_latest_of_equally_good_checkpoints_is_the_best(tmp_path):
    """pass@2 is 0 throughout: each evaluated step is the best until the next."""
    folder = run(tmp_path / "run", *EVALUATED, *KEEP_ONE, "evaluation.best=held_out/pass@2")
    assert {row["pass@2"] for row in read_evaluations(folder) if row["set"] == "held_out"} == {0.0}
    assert checkpoint_steps(folder) == [6]


def test_the_best_checkpoint_survives_later_ones_and_a_resume(evaluated, tmp_path):
    """Step 2 has a better evaluation than all others."""
    folder = copy_as_of(evaluated, 3, tmp_path / "run")
    rows = [row | ({"avg": 5.0} if row["step"] == 2 else {}) for row in read_evaluations(folder)]
    replace_rows(folder, "evaluations.jsonl", rows)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    run(folder, *EVALUATED, "trainer.keep_checkpoints=1", resume=True)
    assert checkpoint_steps(folder) == [2, 6]


@pytest.mark.slow
def test_a_goal_that_is_reached_exactly_ends_the_run_which_can_be_resumed(evaluated, tmp_path):
    rows = held_out_rows(evaluated)
    goal = max(row["avg"] for row in rows if row["step"] < 6)
    first = next(row["step"] for row in rows if row["avg"] >= goal)
    assert first < 6
    folder = run(
        tmp_path / "run", *EVALUATED, f"trainer.stop_at={goal}", "trainer.checkpoint_every=100"
    )
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("done", first)
    assert status["reason"].startswith(f"trainer.stop_at={goal:g} was reached: held_out/avg is ")
    assert "trainer.stop_at=null" in (folder / "run.log").read_text()
    run(folder, *EVALUATED, f"trainer.stop_at={goal}", resume=True)  # the goal is reached already
    assert read_status(folder)["step"] == first
    run(folder, *EVALUATED, resume=True)
    assert read_status(folder)["step"] == 6
    assert read_status(folder)["reason"] is None
    assert_same_training(folder, evaluated, [6])
    assert rows_without_clock(folder) == rows_without_clock(evaluated)


def test_pgtk_evaluate_gives_the_numbers_and_completions_of_the_run(
    evaluated, tmp_path, monkeypatch, capsys
):
    """A checkpoint, and the model that the configuration begins with, to the last bit."""
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(evaluated), "--step", "4"]) == 0
    output = capsys.readouterr().out
    sets = [
        setting
        for setting in EVALUATED
        if not setting.startswith(("evaluation.every", "evaluation.best"))
    ]
    settings = ("task.num_digits=3", "model.hidden_size=32", "rollout.max_completion_length=4")
    assert main(["evaluate", *settings, *sets]) == 0
    folders = {
        row["step"]: folder
        for folder in Path("outputs/evaluations").iterdir()
        for row in read_evaluations(folder)
    }
    assert sorted(folders) == [0, 4]
    expected = rows_without_clock(evaluated)
    for step, folder in folders.items():
        assert rows_without_clock(folder) == [row for row in expected if row["step"] == step]
        for name in ("held_out", "shorter"):
            file = f"completions/evaluation_{name}_{step:06d}.parquet"
            assert read_completions(folder / file) == read_completions(evaluated / file)
    row = next(row for row in expected if row["step"] == 4)
    assert f"{row['avg']:.4f} ± {row['avg_error']:.4f}" in output


def test_the_best_checkpoint_is_exported_and_evaluated(evaluated, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    best = best_step(evaluated)
    assert main(["export", str(evaluated), "folder", "--best"]) == 0
    assert f"step {best} of" in capsys.readouterr().out
    assert main(["evaluate", str(evaluated), "--best"]) == 0
    assert f"{evaluated.name}, step {best}\n" in capsys.readouterr().out
    # As long as in training, which the folder says; else that is 256 for a folder.
    longest = json.loads(Path("folder/generation_config.json").read_text())["max_new_tokens"]
    assert longest == OmegaConf.load(evaluated / "config.yaml").rollout.max_completion_length
    few = ["task.num_digits=1", "evaluation.prompts_per_set=1"]
    assert main(["evaluate", "folder", *few]) == 0
    printed = capsys.readouterr().out
    assert f"at most {longest} tokens, by" in printed
    assert "as max_new_tokens in folder/generation_config.json says" in printed
    assert main(["evaluate", "folder", *few, "evaluation.max_completion_length=2"]) == 0
    printed = capsys.readouterr().out
    assert "at most 2 tokens, by" in printed
    assert "max_new_tokens" not in printed


def test_an_export_of_the_best_checkpoint_needs_evaluations(short, tmp_path, capsys):
    error = refusal(capsys, "export", short, tmp_path / "model", "--best")
    assert "--best needs a run with evaluations and checkpoints (got none)" in error


def test_a_folder_of_adapters_is_answered_with_what_makes_a_model_of_it(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    error = refusal(capsys, "evaluate", tmp_path)
    assert "(got adapters, adapter_config.json)" in error
    assert error.rstrip().endswith(f"Use pgtk export {tmp_path} MERGED and pgtk evaluate MERGED.")


def write_questions(path: Path, numbers: Iterable[int]) -> None:
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_of_training_in_another_file_are_counted_in_a_note(tmp_path, caplog, capsys):
    """By check, and as a run begins."""
    write_questions(tmp_path / "train.jsonl", range(6))
    write_questions(tmp_path / "test.jsonl", (4, 5, 40, 51))
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += [
        "task=prompts",
        f"task.path={tmp_path}/train.jsonl",
        "evaluation.every=1",
        f"evaluation.sets.test.path={tmp_path}/test.jsonl",
    ]
    with caplog.at_level("WARNING", logger="pgtoolkit"):
        build(config_of(*settings))
    said = "2 of the 4 prompts of evaluation set test are also prompts of training"
    assert said in caplog.text
    assert main(["check", *settings, "tracking=none"]) == 0
    assert capsys.readouterr().out.count(said) == 1


def test_check_counts_numbers_that_a_set_asks_again(capsys):
    assert main(["check", "task.num_digits=3", "evaluation.every=20", "tracking=none"]) == 0
    task = make_task(ReverseTaskSettings(name="reverse", num_digits=3), 10**9)
    again = 128 - len({task.prompt(number).text for number in range(128)})
    output = capsys.readouterr().out
    assert f"{again} of the 128 prompts of held_out repeat an earlier one: " in output
    assert "also prompts of training" not in output


def test_an_evaluation_counts_numbers_that_a_run_without_a_held_out_set_was_trained_on(
    short, tmp_path, monkeypatch, capsys
):
    """The run has asked four numbers in each of its three batches."""
    monkeypatch.chdir(tmp_path)
    digits = ReverseTaskSettings(name="reverse", num_digits=3)
    trained = {make_task(digits, 0).prompt(number).text for number in range(12)}
    seed = next(seed for seed in range(1, 999) if make_task(digits, seed).prompt(0).text in trained)
    words = [f"evaluation.seed={seed}", "evaluation.prompts_per_set=1"]
    assert main(["evaluate", str(short), *words]) == 0
    said = "note: 1 of the 1 prompts of evaluation set held_out are also prompts of training"
    assert said in "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def folder_of_files(tmp_path_factory) -> Iterator[Path]:
    """Enter a folder with the files train, test and other, and two runs on prompts of train.

    Their verifier is the user's. The run `without` has no evaluations, the run `with` a set of
    test.
    """
    folder = tmp_path_factory.mktemp("files")
    (folder / "rewards_of_evaluation.py").write_text(
        "def right(completion, answer):\n    return float(completion == answer)\n"
        "def always(completions, **others):\n    return [1.0] * len(completions)\n"
    )
    write_questions(folder / "train.jsonl", range(6))
    write_questions(folder / "test.jsonl", range(40, 45))
    write_questions(folder / "other.jsonl", range(50, 54))
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += ["trainer.max_steps=1", "task=prompts", f"task.path={folder}/train.jsonl"]
    settings += ["task.verifier=rewards_of_evaluation.right"]
    sets = ["evaluation.every=1", f"evaluation.sets.test.path={folder}/test.jsonl"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(folder)
        train(config_of(*settings), folder / "without", overrides=settings)
        train(config_of(*settings, *sets), folder / "with", overrides=[*settings, *sets])
        yield folder


def evaluated_sets(output: str) -> dict[str, tuple[int, str]]:
    """Return the number of prompts and the file of each set in the results of `pgtk evaluate`."""
    words = next(shlex.split(line) for line in output.splitlines() if line.startswith("results"))
    folder = Path(words[1]).parent
    config = OmegaConf.load(folder / "evaluation.yaml")
    rows = read_evaluations(folder)
    return {
        row["set"]: (row["prompts"], Path(config.evaluation.sets[row["set"]].path).name)
        for row in rows
    }


VERIFIER = "task.verifier=rewards_of_evaluation.right"


def test_typing_a_verifier_keeps_the_sets_of_the_run(folder_of_files, capsys):
    assert main(["evaluate", "with", VERIFIER]) == 0
    output = capsys.readouterr().out
    assert evaluated_sets(output) == {"test": (5, "test.jsonl")}
    assert "training prompts" not in output


def test_a_typed_set_is_added_to_those_of_the_run(folder_of_files, capsys):
    assert main(["evaluate", "with", VERIFIER, "evaluation.sets.more.path=other.jsonl"]) == 0
    expected = {"test": (5, "test.jsonl"), "more": (4, "other.jsonl")}
    assert evaluated_sets(capsys.readouterr().out) == expected


def test_a_set_of_more_prompts_than_are_taken_says_so(folder_of_files, capsys):
    few = ["evaluation.prompts_per_set=3", "evaluation.completions_per_prompt=1"]
    assert main(["evaluate", "with", "--on", "other.jsonl", *few]) == 0
    said = "note: evaluation set other has 3 of 4 prompts; evaluation.prompts_per_set=4 takes all."
    assert said in capsys.readouterr().out
    of_set = "evaluation.sets.other={path: other.jsonl, prompts: 2}"
    assert main(["evaluate", "with", VERIFIER, of_set, *few[1:]]) == 0
    assert "has 2 of 4 prompts; evaluation.sets.other.prompts=4 takes" in capsys.readouterr().out


def test_models_on_the_same_prompts_are_compared_prompt_by_prompt(folder_of_files, capsys):
    on = ["--on", "other.jsonl", "evaluation.completions_per_prompt=2"]
    assert main(["evaluate", "with", "without", *on]) == 0
    output = capsys.readouterr().out
    assert output.count("results  ") == 2
    assert output.splitlines()[-1] == (
        "difference   without less with on other, 4 prompts: pass@1 +0.0000 ± 0.0000, "
        "avg +0.0000 ± 0.0000"
    )
    problem = refusal(capsys, "evaluate", "with", "without")
    assert "pgtk evaluate with without needs models that are measured alike (got other" in problem
    assert "Use --on FILE, which names the sets of all." in problem


def test_the_difference_is_that_of_each_prompt_s_means(tmp_path):
    """Prompts a, b and c; the second model has no score of c, and d is unknown to the first."""
    rewards = {
        "first": {"a": [0.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 1.0]},
        "second": {"a": [1.0, 1.0], "b": [0.5, 0.0], "c": [None, None], "d": [1.0, 1.0]},
    }
    measured = []
    for name, of_prompts in rewards.items():
        rows = [
            CompletionRow(step=3, name=prompt, reward=x, exact_match=None if x is None else x >= 1)
            for prompt, values in of_prompts.items()
            for x in values
        ]
        folder = tmp_path / name
        (folder / "completions").mkdir(parents=True)
        write_completions(folder / "completions" / "evaluation_test_000003.parquet", rows)
        measured.append(Evaluation("", folder, [{"set": "test"}]))
    # pass@1: +0.5 and 0; avg: +0.5 and +0.25. Errors: deviations over the root of two.
    assert differences(measured, ["A", "B"]) == (
        "difference   B less A on test, 2 prompts: pass@1 +0.2500 ± 0.2500, avg +0.3750 ± 0.1250"
    )


def test_completions_that_nobody_could_score_are_not_right_in_the_difference(tmp_path):
    """The second model has one score of prompt a and none of prompt b."""
    rewards = {
        "first": {"a": [0.0, 0.0], "b": [0.0, 0.0]},
        "second": {"a": [1.0, None], "b": [None, None]},
    }
    measured = []
    for name, of_prompts in rewards.items():
        rows = [
            CompletionRow(
                step=3,
                name=prompt,
                reward=x,
                exact_match=None if x is None else x >= 1,
                score_failed=x is None,
            )
            for prompt, values in of_prompts.items()
            for x in values
        ]
        folder = tmp_path / name
        (folder / "completions").mkdir(parents=True)
        write_completions(folder / "completions" / "evaluation_test_000003.parquet", rows)
        measured.append(Evaluation("", folder, [{"set": "test"}]))
    # pass@1: +0.5 and 0; avg: +1 of a alone.
    assert differences(measured, ["A", "B"]) == (
        "difference   B less A on test: pass@1 +0.2500 ± 0.2500 (2 prompts), avg +1.0000 (1 prompt)"
    )


def test_prompts_of_files_replace_all_sets(folder_of_files, capsys):
    """The verifier that the run was trained with scores them."""
    files = ["--on", "other.jsonl", "--on", f"{folder_of_files}/test.jsonl"]
    assert main(["evaluate", "with", *files]) == 0
    output = capsys.readouterr()
    expected = {"other": (4, "other.jsonl"), "test": (5, "test.jsonl")}
    assert evaluated_sets(output.out) == expected
    assert "imports rewards_of_evaluation.right (task.verifier)" in output.err


TWO_VERIFIERS = (
    "{right: {verifier: exact_match}, "
    "always: {verifier: rewards_of_evaluation.always, weight: 0.5}}"
)
SET_OF_FILE = f"{{task: prompts, path: other.jsonl, verifiers: {TWO_VERIFIERS}}}"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--on", "other.jsonl", f"task.verifiers={TWO_VERIFIERS}"], "other"),
        ([f"evaluation.sets.mine={SET_OF_FILE}"], "mine"),
    ],
    ids=["of the task", "of a set"],
)
def test_a_run_on_a_generated_task_is_evaluated_on_a_file_with_verifiers_of_the_user(
    short, folder_of_files, capsys, words, name
):
    few = ["evaluation.completions_per_prompt=2", "evaluation.max_completion_length=7"]
    assert main(["evaluate", str(short), *words, *few]) == 0
    output = capsys.readouterr()
    assert evaluated_sets(output.out) == {name: (4, "other.jsonl")}
    key = f"evaluation.sets.{name}.verifiers.always.verifier"
    assert f"imports rewards_of_evaluation.always ({key})" in output.err
    lines = [line.split() for line in output.out.splitlines()]
    numbers = {line[0]: line[1] for line in lines if len(line) > 1}
    assert float(numbers["reward/always"]) == 1
    assert float(numbers["avg"]) >= 0.5


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
            "--training-prompts needs a run directory (got none).",
        ),
        (
            ["with", "--on", "other.jsonl", "task.path=test.jsonl"],
            "--on other.jsonl needs no other prompts (got task.path=test.jsonl).",
        ),
        (["with", "--on", "train.jsonl"], "(got set train: "),
    ],
)
def test_prompts_of_training_and_ignored_settings_of_prompts_are_refused(
    folder_of_files, capsys, words, message
):
    assert main(["evaluate", *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "results" not in output.out


def test_wrong_flags_of_an_evaluation_are_refused_with_wrong_settings(folder_of_files, capsys):
    assert main(["evaluate", "--step=3", "--on", "no_file", "evaluation.temperature=-3"]) == 2
    message = capsys.readouterr().err
    assert "  --step=3 needs a run directory (got none)." in message
    assert "  evaluation.temperature=-3 needs a number from 0 to 100" in message
    assert main(["evaluate", "--step=3", "--on", "no_file"]) == 2
    assert f"  --on {folder_of_files}/no_file needs an existing file" in capsys.readouterr().err
    assert main(["evaluate", "with", "--step=999", "evaluation.temperature=-3"]) == 2
    message = capsys.readouterr().err
    assert "--step=999 needs " in message
    assert "  evaluation.temperature=-3 needs a number from 0 to 100" in message


def test_the_columns_of_other_files_are_named_once_by_keys_that_can_be_typed(
    folder_of_files, capsys
):
    row = {"question": "31=", "solution": 31}
    (folder_of_files / "renamed.jsonl").write_text(json.dumps(row) + "\n")
    words = ["evaluate", "with", "--on", "renamed.jsonl"]
    assert main(words) == 3
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "  renamed.jsonl:1:prompt: is missing; the row has question, solution",
        "  renamed.jsonl:1:answer: is missing; the row has question, solution",
        "  1 of the 1 row read lacks prompt. Use task.prompt_field=question.",
        "  1 of the 1 row read lacks answer. Use task.answer_field=solution.",
    ]
    assert main([*words, "sampler.max_sequences=-1"]) == 2
    assert [line[:23] for line in capsys.readouterr().err.splitlines()[1:4]] == [
        "  sampler.max_sequences",
        "  the prompts of --on /",
        "  renamed.jsonl:1:promp",
    ]
    assert main([*words, "task.prompt_field=question", "task.answer_field=solution"]) == 0
    assert evaluated_sets(capsys.readouterr().out) == {"renamed": (1, "renamed.jsonl")}


def test_prompts_of_training_in_a_file_of_another_name_are_counted_by_evaluate(
    folder_of_files, capsys
):
    write_questions(folder_of_files / "partly.jsonl", (0, 55, 5, 5))
    assert main(["evaluate", "with", "--on", "partly.jsonl", "--on", "other.jsonl"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "are also prompts" in line]
    assert notes == [
        "note: 3 of the 4 prompts of evaluation set partly are also prompts of training: what is "
        "measured on those is not held out."
    ]


def test_training_prompts_are_evaluated_with_a_warning_if_asked_for(folder_of_files, capsys):
    assert main(["evaluate", "without", VERIFIER, "--training-prompts"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "Warning: evaluated on training prompts (held_out)."
    assert "are also prompts of training" not in output  # the warning has said so
    assert f"held_out     {folder_of_files}/train.jsonl" in output


def test_a_generator_with_the_seed_of_training_is_refused(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seed = OmegaConf.load(short / "config.yaml").seed
    error = refusal(capsys, "evaluate", short, f"evaluation.seed={seed}")
    assert "with the same seed asks the same questions. Use another evaluation.seed, or" in error


def test_a_run_is_evaluated_with_the_vocabulary_that_it_was_trained_with(
    short, tmp_path, monkeypatch
):
    """A prompt from a file with fewer characters has the same completions, to the last one."""
    monkeypatch.chdir(tmp_path)
    few = ("evaluation.prompts_per_set=1", "evaluation.completions_per_prompt=8")
    assert main(["evaluate", str(short), *few]) == 0
    (folder,) = Path("outputs/evaluations").iterdir()
    expected = read_completions(folder / "completions" / "evaluation_held_out_000006.parquet")
    (prompt,) = {row.prompt for row in expected}
    assert len({*prompt}) < 6  # the task of the run has all digits
    Path("same.jsonl").write_text(json.dumps({"prompt": prompt, "answer": prompt[-2::-1]}) + "\n")
    prompts = ("task=prompts", "task.path=same.jsonl", "task.verifier=exact_match")
    assert main(["evaluate", str(short), *few, *prompts]) == 0
    (other,) = [path for path in Path("outputs/evaluations").iterdir() if path != folder]
    rows = read_completions(other / "completions" / "evaluation_held_out_000006.parquet")
    assert [(row.prompt, row.completion) for row in rows] == [
        (row.prompt, row.completion) for row in expected
    ]
