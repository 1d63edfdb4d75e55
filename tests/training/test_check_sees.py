"""`pgtk check` lists what would stop a run at its start, in the words of the run's own refusal."""

import json
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, last_of_each_key, with_model

from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.launch.check import add_notes_on_prompts, check, notes, page_sections, problems

REDUCERS = """
import torch
def raising(totals, *, mask, **others): raise RuntimeError("a reducer's own error")
def undefined(totals, *, mask, **others): return torch.full(mask.shape, torch.nan)
def too_few(totals, *, mask, **others): return torch.ones(1)
def equal(totals, *, mask, **others): return torch.ones(mask.shape) / totals.num_tokens
"""


@pytest.fixture
def folder_of_user(tmp_path, monkeypatch) -> Path:
    """Enter a folder with reducers, three recorded rows, prompts with a character that the tiny
    model lacks, and a dangling link."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("reducers_of_a_user.py").write_text(REDUCERS)
    row = {
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "old_log_probs": [0.0, -1.0, -1.0],
        "advantage": 1.0,
    }
    rows = [json.dumps(row | {"id": number}) + "\n" for number in range(3)]
    Path("three.jsonl").write_text("".join(rows))
    Path("foreign.jsonl").write_text(json.dumps({"prompt": "1ß=", "answer": "1"}) + "\n")
    Path("dangling").symlink_to("/nowhere/at/all")
    return tmp_path


FOREIGN = "task: prompts, path: foreign.jsonl, prompt_field: prompt, answer_field: answer"
RECORDED = ("rollout=recorded", "rollout.path=three.jsonl", "advantage=given", "loss=grpo")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.stop=['<end>']"], "rollout.stop=['<end>'] needs texts without special tokens"),
        (["aggregation.reducer=reducers_of_a_user.raising"], "a reducer's own error"),
        (["aggregation.reducer=reducers_of_a_user.undefined"], "(got NaN or infinity)"),
        (
            ["aggregation.reducer=reducers_of_a_user.too_few"],
            "needs to return one finite weight per token",
        ),
        (
            ["kl=k3_ratio", "kl.coefficient=1", "kl.reference_prompt='{prompt}Q'"],
            "it has no token for 'Q'",
        ),
        (
            ["evaluation.every=1", f"evaluation.sets={{a: {{{FOREIGN}}}}}"],
            "it has no token for 'ß'",
        ),
        ([*RECORDED, "accumulation.last_step=drop"], "(got 3 documents in a batch)"),
        (["rollout.lag=1000000"], "rollout.lag=1000000 needs at most 1000"),
        (
            ["rollout.save_path=dangling"],
            "rollout.save_path=dangling needs a place where folders can be made",
        ),
        (
            ["rollout.save_path=/proc/1/x"],
            "rollout.save_path=/proc/1/x needs a place where folders can be made",
        ),
    ],
)
def test_check_lists_the_problem_that_would_stop_the_run(
    folder_of_user, capsys, overrides, message
):
    assert main(["check", "tracking=none", *overrides]) == 2
    page = capsys.readouterr().out
    assert message in page.partition("Problems (1)\n")[2]


GOOD_SET = (
    "task=prompts",
    "rollout.max_completion_length=3",
    "evaluation.every=1",
    "evaluation.sets.a.path=my_task.jsonl",
)
JUDGE = "broken_judge_of_a_user.judge"


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (["task.path=bad.jsonl"], "the prompts of task.path=bad.jsonl cannot be used: 1 problem\n"),
        (
            ["task.path=good.jsonl", f"task.verifier={JUDGE}"],
            f"task.verifier={JUDGE} must score every text, ",
        ),
        (
            ["task.path=good.jsonl", "evaluation.sets.a.prompt_field=asked"],
            "the prompts of evaluation.sets.a.path=my_task.jsonl cannot be used: 1 problem\n",
        ),
    ],
)
def test_a_problem_of_the_task_is_told_once_and_of_no_set_and_of_a_set_with_its_keys(
    tmp_path, monkeypatch, overrides, beginning
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("good.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("my_task.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    Path("bad.jsonl").write_text('{"prompt": "1+2="}\n')
    code = "def judge(completion, answer): return answer\n"
    Path("broken_judge_of_a_user.py").write_text(code)
    (problem,) = problems(check(["tracking=none", *GOOD_SET, *overrides]))
    assert problem.startswith(beginning)


WRONG_RATE = "optimizer.learning_rate=-1"
NO_PROMPTS = ("task=prompts", "task.path=bad.jsonl")
OF_PROMPTS = "the prompts of task.path=bad.jsonl cannot be used"


@pytest.mark.parametrize(
    ("overrides", "beginnings"),
    [
        ([*NO_PROMPTS, WRONG_RATE], [WRONG_RATE, OF_PROMPTS]),
        ([*NO_PROMPTS, "trainer.max_step=3"], ["Unknown key 'trainer.max_step'", OF_PROMPTS]),
        ([*NO_PROMPTS, "task.verifier_seconds=-1"], ["task.verifier_seconds=-1", OF_PROMPTS]),
        ([*NO_PROMPTS, "task.verifier=no.such"], ["task.verifier=no.such", OF_PROMPTS]),
        ([*NO_PROMPTS, "task.verifier=loud_judge.judge", WRONG_RATE], [WRONG_RATE, OF_PROMPTS]),
        ([*NO_PROMPTS, "evaluation.every=-1"], ["evaluation.every=-1", OF_PROMPTS]),
        (
            ["task=conversation", "task.path=bad.jsonl", "task.environment=loud_judge.Environment"],
            [OF_PROMPTS, "task.environment=loud_judge.Environment needs a class that can be"],
        ),
        (
            ["rollout=recorded", "rollout.path=bad.jsonl", WRONG_RATE],
            [WRONG_RATE, "the recorded rollouts cannot be trained on"],
        ),
        (
            ["rollout.save_path=dangling", "tracking.run_name=../x"],
            ["tracking.run_name=../x", "rollout.save_path=dangling"],
        ),
        # What was meant by these may be the file, the column, or another way to rollouts.
        ([*NO_PROMPTS, "task.prompt_feld=question"], ["Unknown key 'task.prompt_feld'"]),
        ([*NO_PROMPTS, "prompt_feld=question"], ["Unknown key 'prompt_feld'"]),
        ([*NO_PROMPTS, "experiment=nope"], ["experiment=nope"]),
        ([*NO_PROMPTS, "rollout=recordd"], ["rollout=recordd"]),
        (["rollout=recorded", "rollout.path=bad.jsonl", "loss=gpso"], ["loss=gpso"]),
    ],
)
def test_problems_of_keys_and_of_files_are_told_together(
    tmp_path, monkeypatch, overrides, beginnings
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("bad.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    Path("loud_judge.py").write_text("raise AssertionError('imported for a refused command')\n")
    Path("dangling").symlink_to("/nowhere/at/all")
    told = problems(check(["tracking=none", *overrides]))
    assert len(told) == len(beginnings)
    for problem, beginning in zip(told, beginnings, strict=True):
        assert problem.startswith(beginning)


def test_a_key_that_hydra_lacks_hides_no_problem_of_the_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = problems(check(["hydra.sweep.dirr=x", "loss=grpo,gpso"], multirun=True))
    assert [problem.partition(" needs ")[0] for problem in told] == [
        "hydra.sweep.dirr=x",
        "loss=gpso: loss=gpso",
    ]


def test_notes_on_the_prompts_of_each_run_of_a_sweep_name_the_runs_that_they_are_of(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, questions in (("a", "12"), ("b", "34"), ("held_out", "35")):
        rows = [f'{{"prompt": "{question}+12345=", "answer": "0"}}\n' for question in questions]
        Path(f"{name}.jsonl").write_text("".join(rows))
    overrides = ["tracking=none", "task=prompts", "task.path=a.jsonl,b.jsonl", "seed=0,1"]
    held_out = ["evaluation.every=5", "evaluation.sets.x.path=held_out.jsonl"]
    shown = dict(page_sections(check([*overrides, *held_out], multirun=True)))["Notes"]
    assert shown == [
        "task.path=b.jsonl seed=0, and 1 more: 1 of the 2 prompts of evaluation set x are also "
        "prompts of training: what is measured on those is not held out."
    ]


def test_a_sweep_says_before_it_starts_which_prompts_of_training_and_of_sets_repeat(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    Path("held_out.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 2)
    task = ["tracking=none", "task=prompts", "task.path=train.jsonl", "seed=0,1"]
    held_out = ["evaluation.every=5", "evaluation.sets.x.path=held_out.jsonl"]
    sweep = check([*task, *held_out], multirun=True)
    add_notes_on_prompts(sweep)
    assert notes(sweep) == [
        "2 of the 3 prompts of task.path=train.jsonl repeat an earlier one: training asks it more "
        "often than others.",
        "1 of the 2 prompts of x repeat an earlier one: pass@1 and its error count it again.",
    ]


def test_check_counts_the_prompts_that_evaluation_sets_have(tmp_path, monkeypatch):
    """By the files, of which one has fewer than are asked for by default, and another more."""
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"prompt": "{number}+9=", "answer": "0"}}\n' for number in range(30)]
    Path("train.jsonl").write_text('{"prompt": "01234+56789=", "answer": "0"}\n')
    Path("few.jsonl").write_text("".join(rows[3:7]))
    Path("many.jsonl").write_text("".join(rows[7:]))
    run = ["tracking=none", "task=prompts", "task.path=train.jsonl", "evaluation.every=300"]
    sets = "few: {path: few.jsonl}, some: {path: few.jsonl, too_long: skip}, own: {task: reverse}"
    asked = f"evaluation.sets={{{sets}, many: {{path: many.jsonl, prompts: 20}}}}"
    page = dict(page_sections(check([*run, asked])))
    assert page["Problems"] == ["none"]
    lines = page["Evaluation"]
    assert lines[1:5] == [
        "few: few.jsonl; all 4 prompts x 4 completions = 16",
        "some: few.jsonl; at most 4 prompts x 4 completions = 16",
        "own: reverse with seed 1000000000; 128 prompts x 4 completions = 512",
        "many: many.jsonl; 20 prompts x 4 completions = 80",
    ]
    assert lines[6].startswith(f"in total at most {2 * (16 + 16 + 512 + 80)} completions")
    there = ["hydra/launcher=slurm", "seed=0,1"]
    lines = dict(page_sections(check([*run, asked, *there], multirun=True)))["Evaluation"]
    assert lines[1] == "few: few.jsonl; at most 128 prompts x 4 completions = 512"


def test_check_says_the_longest_document_of_recorded_rollouts(folder_of_user):
    def page_of(rows: int, *, more: int) -> dict[str, list[str]]:
        file = f"{rows}-{more}.jsonl"
        first = json.loads(Path("three.jsonl").read_text().splitlines()[0])
        last = {name: [*first[name], first[name][-1]] for name in ("token_ids", "old_log_probs")}
        longer = [first | last | {"loss_mask": [0, 1, 1, 1], "id": -1 - n} for n in range(more)]
        lines = [json.dumps(first | {"id": number}) for number in range(rows)]
        Path(file).write_text("\n".join([*map(json.dumps, longer), *lines]))
        recorded = [word.replace("three.jsonl", file) for word in RECORDED]
        checked = check([*recorded, "tracking=none"])
        return dict(page_sections(checked))

    assert page_of(3, more=0)["Step"][0] == "longest document: 3 tokens"
    assert page_of(3, more=1)["Step"][0] == "longest document: 4 tokens"
    page = page_of(2000, more=1)
    assert page["Step"][0] == "longest document: 4 tokens, by 100 that were read"
    assert "micro-batches" not in page["Step"][1]  # those that were not read may be longer
    assert "only the first 100 rows of each file" in "\n".join(page["Notes"])


def test_check_refuses_all_recorded_rows_that_the_run_refuses_for_the_characters_of_its_task(
    folder_of_user,
):
    """The tiny model on a file of prompts has a token for each of its three characters, and the
    end's: 0 to 3. The wrong rows lie behind a hundred that are right."""
    Path("prompts.jsonl").write_text('{"prompt": "1=", "answer": "2"}\n')
    row = json.loads(Path("three.jsonl").read_text().splitlines()[0])
    rows = [row | {"id": number} for number in range(203)]
    rows[150]["token_ids"] = [1, 2, 999]
    rows[200]["old_log_probs"] = [0.0, -1.0, 0.5]
    del rows[202]["advantage"]
    Path("three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["task=prompts", "task.path=prompts.jsonl", "evaluation.every=0"]
    (problem,) = problems(check([*RECORDED, *task, "tracking=none"]))
    lines = problem.splitlines()
    assert lines[0] == "the recorded rollouts cannot be trained on: 3 problems"
    assert [line.partition(" (")[0].partition(", where")[0] for line in lines[1:]] == [
        "  three.jsonl:151:token_ids: needs tokens of the vocabulary, 0 to 3",
        "  three.jsonl:201:old_log_probs: is 0.5 at position 2; a log-prob is at most 0",
        "  three.jsonl:203:advantage: is missing; the row has token_ids, loss_mask, "
        "old_log_probs, id",
    ]


def test_recorded_texts_without_log_probs_name_the_choices_that_train_on_them(folder_of_user):
    row = {"prompt": "1=", "completion": "2", "advantage": 1.0}
    Path("three.jsonl").write_text(json.dumps(row) + "\n")
    corrected = [*RECORDED, "kl=k3_ratio", "kl.coefficient=1", "tracking=none"]
    (problem,) = problems(check(corrected))
    assert problem.splitlines()[1] == (
        "  three.jsonl:1:old_log_probs: is missing; the row has prompt, completion, advantage. "
        "Use loss=reinforce kl=k3, which trains without it"
    )
    instead = {"loss=grpo": "loss=reinforce", "kl=k3_ratio": "kl=k3"}
    assert problems(check([instead.get(word, word) for word in corrected])) == []


@pytest.mark.parametrize(
    "overrides", [["aggregation.reducer=reducers_of_a_user.equal"], ["rollout.stop=['9']"]]
)
def test_check_finds_no_problem_in_a_configuration_that_runs(folder_of_user, overrides):
    assert problems(check([*overrides, "tracking=none"])) == []


@pytest.mark.parametrize(
    "overrides",
    [["rollout.stop=['<end>']"], ["evaluation.every=1", f"evaluation.sets={{a: {{{FOREIGN}}}}}"]],
)
def test_a_run_is_refused_in_the_words_of_check(folder_of_user, overrides):
    checked = check(last_of_each_key(*SHORT, *overrides))
    (problem,) = problems(checked)
    with pytest.raises(PgtoolkitError) as refused:
        train(checked.named_config, folder_of_user / "run")
    assert str(refused.value) == problem


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Save a model, and another with two tokens swapped, beside prompts that become no tokens."""
    folder = tmp_path_factory.mktemp("models")
    save_with_tokenizer(small_llama(), folder / "model")
    save_with_tokenizer(small_llama(), folder / "swapped", alphabet="1023456789=")
    save_with_tokenizer(small_llama(vocab_size=14), folder / "larger")
    (folder / "prompts.jsonl").write_text('{"prompt": "12=", "answer": "3"}\n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "1" * 30, "answer": "3"}) + "\n")
    (folder / "ends.jsonl").write_text('{"prompt": "<end>", "answer": "3"}\n')
    return folder


PROMPTS = ("task=prompts", "task.path=prompts.jsonl", "rollout.max_completion_length=4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kl=k3_ratio", "kl.coefficient=1", "kl.reference=swapped"], "10 of these tokens under"),
        (["loss=grpo", "advantage=gae", "critic.path=swapped"], "10 of these tokens under the"),
        (["loss=grpo", "advantage=gae", "critic.path=larger"], "(got 14 rows, and 12 of these"),
        (["task.path=ends.jsonl"], "ends.jsonl:1 has 0"),
        (["task.path=long.jsonl"], "long.jsonl:1 has 30. A document of at most 32 tokens"),
        (
            ["evaluation.every=1", "evaluation.sets={a: {path: ends.jsonl}}"],
            "evaluation set a: 1 of 1 prompts have no token: ends.jsonl:1 has 0",
        ),
    ],
)
def test_check_and_the_run_refuse_tokens_in_the_same_words(
    models, monkeypatch, overrides, message, tmp_path
):
    monkeypatch.chdir(models)
    settings = with_model(Path("model"), "accumulation.max_tokens=64", *PROMPTS, of=SHORT)
    settings = [setting for setting in settings if not setting.startswith("task.num_digits")]
    checked = check(last_of_each_key(*settings, *overrides))
    (problem,) = problems(checked)
    assert message in problem
    with pytest.raises(PgtoolkitError) as refused:
        train(checked.named_config, tmp_path / "run")
    assert str(refused.value).replace(f"{models}/", "") == problem


def test_check_proposes_the_positions_that_the_longest_prompt_needs(capsys, tmp_path):
    """Of 35 characters each, with completions of 64 tokens, which alone are as many as the tiny
    model has positions, and more than a micro-batch of 60 holds."""
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "1" * 35, "answer": "3"}))
    settings = ["task=prompts", f"task.path={file}", "rollout.max_completion_length=64"]
    assert main(["check", *settings, "accumulation.max_tokens=60"]) == 2
    assert (
        "Use rollout.max_completion_length=25, or model.max_positions=99 and "
        "accumulation.max_tokens=99, or other prompts."
    ) in capsys.readouterr().out
    assert main(["check", *settings, "accumulation.max_tokens=99", "model.max_positions=99"]) == 0
    printed = capsys.readouterr().out
    assert "longest document: prompt 35 + completion 64 = 99 tokens\n" in printed
    # The characters 1 and 3, and the token that ends a completion.
    assert "99 tokens x 3 entries of the vocabulary" in printed


def test_check_measures_the_first_thousand_prompts(capsys, tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": "1" * length, "answer": "3"} for length in [4] * 999 + [9, 11]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["check", "task=prompts", f"task.path={file}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "longest doc" in line]
    assert line.endswith("prompt 9 + completion 7 = 16 tokens, by the first 1000 prompts")


@pytest.mark.parametrize(
    ("overrides", "is_said"),
    [
        ([], True),
        (["optimizer.learning_rate=1e-5"], False),
        (["model.lora_rank=2"], False),  # its default is 1e-5
        (["optimizer=muon"], False),
    ],
)
def test_the_default_rate_of_a_small_model_is_said_to_be_for_large_ones(
    models, monkeypatch, overrides, is_said
):
    monkeypatch.chdir(models)
    settings = with_model(Path("model"), "accumulation.max_tokens=64", *PROMPTS, of=SHORT)
    kept = [word for word in settings if not word.startswith(("task.num_", "optimizer.learning"))]
    checked = check(last_of_each_key(*kept, *overrides))
    assert problems(checked) == []
    said = [note for note in notes(checked) if note.startswith("optimizer.learning_rate=1e-06 is")]
    assert bool(said) == is_said
