"""Checkpoints: whole or absent, newest readable first, nothing executed on loading."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from builders.runs import (
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


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 10, 999_999, 1_000_000):
        save_state(tmp_path, checkpoint_state(step), keep=2)
    assert names(tmp_path) == ["step-999999", "step-1000000"]
    assert load_newest(tmp_path) == checkpoint_state(1_000_000) | {
        "path": tmp_path / "step-1000000"
    }


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_one_takes_no_place_of_those_that_are_kept(tmp_path, keep, caplog):
    for step in (4, 5):
        save_state(tmp_path, checkpoint_state(step), keep=2)
    for path in (tmp_path / "step-000006", tmp_path / "step-000010", tmp_path / ".step-000007.tmp"):
        path.write_bytes(b"PK")
    (tmp_path / "step-000011").mkdir()
    assert load_newest(tmp_path)["step"] == 5
    save_state(tmp_path, checkpoint_state(6), keep)
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000006"][-keep:]
    )
    assert load_newest(tmp_path)["step"] == 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained") / "run", "trainer.max_steps=2")


def test_transformers_loads_a_checkpoint_as_it_lies(trained):
    """The names and numbers of the weights, every prompt's tokens, and how completions are
    sampled."""
    path = trained / "checkpoints" / "step-000002"
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert (model.dtype, model.generation_config.max_new_tokens) == (torch.float32, 4)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    weights = contents_of(path)["model"]
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(path)("123=").input_ids == [1, 2, 3, 10]
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    training = {
        "training/optimizer-00001-00001.safetensors",
        "training/state.json",
        "training/state.safetensors",
    }
    assert (
        found
        == {"config.json", "generation_config.json", "manifest.json", "model.safetensors"}
        | tokenizer
        | training
    )
    assert {oct(file.stat().st_mode)[-3:] for file in path.rglob("*") if file.is_file()} == {"644"}


def test_large_models_are_written_in_several_files(trained, tmp_path, monkeypatch):
    expected = contents_of(trained / "checkpoints" / "step-000001")
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 20_000)
    path = run(tmp_path / "run", "trainer.max_steps=1") / "checkpoints" / "step-000001"
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[:2] == ["model-00001-00001.safetensors", "model-00001-00002.safetensors"]
    found = contents_of(path)
    for kind in ("model", "optimizer"):
        assert found[kind].keys() == expected[kind].keys()
        assert all(torch.equal(found[kind][name], expected[kind][name]) for name in expected[kind])
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(
        torch.equal(weight, expected["model"][name]) for name, weight in model.state_dict().items()
    )


def test_a_resumed_run_writes_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 20_000)
    whole = run(tmp_path / "whole", "trainer.max_steps=2")
    resumed = copy_as_of(whole, 1, tmp_path / "resumed")
    run(resumed, "trainer.max_steps=2", resume=True)
    manifests = [
        folder / "checkpoints" / "step-000002" / "manifest.json" for folder in (whole, resumed)
    ]
    expected, found = (json.loads(manifest.read_text())["files"] for manifest in manifests)
    assert sum(name.startswith("training/optimizer-") for name in expected) > 3
    assert {n: x for n, x in found.items() if "tensors" in n} == {
        n: x for n, x in expected.items() if "tensors" in n
    }


@pytest.mark.parametrize("damage", ["empty", "one byte", "missing"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "training/state.safetensors", "training/state.json"]
)
def test_no_damage_passes_for_a_checkpoint(tmp_path, name, damage, caplog):
    save_state(tmp_path, checkpoint_state(1))
    newest = save_state(
        tmp_path, checkpoint_state(2, x=torch.arange(1000)), weights={"y": torch.arange(1000)}
    )
    data = bytearray((newest / name).read_bytes())
    data[
        data.find(b"1" if name.endswith("json") else torch.arange(500, 510).numpy().tobytes())
    ] ^= 1
    (newest / name).write_bytes(b"" if damage == "empty" else bytes(data))
    if damage == "missing":
        (newest / name).unlink()
    assert load_newest(tmp_path)["step"] == 1
    assert "step-000002 cannot be read and is skipped: " in caplog.text


def test_no_checkpoint_is_none_and_nothing_but_damaged_ones_is_an_error(tmp_path):
    assert load_newest(tmp_path) is None
    (tmp_path / "step-000001").write_bytes(b"PK")
    with pytest.raises(StorageError, match="none of the 1"):
        load_newest(tmp_path)


class Malicious:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "executed"),)


def test_code_in_the_place_of_any_file_is_not_run(trained, tmp_path):
    """As one pickle, and as torch writes it; with a manifest that is as before, and with one that
    fits."""
    whole = trained / "checkpoints" / "step-000002"
    files = [file.relative_to(whole).as_posix() for file in whole.rglob("*") if file.is_file()]
    assert len(files) == 9
    torch.save({"x": Malicious(tmp_path)}, tmp_path / "payload", pickle_module=pickle)
    payloads = pickle.dumps(Malicious(tmp_path)), (tmp_path / "payload").read_bytes()
    for number, name in enumerate(files):
        for fits in (False, True):
            planted = tmp_path / "checkpoints" / "step-000002"
            shutil.copytree(whole, planted)
            if fits and name != "manifest.json":
                replace_file(planted, name, payloads[number % 2])
                with contextlib.suppress(StorageError, SafetensorError):
                    contents_of(load_newest(planted.parent)["path"])
            else:
                (planted / name).write_bytes(payloads[number % 2])
                with pytest.raises(StorageError, match="none of the 1 checkpoints"):
                    load_newest(planted.parent)
            shutil.rmtree(planted)
    assert not (tmp_path / "executed").exists()
    pickle.loads(payloads[0])  # it would have been seen
    assert (tmp_path / "executed").exists()


def test_what_a_manifest_names_lies_in_the_checkpoint(tmp_path, caplog):
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
    "from pgtoolkit.training.checkpoint import save_checkpoint\n"
    "signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[3]))\n"
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    "weights = {'model': {'x': torch.zeros(10**6)}}\n"
    "try:\n"
    "    state = {'step': int(sys.argv[2])}\n"
    "    save_checkpoint(pathlib.Path(sys.argv[1]), state, weights, lambda folder: None, keep=1)\n"
    "except StorageError as error:\n"
    "    print(error)\n"
)


def save_in_a_process(folder, step, on_the_signal):
    """A checkpoint of 4 MB where a file may have 100 000 bytes."""
    command = [sys.executable, "-c", SAVE, str(folder), str(step), on_the_signal]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_killed_in_the_middle_of_saving(tmp_path):
    """The kernel kills the process at byte 100 000 of a checkpoint, once a new one and once the
    newest again."""
    whole = save_state(tmp_path, checkpoint_state(1, x=torch.arange(9)))
    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    for step in (1, 2):
        assert save_in_a_process(tmp_path, step, "SIG_DFL").returncode == -signal.SIGXFSZ
        assert names(tmp_path) == ["step-000001"]
        assert {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()} == before
    save_state(tmp_path, checkpoint_state(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """The file size limit makes the write fail half way, as a full disk does."""
    save_state(tmp_path, checkpoint_state(1))
    done = save_in_a_process(tmp_path, 2, "SIG_IGN")
    assert "step-000002 cannot be written: " in done.stdout, done.stderr
    assert "(os error 27). Earlier ones are intact." in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_newest(tmp_path)["step"] == 1


@pytest.mark.parametrize(
    ("kind", "change", "says"),
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
    trained, tmp_path, capsys, kind, change, says
):
    folder = copy_as_of(trained, 2, tmp_path / "run")
    path = folder / "checkpoints" / "step-000002"
    tensors = contents_of(path)[kind] | change
    file = {
        "model": "model.safetensors",
        "optimizer": "training/optimizer-00001-00001.safetensors",
    }[kind]
    replace_file(path, file, save({name: x for name, x in tensors.items() if x is not None}))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 2
    said = capsys.readouterr().err
    assert "the checkpoint does not fit the configured model: " in said
    assert says in said


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["lm_head.weight.exp_avg_sq"], "lm_head.weight.exp_avg_sq of the optimizer is missing"),
        (["lm_head.weight.step"], "lm_head.weight.step of the optimizer is missing"),
        (
            [f"lm_head.weight.{field}" for field in ("step", "exp_avg", "exp_avg_sq")],
            "lm_head.weight.step of the optimizer is missing",
        ),
        (None, "the optimizer's moments are missing"),
    ],
)
def test_missing_moments_are_refused(trained, tmp_path, capsys, missing, says):
    folder = copy_as_of(trained, 2, tmp_path / "run")
    path = folder / "checkpoints" / "step-000002"
    moments = contents_of(path)["optimizer"]
    left = {name: moments[name] for name in moments if missing is not None and name not in missing}
    replace_file(path, "training/optimizer-00001-00001.safetensors", save(left))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} is damaged: {says}. Delete it" in line


def test_a_weight_that_no_step_has_trained_has_no_moments(trained, tmp_path):
    """A checkpoint says which ones; one without such a list may lack all moments of a weight."""
    for names in (["lm_head.weight"], None):
        folder = copy_as_of(trained, 2, tmp_path / str(names))
        path = folder / "checkpoints" / "step-000002"
        assert contents_of(path)["without_moments"] == []
        moments = contents_of(path)["optimizer"]
        left = {name: moments[name] for name in moments if not name.startswith("lm_head.weight.")}
        replace_file(path, "training/optimizer-00001-00001.safetensors", save(left))
        state = json.loads((path / "training/state.json").read_text())
        del state["without_moments"]
        state |= {} if names is None else {"without_moments": names}
        replace_file(path, "training/state.json", json.dumps(state).encode())
        assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
        after = checkpoint_of(folder, 3)["optimizer"]
        assert (after["lm_head.weight.step"], after["transformer.wte.weight.step"]) == (1, 3)


@pytest.mark.parametrize(("field", "number"), [("exp_avg_sq", -1e-9), ("exp_avg", float("nan"))])
def test_moments_that_cannot_be_are_refused(trained, tmp_path, capsys, field, number):
    """AdamW would take the root of a negative second moment, and make NaN of the weights."""
    folder = copy_as_of(trained, 2, tmp_path / "run")
    path, name = folder / "checkpoints" / "step-000002", f"lm_head.weight.{field}"
    moments = contents_of(path)["optimizer"]
    moments[name].view(-1)[-1] = number
    replace_file(path, "training/optimizer-00001-00001.safetensors", save(moments))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    assert (
        f"is damaged: {name} of the optimizer holds negative numbers or NaN. Delete"
        in capsys.readouterr().err
    )
