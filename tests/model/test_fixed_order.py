"""Attention and embeddings in a fixed order: a setting for their backward pass alone; a GPU repeats
gradients."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from pgtoolkit.errors import ConfigError
from pgtoolkit.model import fixed_order
from pgtoolkit.model.attention import Documents, by_document, use_packed_attention
from pgtoolkit.model.fixed_order import in_fixed_order
from pgtoolkit.model.policy import Policy
from pgtoolkit.training.build import refuse_any_order


@pytest.fixture(autouse=True)
def switched_on():
    fixed_order.switch(True)
    yield
    fixed_order.switch(False)


def setting() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


class Observed(torch.autograd.Function):
    """Twice its input, noting the setting under which its backward pass runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(setting())
        return 2 * gradient, None


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_the_setting_holds_for_one_operation(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        x, seen = torch.ones(3, requires_grad=True), []
        y = Observed.apply(x, seen)
        y = in_fixed_order(Observed.apply(y, seen))
        y = Observed.apply(y, seen)
        y.sum().backward()
        assert seen == [before, (True, False), before]
        assert x.grad.tolist() == [8.0] * 3
        assert setting() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_set_where_it_is_off_or_nothing_is_trained():
    seen, x = [], torch.ones(3, requires_grad=True)
    fixed_order.switch(False)
    in_fixed_order(Observed.apply(x, seen)).sum().backward()
    assert seen == [(False, False)]
    fixed_order.switch(True)
    assert in_fixed_order(torch.ones(3)).tolist() == [1.0] * 3


def test_what_cannot_be_promised_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    policy = Policy(model, None, torch.bfloat16)
    expected = (
        r"trainer.deterministic=true needs on a GPU a model of type gpt2, .* \(got gpt2 in "
        r"bfloat16\)"
    )
    with pytest.raises(ConfigError, match=expected):
        refuse_any_order(policy)
    use_packed_attention(model)
    refuse_any_order(policy)


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, tokens):
        return super().forward(tokens) * 3


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_the_embedding_of_a_model_also_behind_a_factor(kind):
    model, seen = nn.Sequential(kind(4, 2)), {}
    fixed_order.switch_on(model)
    out = model(torch.tensor([1, 1, 3]))
    node = out.grad_fn
    while node is not None:
        name = node.name()
        node.register_prehook(lambda _, name=name: seen.update({name: setting()[0]}))
        node = node.next_functions[0][0] if node.next_functions else None
    out.sum().backward()
    expected = {"EmbeddingBackward0": True, "torch::autograd::AccumulateGrad": False}
    assert seen == expected | ({"MulBackward0": False} if kind is Scaled else {})
    factor = 3.0 if kind is Scaled else 1.0
    assert model[0].weight.grad.tolist() == [[0, 0], [2 * factor] * 2, [0, 0], [factor] * 2]


def embedded():
    """The gradient of an embedding of few rows by many tokens."""
    embedding = nn.Embedding(14, 128, device="cuda")
    fixed_order.switch_on(embedding)
    tokens = torch.arange(5000, device="cuda") * 7 % 14
    return torch.autograd.grad(
        embedding(tokens), embedding.weight, torch.randn(5000, 128, device="cuda")
    )


def attended():
    """Those of attention over documents of several blocks of keys."""
    documents = Documents.whole([640] * 4, 2560, torch.device("cuda"))
    inputs = [
        torch.randn(2560, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    out = by_document(*inputs, documents, None, None)
    return torch.autograd.grad(out, inputs, torch.randn_like(out))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [embedded, attended])
def test_a_gpu_repeats_a_gradient(gradients):
    """Off, it does not: where it does, PyTorch has changed, and this is not needed any more."""

    def number_of_different(times: int) -> int:
        found = []
        for _ in range(times):
            torch.manual_seed(0)
            found.append(torch.cat([x.flatten() for x in gradients()]))
        return sum(not torch.equal(found[0], other) for other in found[1:])

    assert number_of_different(20) == 0
    fixed_order.switch(False)
    assert number_of_different(20) > 0
