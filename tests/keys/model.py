"""Rows of `config/test_keys.py`: the model."""

from __future__ import annotations

import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader
from transformers import LlamaForCausalLM

from keys import LogitsMade, key, module_of, settings, some_documents, step_of


def llama(folder, seed=0) -> str:
    return f"model.path={save_with_tokenizer(small_llama(seed), folder / str(seed))}"


@key("model/tiny.name", "model/huggingface.name")
def model_name(tmp_path):
    assert type(module_of("model=tiny").model).__name__ == "GPT2LMHeadModel"
    assert (
        type(module_of("model=huggingface", llama(tmp_path)).model).__name__ == "LlamaForCausalLM"
    )


@key("model/tiny.num_heads")
def num_heads():
    for heads in (1, 4):
        (block,) = module_of(f"model.num_heads={heads}").model.transformer.h
        assert (block.attn.num_heads, block.attn.head_dim) == (heads, 8 // heads)


@key("model/tiny.num_layers", "model/tiny.hidden_size", "model/tiny.max_positions")
def sizes(key):
    """By the number of parameters of a GPT-2 with 12 tokens and an LM head of its own."""
    name, counts = key.split(".")[1], []
    for value in (8, 12):
        size = {"num_layers": 1, "hidden_size": 8, "max_positions": 64} | {name: value}
        layers, width = size["num_layers"], size["hidden_size"]
        module = module_of(f"model.{name}={value}")
        counts.append(sum(weight.numel() for weight in module.parameters()))
        embeddings = (12 + 12 + size["max_positions"]) * width
        assert counts[-1] == embeddings + layers * (12 * width**2 + 13 * width) + 2 * width
        assert module.policy.max_positions == size["max_positions"]
    assert counts[0] < counts[1]


def head_of(*overrides):
    return (
        module_and_loader(*settings("model=huggingface", *overrides))[0]
        .float()
        .policy.head.weight.detach()
    )


def saved_head(path):
    return LlamaForCausalLM.from_pretrained(path.partition("=")[2]).lm_head.weight.detach()


@key("model/huggingface.path")
def model_path(tmp_path):
    first, second = llama(tmp_path, 0), llama(tmp_path, 1)
    for path in (first, second):
        assert torch.equal(head_of(path), saved_head(path))
    assert not torch.equal(saved_head(first), saved_head(second))


@key("model/huggingface.random_weights")
def random_weights(tmp_path):
    path = llama(tmp_path, 5)
    found = head_of(path, "model.random_weights=true")
    assert found.shape == saved_head(path).shape
    assert (found - saved_head(path)).abs().min() > 0
    assert not torch.equal(found, head_of(path, "model.random_weights=true", "seed=1"))


@key("model/huggingface.gradient_checkpointing")
def gradient_checkpointing(tmp_path):
    path, calls, gradients = llama(tmp_path), {}, []
    for value in ("false", "true"):
        module = module_of("model=huggingface", path, f"model.gradient_checkpointing={value}")
        seen = calls[value] = []
        module.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, seen=seen: seen.append(1)
        )
        module.training_step(step_of(some_documents()), 0)
        gradients.append([weight.grad for weight in module.parameters()])
    assert (len(calls["false"]), len(calls["true"])) == (1, 2)
    torch.testing.assert_close(*gradients)


@key("model/huggingface.fp32_lm_head")
def head_in_float32(tmp_path):
    """The log-probs, and the logits behind the loss, of a body in bfloat16."""
    path, step = llama(tmp_path), step_of(some_documents())
    labels = step.micro_batches[0].labels
    for value, dtype in (("true", torch.float32), ("false", torch.bfloat16)):
        choice = ("model.dtype=bfloat16", f"model.fp32_lm_head={value}")
        module = module_of("model=huggingface", path, *choice).float()
        weight = module.policy.head.weight.detach().bfloat16()
        hidden = module.policy.hidden_states(step.micro_batches[0]).detach()
        both = {
            torch.float32: hidden.float() @ weight.float().T,
            torch.bfloat16: (hidden @ weight.T).float(),
        }
        both = {
            t: x.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[labels >= 0, 0]
            for t, x in both.items()
        }
        assert (both[torch.float32] - both[torch.bfloat16]).abs().max() > 1e-3
        found = module.log_probs(step.micro_batches[0])[labels >= 0]
        torch.testing.assert_close(found, both[dtype], rtol=0, atol=1e-5)
        with LogitsMade(12) as logits:
            out = module.micro_batch_loss(step.micro_batches[0], step.totals)
        assert logits.found == [(int((labels >= 0).sum()), dtype)]
        torch.testing.assert_close(out.log_probs[labels >= 0], both[dtype], rtol=0, atol=1e-5)
