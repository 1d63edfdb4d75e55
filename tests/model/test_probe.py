"""Models of other architectures: each document by itself whatever is beside it, or one sentence that refuses them."""

import math

import pytest
import torch
import transformers
from builders.models import model_config, save_with_tokenizer

from pgtoolkit.batch import Document, pack
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.build import build_policy

WIDTH = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": None}
DENSE = WIDTH | {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
T5 = {"kind": "ForConditionalGeneration", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
SHAPES = {
    "Qwen3": DENSE | {"head_dim": 8},
    "OPT": WIDTH | {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "layerdrop": 0.5},
    "Bloom": {"vocab_size": 12, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Mamba": {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "GptOss": DENSE | EXPERTS | {"head_dim": 8},
    "Mixtral": DENSE | EXPERTS | {"router_jitter_noise": 0.1},
    "Phi3": DENSE
    | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}},
}
"""OPT, Bloom, Mamba and GptOss see other documents of their row; rotary positions of Phi3 depend on the longest."""


def folder_of(name, folder, scale=0.3, kind="ForCausalLM", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHAPES.get(name, DENSE) | changes))
    model = getattr(transformers, f"{name}{kind}")(config)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape)
    return save_with_tokenizer(model, folder)


def document(length):
    tokens, mask = torch.arange(length) * 7 % 11, torch.arange(length) > 0
    return Document(tokens, mask, torch.zeros(length - 1), torch.ones(length - 1), 0, "a document")


@pytest.mark.parametrize("lengths", [(6, 7, 7), (3, 20, 4, 3)], ids=["alike", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_document_is_computed_as_if_it_were_alone(name, lengths, tmp_path):
    folder = folder_of(name, tmp_path)
    policy = build_policy(model_config(folder), None, False)
    assert policy.packs == (name in ("Qwen3", "Mixtral", "Phi3"))
    found = policy.head(policy.hidden_states(pack([document(n) for n in lengths])))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = [model(input_ids=document(n).tokens[None], use_cache=False).logits[0] for n in lengths]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [((6, 7, 7), (3, 7)), ((3, 20, 4, 3), (1, 30)), ((4, 20) * 20, (40, 20))],
    ids=["alike", "mixed", "many"],
)
def test_documents_are_rows_unless_one_row_costs_less(lengths, shape, tmp_path):
    """With 16 hidden units 40 rows of 20 take 800 (96 + 20), their 480 tokens in one row 480 (96 + 480)."""
    policy, seen = build_policy(model_config(folder_of("Qwen3", tmp_path)), None, False), []
    policy.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    policy.hidden_states(pack([document(n) for n in lengths]))
    assert seen == [shape]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Gemma2", {"head_dim": 8, "scale": 0}, "a plain linear LM head"),  # random weights give logits of about 0.1
        ("Granite", {"logits_scaling": 8.0}, "a plain linear LM head"),
        ("Bert", {"kind": "LMHeadModel"}, "an LM head that reads the body's hidden states, the same each time"),
        ("BertGeneration", {"kind": "Decoder"}, "a causal language model (got one whose tokens see those behind them)"),
        ("Phimoe", EXPERTS, "a model that computes the same in training (got phimoe, which then draws its experts"),
        ("T5", T5, "a language model that only decodes (got t5, an encoder and a decoder)"),
        ("Qwen3", {"scale": math.nan}, "weights that are numbers (got NaN or infinity in model.embed_tokens.weight, "),
        ("T5", T5 | {"random": True}, "a language model that only decodes (got t5, an encoder and a decoder)"),
        (
            "Qwen3",
            {"initializer_range": 1e39, "random": True},
            "weights that are numbers (got NaN or infinity in model",
        ),
    ],
)
def test_a_model_that_the_loss_would_be_wrong_for_is_refused(name, changes, said, tmp_path):
    """random: also where its weights are not read."""
    changes = dict(changes)
    random = changes.pop("random", False)
    folder = folder_of(name, tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        build_policy(model_config(folder, random_weights=random), None, False)
    assert str(refused.value).startswith(f"model.path={folder} needs {said}")
