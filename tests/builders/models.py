"""Small models, and folders of them as save_pretrained leaves them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import transformers

from pgtoolkit.config.schema_run import HuggingFaceModelConfig, NumberType
from pgtoolkit.model import attention, compiled, lora
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import character_tokenizer

VOCABULARY = 19  # of `build`: divides by no number of ranks
ALPHABET = "0123456789="
# which torch.compile needs on a CPU
HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None


def small_llama(seed: int = 0, **changes) -> transformers.LlamaForCausalLM:
    """One layer, whose tokens are the digits, `=` and the end; changes: of its LlamaConfig."""
    shape = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {
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
    """The folder, with the model and a tokenizer of one token a character."""
    model.save_pretrained(folder)
    tokenizer = character_tokenizer(alphabet)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def model_config(path, **changes) -> HuggingFaceModelConfig:
    """The configuration of a model folder, without what was not asked for."""
    values = {
        "random_weights": False,
        "dtype": NumberType.auto,
        "gradient_checkpointing": False,
        "compile": False,
    }
    values |= {"lora_rank": None, "lora_alpha": 32.0, "lora_targets": ["all-linear"]}
    return HuggingFaceModelConfig(
        name="huggingface", path=str(path), fp32_lm_head=False, **(values | changes)
    )


def small_policy(kind: str) -> Policy:
    """A small model in float64, the same in each process."""
    tied = "_tied" in kind
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(7)
    if kind.startswith("gpt2"):
        nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            **shape, n_head=4, n_positions=24, **nothing, bos_token_id=None, eos_token_id=None
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[kind.partition("_")[0]]
        make, configure = (
            getattr(transformers, f"{name}ForCausalLM"),
            getattr(transformers, f"{name}Config"),
        )
        window = {"sliding_window": 5} if name == "Mistral" else {}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
        model = make(
            configure(
                **shape,
                **heads,
                **window,
                intermediate_size=24,
                max_position_embeddings=64,
                pad_token_id=2,
            )
        )
        if "_checkpointed" in kind:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    digest = None
    if "_lora" in kind:
        digest = lora.add_adapters(model, model_config("", lora_rank=3, lora_alpha=4.0))
    # also biases and norms, which begin as constants, and LoRA's B
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    if kind.endswith("_by_document"):
        # which it would have on a GPU, here through the loop over documents
        attention.use_packed_attention(model)
    if "_compiled" in kind:
        compiled.switch_on(model)
    return Policy(model.double().train(), None, base_digest=digest)
