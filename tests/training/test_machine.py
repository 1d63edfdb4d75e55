"""What the machine lacks is refused before anything is made, by `check` and by the start, all of it together."""

import os
import subprocess
import sys

import pytest

from pgtoolkit.cli import main

HUGGING_FACE = ("model=huggingface", "trainer.max_steps=1", "tracking=none")
PROMPTS = ("task=prompts", "tracking=none", "rollout.max_completion_length=7")


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
    assert "trainer.device=cuda needs a GPU that torch can use (got none). Its driver or torch's CUDA build is " in said
    assert "kernel=triton needs a GPU (got none). Triton compiles for GPUs; TRITON_INTERPRET=1 runs its kernels" in said


def test_a_check_of_the_defaults_imports_nothing_large(beside):
    script = (
        "import sys; from pgtoolkit.cli import main; main(['check']); "
        "assert not {'torch', 'pyarrow', 'huggingface_hub', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("place", "got"),
    [
        ("text.txt", "a file of another kind"),
        ("text.txt/below/mlflow.db", "a place below the file {}/text.txt"),
        ("pipe", "a file of another kind"),
    ],
)
def test_places_where_no_store_can_be(capsys, beside, place, got):
    (beside / "text.txt").write_text("no database")
    os.mkfifo(beside / "pipe")
    said = refused(capsys, "trainer.max_steps=1", f"tracking.uri=sqlite:///{place}")
    assert f"tracking.uri=sqlite:///{beside}/{place} needs an SQLite file, or a place for one (got " in said
    assert f"(got {got.format(beside)}). MLflow keeps the run there. Use" in said


@pytest.mark.parametrize("place", ["new/folder/mlflow.db", "empty.db"])
def test_places_where_a_store_can_be(capsys, beside, place):
    (beside / "empty.db").touch()
    assert main(["check", f"tracking.uri=sqlite:///{place}"]) == 0
    assert not (beside / "new").exists()


def test_functions_that_are_not_there(capsys, beside):
    (beside / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (beside / "mine.py").write_text("def verify(completion):\n    return 1\n")
    both = ("task.verifier=mine.verify", "aggregation.reducer=mine.reduce")
    said = refused(capsys, *PROMPTS, "task.path=prompts.jsonl", *both)
    assert "task.verifier=mine.verify needs a function that can be called as verify(completion, answer) (got " in said
    assert "aggregation.reducer=mine.reduce needs a function in the module mine (got no reduce)" in said


def test_prompts_that_are_not_there(capsys, beside):
    (beside / "empty.jsonl").touch()
    said = refused(capsys, *PROMPTS, "task.path=empty.jsonl", status=3)
    assert said == "pgtk: error: task.path=empty.jsonl needs at least one prompt (got none).\n"
    (beside / "wrong.jsonl").write_text('{"prompt": "1"}\n')
    assert "1:answer: is missing" in refused(capsys, "-m", *PROMPTS, "task.path=wrong.jsonl", "seed=1,2", status=3)


def test_a_pattern_has_one_group(capsys, beside):
    (beside / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    pattern = ("task.verifier=regular_expression", "task.pattern='(a)(b)'")
    said = refused(capsys, *PROMPTS, "task.path=prompts.jsonl", *pattern)
    assert "needs task.pattern with one group (got (a)(b) with 2; (?:...) is a group that captures nothing)." in said


def test_recorded_rollouts_of_another_run(capsys, beside):
    (beside / "rollouts").mkdir()
    (beside / "rollouts" / "batch-000000.parquet").touch()
    said = refused(capsys, "rollout.save_path=rollouts")
    assert "rollout.save_path=rollouts needs a new or empty folder (got one with 1 batches of rollouts)." in said


def test_a_model_that_is_nowhere_is_refused(beside):
    for path, environment, says in (
        ("models/of/mine", {}, "Repo id must be in the form"),
        ("models/mine", {"HF_HUB_OFFLINE": "1"}, "We couldn't connect to"),
        (
            "mine",
            {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
            "We couldn't connect to 'http://127.0.0.1:9'",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pgtoolkit.cli", *HUGGING_FACE, f"model.path={path}"],
            env={**os.environ, "HF_HOME": str(beside / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert (
            f"model.path={path} needs a model that transformers can load, with its config.json (got {says}"
            in done.stderr
        )
    assert not (beside / "outputs").exists()
