"""GPT-2 and Llama by torch alone, for programs that must start quickly: transformers takes seconds.

Their parameters have the names and shapes of those of transformers, so that they load its weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Transposed(nn.Module):
    """The linear map of GPT-2, whose weight has the shape [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight + self.bias


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the outputs of all heads side by side.

    query, key, value: [heads, tokens, width of a head].
    """
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).mT.flatten(0, 1).mT


def in_heads(states: Tensor, heads: int) -> Tensor:
    """Return states of the shape [tokens, width] as [heads, tokens, width of a head]."""
    return states.unflatten(-1, (heads, -1)).transpose(0, 1)


class GPT2LMHeadModel(nn.Module):
    """GPT-2. config: what its config.json has."""

    def __init__(self, config: dict):
        super().__init__()
        width = config["n_embd"]
        inner = config.get("n_inner") or 4 * width
        self.heads = config["n_head"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config["vocab_size"], width),
                "wpe": nn.Embedding(config["n_positions"], width),
                "h": nn.ModuleList(_layer_of_gpt2(width, inner) for _ in range(config["n_layer"])),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings", True):
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token: [tokens, vocabulary]."""
        body = self.transformer
        states = body["wte"](tokens) + body["wpe"].weight[: len(tokens)]
        for layer in body["h"]:
            projected = layer["attn"]["c_attn"](layer["ln_1"](states)).chunk(3, -1)
            attended = attention(*(in_heads(part, self.heads) for part in projected))
            states = states + layer["attn"]["c_proj"](attended)
            inner = F.gelu(layer["mlp"]["c_fc"](layer["ln_2"](states)), approximate="tanh")
            states = states + layer["mlp"]["c_proj"](inner)
        return self.lm_head(body["ln_f"](states))


def _layer_of_gpt2(width: int, inner: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(width),
            "attn": nn.ModuleDict(
                {"c_attn": Transposed(width, 3 * width), "c_proj": Transposed(width, width)}
            ),
            "ln_2": nn.LayerNorm(width),
            "mlp": nn.ModuleDict(
                {"c_fc": Transposed(width, inner), "c_proj": Transposed(inner, width)}
            ),
        }
    )


class LlamaForCausalLM(nn.Module):
    """Llama, with as many heads of keys as of queries. config: what its config.json has."""

    def __init__(self, config: dict):
        super().__init__()
        width = config["hidden_size"]
        self.epsilon = config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        assert config["num_key_value_heads"] == self.heads
        self.theta = config["rope_parameters"]["rope_theta"]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config["vocab_size"], width),
                "layers": nn.ModuleList(
                    _layer_of_llama(width, config["intermediate_size"], self.epsilon)
                    for _ in range(config["num_hidden_layers"])
                ),
                "norm": nn.RMSNorm(width, self.epsilon),
            }
        )
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token: [tokens, vocabulary]."""
        states = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            before = layer["input_layernorm"](states)
            query, key, value = (
                in_heads(layer["self_attn"][f"{name}_proj"](before), self.heads) for name in "qkv"
            )
            attended = attention(self._rotated(query), self._rotated(key), value)
            states = states + layer["self_attn"]["o_proj"](attended)
            before = layer["post_attention_layernorm"](states)
            gate = F.silu(layer["mlp"]["gate_proj"](before))
            states = states + layer["mlp"]["down_proj"](gate * layer["mlp"]["up_proj"](before))
        return self.lm_head(self.model["norm"](states))

    def _rotated(self, states: Tensor) -> Tensor:
        """Return queries or keys turned by the angles of their positions."""
        _, tokens, width = states.shape
        frequencies = self.theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
        first, second = states.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (states * angles.cos() + turned * angles.sin()).to(states.dtype)


def _layer_of_llama(width: int, inner: int, epsilon: float) -> nn.ModuleDict:
    projections = {f"{name}_proj": nn.Linear(width, width, bias=False) for name in "qkvo"}
    return nn.ModuleDict(
        {
            "input_layernorm": nn.RMSNorm(width, epsilon),
            "self_attn": nn.ModuleDict(projections),
            "post_attention_layernorm": nn.RMSNorm(width, epsilon),
            "mlp": nn.ModuleDict(
                {
                    "gate_proj": nn.Linear(width, inner, bias=False),
                    "up_proj": nn.Linear(width, inner, bias=False),
                    "down_proj": nn.Linear(inner, width, bias=False),
                }
            ),
        }
    )


def model_of(folder: str, dtype: torch.dtype) -> nn.Module:
    """Return the model that the config.json of a folder describes, with weights of any value."""
    config = json.loads(Path(folder, "config.json").read_text())
    kinds = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
    with torch.device("cpu"):
        model = kinds[config["model_type"]](config)
    return model.to(dtype).eval().requires_grad_(False)


def positions_of(folder: str) -> int:
    """Return the length of the longest text that the model of a folder can read."""
    config = json.loads(Path(folder, "config.json").read_text())
    return config.get("n_positions") or config["max_position_embeddings"]
