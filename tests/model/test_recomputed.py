"""A layer as one node of autograd's graph, against transformers' layers under autograd."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from builders.models import HAS_COMPILER, small_policy
from model.test_compiled import LENGTHS, distance, packed, states_and_gradient
from model.test_decoding import DEVICES
from torch._dynamo.utils import counters

from pgtoolkit.model import compiled, recomputed, rowwise

pytestmark = [
    pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", ["qwen2_checkpointed", "qwen3_checkpointed", "mistral_checkpointed"]
)
def test_hidden_states_and_gradients_are_those_of_transformers(monkeypatch, kind, device):
    """In float32 but for rounding; in bfloat16 as near to float32 as without."""
    kind += "_by_document"
    exact = replace(small_policy(kind), model=small_policy(kind).model.float().to(device))
    plain = replace(exact, compute_dtype=torch.bfloat16)
    model = copy.deepcopy(exact.model)
    compiled.switch_on(model)
    calls = []
    layer = recomputed.layer
    monkeypatch.setattr(
        recomputed,
        "layer",
        lambda *given, **options: (calls.append(1), layer(*given, **options))[1],
    )
    for lengths in LENGTHS:
        calls.clear()
        aim = states_and_gradient(exact, lengths)
        found = states_and_gradient(replace(exact, model=model), lengths)
        assert max(distance(found, aim)) < 2e-6, lengths
        rounded = distance(states_and_gradient(plain, lengths), aim)
        found = distance(states_and_gradient(replace(plain, model=model), lengths), aim)
        assert all(0 < x < 1.5 * y for x, y in zip(found, rounded, strict=True)), lengths
        # Two layers, of float32 and bfloat16, with a gradient and without; a row of one token is
        # computed as before.
        assert len(calls) == (8 if sum(lengths) > 1 else 0)


def test_gradients_of_micro_batches_add_up_to_those_of_transformers():
    policy = small_policy("qwen3_checkpointed_by_document")
    policy.model.float()
    found = replace(policy, model=copy.deepcopy(policy.model))
    compiled.switch_on(found.model)
    for lengths in ((5, 7, 3), (2, 9)):
        for one in (policy, found):
            hidden = one.hidden_states(packed(lengths))
            weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).sin()
            (hidden * weights).sum().backward()
    for (name, expected), parameter in zip(
        policy.model.named_parameters(), found.model.parameters(), strict=True
    ):
        if expected.grad is not None:
            torch.testing.assert_close(
                parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name
            )


def test_all_is_compiled_once():
    """On a GPU it is another than that of the forward pass, whose autocast is then as it was to
    begin with."""
    for function in (rowwise.rms_norm, rowwise.gate, rowwise.turned_heads):
        function.cache_clear()
    policy = small_policy("qwen2_checkpointed_by_document")
    policy.model.float()
    compiled.switch_on(policy.model)
    counts = []
    for lengths in ((5, 7, 3), (2, 9)):
        counts.append(counters["stats"]["unique_graphs"])
        loss = policy.hidden_states(packed(lengths)).square().sum()
        counts.append(counters["stats"]["unique_graphs"])
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    counts.append(counters["stats"]["unique_graphs"])
    # A norm, one of a sum, the heads and the gate; the derivative of each, and that of a norm with
    # its input beside it.
    assert [count - counts[0] for count in counts] == [0, 4, 9, 9, 9]
    width, epsilon = torch.float32, policy.model.base_model.norm.variance_epsilon
    functions = [rowwise.rms_norm(epsilon, width, both) for both in (False, True)]
    functions += [rowwise.turned_heads(8, 4, None, width), rowwise.gate("silu")]
    codes = [code for function in functions for code in function._compiled.values()]
    assert len(codes) == 9
    assert all(code.direct is not None for code in codes)


def test_what_is_not_whole_here_or_not_all_trained_is_computed_as_before(monkeypatch):
    """Adapters, a hook, frozen weights, and what is not checkpointed."""
    monkeypatch.setattr(recomputed, "layer", None)
    adapters = small_policy("qwen2_checkpointed_lora_by_document")
    frozen, hooked = (small_policy("qwen2_checkpointed_by_document") for _ in range(2))
    frozen.model.base_model.layers.requires_grad_(False)
    for layer in hooked.model.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: None)
    for policy in (adapters, frozen, hooked, small_policy("qwen2_by_document")):
        policy.model.float()
        compiled.switch_on(policy.model)
        states_and_gradient(policy, (5, 7))
