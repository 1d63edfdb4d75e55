"""What the machine lacks is refused before anything is made, by `check` and by the start, all of it together."""

import json
import os
import struct
import subprocess
import sys
import time

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
        (f"{'x' * 250}.db", "a name that is too long"),
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


def safetensors(path, size=8, name="w", shape=(2,)):
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"x" * size)


def test_a_folder_that_is_no_model(capsys, beside):
    folder = beside / "model"
    folder.mkdir()
    said = refused(capsys, *HUGGING_FACE, "model.path=model")
    assert said.count("model.path=model needs") == 3
    for got in ("(got no config.json)", "(got none of tokenizer.json", "(got no model.safetensors or pytorch_model.b"):
        assert got in said
    (folder / "config.json").write_text("[]")
    (folder / "tokenizer.json").write_text("{}")
    safetensors(folder / "model.safetensors", 3)
    said = refused(capsys, *HUGGING_FACE, "model.path=model")
    assert "(got config.json: it is no JSON object)" in said
    assert "(got model.safetensors: " in said
    assert "not fully covered). A copy or download that was cut off looks so" in said
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    safetensors(folder / "1.safetensors")
    said = refused(capsys, *HUGGING_FACE, "model.path=model")
    assert said.count("model.path=model needs") == 1
    assert "(got 2.safetensors: missing)" in said
    safetensors(folder / "2.safetensors", name="model.embed_tokens.weight", shape=(1, 2))
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 1, "hidden_size": 3}')
    said = refused(capsys, *HUGGING_FACE, "model.path=model")
    assert "needs whole files of weights that fit config.json (got 2.safetensors: model.embed_tokens.weight has" in said
    assert "has shape [1, 2] instead of [1, 3])" in said


def test_a_model_that_is_nowhere_is_refused_within_seconds(beside):
    for path, environment, says in (
        ("models/of/mine", {}, "(got no such folder). It cannot be a name on the hub, which is NAME or OWNER/NAME."),
        ("models/mine", {"HF_HUB_OFFLINE": "1"}, "(got no such folder, and no download of it). HF_HUB_OFFLINE=1 keeps"),
        (
            "mine",
            {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
            "(got no such folder, and from http://127.0.0.1:9: Connect",
        ),
    ):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pgtoolkit.cli", *HUGGING_FACE, f"model.path={path}"],
            env={**os.environ, "HF_HOME": str(beside / "cache"), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert f"model.path={path} needs a folder, or a model on the Hugging Face hub {says}" in done.stderr
        assert time.perf_counter() - start < 30
    assert not (beside / "outputs").exists()
