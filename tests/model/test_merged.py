"""Products with a common input as one: where the weights lie, and completions that are those of the
model itself."""

import copy
from dataclasses import replace

import pytest
import torch
from builders.losses import DEVICE
from builders.models import HAS_COMPILER, small_policy
from model.test_decoding import DEVICES, PROMPTS, decoded, expected, likeliest

from pgtoolkit.model import compiled, decoding, merged
from pgtoolkit.model.policy import Policy

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")


def merged_copy(kind: str, device: str = "cpu") -> tuple[Policy, Policy]:
    """The policy itself, in float32, and the copy that samples, whose products are merged."""
    policy = small_policy(kind)
    policy.model.float().to(device)
    trained = replace(policy, model=copy.deepcopy(policy.model), compiled=True)
    compiled.switch_on(trained.model)
    sampled = trained.copied(trained.compute_dtype)
    sampled.load(trained.weights())
    return policy, sampled


@pytest.mark.parametrize("kind", ["qwen2_tied_checkpointed", "qwen3"])
def test_weights_lie_side_by_side_once(kind):
    policy, sampled = merged_copy(kind)
    own, copied = (dict(one.model.named_parameters()) for one in (policy, sampled))
    for name, parameter in copied.items():
        assert torch.equal(parameter, own[name]), name
    layer = sampled.model.base_model.layers[1]
    attention = layer.self_attn
    together = merged.side_by_side(
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    )
    assert torch.equal(
        together[-len(attention.v_proj.weight) :], own["model.layers.1.self_attn.v_proj.weight"]
    )
    attention.v_proj.weight.data.fill_(7)
    assert (together[-len(attention.v_proj.weight) :] == 7).all()
    # No memory beyond the weights': each storage is as large as what lies in it.
    parameters = set(copied.values())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(storages.values()) == sum(p.nbytes for p in parameters)
    sampled.unload()
    assert all(p.numel() == 0 for p in sampled.model.parameters())
    with pytest.raises(ValueError, match="side by side"):
        merged.side_by_side(
            [
                own["model.layers.0.self_attn.q_proj.weight"],
                own["model.layers.1.mlp.up_proj.weight"],
            ]
        )


def test_only_what_is_compiled_and_has_products_to_merge_is_merged():
    assert not small_policy("qwen2").copied(torch.float32).merges
    assert not replace(small_policy("gpt2"), compiled=True).copied(torch.float32).merges
    assert replace(small_policy("mistral"), compiled=True).copied(torch.float32).merges


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qwen2_tied_checkpointed", "qwen3", "mistral"])
def test_greedy_completions_are_those_of_generate(kind, device):
    """Token by token in float32; their log-probs are those of a pass over the document."""
    policy, sampled = merged_copy(kind, device)
    policy.model.eval()
    how = {
        "draw": likeliest,
        "uniform": torch.zeros(len(PROMPTS), 40, device=device),
        "check": lambda: None,
    }
    tokens, log_probs = sampled.decode(PROMPTS, 40, False, **how, ends=[])
    for prompt, row, found in zip(PROMPTS, tokens, log_probs, strict=True):
        whole = torch.tensor([prompt], device=device)
        settings = {
            "max_new_tokens": 40,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        given = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        assert torch.equal(row, policy.model.generate(**given, **settings)[0, len(prompt) :])
        torch.testing.assert_close(found, expected(policy, prompt, row.tolist()), rtol=0, atol=2e-6)


@needs_compiler
def test_the_kernel_turns_queries_and_keys(monkeypatch):
    """Without a GPU in Triton's interpreter: drawn tokens and log-probs are those of turns by
    PyTorch."""
    from pgtoolkit.kernels import triton_attention

    _, sampled = merged_copy("mistral", DEVICE)
    tokens, log_probs = decoded(sampled, 4)
    turned = []

    def attend_turning(module, query, key, value, mask, **options):
        if options["decoder_cache"].reading is not None:
            return decoding.attention(module, query, key, value, mask, **options)
        kept = options["decoder_cache"].of(module.layer_idx)
        where = options["decoder_cache"].positions, options["scaling"], options["sliding_window"]
        turned.append(options["turns"])
        out = triton_attention.attend(query, key, value, *kept, *where, options["turns"])
        return out[:, None], None

    monkeypatch.setattr(merged, "attention", attend_turning)
    again, of_again = decoded(sampled, 4)
    assert len(turned) == 3 * 2
    assert torch.equal(tokens, again)
    torch.testing.assert_close(log_probs, of_again, rtol=0, atol=2e-6)
