"""A damaged folder of a model is refused in a single line that names the file and the reason; no
code of a folder is run."""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.refusals import refusal
from builders.runs import SHORT
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.setup import build_policy
from pgtoolkit.system.hub import answers

OVERRIDES = [setting for setting in SHORT if not setting.startswith("model.")]
OVERRIDES.append("model=huggingface")
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    return save_with_tokenizer(small_llama(), path)


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, to be damaged."""
    shutil.copytree(saved_model, tmp_path / "model")
    return tmp_path / "model"


Damage = Callable[[Path], object]
"""Damages the folder of a model."""


def replaced(name: str, data: object) -> Damage:
    def damage(folder: Path) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        (folder / name).write_bytes(content)

    return damage


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def halved(name: str) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def changed(name: str, **values: object) -> Damage:
    """Change values of a JSON file."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        replaced(name, content | values)(folder)

    return damage


def changed_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def second_file_missing(folder: Path) -> None:
    """Let the weights be in two files, the second of which is missing."""
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "../model/2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    replaced("model.safetensors.index.json", index)(folder)


CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
AUTO_MAP = {
    "AutoConfig": "evil.C",
    "AutoModelForCausalLM": "evil.M",
    "AutoTokenizer": ["evil.T", "evil.T"],
}
SEEN_BY_CHECK = {
    "no config": (removed(CONFIG), "with its config.json (got Unrecognized model"),
    "half a config": (halved(CONFIG), "a config.json that is whole (got "),
    "config that is a list": (
        replaced(CONFIG, []),
        "a config.json that is whole (got it is no JSON object)",
    ),
    "code of its own": (
        changed(CONFIG, model_type="x", auto_map=AUTO_MAP),
        "with its config.json (got one that names code of its own)",
    ),
    "half a tokenizer": (
        halved(TOKENIZER),
        "a tokenizer that transformers can load, such as tokenizer.json (got",
    ),
    "half a tokenizer_config": (
        halved("tokenizer_config.json"),
        "a tokenizer_config.json that is whole (got",
    ),
    "broken generation_config": (
        replaced("generation_config.json", b'{"eos_token_id": 1'),
        "a generation_config.json that is whole (got Expec",
    ),
    "adapters": (
        replaced("adapter_config.json", {}),
        "a whole model (got adapters, adapter_config.json)",
    ),
}
SEEN_BY_LOADING = {
    "half of the weights": (halved(WEIGHTS), "incomplete metadata"),
    "weights of other shapes": (
        changed(CONFIG, hidden_size=32),
        "lm_head.weight of shape [12, 16] instead of [12, 32]",
    ),
    "a piece that is missing": (
        second_file_missing,
        "weights of the model that config.json describes (got ",
    ),
    "no norm": (
        changed_weights(lambda weights: weights.pop(NORM)),
        f"(got no {NORM}). transformers would fill in random",
    ),
}


@pytest.mark.parametrize("kind", [*SEEN_BY_CHECK, *SEEN_BY_LOADING])
def test_a_damaged_folder_is_refused_in_a_single_line(folder, monkeypatch, capsys, kind):
    monkeypatch.chdir(folder.parent)
    damage, message = (SEEN_BY_CHECK | SEEN_BY_LOADING)[kind]
    damage(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    if kind in SEEN_BY_CHECK:
        error = refusal(capsys, *OVERRIDES, "model.path=model")
        assert error.startswith("pgtk: error: model.path=model needs ")
        assert error.count("\n") == 1
        assert message in error
    with pytest.raises(ConfigError, match=r"^model.path=model needs [^\n]*$") as refused:
        build_policy(model_config("model"), None, False)
    assert message in str(refused.value)
    assert sorted(os.listdir()) == ["model"]


def test_a_folder_with_code_and_further_weights_is_loaded_without_them(
    folder, monkeypatch, capsys, caplog
):
    """The code is for a model that transformers has itself."""
    monkeypatch.chdir(folder.parent)
    for name in (CONFIG, "tokenizer_config.json"):
        changed(name, auto_map=AUTO_MAP)(folder)
    changed_weights(lambda weights: weights.update({"mtp.weight": torch.zeros(2)}))(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    assert main(["check", *OVERRIDES, "model.path=model"]) == 0
    build_policy(model_config("model"), None, False)
    assert (
        "note: the weights of model.path=model hold mtp.weight, which its config.json does not use."
        in caplog.text
    )
    assert sorted(os.listdir()) == ["model"]


@pytest.fixture
def connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let no hub answer, and its cache be in `tmp_path`; return the addresses that are asked, and
    the pauses between two attempts."""
    connections = []

    def connect(_: socket.socket, address: object) -> None:
        connections.append(address)
        raise OSError("no network")

    hub = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    address_of_file = hub + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address_of_file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(time, "sleep", connections.append)
    answers.cache_clear()
    return connections


def test_a_name_is_refused_at_once_where_the_hub_does_not_answer(
    tmp_path, monkeypatch, connections, capsys
):
    monkeypatch.chdir(tmp_path)
    message = refusal(capsys, *OVERRIDES, "model.path=nothere")
    assert message == (
        "pgtk: error: model.path=nothere needs the folder of a model, or the name of one on the "
        "Hugging Face hub (got no such folder here, and no such name in the hub's cache). The hub, "
        "http://127.0.0.1:9, does not answer. Use model.path=FOLDER.\n"
    )
    assert set(connections) == {("127.0.0.1", 9)}


def test_a_model_in_the_cache_is_loaded_where_the_hub_does_not_answer(
    folder, tmp_path, connections
):
    cached = tmp_path / "cache" / "models--owner--name"
    commit = "0" * 40
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    policy = build_policy(model_config("owner/name"), None, False)
    saved = load_file(folder / WEIGHTS)
    torch.testing.assert_close(policy.model.state_dict()[NORM], saved[NORM], rtol=0, atol=0)
    assert set(connections) == {("127.0.0.1", 9)}


def test_a_folder_is_loaded_without_asking_the_hub(folder, connections):
    changed(CONFIG, transformers_version=None)(folder)
    (folder / "generation_config.json").unlink()
    build_policy(model_config(folder), None, False)
    build_policy(model_config(folder, random_weights=True), None, False)
    assert connections == []
