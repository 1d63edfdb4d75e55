"""What the machine lacks is refused before anything is made, by `check` and by the start, all of it
together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama
from huggingface_hub import constants

from pgtoolkit.cli import main

HUGGING_FACE = ("model=huggingface", "trainer.max_steps=1", "tracking=none")
PROMPTS = ("task=prompts", "tracking=none", "rollout.max_completion_length=7")


ROW = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "old_log_probs": [0, -1.0, -2.0]}
GROUP = [ROW | {"reward": reward, "group_id": 0} for reward in (0, 1)]


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return tmp_path


def refused(capsys, *arguments, status=2):
    """What `check` and the start say alike."""
    before = set(os.listdir())
    assert main(["check", *arguments]) == 2
    listed = capsys.readouterr().out.partition("\nProblems")[2]
    assert main(list(arguments)) == status
    said = capsys.readouterr().err
    assert set(os.listdir()) == before
    for line in listed.splitlines()[1:]:
        assert line.strip() in said
    return said


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    said = refused(capsys, "kernel=triton", "trainer.device=cuda")
    assert (
        "trainer.device=cuda needs a GPU that torch can use (got none). Its driver or torch's CUDA "
        "build is "
    ) in said
    assert (
        "kernel=triton needs a GPU (got none). Triton compiles for GPUs; TRITON_INTERPRET=1 runs "
        "its kernels"
    ) in said


def test_a_compiler_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = refused(capsys, "model.compile=true", "trainer.device=cpu", "tracking=none")
    assert "model.compile=true needs a C++ compiler on a CPU (got no no-such-compiler)." in said


def test_a_check_of_the_defaults_imports_nothing_large(beside):
    script = (
        "import sys; from pgtoolkit.cli import main; main(['check', 'experiment=dapo']); "
        "assert not {'torch', 'numpy', 'pyarrow', 'huggingface_hub', 'mlflow', 'transformers'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_functions_that_are_not_there(capsys, beside):
    (beside / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (beside / "badly_asked.py").write_text("def verify(other):\n    return 1\n")
    both = ("task.verifier=badly_asked.verify", "aggregation=badly_asked.reduce")
    said = refused(capsys, *PROMPTS, "task.path=prompts.jsonl", *both)
    parameters = "completion, answer, prompt, row"
    assert (
        f"task.verifier=badly_asked.verify needs a function with parameters among {parameters}"
        in said
    )
    assert (
        "aggregation=badly_asked.reduce needs a function in the module badly_asked (got no reduce)"
        in said
    )


def test_prompts_that_are_not_there(capsys, beside):
    (beside / "empty.jsonl").touch()
    said = refused(capsys, *PROMPTS, "task.path=empty.jsonl", status=3)
    assert said == "pgtk: error: task.path=empty.jsonl needs at least one prompt (got none).\n"
    (beside / "wrong.jsonl").write_text('{"prompt": "1"}\n')
    assert "1:answer: is missing" in refused(
        capsys, "-m", *PROMPTS, "task.path=wrong.jsonl", "seed=1,2", status=3
    )


def test_a_pattern_has_one_group(capsys, beside):
    (beside / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    pattern = ("task.verifier=regular_expression", "task.pattern='(a)(b)'")
    said = refused(capsys, *PROMPTS, "task.path=prompts.jsonl", *pattern)
    assert "needs task.pattern with one group (got (a)(b))." in said


def test_more_processes_than_this_machine_has_room_for(capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said = refused(capsys, "parallelism=ddp", "parallelism.data_parallel=33")
    assert (
        "parallelism.data_parallel=33 needs at most 32 processes on this machine (got 33 of them)"
        in said
    )
    assert main(["check", "parallelism=ddp", "parallelism.data_parallel=32"]) == 0


@pytest.mark.parametrize(
    ("rows", "overrides", "says"),
    [
        ([ROW, ROW], [], "rows.jsonl:1:reward: is missing"),
        (
            [GROUP[0], GROUP[1] | {"token_ids": [1, 2, 99]}],
            [],
            "rows.jsonl:2:token_ids: is 99 at position 2",
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
def test_recorded_rows_that_cannot_be_trained_on(capsys, beside, rows, overrides, says):
    (beside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert says in refused(
        capsys, "rollout=recorded", "rollout.path=rows.jsonl", *overrides, status=3
    )


def test_recorded_rollouts_that_end_before_the_last_step(capsys, beside):
    (beside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GROUP * 5))
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


def test_completions_as_long_as_all_positions(capsys):
    save_with_tokenizer(small_llama(), Path("model"))
    of_folder = (*HUGGING_FACE, "model.path=model", "task.num_digits=3")
    said = refused(capsys, *of_folder, "rollout.max_completion_length=32")
    assert (
        "rollout.max_completion_length=32 needs a number < 32 (got 32). Prompt and completion share"
        in said
    )
    assert main(["check", *of_folder, "rollout.max_completion_length=16"]) == 0


def test_a_folder_of_other_rollouts(capsys, beside):
    (beside / "rollouts").mkdir()
    (beside / "rollouts" / "batch-0.parquet").touch()
    said = refused(capsys, "rollout.save_path=rollouts")
    assert (
        "rollout.save_path=rollouts needs a new or empty folder (got one with 1 batches of "
        "rollouts)."
    ) in said


def test_what_only_later_rows_tell_is_left_to_the_run(capsys, beside):
    rows = [row | {"group_id": number // 3} for number, row in enumerate([*GROUP * 75])]
    (beside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(
            [
                "check",
                "rollout=recorded",
                "rollout.path=rows.jsonl",
                "rollout.group_size=3",
                "advantage=rloo",
            ]
        )
        == 0
    )
    assert "note:" not in capsys.readouterr().err


def test_a_model_that_is_nowhere(capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for path, says in (
        ("models/of/mine", "Repo id must be in the form"),
        ("models/mine", "We couldn't connect to"),
    ):
        said = refused(capsys, *HUGGING_FACE, f"model.path={path}")
        assert (
            f"model.path={path} needs a model that transformers can load, with its config.json "
            f"(got {says}"
        ) in said
