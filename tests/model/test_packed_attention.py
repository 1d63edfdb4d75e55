"""Attention by document against a loop over queries, and a model that uses it against one row per
document."""

import math

import pytest
import torch
from builders.models import small_policy as small_model
from builders.runs import SHORT, config_of, sampler_of
from model.spread import documents, packed

from pgtoolkit.completion import Request
from pgtoolkit.model import attention, fixed_order
from pgtoolkit.model.attention import Documents, by_document
from pgtoolkit.training.build import build

QUERIES, KEYS = [3, 5, 1, 0, 40], [7, 5, 1, 0, 40]
"""The first document began on another rank."""


def tensors(heads: int, key_heads: int, width: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (
        (sum(QUERIES), heads, width),
        (sum(KEYS), key_heads, width),
        (sum(KEYS), key_heads, width),
    )
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def reference(query, key, value, scaling, window):
    out, first_query, first_key = torch.zeros_like(query), 0, 0
    for num_queries, num_keys in zip(QUERIES, KEYS, strict=True):
        for i in range(num_queries):
            last = num_keys - num_queries + i
            seen = range(0 if window is None else max(0, last - window + 1), last + 1)
            for head in range(query.shape[1]):
                shared = head * key.shape[1] // query.shape[1]
                q = query[first_query + i, head]
                scores = torch.stack([scaling * q @ key[first_key + j, shared] for j in seen])
                values = torch.stack([value[first_key + j, shared] for j in seen])
                out[first_query + i, head] = scores.softmax(0) @ values
        first_query, first_key = first_query + num_queries, first_key + num_keys
    return out


def with_gradients(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_query_sees_the_keys_of_its_document_up_to_itself(window, key_heads):
    inputs = tensors(4, key_heads, 6)
    cut = Documents(QUERIES, KEYS, torch.device("cpu"))
    found = with_gradients(lambda *x: by_document(*x, cut, 0.3, window), inputs)
    expected = with_gradients(lambda *x: reference(*x, 0.3, window), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_the_kernel_does_the_same(window, key_heads):
    inputs = [x.bfloat16() for x in tensors(4, key_heads, 16)]
    scaling, device = 1 / math.sqrt(16), torch.device("cuda")
    assert attention.has_kernel(device, torch.bfloat16, 16)
    cut = Documents(QUERIES, KEYS, device)
    found = with_gradients(
        lambda *x: by_document(*x, cut, scaling, window), [x.to(device) for x in inputs]
    )
    expected = with_gradients(
        lambda *x: reference(*x, scaling, window), [x.double() for x in inputs]
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu().double() - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize(
    ("heads", "documents", "processors", "shares"),
    [
        (16, 1, 132, [12, 4]),
        (14, 1, 132, [12, 2]),
        (40, 1, 132, [33, 6, 1]),
        (16, 2, 132, [11, 3, 2]),
        (14, 1, 108, [12, 2]),
        (12, 1, 132, [12]),  # fills the processors by itself
        (16, 5, 132, [16]),  # 5 documents never do
        (32, 4, 132, [32]),  # 128 programs of 132
        (14, 85, 132, [14]),  # more documents than processors
    ],
)
def test_heads_are_divided_so_that_they_fill_the_processors(heads, documents, processors, shares):
    assert attention.shares_of_heads(heads, documents, processors) == shares


@pytest.mark.gpu
def test_divided_heads_do_the_same(monkeypatch):
    """Of a long document in a fixed order: the forward pass to the last bit, gradients but for
    rounding, and each time the same."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    inputs = [
        torch.randn(4200, heads, 64, device=device, dtype=torch.bfloat16) for heads in (14, 2, 2)
    ]
    documents = Documents.whole([4200], 4200, device)
    calls = []
    shares_of_heads = attention.shares_of_heads

    def noted(*sizes):
        calls.append(shares_of_heads(*sizes))
        return calls[-1]

    monkeypatch.setattr(attention, "shares_of_heads", noted)
    expected = with_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert not calls
    monkeypatch.setattr(fixed_order, "_on", True)
    found = with_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert sum(calls[0]) == 14
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm()
    again = with_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2_checkpointed", "qwen3", "mistral"])
def test_a_model_sees_each_document_alone(kind):
    """The whole packed row against each document by itself."""
    rows, row = small_model(kind), small_model(f"{kind}_by_document")
    micro_batch = packed(documents(row.vocabulary_size, 1))
    found = row.hidden_states(micro_batch)
    alone = [
        rows.hidden_states(packed([document])) for document in documents(rows.vocabulary_size, 1)
    ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-12, atol=1e-13)


def test_sampling_between_passes_by_document_is_as_before():
    """Left-padded prompts and a cache, in between of two passes by document."""
    module, loader = build(config_of(*SHORT))
    prompts = [Request(tokens, 1, 0) for tokens in ([1, 2, 3, 4], [5, 6], [7])]
    micro_batch = packed(documents(11, 1)[:3])
    completions, hidden = [], []
    for number in range(2):
        if number == 1:
            attention.use_packed_attention(module.model)
        for _ in range(2):
            torch.manual_seed(5)
            completions.append(sampler_of(loader).complete(prompts))
            assert module.policy.by_document is (number == 1)
            hidden.append(module.policy.hidden_states(micro_batch))
    for found in completions[1:]:
        for a, b in zip(found, completions[0], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            torch.testing.assert_close(a.log_probs, b.log_probs)
    for found in hidden[1:]:
        torch.testing.assert_close(found, hidden[0], rtol=1e-5, atol=1e-6)
