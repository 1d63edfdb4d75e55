"""Checkpoints are complete or absent, the newest readable one is loaded, and loading runs no code.

Files are damaged byte by byte, planted with code, and written by processes that the kernel kills.
"""

import contextlib
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.processes import ForkedProcess
from builders.refusals import refusal
from builders.runs import (
    assert_equal,
    checkpoint_of,
    checkpoint_state,
    contents_of,
    copy_as_of,
    replace_file,
    run,
    save_state,
)
from safetensors import SafetensorError
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgtoolkit.cli import main
from pgtoolkit.errors import StorageError
from pgtoolkit.training import checkpoint
from pgtoolkit.training.checkpoint import list_checkpoints, load_newest

OPTIMIZER_FILE = "training/optimizer-00001-00001.safetensors"


def checkpoint_names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_the_newest_checkpoints_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (1, 2, 10, 999_999, 1_000_000):
        save_state(tmp_path, checkpoint_state(step), keep=2)
    assert checkpoint_names(tmp_path) == ["step-999999", "step-1000000"]
    assert load_newest(tmp_path) == checkpoint_state(1_000_000) | {
        "path": tmp_path / "step-1000000"
    }


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path, keep):
    for step in (4, 5):
        save_state(tmp_path, checkpoint_state(step), keep=2)
    for path in (tmp_path / "step-000006", tmp_path / "step-000010", tmp_path / ".step-000007.tmp"):
        path.write_bytes(b"PK")
    (tmp_path / "step-000011").mkdir()
    assert load_newest(tmp_path)["step"] == 5
    save_state(tmp_path, checkpoint_state(6), keep)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000005", "step-000006"][-keep:]
    assert load_newest(tmp_path)["step"] == 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("trained") / "run", "trainer.max_steps=2")


@pytest.fixture
def copied_run(trained, tmp_path) -> tuple[Path, Path]:
    """Return a copy of the run, and the path of its newest checkpoint."""
    folder = copy_as_of(trained, 2, tmp_path / "run")
    return folder, folder / "checkpoints" / "step-000002"


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_transformers_loads_model_and_tokenizer_from_a_checkpoint(trained):
    path = trained / "checkpoints" / "step-000002"
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.float32
    assert model.generation_config.max_new_tokens == 4
    assert json.loads((path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    weights = contents_of(path)["model"]
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path)("123=").input_ids == [1, 2, 3, 10]


def test_a_checkpoint_has_these_files_which_all_may_read(trained):
    path = trained / "checkpoints" / "step-000002"
    assert {file.relative_to(path).as_posix() for file in files_below(path)} == {
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        OPTIMIZER_FILE,
        "training/state.json",
        "training/state.safetensors",
    }
    assert {oct(file.stat().st_mode)[-3:] for file in files_below(path)} == {"644"}


def test_large_models_are_written_in_several_files(trained, tmp_path, monkeypatch):
    expected = contents_of(trained / "checkpoints" / "step-000001")
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 20_000)
    path = run(tmp_path / "run", "trainer.max_steps=1") / "checkpoints" / "step-000001"
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[:2] == ["model-00001-00001.safetensors", "model-00001-00002.safetensors"]
    contents = contents_of(path)
    assert_equal(contents["model"], expected["model"])
    assert_equal(contents["optimizer"], expected["optimizer"])
    for name, weight in AutoModelForCausalLM.from_pretrained(path).state_dict().items():
        assert torch.equal(weight, expected["model"][name])


def tensor_files_of_manifest(folder: Path) -> dict[str, dict]:
    manifest = json.loads((folder / "checkpoints/step-000002/manifest.json").read_text())
    return {name: file for name, file in manifest["files"].items() if "tensors" in name}


def test_a_resumed_run_writes_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 20_000)
    uninterrupted = run(tmp_path / "uninterrupted", "trainer.max_steps=2")
    resumed = copy_as_of(uninterrupted, 1, tmp_path / "resumed")
    run(resumed, "trainer.max_steps=2", resume=True)
    expected = tensor_files_of_manifest(uninterrupted)
    assert sum(name.startswith("training/optimizer-") for name in expected) > 3
    assert tensor_files_of_manifest(resumed) == expected


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    """Change a digit of the step in a JSON file, and a number of a tensor in others."""
    data = bytearray(file.read_bytes())
    place = b"1" if file.suffix == ".json" else torch.arange(500, 510).numpy().tobytes()
    data[data.find(place)] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [make_empty, flip_a_bit, Path.unlink])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "training/state.safetensors", "training/state.json"]
)
def test_a_damaged_checkpoint_is_skipped(tmp_path, name, damage: Callable[[Path], None], caplog):
    save_state(tmp_path, checkpoint_state(1))
    newest = save_state(
        tmp_path, checkpoint_state(2, x=torch.arange(1000)), weights={"y": torch.arange(1000)}
    )
    damage(newest / name)
    assert load_newest(tmp_path)["step"] == 1
    assert "step-000002 cannot be read and is skipped: " in caplog.text


def test_a_folder_without_checkpoints_gives_none_and_one_of_damaged_ones_an_error(tmp_path):
    assert load_newest(tmp_path) is None
    (tmp_path / "step-000001").write_bytes(b"PK")
    with pytest.raises(StorageError, match="none of the 1"):
        load_newest(tmp_path)


class MakesFolder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_pickle_in_place_of_any_file_of_a_checkpoint_is_not_run(trained, tmp_path):
    """Written by pickle and by torch, under the manifest of before and under one that fits."""
    original = trained / "checkpoints" / "step-000002"
    names = [file.relative_to(original).as_posix() for file in files_below(original)]
    assert len(names) == 9
    executed = tmp_path / "executed"
    torch.save({"x": MakesFolder(executed)}, tmp_path / "payload", pickle_module=pickle)
    payloads = [pickle.dumps(MakesFolder(executed)), (tmp_path / "payload").read_bytes()]
    for number, name in enumerate(names):
        payload = payloads[number % 2]
        for fits in (False, True):
            planted = tmp_path / "checkpoints" / "step-000002"
            shutil.copytree(original, planted)
            if fits and name != "manifest.json":
                replace_file(planted, name, payload)
                with contextlib.suppress(StorageError, SafetensorError):
                    contents_of(load_newest(planted.parent)["path"])
            else:
                (planted / name).write_bytes(payload)
                with pytest.raises(StorageError, match="none of the 1 checkpoints"):
                    load_newest(planted.parent)
            shutil.rmtree(planted)
    assert not executed.exists()
    pickle.loads(payloads[0])  # unpickled, it does make the folder
    assert executed.exists()


def test_a_manifest_that_names_a_file_outside_its_checkpoint_is_refused(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    for step, name in enumerate(
        ("../../outside/x.json", "/etc/hostname", "training/../../x", "a/b/c.json"), start=1
    ):
        path = save_state(folder, checkpoint_state(step))
        replace_file(path, "x.json", b"{}")
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"x.json"', json.dumps(name)))
    with pytest.raises(StorageError, match="none of the 4"):
        load_newest(folder)
    assert caplog.text.count("which is no file of a checkpoint") == 4


SAVE = (
    "import pathlib, resource, signal, sys, torch\n"
    "from pgtoolkit.errors import StorageError\n"
    "from pgtoolkit.training.checkpoint import save_behind, save_checkpoint\n"
    "signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[3]))\n"
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    "weights = {'model': {'x': torch.zeros(10**6)}}\n"
    "try:\n"
    "    state = {'step': int(sys.argv[2])}\n"
    "    arguments = (pathlib.Path(sys.argv[1]), state, weights, lambda folder: None, 1)\n"
    "    if sys.argv[4] == 'behind':\n"
    "        save_behind(*arguments).result()\n"
    "    else:\n"
    "        save_checkpoint(*arguments)\n"
    "except StorageError as error:\n"
    "    print(error)\n"
)


def save_within_limit(folder: Path, step: int, handler: str, how: str) -> tuple[int, str]:
    """Save 4 MB in a process whose files may have 100 000 bytes; beyond, it gets SIGXFSZ.

    how: at once, or behind training, by a thread.
    Returns the status of the process, and what it prints.
    """
    program = folder.with_name("save.py")
    program.write_text(SAVE)
    printed = folder.with_name("printed")
    words = [str(folder), str(step), handler, how]
    process = ForkedProcess(words, folder, dict(os.environ), printed, str(program))
    return process.wait(120), printed.read_text()


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """Return a folder for checkpoints alone."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint(checkpoints):
    """The kernel kills it at byte 100 000, of the newest step again and of a new one."""
    saved = save_state(checkpoints, checkpoint_state(1, x=torch.arange(9)))
    before = {file: file.read_bytes() for file in files_below(saved)}
    for step, how in ((1, "at once"), (2, "at once"), (2, "behind")):
        assert save_within_limit(checkpoints, step, "SIG_DFL", how)[0] == -signal.SIGXFSZ
        assert checkpoint_names(checkpoints) == ["step-000001"]
        assert {file: file.read_bytes() for file in files_below(saved)} == before
    save_state(checkpoints, checkpoint_state(2), keep=1)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(checkpoints):
    """The limit of a file's size makes the write fail half way, as a full disk does."""
    save_state(checkpoints, checkpoint_state(1))
    _, printed = save_within_limit(checkpoints, 2, "SIG_IGN", "at once")
    assert "step-000002 cannot be written: " in printed
    assert "File too large. Earlier ones are intact." in printed
    assert [path.name for path in checkpoints.iterdir()] == ["step-000001"]
    assert load_newest(checkpoints)["step"] == 1


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("model", {"more": torch.zeros(1)}, "more is none of its weights"),
        ("model", {"lm_head.weight": None}, "lm_head.weight is missing"),
        (
            "model",
            {"lm_head.weight": torch.zeros(12, 32).double()},
            "lm_head.weight is of [12, 32, torch.float64], not",
        ),
        (
            "optimizer",
            {"more.step": torch.zeros(())},
            "more.step is none of the optimizer's moments",
        ),
        (
            "optimizer",
            {"lm_head.weight.exp_avg": torch.zeros(12)},
            "exp_avg is of [12, torch.float32], not of [12, ",
        ),
    ],
)
def test_weights_and_moments_of_another_model_are_refused(
    copied_run, capsys, kind, change, message
):
    folder, path = copied_run
    tensors = contents_of(path)[kind] | change
    file = {"model": "model.safetensors", "optimizer": OPTIMIZER_FILE}[kind]
    replace_file(path, file, save({name: x for name, x in tensors.items() if x is not None}))
    error = refusal(capsys, "resume", folder, "trainer.max_steps=3")
    assert "the checkpoint does not fit the configured model: " in error
    assert message in error


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["lm_head.weight.exp_avg_sq"], "lm_head.weight.exp_avg_sq of the optimizer is missing"),
        (
            [f"lm_head.weight.{field}" for field in ("step", "exp_avg", "exp_avg_sq")],
            "lm_head.weight.step of the optimizer is missing",
        ),
        (None, "the optimizer's moments are missing"),
    ],
)
def test_missing_moments_are_refused(copied_run, capsys, missing, message):
    folder, path = copied_run
    moments = contents_of(path)["optimizer"]
    kept = {name: moments[name] for name in moments if missing is not None and name not in missing}
    replace_file(path, OPTIMIZER_FILE, save(kept))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} is damaged: {message}. Delete it" in line


@pytest.mark.parametrize(
    "listed", [{"without_moments": ["lm_head.weight"]}, {}], ids=["listed", "without a list"]
)
def test_a_weight_that_no_step_has_trained_has_no_moments(copied_run, listed):
    """A checkpoint lists such weights; one without a list may lack all moments of a weight."""
    folder, path = copied_run
    assert contents_of(path)["without_moments"] == []
    moments = contents_of(path)["optimizer"]
    kept = {name: moments[name] for name in moments if not name.startswith("lm_head.weight.")}
    replace_file(path, OPTIMIZER_FILE, save(kept))
    state = json.loads((path / "training/state.json").read_text())
    del state["without_moments"]
    replace_file(path, "training/state.json", json.dumps(state | listed).encode())
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
    after = checkpoint_of(folder, 3)["optimizer"]
    assert after["lm_head.weight.step"] == 1
    assert after["transformer.wte.weight.step"] == 3


@pytest.mark.parametrize(("field", "number"), [("exp_avg_sq", -1e-9), ("exp_avg", float("nan"))])
def test_moments_that_are_negative_or_nan_are_refused(copied_run, capsys, field, number):
    """AdamW would take the root of a negative second moment, and make NaN of the weights."""
    folder, path = copied_run
    name = f"lm_head.weight.{field}"
    moments = contents_of(path)["optimizer"]
    moments[name].view(-1)[-1] = number
    replace_file(path, OPTIMIZER_FILE, save(moments))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    assert (
        f"is damaged: {name} of the optimizer holds negative numbers or NaN. Delete"
        in capsys.readouterr().err
    )
