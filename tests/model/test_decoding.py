"""Decoding over a cache of fixed size gives the log-probs of the model's forward pass over each
document, and the completions of transformers' `generate`."""

from collections.abc import Sequence

import pytest
import torch
from builders.losses import DEVICE
from builders.models import (
    VOCABULARY,
    model_config,
    save_with_tokenizer,
    small_llama,
    small_policy,
)
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from pgtoolkit.kernels import triton_attention, triton_draw
from pgtoolkit.model import decoding
from pgtoolkit.model.decoding import can_decode
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import NumberType
from pgtoolkit.model.setup import build_policy
from pgtoolkit.sampling.draw import draw, uniform_numbers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {
    "gpt2": 15,
    "gpt2_tied": 15,
    "qwen2": 90,
    "qwen2_tied_checkpointed": 90,
    "qwen3": 90,
    "mistral": 90,
    "gemma3": 90,
    "mixture_experts_lora": 90,
}
"""Models, with the longest completion that is tested."""

KERNEL_SIZES = [
    pytest.param(256, 256, marks=pytest.mark.gpu),
    pytest.param(256, 640, marks=pytest.mark.gpu),
    pytest.param(256, 4096, marks=pytest.mark.gpu),
    pytest.param(16, 4096, marks=pytest.mark.gpu),
]
"""Rows, and places of the cache."""

HEADS = [pytest.param(14, 2, 64, id="head_64"), pytest.param(4, 1, 256, id="head_256")]
"""Heads, key-value heads and their width: of a Qwen2 of half a billion parameters, and of the Gemma
3 of a billion."""

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8], [9, 7, 9, 3], [2, 3], [8, 4, 6], [6, 4], [3]]


def decoded(
    policy: Policy, max_tokens: int, ends: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and log-probs of completions of PROMPTS."""
    uniform = uniform_numbers([(0, i) for i in range(len(PROMPTS))], max_tokens)
    return policy.decode(
        PROMPTS,
        max_tokens,
        False,
        draw=draw,
        uniform=uniform.to(policy.model.device),
        check=lambda: None,
        ends=list(ends),
    )


@torch.no_grad()
def expected(policy: Policy, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probs of the tokens by one pass over the document."""
    document = torch.tensor([prompt + tokens], device=policy.model.device)
    log_probs = policy.model(input_ids=document).logits[0].log_softmax(-1)
    labels = document[0, len(prompt) :, None]
    return log_probs[len(prompt) - 1 : -1].gather(-1, labels)[:, 0].float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_the_model(kind, device):
    policy = small_policy(kind)
    policy.model.to(device)
    tokens, log_probs = decoded(policy, KINDS[kind])
    assert tokens.shape == log_probs.shape == (len(PROMPTS), KINDS[kind])
    assert len(tokens.unique()) > VOCABULARY / 2
    for prompt, row, actual in zip(PROMPTS, tokens.tolist(), log_probs, strict=True):
        torch.testing.assert_close(actual, expected(policy, prompt, row), rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "mistral", "gemma3"])
def test_log_probs_in_bfloat16_are_those_of_the_model_except_for_rounding(kind, device):
    policy = small_policy(kind)
    policy.model.bfloat16().to(device)
    tokens, log_probs = decoded(policy, KINDS[kind])
    rows = zip(PROMPTS, tokens.tolist(), log_probs, strict=True)
    differences = torch.cat(
        [(actual - expected(policy, prompt, row)).abs() for prompt, row, actual in rows]
    )
    assert differences.mean() < 0.01
    assert differences.max() < 0.06


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_are_those_of_generate(monkeypatch, kind, device):
    """In float32. `generate` completes each prompt alone; here equal prompts are read once."""
    policy = small_policy(kind)
    length = min(40, KINDS[kind])
    policy.model.float().to(device).eval()
    alone = {}
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt], device=device)
        generated = policy.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        alone[tuple(prompt)] = generated[0, len(prompt) :].tolist()
    prompts_read = []
    read = decoding.Cache.read

    def noted_read(cache, layer, key, value):
        prompts_read.append(len(key))
        read(cache, layer, key, value)

    monkeypatch.setattr(decoding.Cache, "read", noted_read)
    groups = [PROMPTS[0]] * 3 + [PROMPTS[3]] * 2 + PROMPTS[1:] + [PROMPTS[0]]
    tokens, log_probs = policy.decode(
        groups,
        length,
        False,
        draw=likeliest,
        uniform=torch.zeros(len(groups), length, device=device),
        check=lambda: None,
        ends=[],
    )
    assert tokens.tolist() == [alone[tuple(prompt)] for prompt in groups]
    assert prompts_read == [len(PROMPTS)] * 2  # in each layer
    assert torch.equal(log_probs[:3, 0], log_probs[-1:, 0].expand(3))
    torch.testing.assert_close(log_probs[:3], log_probs[-1:].expand(3, length), rtol=0, atol=1e-6)


def likeliest(logits: torch.Tensor, _uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens and their log-probs."""
    return logits.argmax(-1), logits.log_softmax(-1).amax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_the_kernels_decode_as_pytorch_does(monkeypatch, kind):
    """Without a GPU they run under Triton's interpreter. With the kernels, prompts are read one by
    one."""
    policy = small_policy(kind)
    options = {"check": lambda: None, "ends": []}
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    uniform = uniform_numbers([(0, i) for i in range(3)], 4)
    by_pytorch = policy.decode(prompts, 4, False, **options, draw=draw, uniform=uniform)
    monkeypatch.setattr(decoding, "_attend", triton_attention.attend)
    monkeypatch.setattr(decoding, "_PROMPT_TOKENS", 1)
    policy.model.to(DEVICE)
    tokens, log_probs = policy.decode(
        prompts, 4, False, **options, draw=1.0, uniform=uniform.to(DEVICE)
    )
    assert torch.equal(tokens.cpu(), by_pytorch[0])
    torch.testing.assert_close(log_probs.cpu(), by_pytorch[1], rtol=0, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "qwen2_tied", "mistral"])
def test_a_kernel_that_makes_the_logits_draws_the_same_tokens(monkeypatch, kind):
    policy = small_policy(kind)
    policy.model.bfloat16().to("cuda")
    uniform = uniform_numbers([(0, i) for i in range(len(PROMPTS))], 15).to("cuda")
    options = {"draw": 0.8, "uniform": uniform, "check": lambda: None, "ends": []}
    by_logits = []

    def noted(*inputs):
        by_logits.append(inputs)
        draw_next(*inputs)

    draw_next = triton_draw.draw_next
    monkeypatch.setattr(triton_draw, "draw_next", noted)
    tokens, log_probs = policy.decode(PROMPTS, 15, True, **options)
    assert len(by_logits) == 1  # for the first token
    monkeypatch.setattr(triton_draw, "can_make_logits", lambda _: False)
    expected_tokens, expected_log_probs = policy.decode(PROMPTS, 15, True, **options)
    assert len(by_logits) == 1 + 15
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "room"), KERNEL_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "key_heads", "width"), HEADS)
def test_the_kernels_for_attention_are_as_near_to_float64_as_pytorch(
    rows, room, dtype, heads, key_heads, width
):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(rows, n, 1, width, device="cuda", dtype=dtype)
        for n in (heads, key_heads, key_heads)
    )
    cache = [
        torch.randn(rows, key_heads, room, width, device="cuda", dtype=dtype) for _ in range(2)
    ]
    positions = torch.randint(room, (rows,), device="cuda")
    positions[:2] = torch.tensor([0, room - 1])
    tensors = (query, key, value, *cache)
    for window in (None, 100):
        by_kernel = triton_attention.attend(*tensors, positions, 0.125, window)[:, :, None]
        by_pytorch = decoding._attend(*tensors, positions, 0.125, window)
        parts = []
        for start in range(0, rows, 16):
            part = slice(start, start + 16)
            wide = (x[part].double() for x in tensors)
            parts.append(decoding._attend(*wide, positions[part], 0.125, window))
        exact = torch.cat(parts)
        kernels_error = float((by_kernel.double() - exact).abs().max())
        pytorchs_error = float((by_pytorch.double() - exact).abs().max())
        assert kernels_error <= 2 * pytorchs_error + 4e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("every", [1, 32])
def test_rows_that_have_ended_are_dropped_and_the_others_continue(monkeypatch, device, every):
    """Here prompts are also read one by one."""
    monkeypatch.setattr(decoding, "_CHECK_EVERY", every)
    monkeypatch.setattr(decoding, "_PROMPT_TOKENS", 1)
    policy = small_policy("mistral")
    policy.model.to(device)
    rows_kept = []
    keep_rows = decoding.Cache.keep_rows

    def noted_keep_rows(cache, rows):
        rows_kept.append(len(rows))
        keep_rows(cache, rows)

    monkeypatch.setattr(decoding.Cache, "keep_rows", noted_keep_rows)
    ends = [4, 17]
    tokens, log_probs = decoded(policy, 80, ends)
    lengths = []
    for prompt, row, actual in zip(PROMPTS, tokens.tolist(), log_probs, strict=True):
        length = next((place + 1 for place, token in enumerate(row) if token in ends), 80)
        lengths.append(length)
        log_probs_expected = expected(policy, prompt, row[:length])
        torch.testing.assert_close(actual[:length], log_probs_expected, rtol=0, atol=2e-6)
    assert len(set(lengths)) > 4
    assert rows_kept == sorted(rows_kept, reverse=True)
    if every == 1:
        assert len(rows_kept) >= 2
        # Nothing is computed once all rows have ended.
        assert (tokens[:, max(lengths) + 1 :] == 0).all()


def test_rows_that_are_left_read_their_prompt_from_the_first_of_them_that_has_it():
    prompt_of = torch.tensor([0, 1, 0, 1, 2, 1])
    lengths = torch.tensor([3, 2, 1])[prompt_of]
    cache = decoding.Cache(prompt_of, lengths, room=4, layers=2)
    key, value = torch.randn(2, 3, 2, 3, 5)
    cache.reading = (torch.arange(6), prompt_of)
    cache.read(0, key, value)
    cache.read(1, value, key)
    assert cache.prompts[0].tolist() == [0, 1, 0, 1, 4, 1]
    cache.keep_rows(torch.tensor([2, 3, 5]))
    assert cache.prompts[0].tolist() == [0, 1, 1]
    assert cache.prompts[1].tolist() == [3, 2, 2]
    for layer, expected in enumerate([(key, value), (value, key)]):
        for kept, new in zip(cache.of(layer), expected, strict=True):
            assert torch.equal(kept[:, :, :3], new[[0, 1, 1]])
            assert kept.is_contiguous()


def test_decoding_leaves_the_model_as_it_was():
    policy = small_policy("qwen3")
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
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    assert not can_decode(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2)))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2_tied", "qwen3"])
def test_a_copy_has_rounded_weights_and_the_same_buffers(kind):
    policy = Policy(small_policy(kind).model.float(), None, torch.bfloat16)
    copied = policy.copied(policy.compute_dtype)
    copied.load(policy.weights())
    weights = dict(policy.model.named_parameters())
    copies = dict(copied.model.named_parameters())
    assert weights.keys() == copies.keys()
    assert all(torch.equal(copies[name], weight.bfloat16()) for name, weight in weights.items())
    assert not any(weight.requires_grad for weight in copies.values())
    buffers = dict(copied.model.named_buffers())
    for name, buffer in policy.model.named_buffers():
        assert torch.equal(buffers[name], buffer)
    with torch.no_grad():
        policy.head.weight.neg_()
    assert not torch.equal(copied.head.weight, policy.head.weight.bfloat16())
    with pytest.raises(ValueError, match="weights differ in"):
        copied.load({})


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 4.90625), ("float32", 4.8989796)])
def test_gemmas_embeddings_have_the_scale_of_the_number_type(tmp_path, dtype, scale):
    """It is the root of 24, in the copy that samples, too."""
    save_with_tokenizer(small_policy("gemma3").model.float(), tmp_path)
    policy = build_policy(model_config(tmp_path, dtype=NumberType(dtype)), None, on_gpu=False)
    for each_policy in (policy, policy.copied(policy.compute_dtype)):
        assert float(each_policy.model.get_input_embeddings().embed_scale) == pytest.approx(scale)
