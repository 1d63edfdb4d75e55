"""A layer that is a single node of autograd's graph computes what transformers' layers compute
under autograd."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from builders.models import HAS_COMPILER, small_policy
from model.test_compiled import LENGTHS, distances, packed, states_and_gradient
from model.test_decoding import DEVICES
from torch._dynamo.utils import counters
from transformers.activations import ACT2FN

from pgtoolkit.kernels import triton_layer
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
    """They differ by rounding; in bfloat16 they are as near to float32 as those. On a CPU, where
    compiling takes longest, only a single kind is tested in bfloat16."""
    in_bfloat16 = device == "cuda" or "qwen3" in kind
    kind += "_by_document"
    exact = replace(small_policy(kind), model=small_policy(kind).model.float().to(device))
    plain = replace(exact, compute_dtype=torch.bfloat16)
    model = copy.deepcopy(exact.model)
    compiled.switch_on(model)
    calls = []
    layer = recomputed.layer

    def counted_layer(*arguments, **options):
        calls.append(1)
        return layer(*arguments, **options)

    monkeypatch.setattr(recomputed, "layer", counted_layer)
    for lengths in LENGTHS:
        calls.clear()
        expected = states_and_gradient(exact, lengths)
        result = states_and_gradient(replace(exact, model=model), lengths)
        assert max(distances(result, expected)) < 2e-6, lengths
        # Two layers, with a gradient and without. A row of a single token goes through
        # transformers' layers.
        num_calls = 4 if sum(lengths) > 1 else 0
        assert len(calls) == num_calls
        if in_bfloat16:
            rounded = distances(states_and_gradient(plain, lengths), expected)
            recomputed_rounded = states_and_gradient(replace(plain, model=model), lengths)
            errors = distances(recomputed_rounded, expected)
            for error, error_of_transformers in zip(errors, rounded, strict=True):
                assert 0 < error < 1.5 * error_of_transformers, lengths
            assert len(calls) == 2 * num_calls


def test_gradients_of_micro_batches_add_up_to_those_of_transformers():
    policy = small_policy("qwen3_checkpointed_by_document")
    policy.model.float()
    recomputing = replace(policy, model=copy.deepcopy(policy.model))
    compiled.switch_on(recomputing.model)
    for lengths in ((5, 7, 3), (2, 9)):
        for each_policy in (policy, recomputing):
            hidden = each_policy.hidden_states(packed(lengths))
            weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).sin()
            (hidden * weights).sum().backward()
    for (name, expected), parameter in zip(
        policy.model.named_parameters(), recomputing.model.parameters(), strict=True
    ):
        if expected.grad is not None:
            torch.testing.assert_close(
                parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "activation"), [("qwen2", "silu"), ("qwen3", "gelu")])
def test_the_kernels_compute_the_gradients_of_compiled_code(monkeypatch, kind, activation):
    """Here they run under Triton's interpreter. Only silu has a kernel."""
    policy = small_policy(f"{kind}_checkpointed_by_document")
    policy.model.float().config.hidden_act = activation
    for layer in policy.model.base_model.layers:
        layer.mlp.act_fn = ACT2FN[activation]
    compiled.switch_on(policy.model)
    _, expected = states_and_gradient(policy, (5, 7))
    calls = []

    def counted(function):
        def call(*arguments):
            calls.append(function.__name__)
            return function(*arguments)

        return call

    for name in ("gate_backward", "rms_norm_backward"):
        monkeypatch.setattr(triton_layer, name, counted(getattr(triton_layer, name)))
    monkeypatch.setattr(recomputed, "_has_kernels", lambda x: True)
    _, gradient = states_and_gradient(policy, (5, 7))
    assert distances([gradient], [expected])[0] < 1e-6
    layers = len(policy.model.base_model.layers)
    assert calls.count("rms_norm_backward") == 2 * layers
    assert calls.count("gate_backward") == (layers if activation == "silu" else 0)


@pytest.mark.slow
def test_each_function_and_its_derivative_is_compiled_once_for_all_lengths():
    """The backward pass runs in a thread of its own, as on a GPU, where it does not see the forward
    pass's autocast."""
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
    # A norm, a norm of a sum, the heads and the gate. The derivatives of the heads, the gate, the
    # last norm, and a norm that also returns its input.
    assert [count - counts[0] for count in counts] == [0, 4, 8, 8, 8]
    dtype = torch.float32
    epsilon = policy.model.base_model.norm.variance_epsilon
    functions = [rowwise.rms_norm(epsilon, dtype, both) for both in (False, True)]
    functions += [rowwise.turned_heads(8, 4, None, dtype), rowwise.gate("silu")]
    codes = [code for function in functions for code in function._compiled.values()]
    assert len(codes) == 8
    assert all(code.direct is not None for code in codes)


@pytest.mark.slow
def test_layers_with_adapters_hooks_or_frozen_weights_or_not_checkpointed_stay_as_they_are(
    monkeypatch,
):
    monkeypatch.setattr(recomputed, "layer", None)
    adapters = small_policy("qwen2_checkpointed_lora_by_document")
    frozen = small_policy("qwen2_checkpointed_by_document")
    hooked = small_policy("qwen2_checkpointed_by_document")
    frozen.model.base_model.layers.requires_grad_(False)
    for layer in hooked.model.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: None)
    for policy in (adapters, frozen, hooked, small_policy("qwen2_by_document")):
        policy.model.float()
        compiled.switch_on(policy.model)
        states_and_gradient(policy, (5, 7))
