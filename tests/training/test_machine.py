"""A machine, model or data that a run cannot use are refused before anything is made.

`pgtk check` lists the problems, and the run's own start refuses them in the same words.
"""

import json
import os
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.refusals import refusal
from huggingface_hub import constants
from torch.cuda import is_available

from pgtoolkit.cli import main

HUGGING_FACE = ("model=huggingface", "trainer.max_steps=1", "tracking=none")
PROMPTS = ("task=prompts", "tracking=none", "rollout.max_completion_length=7")

ROW = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "old_log_probs": [0, -1.0, -2.0]}
GROUP = [ROW | {"reward": reward, "group_id": 0} for reward in (0, 1)]


@pytest.fixture(autouse=True)
def current_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return tmp_path


def refusal_of_start(capsys, *arguments: str, status: int = 2) -> str:
    """Return the error of a run's start, after checking that `check` lists the same problems and
    neither makes a file."""
    before = set(os.listdir())
    problems = refusal(capsys, "check", *arguments).partition("\nProblems")[2]
    assert main(list(arguments)) == status
    error = capsys.readouterr().err
    assert set(os.listdir()) == before
    for line in problems.splitlines()[1:]:
        assert line.strip() in error
    return error


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_the_rules_refuse_and_what_the_machine_lacks_are_listed_together(capsys):
    words = ["trainer.max_steps=0", "task=prompts", "task.path=none.jsonl", "kl=k3"]
    words += ["kl.reference=none", "model=huggingface", "model.path=none", "sampler=vllm"]
    lines = refusal(capsys, "check", *words).partition("\nProblems")[2].strip().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "trainer.max_steps=0",
        "task.path=none.jsonl",
        "sampler.executable=vllm",
        "model.path=none",
        "kl.reference=none",
    ]


def test_a_device_and_kernels_that_need_a_missing_gpu_are_refused(capsys, monkeypatch):
    if is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    error = refusal_of_start(capsys, "kernel=triton", "trainer.device=cuda")
    assert (
        "trainer.device=cuda needs a GPU that torch can use (got none). Its driver or torch's CUDA "
        "build is "
    ) in error
    assert (
        "kernel=triton needs a GPU (got none). Triton compiles for GPUs; TRITON_INTERPRET=1 runs "
        "its kernels"
    ) in error


def test_a_compiled_model_is_refused_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    error = refusal_of_start(capsys, "model.compile=true", "trainer.device=cpu", "tracking=none")
    assert "model.compile=true needs a C++ compiler on a CPU (got no no-such-compiler)." in error
    assert "Use model.compile=false." in error


def test_functions_that_are_missing_or_take_other_parameters_are_refused(capsys, current_folder):
    (current_folder / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (current_folder / "badly_asked.py").write_text("def verify(other):\n    return 1\n")
    functions = ("task.verifier=badly_asked.verify", "aggregation=badly_asked.reduce")
    error = refusal_of_start(capsys, *PROMPTS, "task.path=prompts.jsonl", *functions)
    parameters = "completion, answer, prompt, row"
    assert (
        f"task.verifier=badly_asked.verify needs a function with parameters among {parameters}"
        in error
    )
    assert (
        "aggregation=badly_asked.reduce needs a function in the module badly_asked (got no reduce)"
        in error
    )


def test_a_file_of_prompts_that_is_empty_or_lacks_a_field_is_refused(capsys, current_folder):
    (current_folder / "empty.jsonl").touch()
    error = refusal_of_start(capsys, *PROMPTS, "task.path=empty.jsonl", status=3)
    assert error == "pgtk: error: task.path=empty.jsonl needs at least one prompt (got none).\n"
    (current_folder / "wrong.jsonl").write_text('{"prompt": "1"}\n')
    assert "1:answer: is missing" in refusal_of_start(
        capsys, "-m", *PROMPTS, "task.path=wrong.jsonl", "seed=1,2", status=3
    )


def test_a_pattern_of_two_groups_is_refused(capsys, current_folder):
    (current_folder / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    pattern = ("task.verifier=regular_expression", "task.pattern='(a)(b)'")
    error = refusal_of_start(capsys, *PROMPTS, "task.path=prompts.jsonl", *pattern)
    assert "needs task.pattern with one group (got (a)(b))." in error


def test_more_processes_than_the_machine_has_room_for_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    error = refusal_of_start(capsys, "parallelism=ddp", "parallelism.data_parallel=33")
    assert (
        "parallelism.data_parallel=33 needs at most 32 processes on this machine (got 33 of them)"
        in error
    )
    assert main(["check", "parallelism=ddp", "parallelism.data_parallel=32"]) == 0


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([ROW, ROW], [], "rows.jsonl:1:reward: is missing"),
        (
            [GROUP[0], GROUP[1] | {"token_ids": [1, 2, 99]}],
            [],
            "rows.jsonl:2:token_ids: needs tokens of the vocabulary, 0 to ",
        ),
        (GROUP, ["accumulation.max_tokens=2"], "has 3 tokens and at most 2 fit"),
        (GROUP, ["correction=token_mask"], "rows.jsonl:1:sampling_log_probs: is missing"),
        ([], [], "rollout.path=rows.jsonl needs at least one row (got none in rows.jsonl)"),
        (
            [row | {"loss_mask": [0, 0, 0]} for row in GROUP],
            [],
            "needs a trained token (got 2 documents whose",
        ),
        (
            [*GROUP, ROW | {"reward": 0}],
            [],
            "rows.jsonl:3:group_id: is missing; other rows have one",
        ),
        (
            [row | {"reward": -1} for row in GROUP] * 60,
            ["advantage=max_rl"],
            "max_rl divides by the group's mean",
        ),
        (
            [row | {"id": "a"} for row in GROUP] * 60,
            [],
            "rows.jsonl:2:id: is 'a' like that of rows.jsonl:1",
        ),
    ],
)
def test_recorded_rows_that_cannot_be_trained_on_are_refused(
    capsys, current_folder, rows, overrides, message
):
    write_rows(current_folder / "rows.jsonl", rows)
    recorded = ("rollout=recorded", "rollout.path=rows.jsonl")
    assert message in refusal_of_start(capsys, *recorded, *overrides, status=3)


def test_recorded_rollouts_that_end_before_the_last_step_are_noted(capsys, current_folder):
    write_rows(current_folder / "rows.jsonl", GROUP * 5)
    recorded = (
        "rollout=recorded",
        "rollout.path=rows.jsonl",
        "accumulation.docs_per_step=4",
        "trainer.max_steps=5",
    )
    note = (
        "rollout.epochs=1 of 10 documents ends after at most 3 of trainer.max_steps=5 steps. To "
        "make them all, use "
    )
    for epochs, is_noted in ((1, True), (2, False)):
        main(["check", *recorded, f"rollout.epochs={epochs}"])
        assert (f"{note}rollout.epochs=2." in capsys.readouterr().out) is is_noted
    main(["check", *recorded, "optimizer.schedule=cosine"])
    note = note.replace(
        " steps. To", " steps, before optimizer.schedule=cosine comes to its end. To"
    )
    ends = "rollout.epochs=2, or trainer.max_steps=3 for a schedule that ends there."
    assert f"{note}{ends}" in capsys.readouterr().out


def test_completions_as_long_as_all_positions_of_the_model_are_refused(capsys):
    save_with_tokenizer(small_llama(), Path("model"))
    settings = (*HUGGING_FACE, "model.path=model", "task.num_digits=3")
    error = refusal_of_start(capsys, *settings, "rollout.max_completion_length=32")
    assert (
        "rollout.max_completion_length=32 needs a number < 32 (got 32). Prompt and completion share"
        in error
    )
    assert main(["check", *settings, "rollout.max_completion_length=16"]) == 0


def test_rollouts_are_not_saved_into_a_folder_of_other_rollouts(capsys, current_folder):
    (current_folder / "rollouts").mkdir()
    (current_folder / "rollouts" / "batch-0.parquet").touch()
    error = refusal_of_start(capsys, "rollout.save_path=rollouts")
    assert (
        "rollout.save_path=rollouts needs a new or empty folder (got one with 1 batches of "
        "rollouts)."
    ) in error


def test_groups_that_only_rows_beyond_the_first_complete_are_left_to_the_run(
    capsys, current_folder
):
    rows = [row | {"group_id": number // 3} for number, row in enumerate(GROUP * 75)]
    write_rows(current_folder / "rows.jsonl", rows)
    recorded = ("rollout=recorded", "rollout.path=rows.jsonl", "rollout.group_size=3")
    assert main(["check", *recorded, "advantage=rloo"]) == 0
    assert "note:" not in capsys.readouterr().err


def test_a_model_that_is_neither_here_nor_on_the_hub_is_refused(
    capsys, monkeypatch, current_folder
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (current_folder / "config.json").write_text("{}")
    needs = "needs the folder of a model, or the name of one on the Hugging Face hub"
    for path, got in (
        ("models/of/mine", "(got no such folder here). A name on the hub is OWNER/NAME."),
        (
            "models/mine",
            "(got no such folder here, and no such name in the hub's cache). "
            "HF_HUB_OFFLINE keeps the hub from being asked.",
        ),
        ("config.json", "(got a file)."),
    ):
        error = refusal_of_start(capsys, *HUGGING_FACE, f"model.path={path}")
        assert f"model.path={path} {needs} {got}" in error
    for key, overrides in (
        ("kl.reference", ["kl=k3", "kl.reference=models/of/mine"]),
        ("critic.path", ["advantage=gae", "critic.path=models/of/mine"]),
    ):
        save_with_tokenizer(small_llama(), current_folder / "model")
        error = refusal_of_start(capsys, *HUGGING_FACE, "model.path=model", *overrides)
        assert f"{key}=models/of/mine {needs} (got no such folder here)." in error
