"""A model from a folder is loaded with its own head and tokenizer, trained in the precision that is
asked for, and resumed to the last bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from builders.documents import document_of
from builders.models import save_with_tokenizer, small_llama
from builders.runs import assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, with_model
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

from pgtoolkit.assembly.train import build, train
from pgtoolkit.cli import main
from pgtoolkit.config.schema import Config
from pgtoolkit.document import Document
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.tasks.prompts import tiny_tokenizer

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama with tied embeddings, and its tokenizer."""
    model = small_llama(num_hidden_layers=2, tie_word_embeddings=True, attention_dropout=0.3)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


def config_with(folder: Path, *overrides: str) -> Config:
    return config_of(*with_model(folder, "trainer.max_steps=4", *overrides))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_run_is_equal_to_the_last_bit(folder, tmp_path, checkpointing):
    config = config_with(folder, f"model.gradient_checkpointing={str(checkpointing).lower()}")
    train(config, tmp_path / "whole")
    rows = metrics_of(tmp_path / "whole")
    # The model has dropout: a ratio of 1 shows that it is off.
    assert rows[0]["ratio_new_old"] == pytest.approx(1, abs=1e-6)
    resumed = copy_as_of(tmp_path / "whole", 1, tmp_path / "resumed")
    train(config, resumed, resume=True)
    assert metrics_of(resumed) == rows
    assert_equal(checkpoint_of(resumed, 4), checkpoint_of(tmp_path / "whole", 4))


def test_a_head_that_differs_from_the_tied_embeddings_is_trained_and_saved_as_it_is(
    folder, tmp_path, capsys
):
    """In bfloat16 completions come from a copy. The saved model is loaded with a head of its own,
    and has the same weights."""
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    head = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    save_file(
        weights | {"lm_head.weight": head}, tmp_path / "model/model.safetensors", {"format": "pt"}
    )
    config = config_with(
        tmp_path / "model",
        "trainer.max_steps=1",
        "model.dtype=bfloat16",
        "optimizer.learning_rate=1e-12",
    )
    train(config, tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if "tie_word_embeddings" in line]
    assert note.startswith(
        f"note: config.json of model.path={tmp_path / 'model'} says tie_word_embeddings=true, but "
    )
    saved = tmp_path / "run/checkpoints/step-000001"
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    model = AutoModelForCausalLM.from_pretrained(saved)
    torch.testing.assert_close(model.lm_head.weight, head, rtol=0, atol=0)
    embeddings = weights["model.embed_tokens.weight"]
    torch.testing.assert_close(model.model.embed_tokens.weight, embeddings, rtol=0, atol=0)


def short_document() -> Document:
    mask = torch.tensor([False, False, True, True])
    return document_of(torch.tensor([1, 2, 3, 4]), mask, advantages=1.0)


@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(folder, tmp_path, fp32_lm_head):
    config = config_with(
        folder, "model.dtype=bfloat16", f"model.fp32_lm_head={str(fp32_lm_head).lower()}"
    )
    train(config, tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["ratio_new_old"] == pytest.approx(1, abs=1e-3)
    assert all(row["num_skipped_steps"] == 0 for row in rows)
    weights = checkpoint_of(tmp_path / "run", 4)["model"]
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    # Hidden states and weight are in bfloat16. Their product is rounded to bfloat16 unless it is
    # asked for in float32.
    module, _ = build(config)
    micro_batch = make_step([short_document()], 99, {}).micro_batches[0]
    with torch.no_grad():
        hidden = module.policy.hidden_states(micro_batch)
        weight = module.policy.head.weight.bfloat16()
        assert hidden.dtype == torch.bfloat16
        logits = hidden.double() @ weight.double().T
        exact = logits.log_softmax(-1)[[1, 2], [3, 4]]
        rounded = logits.bfloat16().double().log_softmax(-1)[[1, 2], [3, 4]]
        log_probs = module.log_probs(micro_batch)[1:3].double()
    assert (exact - rounded).abs().max() > 2e-5
    torch.testing.assert_close(log_probs, exact if fp32_lm_head else rounded, rtol=0, atol=2e-6)


def test_a_head_with_a_bias_is_trained_with_it(tmp_path):
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(vocab_size=12, intermediate_size=32, **SIZES))
    torch.nn.init.normal_(model.lm_head.bias)
    config = config_with(save_with_tokenizer(model, tmp_path), "kernel=fused_linear")
    module, _ = build(config)
    document = short_document()
    micro_batch = make_step([document], 99, {}).micro_batches[0]
    logits = module.model(input_ids=document.tokens[None]).logits[0].log_softmax(-1)
    expected = [logits[1, 3].item(), logits[2, 4].item()]
    assert module.log_probs(micro_batch)[1:3].tolist() == pytest.approx(expected, abs=1e-5)


def test_prompts_begin_with_the_tokenizers_first_token_and_lack_its_last(folder, tmp_path, capsys):
    """The tokenizer adds `=` at the beginning and an end. `pgtk check` shows the tokens."""
    shutil.copytree(folder, tmp_path / "model")
    backend = tiny_tokenizer("0123456789=")
    special = [("=", 10), ("<end>", 11)]
    backend.post_processor = processors.TemplateProcessing(
        single="= $A <end>", special_tokens=special
    )
    options = {"bos_token": "=", "eos_token": "<end>", "pad_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(tmp_path / "model")
    config = config_with(tmp_path / "model")
    module, loader = build(config)
    assert module.policy.tokenizer("12=").input_ids == [10, 1, 2, 10, 11]
    documents = next(iter(loader)).documents
    for document in documents:
        assert document.loss_mask.tolist().index(True) == 5
        assert (document.tokens[0], document.tokens[4]) == (10, 10)
        assert 10 not in document.tokens[1:4].tolist()
    first = documents[0].tokens[:5].tolist()
    assert main(["check", *with_model(tmp_path / "model")]) == 0
    shown = " ".join(f"'{'=' if token == 10 else token}'={token}" for token in first)
    assert f"  5 tokens: {shown}\n" in capsys.readouterr().out


def test_steps_whose_advantages_are_all_zero_are_noted_once_and_counted(folder, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "no"}\n' * 4)
    others = [setting for setting in with_model(folder) if not setting.startswith("task.")]
    prompts = ("task=prompts", f"task.path={tmp_path / 'p.jsonl'}")
    train(config_of(*others, *prompts, "trainer.max_steps=3"), tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if "every advantage" in line]
    assert "every advantage of the step that ends at document 8 is 0" in note
    fractions = [row["zero_advantage_group_fraction"] for row in metrics_of(tmp_path / "run")]
    assert fractions == [1, 1, 1]
