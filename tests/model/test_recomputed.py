"""A layer that is a single node of autograd's graph computes what transformers' layers compute
under autograd."""

import copy
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from builders.models import VOCABULARY, small_llama, small_policy
from builders.runs import assert_equal
from model.test_compiled import LENGTHS, distances, packed, states_and_gradient
from model.test_decoding import DEVICES
from model.test_packed_attention import states_and_gradients
from transformers.activations import ACT2FN

from pgtoolkit.kernels import triton_layer
from pgtoolkit.model import attention, compiled, fixed_order, recomputed
from pgtoolkit.model.policy import Policy

pytestmark = [
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", ["qwen2_checkpointed", "qwen3_checkpointed", "mistral_checkpointed"]
)
def test_hidden_states_and_gradients_are_those_of_transformers(monkeypatch, kind, device):
    """They differ by rounding; in bfloat16 they are as near to float32 as those. On a CPU only a
    single kind is tested in bfloat16."""
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


KEPT = ((False, False), (True, False), (True, True))
"""Whether layers keep attention's output, and the results of products."""


def test_gradients_add_up_to_those_of_transformers_to_the_bit_whatever_is_kept():
    """Of two micro-batches, with three documents and with two. What is kept is not made again: in
    each of two layers attention for each document, and three products for all of them."""
    policy = small_policy("qwen3_checkpointed_by_document")
    policy.model.float()
    recomputing = []
    for kept in KEPT:
        model = copy.deepcopy(policy.model)
        compiled.switch_on(model)
        for layer in model.base_model.layers:
            recomputed.keep(layer, *kept)
        recomputing.append(replace(policy, model=model))
    for lengths in ((5, 7, 3), (2, 9)):
        counts = []
        for each_policy in (policy, *recomputing):
            hidden = each_policy.hidden_states(packed(lengths))
            weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).sin()
            with torch.profiler.profile() as profiler:
                (hidden * weights).sum().backward()
            # Without `key_averages`, which makes a tree of all events first.
            events = profiler.profiler.kineto_results.events()
            counts.append(Counter(event.name() for event in events))
        attentions = [each["aten::scaled_dot_product_attention"] for each in counts[1:]]
        assert attentions == [2 * len(lengths), 0, 0]
        products = [each["aten::mm"] for each in counts[1:]]
        assert [products[0] - each for each in products] == [0, 0, 2 * 3]
    for name, expected in policy.model.named_parameters():
        first, *others = (each.model.get_parameter(name).grad for each in recomputing)
        if expected.grad is not None:
            torch.testing.assert_close(first, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
            assert all(torch.equal(first, other) for other in others), name


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3_checkpointed_lora"])
def test_in_bfloat16_gradients_are_the_same_bits_whatever_is_kept(kind, shares):
    """Adapters are trained in transformers' layers, which are checkpointed or not."""
    policy = replace(small_policy(f"{kind}_by_document"), compute_dtype=torch.bfloat16)
    compiled.switch_on(policy.model.float())
    results = []
    for kept in KEPT:
        for layer in policy.model.base_model.layers:
            recomputed.keep(layer, *kept)
        results.append(states_and_gradients(policy, shares))
    assert_equal(results[1:], [results[0]] * 2)
    assert len(results[0]) > 5


@pytest.mark.gpu
def test_on_a_gpu_layers_keep_what_they_are_said_to_and_gradients_are_the_same_bits(monkeypatch):
    """One document is so long that its heads are divided. The backward pass frees what is kept,
    though the loss is still there."""
    monkeypatch.setattr(fixed_order, "_on", True)
    model = small_llama(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    attention.use_packed_attention(model)
    fixed_order.switch_on(model)
    compiled.switch_on(model.cuda().train())
    policy = Policy(model, None, torch.bfloat16)
    micro_batch = packed((4500, 300, 1)).to(model.device)
    gradients = []
    rooms = []
    # The first round compiles, and makes the gradients' memory.
    for kept in (KEPT[0], *KEPT):
        for layer in model.model.layers:
            recomputed.keep(layer, *kept)
        model.zero_grad(set_to_none=False)
        before = torch.cuda.memory_allocated()
        loss = policy.hidden_states(micro_batch).float().square().mean()
        rooms.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        left = torch.cuda.memory_allocated() - before
        assert len(rooms) == 1 or left < rooms[1] / 10
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        del loss
    assert_equal(gradients[2:], [gradients[1]] * 2)
    of_token = recomputed.bytes_of_token(model.model.layers[0], torch.bfloat16)
    assert of_token == (4 * 512, 2 * 512 + 4 * 8, 2 * (512 + 2 * 128 + 512 + 2 * 1024))
    differences = [after - before for before, after in itertools.pairwise(rooms[1:])]
    expected = [3 * 4801 * size for size in of_token[1:]]
    # PyTorch fills up the log-sums that its attention keeps.
    assert differences == pytest.approx(expected, rel=0.05)


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
def test_layers_with_adapters_hooks_or_frozen_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(recomputed, "layer", None)
    adapters = small_policy("qwen2_checkpointed_lora_by_document")
    frozen, hooked, watched = (small_policy("qwen2_by_document") for _ in range(3))
    frozen.model.base_model.layers.requires_grad_(False)
    for layer in hooked.model.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: None)
    for layer in watched.model.base_model.layers:
        layer.mlp.up_proj.weight.register_hook(lambda _: None)
    for policy in (adapters, frozen, hooked, watched):
        policy.model.float()
        compiled.switch_on(policy.model)
        states_and_gradient(policy, (5, 7))
