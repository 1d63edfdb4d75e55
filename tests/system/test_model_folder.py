"""A damaged folder of a model is refused in a single line that names the file and the reason; no
code of a folder is run."""

import json
import os
import re
import shutil
import socket
import threading
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
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pgtoolkit.assembly.inputs import _problem_of_model
from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.architectures import MODEL_TYPES
from pgtoolkit.model.setup import build_policy
from pgtoolkit.model.weight_files import _by_expert, _lacks, needed_shapes
from pgtoolkit.system.hub import answers
from pgtoolkit.system.model_folder import load_tokenizer

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


def unfinished(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.incomplete")


def half_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    halved("pytorch_model.bin")(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:46\nsize 135\n"
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
    "a pointer to the config": (
        replaced(CONFIG, POINTER),
        "a config.json that is whole (got the po",
    ),
    "a pointer to the tokenizer": (
        replaced(TOKENIZER, POINTER),
        "the pointer of Git LFS in the place of tokenizer.json). `git lfs pull`",
    ),
    "no tokenizer": (
        lambda folder: [removed(name)(folder) for name in (TOKENIZER, "tokenizer_config.json")],
        "such as tokenizer.json (got none)",
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
NEEDS_WEIGHTS = "weights of the model that config.json describes (got "
IN_WEIGHTS = {
    "no weights": (removed(WEIGHTS), "no model.safetensors)"),
    "half of the weights": (halved(WEIGHTS), " bytes of model.safetensors)"),
    "empty weights": (replaced(WEIGHTS, b""), "an empty model.safetensors)"),
    "a pointer to the weights": (
        replaced(WEIGHTS, POINTER),
        "the pointer of Git LFS in the place of model.safetensors). `git lfs pull`",
    ),
    "a page in the place of the weights": (
        replaced(WEIGHTS, b"<!doctype html><html>"),
        "a model.safetensors that is no safetensors file)",
    ),
    "a download that has not ended": (unfinished, "model.safetensors.incomplete, of a download"),
    "pieces without their index": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors"),
        "model-00001-of-00002.safetensors without model.safetensors.index.json)",
    ),
    "weights of other shapes": (
        changed(CONFIG, hidden_size=32),
        "lm_head.weight of shape [12, 16] instead of [12, 32]",
    ),
    "a piece that is missing": (second_file_missing, "1 of the 2 files that model.safetensors.in"),
    "a layer that is missing": (
        changed(CONFIG, num_hidden_layers=2),
        "no model.layers.1.input_layernorm.weight, no model.layers.1.mlp.down_proj.weight",
    ),
    "no norm": (
        changed_weights(lambda weights: weights.pop(NORM)),
        f"no {NORM}). transformers would fill in random",
    ),
    "half a pickle": (half_a_pickle, "a pytorch_model.bin that is not whole)"),
}


@pytest.mark.parametrize("kind", [*SEEN_BY_CHECK, *IN_WEIGHTS])
def test_check_and_the_run_refuse_a_damaged_folder_in_the_same_line(
    folder, monkeypatch, capsys, kind
):
    monkeypatch.chdir(folder.parent)
    damage, message = (SEEN_BY_CHECK | IN_WEIGHTS)[kind]
    damage(folder)
    (folder / "evil.py").write_text("open('ran', 'w')\n")
    problem = _problem_of_model(str(folder), "model", False)
    if kind in IN_WEIGHTS:
        message = NEEDS_WEIGHTS + message if message[0] != " " else message
    assert message in problem
    assert re.fullmatch(r"model.path=model needs [^\n]*", problem)
    with pytest.raises(ConfigError) as refused:
        build_policy(model_config("model"), None, False)
    assert str(refused.value) == problem
    if kind in ("half a config", "half of the weights"):
        assert refusal(capsys, *OVERRIDES, "model.path=model") == f"pgtk: error: {problem}\n"
    if kind in IN_WEIGHTS and "config" not in kind and "layer" not in kind:
        build = build_policy(model_config("model", random_weights=True), None, False)
        assert build.model.config.model_type == "llama"
    assert sorted(os.listdir()) == ["model"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_the_shapes_that_a_header_is_compared_with_are_those_of_the_model(tmp_path, kind, tied):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8}
    further = {} if kind == "gpt2" else {"num_key_value_heads": 2, "intermediate_size": 12}
    if kind == "qwen3_moe":
        further |= {"num_experts": 3, "moe_intermediate_size": 5, "mlp_only_layers": [1]}
    if kind == "llama":
        further |= {"attention_bias": tied, "mlp_bias": tied}
    config = AutoConfig.for_model(
        kind, vocab_size=11, tie_word_embeddings=tied, head_dim=6, **sizes, **further
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert needed_shapes(config) == {name: tuple(weight.shape) for name, weight in saved.items()}
    # A checkpoint of a run has the experts of a layer as one tensor.
    in_memory = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert _lacks(_by_expert(in_memory), needed_shapes(config)) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "needs a language model that only decodes"),
        ("vit", "needs a language model (got vit, of which transformers has none)"),
    ],
)
def test_check_refuses_a_model_of_another_kind(folder, kind, reason):
    changed(CONFIG, model_type=kind)(folder)
    assert reason in _problem_of_model(kind, str(folder), False)


def test_a_tokenizer_that_draws_its_tokens_is_refused(folder):
    bytes_ = Tokenizer(models.BPE(vocab={"1": 0, "<end>": 1}, merges=[], dropout=0.5))
    PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<end>").save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"same tokens every time \(got dropout=0.5 in tokenizer"):
        load_tokenizer(str(folder))


def test_a_chat_template_in_a_file_of_its_own_is_used(folder):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(folder)).chat_template == "{{ messages }}"
    (folder / "chat_template.json").write_text('{"chat')
    with pytest.raises(ConfigError, match=r"needs a chat_template\.json with"):
        load_tokenizer(str(folder))


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

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():  # others are no attempts
            connections.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
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
