"""Small models, and folders of them as save_pretrained leaves them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import transformers

from pgtoolkit.model import attention, compiled, lora, mixture
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings, NumberType
from pgtoolkit.model.setup import character_tokenizer

VOCABULARY = 19  # of `small_policy`: no number of ranks divides it
ALPHABET = "0123456789="
_CLASSES = {
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mixture": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
# torch.compile needs one on a CPU.
HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None


def small_llama(seed: int = 0, **changes: object) -> transformers.LlamaForCausalLM:
    """Return a model of one layer, whose tokens are the digits, `=` and the end.

    changes: further keywords of its LlamaConfig.
    """
    shape = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": 11,
    }
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | changes))


def save_with_tokenizer(
    model: transformers.PreTrainedModel,
    folder: Path,
    chat_template: str | None = None,
    alphabet: str = ALPHABET,
) -> Path:
    """Save the model with a tokenizer of one token for each character; return the folder."""
    model.save_pretrained(folder)
    tokenizer = character_tokenizer(alphabet)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def model_config(path: str | Path, **changes: object) -> HuggingFaceModelSettings:
    """Return the configuration of a model folder with every option off, but for the changes."""
    values = {
        "random_weights": False,
        "dtype": NumberType.auto,
        "gradient_checkpointing": False,
        "compile": False,
        "lora_rank": None,
        "lora_alpha": 32.0,
        "lora_targets": ["all-linear"],
    }
    return HuggingFaceModelSettings(
        name="huggingface", path=str(path), fp32_lm_head=False, **(values | changes)
    )


def small_policy(kind: str) -> Policy:
    """Return a small model in float64, with the same weights in every process.

    kind: gpt2, qwen2, qwen3, mistral, gemma3 or mixture (qwen3_moe), then options: _tied,
        _checkpointed, _lora, _compiled, _experts, as runs compute those of a mixture, and at the
        end _by_document: the attention that a GPU would use, here as a loop over documents.
    """
    torch.manual_seed(7)
    model = _gpt2("_tied" in kind) if kind.startswith("gpt2") else _decoder(kind)
    digest = None
    if "_lora" in kind:
        has_experts = kind.startswith("mixture")
        targets = ["q_proj", "gate_up_proj", "down_proj"] if has_experts else ["all-linear"]
        changes = {"lora_rank": 3, "lora_alpha": 4.0, "lora_targets": targets}
        digest = lora.add_adapters(model, model_config("", **changes))
    # Biases and norms, and LoRA's B, would otherwise be constants.
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    if kind.endswith("_by_document"):
        attention.use_packed_attention(model)
    if "_experts" in kind:
        mixture.switch_on(model)
    elif kind.startswith("mixture"):
        model.set_experts_implementation("eager")  # the others lack float64
    if "_compiled" in kind:
        compiled.switch_on(model)
    return Policy(model.double().train(), None, base_digest=digest)


def _gpt2(tied: bool) -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
        n_head=4,
        n_positions=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def _decoder(kind: str) -> transformers.PreTrainedModel:
    name = kind.partition("_")[0]
    config_class, model_class = _CLASSES[name]
    further: dict[str, object] = {"sliding_window": 5} if name in ("gemma3", "mistral") else {}
    if name == "gemma3":
        further["layer_types"] = ["sliding_attention", "full_attention"]
        further["query_pre_attn_scalar"] = 7
    if name == "mixture":
        further |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        further["norm_topk_prob"] = True
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=24 if name == "gemma3" else 16,
        num_hidden_layers=2,
        tie_word_embeddings="_tied" in kind,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        intermediate_size=24,
        max_position_embeddings=64,
        pad_token_id=2,
        **further,
    )
    model = model_class(config)
    if "_checkpointed" in kind:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
