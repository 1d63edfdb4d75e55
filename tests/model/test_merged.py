"""A copy that samples computes products with a common input as a single product: its weights lie
side by side, and its completions are those of the model itself."""

import copy
from dataclasses import replace

import pytest
import torch
from builders.losses import DEVICE
from builders.models import small_policy
from model.test_decoding import DEVICES, PROMPTS, decoded, expected, likeliest

from pgtoolkit.kernels import triton_attention
from pgtoolkit.model import compiled, decoding, merged
from pgtoolkit.model.policy import Policy

pytestmark = pytest.mark.usefixtures("uncompiled")


def policy_and_merged_copy(kind: str, device: str = "cpu") -> tuple[Policy, Policy]:
    """Return a policy in float32, and its copy that samples, whose products are merged."""
    policy = small_policy(kind)
    policy.model.float().to(device)
    trained = replace(policy, model=copy.deepcopy(policy.model), compiled=True)
    compiled.switch_on(trained.model)
    sampled = trained.copied(trained.compute_dtype)
    sampled.load(trained.weights())
    return policy, sampled


@pytest.mark.parametrize("kind", ["qwen2_tied_checkpointed", "qwen3"])
def test_the_weights_of_a_merged_product_lie_side_by_side_and_take_no_further_memory(kind):
    policy, sampled = policy_and_merged_copy(kind)
    weights = dict(policy.model.named_parameters())
    copied = dict(sampled.model.named_parameters())
    for name, parameter in copied.items():
        assert torch.equal(parameter, weights[name]), name
    layer = sampled.model.base_model.layers[1]
    attention = layer.self_attn
    together = merged.side_by_side(
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    )
    num_values = len(attention.v_proj.weight)
    values = weights["model.layers.1.self_attn.v_proj.weight"]
    assert torch.equal(together[-num_values:], values)
    attention.v_proj.weight.data.fill_(7)
    assert (together[-num_values:] == 7).all()
    parameters = set(copied.values())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(storages.values()) == sum(p.nbytes for p in parameters)
    sampled.unload()
    assert all(p.numel() == 0 for p in sampled.model.parameters())
    with pytest.raises(ValueError, match="side by side"):
        merged.side_by_side(
            [
                weights["model.layers.0.self_attn.q_proj.weight"],
                weights["model.layers.1.mlp.up_proj.weight"],
            ]
        )


def test_only_a_compiled_copy_with_products_of_a_common_input_merges_them():
    assert not small_policy("qwen2").copied(torch.float32).merges
    assert not replace(small_policy("gpt2"), compiled=True).copied(torch.float32).merges
    assert replace(small_policy("mistral"), compiled=True).copied(torch.float32).merges


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", ["qwen2_tied_checkpointed", "qwen3", "mistral", "gemma3_tied", "mixture_experts"]
)
def test_greedy_completions_of_a_merged_copy_are_those_of_generate(kind, device):
    """Their log-probs, in float32, are those of a pass over the document."""
    policy, sampled = policy_and_merged_copy(kind, device)
    policy.model.eval()
    tokens, log_probs = sampled.decode(
        PROMPTS,
        40,
        False,
        draw=likeliest,
        uniform=torch.zeros(len(PROMPTS), 40, device=device),
        check=lambda: None,
        ends=[],
    )
    for prompt, row, row_log_probs in zip(PROMPTS, tokens, log_probs, strict=True):
        input_ids = torch.tensor([prompt], device=device)
        generated = policy.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert torch.equal(row, generated[0, len(prompt) :])
        expected_log_probs = expected(policy, prompt, row.tolist())
        torch.testing.assert_close(row_log_probs, expected_log_probs, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_queries_and_keys_that_the_kernel_rotates_give_the_completions_of_pytorchs(monkeypatch):
    """Without a GPU the kernel runs under Triton's interpreter."""
    _, sampled = policy_and_merged_copy("mistral", DEVICE)
    by_kernel = triton_attention.attend
    turned = []

    def attend_turning(*inputs, turns, prompts):
        turned.append(turns is not None)
        return by_kernel(*inputs, turns=turns, prompts=prompts)

    monkeypatch.setattr(triton_attention, "attend", decoding._attend)
    tokens, log_probs = decoded(sampled, 4)
    monkeypatch.setattr(decoding, "_attend", attend_turning)
    monkeypatch.setattr(triton_attention, "attend", attend_turning)
    kernels_tokens, kernels_log_probs = decoded(sampled, 4)
    assert turned == [True] * (3 * 2)
    assert torch.equal(tokens, kernels_tokens)
    torch.testing.assert_close(log_probs, kernels_log_probs, rtol=0, atol=2e-6)
