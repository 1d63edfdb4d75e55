"""Tests of single keys (see `keys`): the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader
from torch import Tensor
from transformers import LlamaForCausalLM

from keys import key_test
from keys.small_runs import (
    VOCABULARY,
    LogitsMade,
    module_and_steps,
    module_of,
    settings,
    some_documents,
    step_of,
)
from pgtoolkit.batch import MicroBatch


def saved_llama(folder: Path, seed: int = 0) -> str:
    """Save a small Llama and return its folder."""
    return str(save_with_tokenizer(small_llama(seed), folder / str(seed)))


@key_test("model/tiny.name", "model/huggingface.name")
def the_name_decides_between_a_tiny_gpt2_and_the_model_of_a_folder(tmp_path: Path):
    assert type(module_of("model=tiny").model).__name__ == "GPT2LMHeadModel"
    module = module_of("model=huggingface", f"model.path={saved_llama(tmp_path)}")
    assert type(module.model).__name__ == "LlamaForCausalLM"


@key_test("model/tiny.num_heads")
def the_heads_divide_the_hidden_size():
    for num_heads in (1, 4):
        (block,) = module_of(f"model.num_heads={num_heads}").model.transformer.h
        assert (block.attn.num_heads, block.attn.head_dim) == (num_heads, 8 // num_heads)


@key_test("model/tiny.num_layers", "model/tiny.hidden_size", "model/tiny.max_positions")
def the_number_of_weights_is_that_of_a_gpt2_of_these_sizes(key: str):
    """The LM head is a matrix of its own."""
    name = key.split(".")[1]
    counts = []
    for value in (8, 12):
        sizes = {"num_layers": 1, "hidden_size": 8, "max_positions": 64} | {name: value}
        width = sizes["hidden_size"]
        module = module_of(f"model.{name}={value}")
        counts.append(sum(weight.numel() for weight in module.parameters()))
        embeddings = (VOCABULARY + VOCABULARY + sizes["max_positions"]) * width
        layers = sizes["num_layers"] * (12 * width**2 + 13 * width)
        assert counts[-1] == embeddings + layers + 2 * width
        assert module.policy.max_positions == sizes["max_positions"]
    assert counts[0] < counts[1]


def head_of(*overrides: str) -> Tensor:
    module, _ = module_and_loader(*settings("model=huggingface", *overrides))
    return module.float().policy.head.weight.detach()


def saved_head(folder: str) -> Tensor:
    return LlamaForCausalLM.from_pretrained(folder).lm_head.weight.detach()


@key_test("model/huggingface.path")
def the_weights_are_those_of_the_path(tmp_path: Path):
    first = saved_llama(tmp_path, 0)
    second = saved_llama(tmp_path, 1)
    for folder in (first, second):
        assert torch.equal(head_of(f"model.path={folder}"), saved_head(folder))
    assert not torch.equal(saved_head(first), saved_head(second))


@key_test("model/huggingface.random_weights")
def random_weights_have_the_shape_of_the_saved_ones_and_follow_the_seed(tmp_path: Path):
    folder = saved_llama(tmp_path, 5)
    overrides = (f"model.path={folder}", "model.random_weights=true")
    head = head_of(*overrides)
    assert head.shape == saved_head(folder).shape
    assert (head - saved_head(folder)).abs().min() > 0
    assert not torch.equal(head, head_of(*overrides, "seed=1"))


@key_test("model/huggingface.gradient_checkpointing")
def with_gradient_checkpointing_a_layer_runs_twice_for_the_same_gradient(tmp_path: Path):
    """On a CPU `auto` is false."""
    folder = saved_llama(tmp_path)
    num_calls = {"false": 0, "true": 0, "auto": 0}
    gradients = []
    for value in num_calls:
        module = module_of(
            "model=huggingface", f"model.path={folder}", f"model.gradient_checkpointing={value}"
        )

        def count_call(*_: object, value: str = value) -> None:
            num_calls[value] += 1

        module.model.model.layers[0].mlp.register_forward_pre_hook(count_call)
        module.training_step(step_of(some_documents()), 0)
        gradients.append([weight.grad for weight in module.parameters()])
    assert num_calls == {"false": 1, "true": 2, "auto": 1}
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0])


@key_test("model/huggingface.fp32_lm_head")
def the_head_of_a_body_in_bfloat16_multiplies_in_float32_or_in_bfloat16(tmp_path: Path):
    """Seen in the log-probs, and in the logits behind the loss."""
    folder = saved_llama(tmp_path)
    step = step_of(some_documents())
    micro_batch = step.micro_batches[0]
    trained = micro_batch.labels >= 0

    def trained_log_probs(logits: Tensor) -> Tensor:
        index = micro_batch.labels.clamp(min=0)[:, None]
        return logits.log_softmax(-1).gather(-1, index)[trained, 0]

    for value, dtype in (("true", torch.float32), ("false", torch.bfloat16)):
        module = module_of(
            "model=huggingface",
            f"model.path={folder}",
            "model.dtype=bfloat16",
            f"model.fp32_lm_head={value}",
        ).float()
        weight = module.policy.head.weight.detach().bfloat16()
        hidden = module.policy.hidden_states(micro_batch).detach()
        expected = {
            torch.float32: trained_log_probs(hidden.float() @ weight.float().T),
            torch.bfloat16: trained_log_probs((hidden @ weight.T).float()),
        }
        assert (expected[torch.float32] - expected[torch.bfloat16]).abs().max() > 1e-3
        log_probs = module.log_probs(micro_batch)[trained]
        torch.testing.assert_close(log_probs, expected[dtype], rtol=0, atol=1e-5)
        with LogitsMade(VOCABULARY) as logits:
            out = module.micro_batch_loss(micro_batch, step.totals)
        assert logits.rows == [int(trained.sum())]
        assert logits.dtypes == [dtype]
        torch.testing.assert_close(out.log_probs[trained], expected[dtype], rtol=0, atol=1e-5)


@key_test("model/tiny.share_prompts", "model/huggingface.share_prompts")
def completions_share_a_prompt_in_steps_and_in_passes_before_them(key: str, tmp_path: Path):
    """Four completions of at most four tokens have a prompt of four. On a CPU auto shares none."""
    model = ()
    if "huggingface" in key:
        model = ("model=huggingface", f"model.path={saved_llama(tmp_path)}")
    for value, shared in (("false", ()), ("true", (0, 4, 4, 4)), ("auto", ())):
        module, loader = module_and_steps(
            *model,
            f"model.share_prompts={value}",
            "accumulation.max_tokens=20",
            "rollout.passes=2",
        )
        scored = []
        log_probs = module.log_probs

        def noted(micro_batch: MicroBatch, scored: list = scored, log_probs: Callable = log_probs):
            scored.append(micro_batch.shared)
            return log_probs(micro_batch)

        module.log_probs = noted
        step = next(iter(loader))
        loader.source.close()
        assert module.policy.by_document is (value == "true")
        of_step = [micro_batch.shared for micro_batch in step.micro_batches]
        if value != "true":
            assert {*of_step, *scored} == {()}
        else:
            assert (of_step, scored) == ([shared] * 2, [shared] * 4)
