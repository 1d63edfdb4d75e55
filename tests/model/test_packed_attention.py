"""Attention by document is that of a loop over queries, and a model that uses it computes each
document as if it were alone."""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders.documents import document_of
from builders.models import small_policy as small_model
from builders.parts import ROLLOUT, short_policy
from builders.runs import assert_equal
from model.parallel_gpu import build as build_on
from model.spread import documents, packed
from torch.utils._python_dispatch import TorchDispatchMode

from pgtoolkit.batch import pack
from pgtoolkit.completion import Request
from pgtoolkit.document import Document
from pgtoolkit.model import attention, fixed_order
from pgtoolkit.model.attention import Documents, by_document
from pgtoolkit.model.kept_attention import KeptAttention
from pgtoolkit.model.policy import Policy
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import TransformersSamplerSettings

QUERIES = [3, 5, 1, 0, 40]
KEYS = [7, 5, 1, 0, 40]
"""By document. The first began on another rank, so that it has more keys than queries."""


def query_key_value(heads: int, key_heads: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (sum(QUERIES), heads, width),
        (sum(KEYS), key_heads, width),
        (sum(KEYS), key_heads, width),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attention_in_loops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of each query to the keys of its document up to itself."""
    out = torch.zeros_like(query)
    first_query = 0
    first_key = 0
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
        first_query += num_queries
        first_key += num_keys
    return out


def result_and_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    # In float16 the steps of a long linspace would be 0, and some of its numbers nan.
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device)
    (out * weights.to(out.dtype).view_as(out)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_query_sees_the_keys_of_its_document_up_to_itself(window, key_heads):
    inputs = query_key_value(4, key_heads, 6)
    cut = Documents(QUERIES, KEYS, torch.device("cpu"))
    result = result_and_gradients(lambda *x: by_document(*x, cut, 0.3, window), inputs)
    expected = result_and_gradients(lambda *x: attention_in_loops(*x, 0.3, window), inputs)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


class Softmaxes(TorchDispatchMode):
    """Counts the forward passes of softmax, one in each of PyTorch's attention in float64."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.name() in ("aten::_softmax", "aten::_safe_softmax")
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(("shares", "window"), [(False, None), (True, 4)])
def test_a_second_pass_has_the_outputs_and_gradients_of_the_first_by_no_attention(shares, window):
    """The first holds no query, key or value. `shares`: keys are copies of some positions."""
    inputs = query_key_value(4, 4, 6)
    cut = Documents(QUERIES, KEYS, torch.device("cpu"))
    if shares:
        cut = replace(cut, sources=torch.arange(sum(KEYS)) % sum(QUERIES))
        inputs[1:] = [x[: sum(QUERIES)] for x in inputs[1:]]
    expected = result_and_gradients(lambda *x: by_document(*x, cut, 0.3, window), inputs)
    kept = KeptAttention()
    copies = [x.clone() for x in inputs]
    references = [weakref.ref(x) for x in copies]
    with torch.no_grad(), Softmaxes() as softmaxes:
        first = by_document(*copies, cut, 0.3, window, kept)
    assert softmaxes.count == 4  # one of the five documents has no query
    kept.fill()
    del copies
    assert [reference() for reference in references] == [None] * 3
    with Softmaxes() as softmaxes:
        second = result_and_gradients(lambda *x: by_document(*x, cut, 0.3, window, kept), inputs)
    assert softmaxes.count == 0
    assert_equal([first, *second], [expected[0], *expected])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_on_a_gpu_the_kernel_does_the_same_in_bfloat16(window, key_heads):
    inputs = [x.bfloat16() for x in query_key_value(4, key_heads, 16)]
    scaling = 1 / math.sqrt(16)
    device = torch.device("cuda")
    assert attention.has_kernel(device, torch.bfloat16, 16)
    cut = Documents(QUERIES, KEYS, device)
    result = result_and_gradients(
        lambda *x: by_document(*x, cut, scaling, window), [x.to(device) for x in inputs]
    )
    expected = result_and_gradients(
        lambda *x: attention_in_loops(*x, scaling, window), [x.double() for x in inputs]
    )
    for a, b in zip(result, expected, strict=True):
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
    monkeypatch.setattr(fixed_order, "_on", False)  # a run in this process may have switched it on
    expected = result_and_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert not calls
    monkeypatch.setattr(fixed_order, "_on", True)
    divided = result_and_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert sum(calls[0]) == 14
    assert torch.equal(divided[0], expected[0])
    for a, b in zip(divided, expected, strict=True):
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm()
    again = result_and_gradients(lambda *x: by_document(*x, documents, None, None), inputs)
    assert all(torch.equal(a, b) for a, b in zip(divided, again, strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2_checkpointed", "qwen3", "mistral"])
def test_hidden_states_of_a_packed_row_are_those_of_each_document_alone(kind):
    policy = small_model(kind)
    by_document_policy = small_model(f"{kind}_by_document")
    some_documents = documents(policy.vocabulary_size, 1)
    hidden = by_document_policy.hidden_states(packed(some_documents))
    alone = [policy.hidden_states(packed([document])) for document in some_documents]
    torch.testing.assert_close(hidden, torch.cat(alone), rtol=1e-12, atol=1e-13)


def test_sampling_between_passes_by_document_changes_neither():
    """Sampling pads prompts on the left and has a cache, which attention by document has not."""
    policy = short_policy()
    sampler = TransformersSampler(policy, ROLLOUT.sampling, TransformersSamplerSettings())
    prompts = [Request(tokens, 1, 0) for tokens in ([1, 2, 3, 4], [5, 6], [7])]
    micro_batch = packed(documents(11, 1)[:3])
    completions = []
    hidden = []
    for number in range(2):
        if number == 1:
            attention.use_packed_attention(policy.model)
        for _ in range(2):
            torch.manual_seed(5)
            completions.append(sampler.complete(prompts))
            assert policy.by_document is (number == 1)
            hidden.append(policy.hidden_states(micro_batch))
    for later_completions in completions[1:]:
        for completion, first in zip(later_completions, completions[0], strict=True):
            assert completion.tokens.tolist() == first.tokens.tolist()
            torch.testing.assert_close(completion.log_probs, first.log_probs)
    for later_hidden in hidden[1:]:
        torch.testing.assert_close(later_hidden, hidden[0], rtol=1e-5, atol=1e-6)


def completions(vocabulary: int, scale: int = 1) -> list[Document]:
    """Return documents of three groups, whose prompts have 7, 1 and 12 tokens times `scale`."""
    draw = torch.Generator().manual_seed(2)
    made = []
    for group, (prompt_length, lengths) in enumerate(((7, (3, 1, 5)), (1, (4, 2)), (12, (1, 6)))):
        prompt = torch.randint(0, vocabulary, (scale * prompt_length,), generator=draw)
        for length in lengths:
            own = torch.randint(0, vocabulary, (scale * length,), generator=draw)
            tokens = torch.cat([prompt, own])
            made.append(document_of(tokens, torch.arange(len(tokens)) >= len(prompt), group=group))
    return made


def states_and_gradients(policy: Policy, shares: bool, scale: int = 1) -> list[torch.Tensor]:
    """Return the states that predict the trained tokens, and the gradient of each weight."""
    vocabulary = policy.vocabulary_size
    micro_batch = pack(completions(vocabulary, scale), shares=shares).to(policy.model.device)
    assert bool(micro_batch.shared) is shares
    policy.model.zero_grad(set_to_none=True)
    states = policy.hidden_states(micro_batch)[micro_batch.labels >= 0]
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype, device=states.device)
    (states * weights.view_as(states)).sum().backward()
    gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
    return [states.detach(), *gradients]


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("gpt2", 1e-12),
        # transformers' norms of these compute in float32.
        ("qwen2_checkpointed", 1e-5),
        ("qwen3", 1e-5),
        ("mistral", 1e-5),
        ("qwen2_lora", 1e-5),
        pytest.param("qwen3_checkpointed_compiled", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_documents_that_share_have_the_states_and_gradients_of_whole_ones(request, kind, tolerance):
    if "compiled" in kind:
        request.getfixturevalue("uncompiled")
    shared, *gradients = states_and_gradients(small_model(f"{kind}_by_document"), True)
    expected, *expected_gradients = states_and_gradients(small_model(kind), False)
    torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-12)
    for gradient, of_whole in zip(gradients, expected_gradients, strict=True):
        assert (gradient - of_whole).norm() <= tolerance * of_whole.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "compiled"])
def test_on_a_gpu_documents_that_share_repeat_to_the_bit(monkeypatch, options):
    """States and gradients in bfloat16 are as far from float32's as those of whole documents."""
    monkeypatch.setattr(fixed_order, "_on", True)
    device = torch.device("cuda")
    policy = build_on(device, torch.bfloat16, options)
    assert policy.by_document
    exact = build_on(device, torch.float32)
    attention.use_packed_attention(exact.model)
    expected = states_and_gradients(exact, False, 20)
    whole = states_and_gradients(policy, False, 20)
    shared = states_and_gradients(policy, True, 20)
    again = states_and_gradients(policy, True, 20)
    assert all(torch.equal(a, b) for a, b in zip(shared, again, strict=True))
    for a, b, c in zip(shared, whole, expected, strict=True):
        errors = [float((x.double() - c.double()).norm()) for x in (a, b)]
        assert errors[0] < 1.3 * errors[1] + 1e-3 * float(c.double().norm())
