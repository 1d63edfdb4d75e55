"""Damaged folders of models: one refusal that names the file and the reason; nothing of a folder is run."""

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
from pgtoolkit.model.build import build_policy

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
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


def remove(name):
    return lambda folder: (folder / name).unlink()


def half(name):
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def changed(name, **values):
    return lambda folder: put(name, json.loads((folder / name).read_text()) | values)(folder)


def without(name, key):
    def damage(folder):
        content = json.loads((folder / name).read_text())
        del content[key]
        put(name, content)(folder)

    return damage


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def tensors(change):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def in_pieces(folder):
    index = {"weight_map": {"a": "1.safetensors", "b": "../model/2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    put("model.safetensors.index.json", index)(folder)


def old_format(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    half("pytorch_model.bin")(folder)


CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
AUTO_MAP = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
FOUND_BY_CHECK = {
    "no config": (remove(CONFIG), "no config.json"),
    "empty config": (put(CONFIG, b""), "config.json: Expecting value"),
    "half a config": (half(CONFIG), "config.json: "),
    "config that is a list": (put(CONFIG, []), "config.json: it is no JSON object"),
    "binary config": (put(CONFIG, bytes(range(256))), "config.json: "),
    "deep config": (put(CONFIG, b"[" * 100_000), "config.json: "),
    "config without a type": (without(CONFIG, "model_type"), "config.json: it has no model_type"),
    "config of an unknown type": (changed(CONFIG, model_type="x"), "has model type `x` but Transformers does not"),
    "heads that do not divide": (
        changed(CONFIG, hidden_size=17),
        "whole files of weights that fit config.json (got m",
    ),
    "text for a number": (changed(CONFIG, num_hidden_layers="a"), "Field 'num_hidden_layers' expected int, got str"),
    "code of its own": (
        changed(CONFIG, model_type="x", auto_map=AUTO_MAP),
        "config.json that transformers can load (",
    ),
    "no tokenizer": (lambda f: [remove(n)(f) for n in (TOKENIZER, "tokenizer_config.json")], "none of tokenizer.json"),
    "half a tokenizer": (half(TOKENIZER), "a tokenizer that transformers can load, such as tokenizer.json (got"),
    "tokenizer of another format": (put(TOKENIZER, {"a": 1}), "a tokenizer that transformers can load, such as token"),
    "half a tokenizer_config": (half("tokenizer_config.json"), "tokenizer_config.json: "),
    "no weights": (remove(WEIGHTS), "no model.safetensors or pytorch_model.bin"),
    "empty weights": (put(WEIGHTS, b""), "model.safetensors: Error while deserializing header: header too small"),
    "half of the weights": (half(WEIGHTS), "model.safetensors: "),
    "header that is none": (put(WEIGHTS, b"\x08" + bytes(7) + b"garbage!" * 9), "deserializing header: invalid"),
    "weights of other shapes": (
        changed(CONFIG, hidden_size=32),
        "model.embed_tokens.weight has shape [12, 16] ins",
    ),
    "a piece that is missing": (in_pieces, "../model/2.safetensors: missing"),
    "broken index": (
        lambda f: [remove(WEIGHTS)(f), put(f"{WEIGHTS}.index.json", b"{")(f)],
        "index.json: Expecting",
    ),
    "broken generation_config": (put("generation_config.json", b'{"eos_token_id": 1'), "generation_config.json: Expec"),
    **{f"pipe {name}": (pipe(name), f"{name}: a pipe") for name in (CONFIG, TOKENIZER, WEIGHTS, "merges.txt")},
    "link to nothing": (
        lambda f: [remove(CONFIG)(f), (f / CONFIG).symlink_to("x")],
        "config.json: a link to x: No su",
    ),
    "folder for a file": (lambda f: [remove(CONFIG)(f), (f / CONFIG).mkdir()], "config.json: Is a directory"),
}
FOUND_BY_LOADING = {
    "a layer more": (
        changed(CONFIG, num_hidden_layers=2),
        "no model.layers.1.input_layernorm.weight, no model.",
    ),
    "another width": (
        changed(CONFIG, intermediate_size=8),
        "mlp.down_proj.weight of shape [16, 32] instead of [16,",
    ),
    "no norm": (
        tensors(lambda weights: weights.pop(NORM)),
        f"(got no {NORM}). transformers would fill in random",
    ),
    "NaN": (tensors(lambda weights: weights[NORM].fill_(torch.nan)), f"NaN or infinity in {NORM}"),
    "one infinity": (tensors(lambda weights: weights[NORM][3].fill_(-torch.inf)), f"NaN or infinity in {NORM}"),
    "half of an old format": (old_format, "weights of the model that config.json describes (got "),
    "no function of that name": (
        changed(CONFIG, hidden_act="zz"),
        "weights of the model that config.json describes",
    ),
    "no language model": (changed(CONFIG, model_type="vit"), "weights of the model that config.json describes (got"),
}


@pytest.mark.parametrize("kind", [*FOUND_BY_CHECK, *FOUND_BY_LOADING])
def test_a_damaged_folder_is_one_message(folder, monkeypatch, capsys, kind):
    monkeypatch.chdir(folder.parent)
    damage, says = (FOUND_BY_CHECK | FOUND_BY_LOADING)[kind]
    damage(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    if kind in FOUND_BY_CHECK:
        assert main([*OVERRIDES, "model.path=model"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("pgtk: error: model.path=model needs ")
        assert said.count("\n") == 1
        assert says in said
    with pytest.raises(ConfigError) as error:
        build_policy(model_config("model"), None, False)
    assert str(error.value).startswith("model.path=model needs ")
    assert "\n" not in str(error.value)
    assert says in str(error.value)
    assert sorted(os.listdir()) == ["model"]


def test_a_whole_folder_is_loaded(folder, monkeypatch, capsys, caplog):
    """Also one that brings code for a model that transformers has, which is not run, and weights for more."""
    monkeypatch.chdir(folder.parent)
    for name in (CONFIG, "tokenizer_config.json"):
        changed(name, auto_map=AUTO_MAP)(folder)
    tensors(lambda weights: weights.update({"mtp.weight": torch.zeros(2)}))(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    assert main(["check", *OVERRIDES, "model.path=model"]) == 0
    build_policy(model_config("model"), None, False)
    assert "note: the weights of model.path=model hold mtp.weight, which its config.json does not use." in caplog.text
    assert sorted(os.listdir()) == ["model"]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_path_of_no_folder(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("model") if kind == "pipe" else (tmp_path / "model").touch()
    for path in ("model", "./model"):
        assert main(["check", *OVERRIDES, f"model.path={path}"]) == 2
        assert f"model.path={path} needs a folder (got a file). A model is made of several" in capsys.readouterr().out


def test_a_folder_asks_no_hub(folder, monkeypatch):
    def connect(*_):
        asked.append(1)
        raise OSError("no network")

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    without(CONFIG, "transformers_version")(folder)
    (folder / "generation_config.json").unlink()
    build_policy(model_config(folder), None, False)
    build_policy(model_config(folder, random_weights=True), None, False)
    assert asked == []
