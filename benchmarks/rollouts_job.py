"""The job of the rollout benchmark: a model of Qwen2.5-0.5B's shape with random weights, prompts, and a reward."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

GROUP = 8
"""Completions of a prompt."""

BODY = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
BODY |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
TINY_BODY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY_BODY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}


@dataclass(frozen=True)
class Case:
    """What one process measures.

    trainer: pgtoolkit or trl. sampler: transformers or vllm; of trl also static, transformers with a static cache.
    length: tokens of a completion, which ends before only where one token of the vocabulary is drawn. completions: of
    an iteration. overrides: further ones of pgtk. iterations: rollouts with an update each.
    """

    folder: str
    trainer: str
    sampler: str
    length: int
    completions: int
    overrides: list[str]
    iterations: int
    tiny: bool

    @property
    def model(self) -> str:
        return f"{self.folder}/model"

    @property
    def prompts(self) -> str:
        return f"{self.folder}/prompts.jsonl"

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return longest_prompt(self.tiny) + self.length

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def longest_prompt(tiny: bool) -> int:
    return 16 if tiny else 160


def write_inputs(folder: Path, num_prompts: int, tiny: bool, body: dict | None = None, weights: bool = True) -> None:
    """The model, in the number type of those on the hub, with a tokenizer that has a word for each of its tokens.

    body: entries of its configuration, for another than the benchmark's. weights: whether they are written, too.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    untied = body is not None
    body = body or (TINY_BODY if tiny else BODY)
    draw, longest = random.Random(0), longest_prompt(tiny)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(num_prompts):
            text = "".join(draw.choice("abcdefgh") for _ in range(draw.randint(longest * 2 // 5, longest)))
            file.write(json.dumps({"prompt": text, "answer": "x"}) + "\n")
    if (folder / "model" / "config.json").exists():
        return
    tokenizer = _tokenizer(body["vocab_size"])
    end = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = Qwen2Config(**body, **end, tie_word_embeddings=not untied, max_position_embeddings=8192)
    if not weights:
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder / "model")
    elif untied and torch.cuda.is_available():
        with torch.device("cuda"):
            Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    else:
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _tokenizer(size: int):
    """A character of a prompt is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", *"abcdefgh"]
    words += [f"w{number}" for number in range(size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


def reward(completion: str, _answer: str = "") -> float:
    """As if at random: a function of the completion alone."""
    return random.Random(completion).random()
