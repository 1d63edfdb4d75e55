"""The backward passes of attention and embeddings add up in a fixed order, so that a GPU repeats
gradients, and no other operation is changed."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from pgtoolkit.assembly.build import refuse_any_order
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import fixed_order
from pgtoolkit.model.attention import Documents, by_document, use_packed_attention
from pgtoolkit.model.fixed_order import in_fixed_order
from pgtoolkit.model.policy import Policy


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    fixed_order.switch(True)
    yield
    fixed_order.switch(False)


def deterministic_setting() -> tuple[bool, bool]:
    """Return whether PyTorch takes deterministic algorithms, and whether it only warns of
    others."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


class Doubled(torch.autograd.Function):
    """Doubles its input, and records the setting under which its backward pass runs."""

    @staticmethod
    def forward(ctx, x, settings):
        ctx.settings = settings
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        ctx.settings.append(deterministic_setting())
        return 2 * gradient, None


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_the_setting_holds_for_the_backward_pass_of_a_single_operation(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        x = torch.ones(3, requires_grad=True)
        settings = []
        y = Doubled.apply(x, settings)
        y = in_fixed_order(Doubled.apply(y, settings))
        y = Doubled.apply(y, settings)
        y.sum().backward()
        assert settings == [before, (True, False), before]
        assert x.grad.tolist() == [8.0] * 3
        assert deterministic_setting() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_set_where_it_is_off_or_nothing_is_trained():
    settings = []
    x = torch.ones(3, requires_grad=True)
    fixed_order.switch(False)
    in_fixed_order(Doubled.apply(x, settings)).sum().backward()
    assert settings == [(False, False)]
    fixed_order.switch(True)
    assert in_fixed_order(torch.ones(3)).tolist() == [1.0] * 3


def test_a_model_whose_attention_has_no_fixed_order_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    policy = Policy(model, None, torch.bfloat16)
    expected = (
        r"trainer.deterministic=true needs on a GPU a model of type gemma3_text, .* \(got gpt2 in "
        r"bfloat16\)"
    )
    with pytest.raises(ConfigError, match=expected):
        refuse_any_order(policy)
    use_packed_attention(model)
    refuse_any_order(policy)


class Scaled(nn.Embedding):
    """An embedding behind a factor, which Gemma has."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_a_models_embedding_adds_up_in_a_fixed_order_also_behind_a_factor(kind):
    model = nn.Sequential(kind(4, 2))
    is_deterministic = {}
    fixed_order.switch_on(model)
    out = model(torch.tensor([1, 1, 3]))
    node = out.grad_fn
    while node is not None:
        name = node.name()

        def record_setting(_: object, name: str = name) -> None:
            is_deterministic[name] = deterministic_setting()[0]

        node.register_prehook(record_setting)
        node = node.next_functions[0][0] if node.next_functions else None
    out.sum().backward()
    expected = {"EmbeddingBackward0": True, "torch::autograd::AccumulateGrad": False}
    assert is_deterministic == expected | ({"MulBackward0": False} if kind is Scaled else {})
    factor = 3.0 if kind is Scaled else 1.0
    assert model[0].weight.grad.tolist() == [[0, 0], [2 * factor] * 2, [0, 0], [factor] * 2]


def gradient_of_embedding() -> Sequence[torch.Tensor]:
    """Return the gradient of an embedding of few rows by many tokens."""
    embedding = nn.Embedding(14, 128, device="cuda")
    fixed_order.switch_on(embedding)
    tokens = torch.arange(5000, device="cuda") * 7 % 14
    return torch.autograd.grad(
        embedding(tokens), embedding.weight, torch.randn(5000, 128, device="cuda")
    )


def gradients_of_attention() -> Sequence[torch.Tensor]:
    """Return the gradients of attention over documents of several blocks of keys."""
    documents = Documents.whole([640] * 4, 2560, torch.device("cuda"))
    inputs = [
        torch.randn(2560, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    out = by_document(*inputs, documents, None, None)
    return torch.autograd.grad(out, inputs, torch.randn_like(out))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [gradient_of_embedding, gradients_of_attention])
def test_a_gpu_repeats_a_gradient(gradients):
    """Switched off, it does not. Where it does, PyTorch has changed, and fixed_order is needed no
    longer."""

    def num_different(repeats: int) -> int:
        results = []
        for _ in range(repeats):
            torch.manual_seed(0)
            results.append(torch.cat([x.flatten() for x in gradients()]))
        return sum(not torch.equal(results[0], other) for other in results[1:])

    assert num_different(20) == 0
    fixed_order.switch(False)
    assert num_different(20) > 0
