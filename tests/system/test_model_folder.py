"""Damaged folders of models: one refusal that names the file and the reason; nothing of a folder is
run."""

import json
import os
import shutil
import socket

import pytest
import torch
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.runs import SHORT
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.setup import build_policy

OVERRIDES = [*(one for one in SHORT if not one.startswith("model.")), "model=huggingface"]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    return save_with_tokenizer(small_llama(), path)


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def put(name, data):
    return lambda folder: (folder / name).write_bytes(
        data if isinstance(data, bytes) else json.dumps(data).encode()
    )


def remove(name):
    return lambda folder: (folder / name).unlink()


def half(name):
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def changed(name, **values):
    return lambda folder: put(name, json.loads((folder / name).read_text()) | values)(folder)


def tensors(change):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def in_pieces(folder):
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "../model/2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    put("model.safetensors.index.json", index)(folder)


CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
AUTO_MAP = {
    "AutoConfig": "evil.C",
    "AutoModelForCausalLM": "evil.M",
    "AutoTokenizer": ["evil.T", "evil.T"],
}
SEEN_BY_CHECK = {
    "no config": (remove(CONFIG), "with its config.json (got Unrecognized model"),
    "half a config": (half(CONFIG), "a config.json that is whole (got "),
    "config that is a list": (
        put(CONFIG, []),
        "a config.json that is whole (got it is no JSON object)",
    ),
    "code of its own": (
        changed(CONFIG, model_type="x", auto_map=AUTO_MAP),
        "with its config.json (got one that names code of its own)",
    ),
    "half a tokenizer": (
        half(TOKENIZER),
        "a tokenizer that transformers can load, such as tokenizer.json (got",
    ),
    "half a tokenizer_config": (
        half("tokenizer_config.json"),
        "a tokenizer_config.json that is whole (got",
    ),
    "broken generation_config": (
        put("generation_config.json", b'{"eos_token_id": 1'),
        "a generation_config.json that is whole (got Expec",
    ),
    "adapters": (
        put("adapter_config.json", {}),
        "a whole model (got adapters, adapter_config.json)",
    ),
}
SEEN_BY_LOADING = {
    "half of the weights": (half(WEIGHTS), "incomplete metadata"),
    "weights of other shapes": (
        changed(CONFIG, hidden_size=32),
        "lm_head.weight of shape [12, 16] instead of [12, 32]",
    ),
    "a piece that is missing": (in_pieces, "weights of the model that config.json describes (got "),
    "no norm": (
        tensors(lambda weights: weights.pop(NORM)),
        f"(got no {NORM}). transformers would fill in random",
    ),
}


@pytest.mark.parametrize("kind", [*SEEN_BY_CHECK, *SEEN_BY_LOADING])
def test_a_damaged_folder_is_one_message(folder, monkeypatch, capsys, kind):
    monkeypatch.chdir(folder.parent)
    damage, says = (SEEN_BY_CHECK | SEEN_BY_LOADING)[kind]
    damage(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    if kind in SEEN_BY_CHECK:
        assert main([*OVERRIDES, "model.path=model"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("pgtk: error: model.path=model needs ")
        assert said.count("\n") == 1
        assert says in said
    with pytest.raises(ConfigError, match=r"^model.path=model needs [^\n]*$") as error:
        build_policy(model_config("model"), None, False)
    assert says in str(error.value)
    assert sorted(os.listdir()) == ["model"]


def test_a_whole_folder_is_loaded(folder, monkeypatch, capsys, caplog):
    """Also one that brings code for a model that transformers has, which is not run, and weights
    for more."""
    monkeypatch.chdir(folder.parent)
    for name in (CONFIG, "tokenizer_config.json"):
        changed(name, auto_map=AUTO_MAP)(folder)
    tensors(lambda weights: weights.update({"mtp.weight": torch.zeros(2)}))(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    assert main(["check", *OVERRIDES, "model.path=model"]) == 0
    build_policy(model_config("model"), None, False)
    assert (
        "note: the weights of model.path=model hold mtp.weight, which its config.json does not use."
        in caplog.text
    )
    assert sorted(os.listdir()) == ["model"]


def test_a_folder_asks_no_hub(folder, monkeypatch):
    def connect(*_):
        asked.append(1)
        raise OSError("no network")

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    changed(CONFIG, transformers_version=None)(folder)
    (folder / "generation_config.json").unlink()
    build_policy(model_config(folder), None, False)
    build_policy(model_config(folder, random_weights=True), None, False)
    assert asked == []
