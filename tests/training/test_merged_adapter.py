"""`pgtk export` of adapters that peft saved, as TRL does: the whole model computes what peft's
does."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.refusals import refusal
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from pgtoolkit.cli import main
from pgtoolkit.model.weight_files import open_model

TOKENS = torch.tensor([[1, 2, 3, 10, 3, 2, 1, 11]])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 12, "eos_token_id": 11}
    return GPT2LMHeadModel(GPT2Config(n_positions=32, bos_token_id=None, **shape))


def adapter_of(folder: Path, model: torch.nn.Module, **settings: object) -> torch.nn.Module:
    """Save a model in folder/base and adapters of random numbers in folder/adapter; return both as
    peft has them."""
    base = save_with_tokenizer(model, folder / "base")
    loaded = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) / 4
    adapted.save_pretrained(folder / "adapter")
    return adapted


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (small_llama, {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}),
        (
            small_llama,
            {"r": 4, "use_rslora": True, "lora_dropout": 0.1, "rank_pattern": {"q_proj": 2}}
            | {"target_modules": "all-linear"},
        ),
        (gpt2, {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_the_merged_model_computes_what_peft_computes(tmp_path, capsys, make, settings):
    adapted = adapter_of(tmp_path, make(), **settings).eval()
    with torch.no_grad():
        expected = adapted(input_ids=TOKENS).logits
        with adapted.disable_adapter():
            assert (adapted(input_ids=TOKENS).logits - expected).abs().max() > 0.05
    use = refusal(capsys, "check", "model=huggingface", f"model.path={tmp_path}/adapter")
    assert f"Use pgtk export {tmp_path}/adapter MERGED and model.path=MERGED." in " ".join(
        use.split()
    )
    merged = tmp_path / "merged"
    assert main(["export", str(tmp_path / "adapter"), str(merged)]) == 0
    assert f"model.path={merged} is the whole model" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        assert (model(input_ids=TOKENS).logits - expected).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(merged)("12")["input_ids"] == [1, 2]
    open_model(str(merged))  # as `pgtk check` does
    card = (merged / "README.md").read_text()
    assert "# adapter\n" in card
    assert f"of {tmp_path}/base, added by pgtoolkit" in card
    assert "None: the tokenizer has none." in card


def test_a_folder_of_checkpoints_is_refused_with_the_newest(tmp_path, capsys, monkeypatch):
    """As TRL leaves it where training did not come to its end."""
    monkeypatch.chdir(tmp_path)
    adapter_of(tmp_path, small_llama(), r=2, target_modules=["q_proj"])
    for step in (90, 100):
        shutil.copytree("adapter", f"a run/checkpoint-{step}")
    (tmp_path / "a run" / "checkpoint-100" / "trainer_state.json").write_text("{}")
    message = refusal(capsys, "check", "model=huggingface", "model.path='a run'")
    assert "Use model.path='a run/checkpoint-100'." in message
    message = refusal(capsys, "export", "a run", "merged")
    use = re.findall(r"Use pgtk (.*)\.$", message)[0]
    assert shlex.split(use) == ["export", "a run/checkpoint-100", "merged"]
    assert main(shlex.split(use)) == 0
    shutil.copytree("merged", "whole/checkpoint-3")
    message = refusal(capsys, "check", "model=huggingface", "model.path=whole")
    assert "Use model.path=whole/checkpoint-3." in message
    shutil.copytree("merged", "of pgtk/checkpoints/step-000002")
    message = refusal(capsys, "check", "model=huggingface", "model.path='of pgtk'")
    assert "Use pgtk export 'of pgtk' MODEL and model.path=MODEL." in message


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"use_dora": True}, "adapters of plain LoRA (got use_dora=true)"),
        ({"bias": "all"}, "adapters of plain LoRA (got bias=all)"),
        ({"init_lora_weights": "pissa"}, "plain LoRA (got init_lora_weights=pissa)"),
        ({"alpha_pattern": {"q_proj": 4}}, "plain LoRA (got alpha_pattern={"),
        ({"peft_type": "IA3"}, "plain LoRA (got peft_type=IA3)"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path in adapter_config.json (got"),
        (
            {"base_model_name_or_path": "/nowhere"},
            "Use an editor to write the folder of that model into ",
        ),
        ({"lora_alpha": 0}, "a lora_alpha > 0 in adapter_config.json (got 0)"),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path, capsys, settings, got):
    adapter_of(tmp_path, small_llama(), r=2, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    message = refusal(capsys, "export", tmp_path / "adapter", tmp_path / "merged")
    assert got in message
    assert not (tmp_path / "merged").exists()


def test_tensors_that_are_no_pair_of_a_linear_layer_are_refused(tmp_path, capsys):
    adapter_of(tmp_path, small_llama(tie_word_embeddings=True), r=2, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    (a, b) = sorted(whole)
    layer = a.removesuffix(".lora_A.weight")

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        return refusal(capsys, "export", tmp_path / "adapter", tmp_path / "merged")

    assert f"matrices A and B of linear layers (got {a})" in refused({a: whole[a]})
    more = {"base_model.model.model.norm.weight": torch.ones(16)}
    assert "(got base_model.model.model.norm.weight)" in refused(whole | more)
    assert "q_proj of shape [5, 16]" in refused({a: whole[a], b: torch.ones(5, 2)})
    renamed = {name.replace("q_proj", "w_proj"): tensor for name, tensor in whole.items()}
    assert "layers that the model has (got" in refused(renamed)
    head = {
        a: "base_model.model.lm_head.lora_A.weight",
        b: "base_model.model.lm_head.lora_B.weight",
    }
    assert layer.endswith("q_proj")
    tied = {head[a]: torch.ones(2, 16), head[b]: torch.ones(12, 2)}
    assert "a head that is not tied to the embeddings (got an adapter of lm_head)" in refused(tied)
    file.write_bytes(file.read_bytes()[:50])
    assert "adapter_model.safetensors, whole" in refusal(
        capsys, "export", tmp_path / "adapter", tmp_path / "merged"
    )
