"""Decoding over a cache of fixed size against the model's own forward pass over each whole document."""

import pytest
import torch
from builders.models import VOCABULARY, build, small_llama

from pgtoolkit.model import decoding
from pgtoolkit.model.decoding import can_decode
from pgtoolkit.model.policy import Policy
from pgtoolkit.sampling.draw import draw, uniform_numbers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {"gpt2": 15, "gpt2_tied": 15, "qwen2": 90, "qwen2_tied_checkpointed": 90, "qwen3": 90, "mistral": 90}
"""With the most tokens that a completion may have."""

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8], [9, 7, 9, 3], [2, 3], [8, 4, 6], [6, 4], [3]]


def decoded(policy, max_tokens, ends=()):
    uniform = uniform_numbers([(0, i) for i in range(len(PROMPTS))], max_tokens).to(policy.model.device)
    how = {"draw": draw, "uniform": uniform, "check": lambda: None, "ends": list(ends)}
    return policy.decode(PROMPTS, max_tokens, False, **how)


@torch.no_grad()
def expected(policy, prompt, tokens):
    """Log-probs of the tokens by one pass over the document."""
    document = torch.tensor([prompt + tokens], device=policy.model.device)
    log_probs = policy.model(input_ids=document).logits[0].log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(-1, document[0, len(prompt) :, None])[:, 0].float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_the_models_own(monkeypatch, kind, device):
    """Across the places where attention begins to look at more of the cache."""
    monkeypatch.setattr(decoding, "_FIRST_SEGMENT", 8)
    policy = build(kind)
    policy.model.to(device)
    tokens, log_probs = decoded(policy, KINDS[kind])
    assert tokens.shape == log_probs.shape == (len(PROMPTS), KINDS[kind])
    assert len(tokens.unique()) > VOCABULARY / 2
    for prompt, own, found in zip(PROMPTS, tokens.tolist(), log_probs, strict=True):
        torch.testing.assert_close(found, expected(policy, prompt, own), rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("every", [1, 2, 32])
def test_rows_that_have_ended_are_dropped_and_the_others_go_on(monkeypatch, device, every):
    """Looked at often; and prompts are read one by one."""
    monkeypatch.setattr(decoding, "_CHECK_EVERY", every)
    monkeypatch.setattr(decoding, "_FIRST_SEGMENT", 8)
    monkeypatch.setattr(decoding, "_PROMPT_TOKENS", 1)
    policy, seen = build("mistral"), []
    policy.model.to(device)
    monkeypatch.setattr(decoding.Cache, "keep_rows", noting(decoding.Cache.keep_rows, seen))
    ends = [4, 17]
    tokens, log_probs = decoded(policy, 80, ends)
    lengths = []
    for prompt, row, found in zip(PROMPTS, tokens.tolist(), log_probs, strict=True):
        length = next((place + 1 for place, token in enumerate(row) if token in ends), 80)
        lengths.append(length)
        own = expected(policy, prompt, row[:length])
        torch.testing.assert_close(found[:length], own, rtol=0, atol=2e-6)
    assert len(set(lengths)) > 4
    assert seen == sorted(seen, reverse=True)
    assert len(seen) >= 2 or every == 32
    if every == 1:  # rows that have all ended cost nothing more
        assert (tokens[:, max(lengths) + 1 :] == 0).all()


def noting(keep_rows, seen):
    def noted(self, rows):
        seen.append(len(rows))
        keep_rows(self, rows)

    return noted


def test_the_model_is_left_as_it_was():
    policy = build("qwen3")
    before = policy.model.config._attn_implementation
    decoded(policy, 3)
    assert policy.model.config._attn_implementation == before != decoding.NAME
    assert policy.model.training
    logits = policy.model(input_ids=torch.tensor([PROMPTS[0]])).logits
    assert logits.isfinite().all()


def test_only_ordinary_attention_and_fixed_rotary_positions_are_decoded():
    shape = {"rope_theta": 1e4, "factor": 2.0}
    assert can_decode(small_llama())
    assert can_decode(small_llama(rope_parameters={"rope_type": "linear", **shape}))
    assert not can_decode(small_llama(rope_parameters={"rope_type": "dynamic", **shape}))
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    assert not can_decode(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2)))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2_tied", "qwen3"])
def test_a_copy_has_the_weights_rounded_and_what_the_model_computes_for_itself_not(kind):
    policy = Policy(build(kind).model.float(), None, torch.bfloat16)
    copied = policy.copied()
    copied.load(policy.weights())
    own, others = dict(policy.model.named_parameters()), dict(copied.model.named_parameters())
    assert own.keys() == others.keys()
    assert all(torch.equal(others[name], weight.bfloat16()) for name, weight in own.items())
    assert not any(weight.requires_grad for weight in others.values())
    buffers = dict(copied.model.named_buffers())
    for name, buffer in policy.model.named_buffers():
        assert torch.equal(buffers[name], buffer)
    with torch.no_grad():
        policy.head.weight.neg_()
    assert not torch.equal(copied.head.weight, policy.head.weight.bfloat16())
    with pytest.raises(ValueError, match="weights differ in"):
        copied.load({})
