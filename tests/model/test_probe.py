"""A model of another architecture computes each document as if it were alone, in training and when
it samples, or is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders.documents import document_of
from builders.models import model_config, save_with_tokenizer
from builders.runs import config_of, sampler_of, with_model

from pgtoolkit.assembly.build import build
from pgtoolkit.batch import pack
from pgtoolkit.completion import Request
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import build_policy
from pgtoolkit.sampling.samplers import TransformersSampler

WIDTH = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": None,
}
DENSE = WIDTH | {
    "intermediate_size": 24,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
T5 = {
    "kind": "ForConditionalGeneration",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
SHAPES = {
    "Qwen3": DENSE | {"head_dim": 8},
    "OPT": WIDTH
    | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "layerdrop": 0.5},
    "Bloom": {"vocab_size": 12, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Mamba": {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "GptOss": DENSE | EXPERTS | {"head_dim": 8},
    "Mixtral": DENSE | EXPERTS | {"router_jitter_noise": 0.1},
    "Phi3": DENSE
    | {
        "original_max_position_embeddings": 16,
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 16},
    },
}
"""The configuration of each model, else DENSE. Tokens of OPT, Bloom, Mamba and GptOss see
other documents of their row; the rotary positions of Phi3 depend on the longest document."""


def folder_of(
    name: str, folder: Path, scale: float = 0.3, kind: str = "ForCausalLM", **changes: Any
) -> Path:
    """Save a small model of this architecture, and return its folder.

    scale: of the noise that is added to its weights. kind: the end of its class's name.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHAPES.get(name, DENSE) | changes))
    model = getattr(transformers, f"{name}{kind}")(config)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape)
    return save_with_tokenizer(model, folder)


def document(length: int) -> Document:
    return document_of(torch.arange(length) * 7 % 11)


@pytest.mark.parametrize("lengths", [(6, 7, 7), (3, 20, 4, 3)], ids=["alike", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_document_is_computed_as_if_it_were_alone(name, lengths, tmp_path):
    folder = folder_of(name, tmp_path)
    policy = build_policy(model_config(folder), None, False)
    assert policy.packs == (name in ("Qwen3", "Mixtral", "Phi3"))
    logits = policy.head(policy.hidden_states(pack([document(n) for n in lengths])))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = [model(input_ids=document(n).tokens[None], use_cache=False).logits[0] for n in lengths]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [((6, 7, 7), (3, 7)), ((3, 20, 4, 3), (1, 30)), ((4, 20) * 20, (40, 20))],
    ids=["alike", "mixed", "many"],
)
def test_documents_are_padded_rows_unless_a_packed_row_costs_less(lengths, shape, tmp_path):
    """With 16 hidden units 40 padded rows of 20 cost 800 (96 + 20), and their 480 tokens in one
    row 480 (96 + 480)."""
    policy = build_policy(model_config(folder_of("Qwen3", tmp_path)), None, False)
    shapes = []
    policy.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: shapes.append(inputs[0].shape)
    )
    policy.hidden_states(pack([document(n) for n in lengths]))
    assert shapes == [shape]


@pytest.mark.parametrize(
    ("name", "changes", "needed"),
    [
        # Without noise its logits are about 0.1, too small for its softcapping to act.
        ("Gemma2", {"head_dim": 8, "scale": 0}, "a plain linear LM head"),
        ("Granite", {"logits_scaling": 8.0}, "a plain linear LM head"),
        (
            "Bert",
            {"kind": "LMHeadModel"},
            "an LM head that reads the body's hidden states, the same each time",
        ),
        (
            "BertGeneration",
            {"kind": "Decoder"},
            "a causal language model (got one whose tokens see those behind them)",
        ),
        (
            "Phimoe",
            EXPERTS,
            "a model that computes the same in training (got phimoe, which then draws its experts",
        ),
        ("T5", T5, "a language model that only decodes (got t5, an encoder and a decoder)"),
        (
            "Qwen3",
            {"scale": math.nan},
            "weights that are numbers (got NaN or infinity in model.embed_tokens.weight, ",
        ),
        (
            "T5",
            T5 | {"random": True},
            "a language model that only decodes (got t5, an encoder and a decoder)",
        ),
        (
            "Qwen3",
            {"initializer_range": 1e39, "random": True},
            "weights that are numbers (got NaN or infinity in model",
        ),
    ],
)
def test_a_model_for_which_the_loss_would_be_wrong_is_refused(name, changes, needed, tmp_path):
    """random: refused also where its weights are drawn at random."""
    changes = dict(changes)
    random = changes.pop("random", False)
    folder = folder_of(name, tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        build_policy(model_config(folder, random_weights=random), None, False)
    assert str(refused.value).startswith(f"model.path={folder} needs {needed}")


RECURRENT = ["linear_attention", "full_attention"]
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_chunk_size": 4}
NEMOTRON = {
    "layers_block_type": RECURRENT,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 4,
}
MAMBA2_LIMITED = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 4,
    "n_groups": 1,
    "time_step_limit": (0.0, 0.1),
}
KIMI = {
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "layer_types": RECURRENT[:1] * 2,
    "mlp_layer_types": ["dense"] * 2,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
}
BART = {
    "vocab_size": 12,
    "d_model": 16,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
}
SAMPLED = {
    "GPTNeoX": WIDTH | {"intermediate_size": 24, "max_position_embeddings": 64},
    "Bamba": DENSE | MAMBA2 | {"attn_layer_indices": [1]},
    "MiniMax": DENSE | EXPERTS | {"head_dim": 8, "layer_types": RECURRENT},
    "Bart": BART | {"max_position_embeddings": 64},
}
"""Models that are sampled from. Padding does not reach the state of Bamba; MiniMax attends to it in
every step with a cache, and Bart counts it as positions."""


def policy_and_sampler(folder: Path, *overrides: str) -> tuple[Policy, TransformersSampler]:
    module, loader = build(config_of(*with_model(folder, *overrides)))
    return module.policy, sampler_of(loader)


@pytest.mark.parametrize("name", SAMPLED)
def test_completions_are_those_of_a_forward_pass_of_each_document_alone(name, tmp_path):
    """Prompts of all lengths are a batch where padding changes nothing, and those of each length
    are a batch elsewhere."""
    folder = folder_of(name, tmp_path, **SAMPLED[name])
    policy, sampler = policy_and_sampler(folder, "rollout.max_completion_length=9")
    batch_sizes = []
    policy.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: batch_sizes.append(len(inputs[0]))
    )
    prompts = [[3, 1, 4, 1, 5, 9, 2], [2, 7], [6, 5], [8, 1, 10, 9]]
    completions = sampler.complete(
        [Request(prompt, 2, number) for number, prompt in enumerate(prompts)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for number, completion in enumerate(completions):
        prompt = prompts[number // 2]
        tokens = completion.tokens
        document = torch.cat([torch.tensor(prompt), tokens])[None]
        with torch.no_grad():
            logits = model(input_ids=document, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(completion.log_probs, expected, rtol=1e-4, atol=1e-4)
    assert set(batch_sizes) == ({8} if name in ("GPTNeoX", "Bamba") else {4, 2})


def test_documents_are_limited_to_the_length_at_which_rotary_positions_change(tmp_path, caplog):
    """Phi3 has other rotary positions in documents of more than 16 tokens. The task's prompts have
    four."""
    folder = folder_of("Phi3", tmp_path)
    policy_and_sampler(folder, "rollout.max_completion_length=12")
    assert "documents have at most 16 tokens" in caplog.text
    with pytest.raises(
        DataError, match=r"A document of at most 16 tokens holds a prompt and a completion of .*=13"
    ):
        policy_and_sampler(folder, "rollout.max_completion_length=13")


@pytest.mark.parametrize(
    ("name", "changes", "got"),
    [
        (
            "NemotronH",
            DENSE | NEMOTRON,
            "nemotron_h, whose layers limit time steps to 0.001 and more in a forward pass",
        ),
        (
            "Mamba2",
            MAMBA2_LIMITED,
            "mamba2, whose layers limit time steps to 0 to 0.1 in a forward pass",
        ),
        (
            "MiniMax",
            SAMPLED["MiniMax"] | {"sliding_window": 20},
            "minimax with a sliding window, which its steps may not",
        ),
        (
            "KimiLinear",
            DENSE | KIMI,
            "kimi_linear, which fails: `get_seq_length` can only be called on Attention layers",
        ),
    ],
)
def test_a_model_whose_steps_are_not_its_forward_pass_is_not_sampled_from(
    name, changes, got, tmp_path
):
    folder = folder_of(name, tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        policy_and_sampler(folder)
    needs = "a model that computes token by token, with a cache, the same as in one forward pass"
    assert str(refused.value).startswith(f"sampler=transformers needs {needs} (got {got}")


def test_a_limit_of_time_steps_acts_in_a_forward_pass_alone():
    """So the refusal is needed. Once transformers limits time steps in both, this test fails, and
    the refusal can go."""
    differences = []
    for low in (0.0, 2.0):
        torch.manual_seed(0)
        model = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(**MAMBA2_LIMITED | {"time_step_limit": (low, math.inf)})
        )
        tokens = torch.arange(8)[None] % 11
        with torch.no_grad():
            passed = model(input_ids=tokens, use_cache=True)
            step = model(
                input_ids=torch.tensor([[3]]), cache_params=passed.cache_params, use_cache=True
            ).logits[0, -1]
            forward = model(
                input_ids=torch.cat([tokens, torch.tensor([[3]])], 1), use_cache=False
            ).logits[0, -1]
        differences.append(float((step - forward).norm() / forward.norm()))
    assert differences[0] < 1e-5 < 1e-3 < differences[1], differences
